"""What a program is made of, against counts by hand and against LLVM's view of the code object."""
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from attention import fp8_hd128
from cdna4dsl import asm, cli, codeobject, encode, isa, parse, stats, target

ROOT = Path(__file__).parent.parent
FIRST = f"{ROOT / 'docs/examples/first_kernel.py'}:axpy"
LLVM_BIN = Path(os.environ.get("LLVM_BIN", "/usr/lib/llvm-22/bin"))

NEST = """s_mov_b32 s0, 0
outer:
  s_mov_b32 s1, 0
  v_mov_b32 v0, 0x12345
middle:
  v_exp_f32 v1, v0
inner:
  s_nop 0
  v_mfma_f32_32x32x16_bf16 v[16:31], v[0:3], v[4:7], v[16:31]
  v_mfma_f32_16x16x32_f16 a[4:7], v[0:3], v[4:7], a[4:7]
  ds_read_b128 v[32:35], v8
  s_waitcnt lgkmcnt(0)
  s_cbranch_scc1 inner
  s_cbranch_scc0 middle
  s_cbranch_vccz inner2
  v_add_f32 v9, v9, v9
inner2:
  buffer_load_dword v40, v41, s[4:7], 0 offen
  s_cbranch_vccnz inner2
  s_cmp_lt_u32 s0, s1
  s_cbranch_scc1 outer
s_endpgm
"""


def of(text: str) -> stats.Stats:
    return stats.stats(parse.parse(text, "t.s")[0])


def test_mix_and_nested_loops():
    s, program = of(NEST), parse.parse(NEST, "t.s")[0]
    code = b"".join(encode.encode(i, labels=dict.fromkeys(program.labels, 0)) for i in program.instructions)
    assert s.mix.instructions == 18 and s.mix.bytes == len(code)
    count = dict(MFMA=2, VALU=2, trans=1, SALU=3, SMEM=0, LDS=1, VMEM=1, wait=1, nop=1, branch=5, other=1)
    assert s.mix.categories == count and sum(count.values()) == 18
    assert s.mix.units == {"branch": 5, "lds": 1, "matrix": 2, "none": 3, "salu": 3, "valu": 3, "vmem": 1}
    assert s.mix.classes["xdl"] == 2 and s.mix.classes["trans"] == 1
    tree = [(x.label, x.depth, x.parent, x.where, x.mix.instructions) for x in s.loops]
    assert tree == [("outer", 0, None, ("3", "21"), 16), ("middle", 1, 0, ("6", "14"), 8),
                    ("inner", 2, 1, ("8", "13"), 6), ("inner2", 1, 0, ("18", "19"), 2)]
    mfma = 2 * 32 * 32 * 16 + 2 * 16 * 16 * 32
    assert [x.mix.flops for x in s.loops] == [mfma, mfma, mfma, 0] and s.mix.flops == mfma
    assert s.loops[2].mix.categories["LDS"] == 1 and s.loops[2].mix.bytes == 4 + 8 + 8 + 8 + 4 + 4
    assert s.irreducible == () and s.occupancy is None and s.lds_bytes is None
    assert (s.registers.vgprs_used, s.registers.agprs_used, s.registers.sgprs_used, s.registers.vgprs) == (42, 8, 8, None)


def test_loops_that_share_a_header_and_self_loops():
    s = of("a:\n s_nop 0\n s_cbranch_scc1 a\n s_nop 1\n s_cbranch_scc0 a\n s_endpgm\n")
    assert [(x.label, x.mix.instructions) for x in s.loops] == [("a", 4)]
    assert of("s_nop 0\ns_endpgm\n").loops == ()
    forward = of("s_cbranch_scc1 b\ns_nop 0\nb:\ns_branch c\nd:\ns_endpgm\nc:\ns_branch d\n")
    assert forward.loops == () and forward.irreducible == ()          # a jump back that closes no cycle


def test_irreducible_and_unreachable():
    """Two ways into a cycle: no natural loop. Code that nothing reaches makes none either."""
    s = of("s_cbranch_scc0 b\na:\ns_nop 0\nb:\ns_nop 1\ns_cbranch_scc1 a\ns_endpgm\ndead:\ns_branch dead\n")
    assert s.loops == () and len(s.irreducible) == 1


def test_flops_of_every_matrix_instruction():
    """By name, against the sizes in the semantics."""
    seen = 0
    for spec in isa.load().instructions.values():
        if spec.unit != "matrix":
            assert stats.flops(spec) == 0
            continue
        nodes = (n for st in spec.semantics for n in (st[2:] if st[0] == "assign" else [st]))
        call = next((n for n in nodes if n[0] == "call" and n[1] in ("mfma", "mfma_scale")), None)
        if call:
            sizes = [a[1] for a in call[2][:4 if call[1] == "mfma" else 3] if a[0] == "num"]
            product = 2
            for n in sizes:
                product *= n
            assert stats.flops(spec) == product, spec.mnemonic
            seen += 1
    assert seen >= 10


@pytest.mark.parametrize("vgprs,lds,waves,groups,per_simd,limited,cliff", [
    (64, 0, 4, 8, 8, ("wave slots",), None),
    (65, 0, 4, 7, 7, ("VGPR",), "1 VGPRs fewer would give 8 waves a SIMD"),
    (136, 0, 4, 3, 3, ("VGPR",), "8 VGPRs fewer would give 4 waves a SIMD"),
    (176, 0, 4, 2, 2, ("VGPR",), "8 VGPRs fewer would give 3 waves a SIMD"),
    (512, 65536, 4, 1, 1, ("VGPR",), "256 VGPRs fewer would give 2 waves a SIMD"),
    (64, 81920, 4, 2, 2, ("LDS",), "28160 bytes of LDS fewer would give 3 waves a SIMD"),
    (256, 81921, 4, 1, 1, ("LDS",), "1 bytes of LDS fewer would give 2 waves a SIMD"),
    (257, 81921, 4, 1, 1, ("VGPR", "LDS"), "1 VGPRs and 1 bytes of LDS fewer would give 2 waves a SIMD"),
    (256, 163840, 8, 1, 2, ("VGPR", "LDS"), "128 VGPRs and 81920 bytes of LDS fewer would give 4 waves a SIMD"),
    (512, 0, 8, 0, 0, ("VGPR",), "256 VGPRs fewer would give 2 waves a SIMD"),
    (32, 0, 1, 32, 8, ("wave slots",), None),
    (32, 0, 16, 2, 8, ("wave slots",), None),
    (32, 0, 2, 16, 8, ("wave slots",), None),
    (32, 0, 12, 2, 6, ("workgroup size",), None),
])
def test_occupancy(vgprs, lds, waves, groups, per_simd, limited, cliff):
    """By hand: 512 VGPRs a lane in eights, 160 KiB of LDS in 1280 bytes, 4 SIMDs of 8 waves."""
    o = stats.occupancy(vgprs, lds, waves)
    assert (o.workgroups_per_cu, o.waves_per_simd, o.limited_by, stats.cliff_text(o)) == (groups, per_simd, limited, cliff)
    if o.cliff:                                     # doing what it says gives what it says, and a little less does not
        then = stats.occupancy(vgprs - o.cliff["vgprs_fewer"], lds - o.cliff["lds_bytes_fewer"], waves)
        assert then.waves_per_simd == o.cliff["waves_per_simd"]
        for part in ("vgprs_fewer", "lds_bytes_fewer"):
            if o.cliff[part]:
                less = {k: o.cliff[k] - (k == part) for k in ("vgprs_fewer", "lds_bytes_fewer")}
                after = stats.occupancy(vgprs - less["vgprs_fewer"], lds - less["lds_bytes_fewer"], waves)
                assert after.waves_per_simd < then.waves_per_simd
    if groups:
        assert stats.occupancy(vgprs + o.spare_vgprs, lds + o.spare_lds_bytes, waves).workgroups_per_cu == groups
        if vgprs + o.spare_vgprs < 512:
            assert stats.occupancy(vgprs + o.spare_vgprs + 1, lds, waves).workgroups_per_cu < groups


def test_instruction_cache():
    body = "v_mov_b32 v0, 0x12345\n" * 8190                          # 8 bytes each
    s = of(f"a:\n{body}s_cbranch_scc1 a\ns_endpgm\n")
    assert s.loops[0].mix.bytes == 65524 and s.loops[0].cache_bytes == 65536 and s.loops[0].fits_cache
    s = of(f"a:\n{body}{body[:66]}s_cbranch_scc1 a\ns_endpgm\n")
    assert not s.loops[0].fits_cache and s.loops[0].cache_bytes == 65664


def test_same_from_python_text_and_code_object():
    program = fp8_hd128.build()
    data = asm.assemble(program)
    ways = [program, parse.parse(asm.to_text(program), "k.s")[0], codeobject.read(data, "k.co")[0]]
    results = [stats.stats(p) for p in ways]
    for s in results[1:]:
        assert s.mix == results[0].mix and s.lds_bytes == results[0].lds_bytes
        # a descriptor counts VGPRs in eights, so the distance to the cliff may differ, not the cliff
        a, b = s.occupancy, results[0].occupancy
        assert (a.limits, a.limited_by, a.cliff["vgprs"], a.waves_per_simd) == (b.limits, b.limited_by, b.cliff["vgprs"], b.waves_per_simd)
        shape = lambda s: [(x.first, x.last, x.offset, x.mix, x.depth) for x in s.loops]
        assert shape(s) == shape(results[0])
    assert results[0].loops and results[0].loops[0].mix.categories["MFMA"] > 0 and "fp8_hd128.py:" in results[0].loops[0].where[0]
    r = results[0].registers
    assert r.vgprs_used <= r.vgprs and r.agprs_used <= r.agprs


@pytest.mark.skipif(not (LLVM_BIN / "llvm-objdump").exists(), reason=f"no llvm-objdump in {LLVM_BIN}")
def test_counts_equal_llvm_objdump(tmp_path):
    program = fp8_hd128.build()
    (tmp_path / "k.co").write_bytes(asm.assemble(program))
    command = [LLVM_BIN / "llvm-objdump", "-d", "--no-show-raw-insn", tmp_path / "k.co"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [m[1] for line in out.splitlines() if (m := re.match(r"\t(\w+)", line))]
    names = names[:stats.stats(program).mix.instructions]          # behind them LLVM prints the padding
    c = stats.stats(program).mix.categories
    assert c["MFMA"] == sum(n.startswith("v_mfma") for n in names) and c["LDS"] == sum(n.startswith("ds_") for n in names)
    assert c["VMEM"] == sum(n.startswith(("buffer_", "global_", "flat_")) for n in names) and c["wait"] == names.count("s_waitcnt")
    assert c["trans"] == sum(bool(re.match(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_", n)) for n in names)
    assert c["nop"] == names.count("s_nop") and c["branch"] == sum(n.startswith(("s_branch", "s_cbranch")) for n in names)


def test_command(tmp_path):
    run = lambda *args: CliRunner().invoke(cli.main, ["stats", *map(str, args)])
    r = run(FIRST)
    assert r.exit_code == 0 and "axpy: 19 instructions" in r.stdout and "occupancy: 8 wave(s) a SIMD" in r.stdout
    kernel, = json.loads(run(FIRST, "--json").stdout)["kernels"]
    assert {"kernel", "mix", "loops", "registers", "lds_bytes", "occupancy", "cache_bytes", "cache_size", "irreducible"} <= set(kernel)
    assert kernel["mix"]["bytes"] == 104 and kernel["occupancy"]["limited_by"] == ["wave slots"]
    (tmp_path / "f.s").write_text(NEST)
    r = run(tmp_path / "f.s")
    assert r.exit_code == 0 and "outer" in r.stdout and "      inner" in r.stdout and "occupancy" not in r.stdout
    (tmp_path / "bad.s").write_text("v_nothing v0\n")
    for name in ("bad.s", "none.s"):
        r = run(tmp_path / name)
        assert r.exit_code == 2 and str(tmp_path / name) in r.stderr
    assert run(FIRST, "-p", "nosuch=1").exit_code == 2
    assert stats.stats(target.load(FIRST)[0]).registers.sgprs == 14

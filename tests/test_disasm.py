"""Disassembly held to LLVM: its text assembles to the same code, descriptors and metadata; damaged files end in an error."""
import io
import json
import os
import random
import struct
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from elftools.elf.elffile import ELFFile

from cdna4dsl import asm, cli, codeobject, disasm, parse, target
from cdna4dsl.codeobject import CodeObjectError
from cdna4dsl.encode import encode

ROOT = Path(__file__).parent.parent
LLVM_BIN = Path(os.environ.get("LLVM_BIN", "/usr/lib/llvm-22/bin"))
needs_llvm = pytest.mark.skipif(not (LLVM_BIN / "llvm-mc").exists(),
                                reason=f"no llvm-mc with AMDGPU in {LLVM_BIN} (Debian: llvm-22; or set LLVM_BIN)")

KERNEL = """
.globl {name}
.p2align 8
.type {name},@function
{name}:
  s_mov_b32 s4, 0
{name}_loop:
  v_add_f32 v0, v1, v{reg}
  s_add_u32 s4, s4, 0x12345
  s_cmp_lt_u32 s4, 0x99999
  s_cbranch_scc1 {name}_loop
  s_cbranch_execz {name}_end
  v_mfma_f32_32x32x16_bf16 v[16:31], v[0:3], v[4:7], v[16:31]
{name}_end:
  s_waitcnt vmcnt(0) lgkmcnt(3)
  s_endpgm
.L{name}_e:
.size {name}, .L{name}_e-{name}
"""
DESCRIPTOR = """
.section .rodata,"a",@progbits
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_accum_offset {accum}
  .amdhsa_next_free_sgpr {sgprs}
{more}
.end_amdhsa_kernel
.text
"""


def two_kernels() -> str:
    text = '.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n.text\n'
    for name, reg, vgprs, accum, sgprs in (("first", 2, 64, 32, 20), ("second", 3, 32, 32, 102)):
        text += KERNEL.format(name=name, reg=reg)
        text += DESCRIPTOR.format(name=name, vgprs=vgprs, accum=accum, sgprs=sgprs, more="  .amdhsa_ieee_mode 0")
    return text + ".fill 64, 4, 0xbf9f0000\n"


@pytest.fixture(scope="module")
def axpy():
    return asm.assemble(target.load(f"{ROOT / 'docs/examples/first_kernel.py'}:axpy")[0])


@pytest.fixture(scope="module")
def pair():
    return asm.assemble(two_kernels())


def section(data: bytes, name: str) -> bytes:
    return ELFFile(io.BytesIO(data)).get_section_by_name(name).data()


def same(a: disasm.Listing, b: disasm.Listing) -> None:
    assert [s.data for s in a.sections] == [s.data for s in b.sections]
    assert [d.raw for d in a.descriptors] == [d.raw for d in b.descriptors]
    assert a.metadata == b.metadata and (a.target, a.version) == (b.target, b.version)
    symbols = lambda l: {(s.name, y.name, y.offset, y.size, y.type, y.binding, y.visibility) for s in l.sections for y in s.symbols}
    assert symbols(a) <= symbols(b)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("name", ["axpy", "pair"])
def test_text_assembles_to_the_same(name, offsets, request):
    data = request.getfixturevalue(name)
    first = disasm.listing(data, "k.co")
    assert first.unknown == 0 and all(d.directives for d in first.descriptors)
    again = asm.assemble(disasm.text(first, offsets=offsets))
    same(first, disasm.listing(again, "again"))
    assert section(data, ".text") == section(again, ".text")


@pytest.mark.parametrize("name", ["axpy", "pair"])
def test_text_parses_to_the_same_programs(name, request):
    data = request.getfixturevalue(name)
    programs = parse.parse(disasm.text(disasm.listing(data, "k.co"), offsets=True), "k.s")
    for p, q in zip(programs, codeobject.read(data, "k.co"), strict=True):
        body = [encode(i, labels={n: 0 for n in p.labels}) for i in p.instructions[:len(q.instructions)]]
        assert p.name == q.name and [len(b) for b in body] == [len(encode(i, labels={n: 0 for n in q.labels})) for i in q.instructions]
        assert [str(i).split()[0] for i in p.instructions[:len(q.instructions)]] == [str(i).split()[0] for i in q.instructions]
        known = lambda info: (info.lds_bytes, info.kernarg_size, info.workgroup, info.args)
        assert known(p.info) == known(q.info)


def test_labels_padding_and_json(pair):
    listing = disasm.listing(pair, "k.co")
    s, = listing.sections
    assert {y.name for y in s.symbols} >= {"first", "second", "first_loop", "second_end"}
    offset = {y.name: y.offset for y in s.symbols}
    assert s.targets[offset["first_loop"]] == f"L_{offset['first_loop']:x}" and len(s.targets) == 4
    assert any(i.text == ".fill 64, 4, 0xbf9f0000" and i.kind == "padding" for i in s.items)
    plain = json.loads(json.dumps(listing.to_json()))
    assert [k["name"] for k in plain["kernels"]] == ["first", "second"] and plain["unknown"] == 0
    assert plain["kernels"][0]["directives"]["accum_offset"] == 32 and sum(i["size"] for i in plain["sections"][0]["items"]) == len(s.data)


def llvm(text: str, folder: Path) -> bytes:
    (folder / "k.s").write_text(text)
    command = [LLVM_BIN / "llvm-mc", "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx950", "-filetype=obj", folder / "k.s", "-o", folder / "k.o"]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == 0 and not r.stderr, r.stderr[:3000]
    return (folder / "k.o").read_bytes()


def random_directives(rng: random.Random) -> dict[str, int]:
    """Values of every directive that LLVM accepts together."""
    values = {name: rng.randrange(1 << bits) for name, (_, _, bits) in disasm._FIELDS.items()}
    values["next_free_vgpr"] = rng.choice([8, 128, 512, rng.randrange(1, 513)])
    values["accum_offset"] = rng.randrange(4, min(256, -(-values["next_free_vgpr"] // 4) * 4) + 1, 4)
    values["next_free_sgpr"] = rng.choice([1, 2, 3, 102, rng.randrange(1, 103)])
    values["system_vgpr_workitem_id"] %= 3
    values["user_sgpr_kernarg_preload_length"], values["user_sgpr_kernarg_preload_offset"] = rng.randrange(17), rng.randrange(512)
    values["kernarg_size"] = 0 if rng.random() < 0.2 else rng.randrange(3000, 1 << 32)
    implied = sum(n for k, n in disasm._USER_SGPRS.items() if values[k]) + values["user_sgpr_kernarg_preload_length"]
    values["user_sgpr_count"] = rng.randrange(implied, 32)
    return values


@needs_llvm
def test_descriptors_equal_llvm(tmp_path):
    """Random values of every directive: LLVM's bytes are descriptor_bytes', and directives() gives them back."""
    rng = random.Random(1)
    cases = [random_directives(rng) for _ in range(300)]
    text = ".text\n" + "".join(f".globl k{n}\nk{n}:\n s_endpgm\n" for n in range(len(cases)))
    text += '.section .rodata,"a",@progbits\n.p2align 6\n'
    for n, values in enumerate(cases):
        text += f".amdhsa_kernel k{n}\n" + "".join(f" .amdhsa_{k} {v}\n" for k, v in values.items()) + ".end_amdhsa_kernel\n"
    data = llvm(text, tmp_path)
    listing = disasm.listing(data, "k.o")
    raws = {d.kernel: d for d in listing.descriptors}
    for n, values in enumerate(cases):
        d = raws[f"k{n}"]
        assert d.raw == disasm.descriptor_bytes(values), values
        assert d.directives is not None, d.why
        assert disasm.descriptor_bytes(d.directives) == d.raw
    again = disasm.listing(llvm(disasm.text(listing), tmp_path), "again")
    same(listing, again)


@needs_llvm
def test_descriptor_without_directives_is_data(axpy, tmp_path):
    """A bit that no directive sets: the descriptor is printed as data, with its distance to the code as an expression."""
    at = axpy.index(section(axpy, ".rodata"))
    damaged = bytearray(axpy)
    damaged[at + 49] |= 4          # a priority in rsrc1
    listing = disasm.listing(bytes(damaged), "k.co")
    d, = listing.descriptors
    assert d.directives is None and "byte 49" in d.why
    again = disasm.listing(asm.assemble(disasm.text(listing)), "again")
    assert again.descriptors[0].raw[:16] == d.raw[:16] and again.descriptors[0].raw[24:] == d.raw[24:]
    assert again.descriptors[0].why == d.why                                 # and not that its code is elsewhere
    same(listing, again)


ODD = """
.text
.globl "a name: with spaces"
"a name: with spaces":
  s_nop 0
v0:
  s_branch 100
  s_branch -100
  .long 0xffffffff
  s_branch L_40000
  .long 0x84926969
  .long 0xbf8c3f70
  .fill 20, 4, 0
L_40000:
middle = v0+6
  s_endpgm
  .long 0xbf9f0000
last:
.section .text.other,"ax",@progbits
.p2align 8
.weak other
.hidden other
other:
  s_cbranch_scc0 other
  v_mov_b32 v0, 0x12345678
  s_endpgm
  .byte 1, 2, 3
"""


@needs_llvm
def test_odd_code(tmp_path):
    """Data in code, branches to nowhere, names that are registers, symbols amid instructions, more than one code section."""
    data = llvm(ODD, tmp_path)
    listing = disasm.listing(data, "k.o")
    text = disasm.text(listing, offsets=True)
    same(listing, disasm.listing(llvm(text, tmp_path), "again"))
    notes = [(i.text, i.note) for s in listing.sections for i in s.items if i.kind == "data"]
    assert (".long 0xffffffff", "not an instruction") in notes and (".byte 0x01, 0x02, 0x03", "not an instruction") in notes
    assert any("no counter" in n for _, n in notes) and any("s105 has no name" in n for _, n in notes)
    assert any("where no instruction starts" in (i.note or "") for s in listing.sections for i in s.items)
    for part in ('"a name: with spaces":', ".set middle", "L1_0:", "\nL_6c:", ".fill 20, 4, 0x0"):
        assert part in text


@needs_llvm
def test_metadata_equals_llvm(tmp_path):
    """Names that YAML takes for numbers or truth values, quotes, comment characters, other alphabets."""
    names = ["n", "nan", "12", "true", "1e5", "a b", "it's \"quoted\"", "x;y//z /* w */ # v",
             "\u00e9\u4e16\U0001f600", "tab\tnewline\n", "~", "-", "", "int*", ".x", "inf", "0x10"]
    args = "".join(f"      - .name: {disasm._scalar(n)}\n        .offset: {8 * i}\n        .size: 8\n        .value_kind: by_value\n"
                   for i, n in enumerate(names))
    text = (".text\nk:\n  s_endpgm\n" + DESCRIPTOR.format(name="k", vgprs=8, accum=8, sgprs=8, more="")
            + ".amdgpu_metadata\n---\namdhsa.version: [1, 2]\namdhsa.target: amdgcn-amd-amdhsa--gfx950\namdhsa.kernels:\n"
              "  - .name: k\n    .symbol: k.kd\n    .kernarg_segment_size: 200\n    .kernarg_segment_align: 8\n"
              "    .group_segment_fixed_size: 0\n    .private_segment_fixed_size: 0\n    .wavefront_size: 64\n    .sgpr_count: 8\n"
              "    .vgpr_count: 8\n    .max_flat_workgroup_size: 64\n    .reqd_workgroup_size: [64, 1, 1]\n"
              f"    .args:\n{args}...\n.end_amdgpu_metadata\n")
    listing = disasm.listing(llvm(text, tmp_path), "k.o")
    assert [a[".name"] for a in listing.metadata["amdhsa.kernels"][0][".args"]] == names
    same(listing, disasm.listing(llvm(disasm.text(listing), tmp_path), "again"))


@needs_llvm
def test_mnemonics_equal_llvm_objdump(pair, tmp_path):
    (tmp_path / "k.co").write_bytes(pair)
    command = [LLVM_BIN / "llvm-objdump", "-d", "--no-show-raw-insn", tmp_path / "k.co"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [l.split("//")[0].split() for l in out.splitlines() if l.startswith("\t")]
    ours = []
    for i in disasm.listing(pair, "k").sections[0].items:
        ours += ["s_nop"] * (i.size // 4) if i.note == "s_nop 0" else [i.text.split()[0]] if i.kind == "instruction" else []
    llvms = [l[0].rstrip(",") for l in lines if l and l[0] != ".long"]
    assert ours == llvms


@needs_llvm
@pytest.mark.parametrize("cpu,message", [("gfx942", "gfx942"), ("gfx90a", "gfx90a"), ("gfx1100", "machine 0x41")])
def test_other_amd_machines(cpu, message, tmp_path):
    (tmp_path / "k.s").write_text(".text\ns_endpgm\n")
    command = [LLVM_BIN / "llvm-mc", "-triple=amdgcn-amd-amdhsa", f"-mcpu={cpu}", "-filetype=obj", tmp_path / "k.s", "-o", tmp_path / "k.o"]
    subprocess.run(command, check=True)
    with pytest.raises(CodeObjectError, match=f"k.o: .*{message}.*gfx950"):
        disasm.listing((tmp_path / "k.o").read_bytes(), "k.o")


def test_no_gfx950(axpy):
    x86 = bytearray(axpy)
    x86[18:20] = struct.pack("<H", 62)
    wide = bytearray(axpy)
    wide[4] = 1
    for data, message in ((b"", "empty"), (b"MZ" + bytes(100), "no ELF"), (axpy[:40], "truncated"),
                          (bytes(x86), "EM_X86_64"), (bytes(wide), "32-bit"),
                          (axpy[:len(axpy) // 2], "truncated")):
        with pytest.raises(CodeObjectError, match=f"k.co: .*{message}"):
            disasm.listing(data, "k.co")


def headers(data: bytes) -> int:
    return struct.unpack_from("<Q", data, 40)[0]


def section_header(data: bytes, name: str) -> int:
    """File offset of a section's header."""
    elf = ELFFile(io.BytesIO(data))
    return headers(data) + 64 * elf.get_section_index(name)


@pytest.mark.parametrize("field,value", [(24, 1 << 62), (24, (1 << 64) - 1), (32, 1 << 60), (32, (1 << 64) - 1), (32, 0),
                                         (48, 1 << 62), (16, 1 << 63), (4, 8)])
@pytest.mark.parametrize("name", [".text", ".symtab", ".strtab", ".shstrtab", ".rodata", ".note"])
def test_section_headers_that_lie(axpy, name, field, value):
    """Offset, size, alignment, address and type of sections, past all bounds."""
    data = bytearray(axpy)
    at = section_header(axpy, name) + field
    data[at:at + (4 if field == 4 else 8)] = (value & (1 << 64) - 1).to_bytes(8, "little")[:4 if field == 4 else 8]
    survives(bytes(data))


def test_symbols_by_the_million(axpy):
    """A symbol table of a million entries, all in the code: a message, in bounded time; and one of a million that are not."""
    for value, section_index in ((0, ELFFile(io.BytesIO(axpy)).get_section_index(".text")), (0, 0)):
        data = bytearray(axpy)
        at = section_header(axpy, ".symtab")
        name = struct.unpack_from("<I", axpy, struct.unpack_from("<Q", axpy, at + 24)[0] + 24)[0]
        table = struct.pack("<IBBHQQ", name, 0, 0, section_index, value, 0) * ((1 << 20) + 1)
        data[at + 24:at + 40] = struct.pack("<QQ", len(data), len(table))
        started = time.monotonic()
        try:
            disasm.listing(bytes(data) + table, "k.co")
            assert section_index == 0
        except CodeObjectError as e:
            assert "symbols" in str(e) if section_index else "kernel symbol" in str(e)
        assert time.monotonic() - started < 3


def test_sections_that_overlap(axpy):
    """Many code sections over the same bytes would multiply the work."""
    at = section_header(axpy, ".comment")
    data = bytearray(axpy)
    data[at:at + 64] = axpy[section_header(axpy, ".text"):][:64]
    with pytest.raises(CodeObjectError, match="overlap"):
        disasm.listing(bytes(data), "k.co")


def survives(data: bytes) -> bool:
    """True for a listing, False for the documented error; anything else, or more than a second, fails."""
    started = time.monotonic()
    try:
        text = disasm.text(disasm.listing(data, "k.co"), offsets=True)
        assert len(text) < 4_000_000
        done = True
    except CodeObjectError as e:
        assert str(e).startswith("k.co: ")
        done = False
    assert time.monotonic() - started < 1
    return done


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Truncated, bits flipped, bytes or fields overwritten with what hurts: mostly in headers and tables."""
    out = bytearray(data)
    tables = [(0, 64), (headers(data), len(data) - headers(data))]
    elf = ELFFile(io.BytesIO(data))
    tables += [(s["sh_offset"], s["sh_size"]) for s in elf.iter_sections()
               if s["sh_type"] not in ("SHT_NULL", "SHT_NOBITS") and s["sh_size"]]
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16, 64])):
        at, size = rng.choice(tables) if rng.random() < 0.9 else (0, len(data))
        at += rng.randrange(max(1, size))
        kind = rng.randrange(4)
        if kind == 0:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at % len(out)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        else:
            width = rng.choice([2, 4, 8])
            at -= at % width
            value = rng.choice([0, 1, 0xFF, len(data), len(data) - 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1,
                                rng.getrandbits(64)])
            out[at:at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    return bytes(out[:rng.randrange(len(out))] if rng.random() < 0.15 else out)


def test_fuzz(axpy, pair):
    rng = random.Random(950)
    listed = sum(survives(damaged(rng, rng.choice([axpy, pair]))) for _ in range(1000))
    assert 100 < listed < 950       # both ends are reached


def test_command(axpy, tmp_path):
    run = lambda *args: CliRunner().invoke(cli.main, ["disasm", *map(str, args)])
    (tmp_path / "k.co").write_bytes(axpy)
    r = run(tmp_path / "k.co", "--offsets")
    assert r.exit_code == 0 and ".amdhsa_kernel axpy" in r.stdout and "// 000000: " in r.stdout
    assert run(tmp_path / "k.co", "-o", tmp_path / "o" / "k.s").exit_code == 0
    assert asm.assemble((tmp_path / "o" / "k.s").read_text())
    assert json.loads(run(tmp_path / "k.co", "--json").stdout)["kernels"][0]["name"] == "axpy"
    code = bytearray(axpy)
    at = axpy.index(section(axpy, ".text"))
    code[at:at + 4] = b"\xff" * 4
    (tmp_path / "odd.co").write_bytes(code)
    r = run(tmp_path / "odd.co")
    assert r.exit_code == 1 and ".long 0xffffffff" in r.stdout and "not an instruction" in r.stdout and "odd.co: " in r.stderr
    (tmp_path / "bad.co").write_bytes(axpy[:300])
    for name in ("bad.co", "none.co", ""):
        r = run(tmp_path / name)
        assert r.exit_code == 2 and str(tmp_path / name) in r.stderr and not r.stdout
    assert run(tmp_path / "k.co", "-o", tmp_path).exit_code == 2

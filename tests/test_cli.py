"""The command line: exit codes, JSON shapes, and that bad input ends in a message with its place."""
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cdna4dsl import cli

ROOT = Path(__file__).parent.parent
FIRST = f"{ROOT / 'docs/examples/first_kernel.py'}:axpy"
FRAGMENT = "v_exp_f32 v0, v1\nv_add_f32 v2, v0, v0\n"   # a transcendental result read in the next slot: 1 wait state short
CLEAN = "v_exp_f32 v0, v1\ns_nop 0\nv_add_f32 v2, v0, v0\n"


def cdna4(*args, code=0):
    result = CliRunner().invoke(cli.main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture
def launch(tmp_path):
    x, y = (np.random.default_rng(i).standard_normal(1000).astype(np.float32) for i in range(2))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    spec = {"grid": [2, 1, 1], "workgroup": [256, 1, 1], "buffers": {"x": {"file": "x.npy"}, "y": {"file": "y.npy"}},
            "kernarg": [{"offset": 0, "buffer": "x"}, {"offset": 8, "buffer": "y"}, {"offset": 16, "f32": 2.5}, {"offset": 20, "u32": 1000}]}
    file = tmp_path / "launch.json"
    file.write_text(json.dumps(spec))
    return file, spec, x, y


def test_build_check_emulate_simulate_in_every_form(tmp_path, launch):
    """The first kernel as Python, as text and as a code object."""
    file, _, x, y = launch
    built = json.loads(cdna4("build", FIRST, "-o", tmp_path / "o", "--json").stdout)
    assert sorted(Path(f).name for f in built["files"]) == ["axpy.hsaco", "axpy.s"]
    want = (np.float64(2.5) * x + y).astype(np.float32)
    clk = set()
    for target in (FIRST, tmp_path / "o/axpy.s", tmp_path / "o/axpy.hsaco"):
        found = json.loads(cdna4("check", target, "--json").stdout)
        assert [f for f in found["findings"] if f["severity"] != "note"] == [] and "summary" in found
        ran = json.loads(cdna4("emulate", target, "--launch", file, "--out", tmp_path / "r", "--json").stdout)
        assert ran["faults"] == []
        np.testing.assert_array_equal(np.load(tmp_path / "r/y.npy"), want)
        sim = json.loads(cdna4("simulate", target, "--launch", file, "--json").stdout)
        assert set(sim) == {"kernel", "clk", "clock_mhz", "waves_per_simd", "units", "loop", "stalls", "tflops", "peak_fraction"}
        assert set(sim["units"]) == {"matrix", "valu", "lds", "vmem", "salu"} and 0 < sim["units"]["valu"]["busy"] < 1
        clk.add(sim["clk"])
    assert len(clk) == 1


def test_check_finds_and_says(tmp_path):
    bad, good = tmp_path / "bad.s", tmp_path / "good.s"
    bad.write_text(FRAGMENT)
    good.write_text(CLEAN)
    cdna4("check", good)
    finding, = json.loads(cdna4("check", bad, "--json", code=1).stdout)["findings"]
    assert set(finding) == {"rule", "severity", "line", "instruction", "python", "have", "need", "message"}
    assert (finding["line"], finding["have"], finding["need"]) == (2, 0, 1) and finding["instruction"].startswith("v_add_f32")
    assert "bad.s:2" in cdna4("check", bad, code=1).output


def test_timelines(tmp_path, launch):
    file, *_ = launch
    cdna4("simulate", FIRST, "--launch", file, "--timeline", tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())
    assert any("v_pk_fma_f32" in e.get("name", "") for e in (events["traceEvents"] if isinstance(events, dict) else events))
    cdna4("simulate", FIRST, "--timeline", tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    cdna4("simulate", FIRST, "--set", "vmem.latency=80", "--json")
    assert "did you mean vmem.latency" in cdna4("simulate", FIRST, "--set", "vmem.latenc=80", code=2).stderr


def test_isa():
    for mnemonic in ("v_fma_f32", "V_MOV_B32_e32", "v_mfma_f32_32x32x64_f8f6f4"):
        cdna4("isa", mnemonic)
    shown = json.loads(cdna4("isa", "v_mfma_f32_32x32x64_f8f6f4", "--json").stdout)
    assert shown["passes"] == 16 and shown["latency_clk"] == 64 and "xdl_valu" in shown["hazards"]
    assert "did you mean" in cdna4("isa", "v_fmaa_f32", code=2).stderr


def test_attention_json(tmp_path):
    report, = json.loads(cdna4("attention", "--seq", "200", "--heads", "2", "--kv-heads", "1", "--seed", "5", "-o", tmp_path, "--json").stdout)
    assert {"kernel", "findings", "relative_error", "max_abs_error", "lse_max_abs_error", "clk", "loop", "tflops"} <= set(report)
    assert report["findings"] == 0 and report["relative_error"] <= 0.04 and report["lse_max_abs_error"] <= 0.05
    for suffix in (".s", ".hsaco", ".timeline.json", ".timeline.png"):
        assert (tmp_path / f"fp8_hd128{suffix}").stat().st_size > 1000


BAD_TEXT = {
    "unknown mnemonic": ("v_fma_f23 v0, v1, v2, v3\n", "v_fma_f32"),
    "register past the file": ("v_mov_b32 v256, v0\n", "v256|256"),
    "odd pair": ("v_pk_mul_f32 v[1:2], v[2:3], v[4:5]\n", "even|align"),
    "missing label": ("s_branch nowhere\n", "nowhere"),
    "garbage": ("v_mov_b32 v0 v1 ,,\n", "bad.s:1"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text(tmp_path, name):
    import re
    text, pattern = BAD_TEXT[name]
    f = tmp_path / "bad.s"
    f.write_text(text)
    message = cdna4("check", f, code=2).stderr
    assert re.search(pattern, message) and "bad.s:1" in message, message


@pytest.mark.parametrize("change,pattern", [
    (lambda s: s["buffers"].pop("y"), "y"),
    (lambda s: s["buffers"]["x"].update(file="nothing.npy"), "nothing.npy"),
    (lambda s: s["buffers"]["x"].update(dtype="bfloat16"), "bfloat16|dtype"),
    (lambda s: s["buffers"]["x"].update(dtype="float31"), "float31"),
    (lambda s: s.pop("grid"), "grid"),
    (lambda s: s.update(grid=[0, 1, 1]), "grid"),
    (lambda s: s.update(workgroup=[2000, 1, 1]), "workgroup|1024"),
    (lambda s: s["kernarg"].append({"offset": 4, "u32": 1}), "overlap|offset"),
    (lambda s: s["kernarg"].append({"offset": 24, "u31": 1}), "u31"),
])
def test_bad_launch(launch, change, pattern):
    import re
    file, spec, *_ = launch
    change(spec)
    file.write_text(json.dumps(spec))
    message = cdna4("emulate", FIRST, "--launch", file, code=2).stderr
    assert re.search(pattern, message) and "Traceback" not in message, message


def test_bad_targets(tmp_path):
    cdna4("build", FIRST, "-o", tmp_path)
    data = (tmp_path / "axpy.hsaco").read_bytes()
    for cut in (0, 3, 40, 64, 200, len(data) // 2, len(data) - 100):
        (tmp_path / "cut.hsaco").write_bytes(data[:cut])
        assert "cut.hsaco" in cdna4("check", tmp_path / "cut.hsaco", code=2).stderr
    for target, pattern in (("nosuch.s", "nosuch.s"), ("nosuch", "target"), ("math:nosuch", "nosuch"), ("math:pi", "expected a Kernel"),
                            (f"{FIRST}x", "axpyx"), ("nosuchmodule:x", "nosuchmodule")):
        assert pattern in cdna4("check", target, code=2).stderr
    cdna4("check", FIRST, "-p", "nosuch=1", code=2)


def test_wild_address_and_endless_loop(tmp_path, launch):
    file, spec, *_ = launch
    spec["kernarg"][3]["u32"] = 5000                          # past the buffers' ends
    file.write_text(json.dumps(spec))
    spec["grid"] = [20, 1, 1]
    file.write_text(json.dumps(spec))
    message = cdna4("emulate", FIRST, "--launch", file, code=1).stderr
    assert "global_load_dwordx2" in message and "first_kernel.py:" in message and "lane" in message
    loop = tmp_path / "loop.py"
    loop.write_text("from cdna4dsl.authoring import Kernel\ndef spin():\n    k = Kernel('spin')\n    with k.loop('forever') as l:\n"
                    "        l.again()\n    k.s_endpgm()\n    return k\n")
    file.write_text(json.dumps({"grid": [1, 1, 1], "workgroup": [64, 1, 1], "buffers": {}, "kernarg": []}))
    message = cdna4("emulate", f"{loop}:spin", "--launch", file, "--max-instructions", "10000", code=1).stderr
    assert "forever" in message and "loop.py:5" in message


def test_attention_refuses(tmp_path):
    np.savez(tmp_path / "nan.npz", **{n: np.full((1, 8, 1, 64), np.nan, np.float32) for n in "qkv"})
    np.savez(tmp_path / "few.npz", q=np.zeros((1, 8, 1, 64), np.float32))
    np.savez(tmp_path / "wide.npz", **{n: np.zeros((1, 8, 1, 256), np.float32) for n in "qkv"})
    np.savez(tmp_path / "int.npz", **{n: np.zeros((1, 8, 1, 64), np.int32) for n in "qkv"})
    (tmp_path / "text.npz").write_text("no zip")
    for name, pattern in (("nan", "NaN"), ("few", "no array k"), ("wide", "head dim 256"), ("int", "int32"), ("text", "not a readable"), ("gone", "no such file")):
        assert pattern in cdna4("attention", "--inputs", tmp_path / f"{name}.npz", "-o", tmp_path, code=2).stderr
    cdna4("attention", "--kernel", "fp9", "-o", tmp_path, code=2)
    cdna4("attention", "--heads", "3", "--kv-heads", "2", "-o", tmp_path, code=2)
    cdna4("attention", "--inputs", tmp_path / "few.npz", "--seed", "1", "-o", tmp_path, code=2)


def test_places_that_cannot_be_written(tmp_path, launch):
    """A file where a folder must be."""
    (tmp_path / "file").write_text("")
    file, *_ = launch
    for args in (["build", FIRST, "-o", tmp_path / "file"], ["emulate", FIRST, "--launch", file, "--out", tmp_path / "file" / "deeper"],
                 ["simulate", FIRST, "--timeline", tmp_path / "file" / "t.png"], ["simulate", FIRST, "--timeline", ""]):
        message = cdna4(*args, code=2).stderr
        assert "error: " in message.lower() and "Traceback" not in message


def test_metadata_and_data_in_text(tmp_path):
    """Metadata whose numbers are none, and data where an instruction must be."""
    cdna4("build", FIRST, "-o", tmp_path)
    text = (tmp_path / "axpy.s").read_text()
    bad = tmp_path / "bad.s"
    for old, new, pattern in ((".max_flat_workgroup_size: 256", ".max_flat_workgroup_size: 2x6", "2x6"), (".size: 8", ".size: v[0:1]", "32 bits"),
                              ("  s_waitcnt", "  .long 0\n  s_waitcnt", ".long among instructions")):
        assert old in text
        bad.write_text(text.replace(old, new, 1))
        line = next(i for i, raw in enumerate(bad.read_text().split("\n"), 1) if new.strip().split("\n")[0] in raw)
        message = cdna4("check", bad, code=2).stderr
        assert pattern in message and f"bad.s:{line}:" in message


def test_a_kernel_symbol_without_a_size(tmp_path):
    """Hand-written assembly often has no .size: the kernel ends at the section's end, and is never an empty program."""
    cdna4("build", FIRST, "-o", tmp_path)
    import io
    from cdna4dsl import codeobject
    code = (tmp_path / "axpy.hsaco").read_bytes()
    from elftools.elf.elffile import ELFFile
    data = bytearray(code)
    for section in ELFFile(io.BytesIO(code)).iter_sections():
        if section["sh_type"] in ("SHT_SYMTAB", "SHT_DYNSYM"):
            for n, symbol in enumerate(section.iter_symbols()):
                if symbol.name == "axpy":
                    at = section["sh_offset"] + n * 24 + 16            # st_size
                    data[at:at + 8] = bytes(8)
    assert bytes(data) != code
    found = codeobject.read(bytes(data), "axpy.hsaco")[0]
    assert len(found.instructions) == len(codeobject.read(code, "axpy.hsaco")[0].instructions) > 10

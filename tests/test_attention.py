"""The FP8 kernel's machine code, emulated, against float64 attention on the same quantised inputs."""
import shutil
import subprocess

import numpy as np
import pytest

import attention
from attention import reference
from attention.proof import lse_error
from cdna4dsl import asm, check, codeobject, emulate, parse

ml_dtypes = pytest.importorskip("ml_dtypes")
ENTRY = attention.KERNELS["fp8_hd128"]


@pytest.fixture(scope="module")
def program():
    return ENTRY.program()


def run(program, problem, **options):
    result = emulate.run(program, attention.launch(ENTRY, program, problem), **options)
    o = reference.decode_bf16(result.buffers["o"]).astype(np.float64)
    return o, result.buffers["lse"].astype(np.float64), result


def prove(program, problem, **options):
    o, lse, result = run(program, problem, **options)
    want_o, want_lse = problem.reference()
    assert not result.faults, result.faults[:3]
    assert all(w.all() for w in result.written.values()), "an output element was not written"
    assert not np.isnan(o).any() and not np.isnan(lse).any()
    assert reference.relative_error(o, want_o) <= 0.04
    assert lse_error(lse, want_lse) <= 0.05
    return o, lse, result


def test_e4m3_codec_equals_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(reference.decode_e4m3(codes), want)
    x = np.random.default_rng(0).standard_normal(20000) * np.exp(np.random.default_rng(1).uniform(-12, 5, 20000))
    x = np.clip(np.concatenate([x, want[~np.isnan(want)], (want[:126] + want[1:127]) / 2]), -448, 448)
    np.testing.assert_array_equal(reference.encode_e4m3(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_reference_equals_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 37, h, 16)) for h in (4, 2, 2))
    o, lse = reference.attention(q, k, v, 0.3)
    tq, tk, tv = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, is_causal=True, scale=0.3, enable_gqa=True)
    np.testing.assert_allclose(o, want.transpose(1, 2).numpy(), atol=1e-12)
    s = (tq @ tk.repeat_interleave(2, 1).transpose(-1, -2) * 0.3).masked_fill(torch.ones(37, 37).triu(1).bool(), float("-inf"))
    np.testing.assert_allclose(lse, torch.logsumexp(s, -1).numpy(), atol=1e-12)


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("seq", [1, 31, 128, 333, 512, 1000])
def test_random(program, seq, seed):
    prove(program, attention.random_problem(seed, seq=seq, heads=1))


@pytest.mark.parametrize("seed", [21, 22, 23])
def test_grouped_query_batch_and_odd_scale(program, seed):
    prove(program, attention.random_problem(seed, seq=333, heads=8, kv_heads=2, batch=2, scale=0.0731))


@pytest.mark.parametrize("seq,seq_kv", [(100, 700), (257, 129), (5, 300), (300, 5), (256, 256)])
def test_sequences_of_unequal_length(program, seq, seq_kv):
    """Causal is aligned bottom-right; rows that see no key give 0 and -inf."""
    prove(program, attention.random_problem(5, seq=seq, seq_kv=seq_kv, heads=2))


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-30, 3.0])
def test_scales(program, scale):
    """Zero, negative, vanishing, and so large that one key takes all."""
    prove(program, attention.random_problem(6, seq=200, heads=1, scale=scale))


def test_descales(program):
    p = attention.random_problem(7, seq=200, heads=2)
    from attrs import evolve
    prove(program, evolve(p, descale=(0.013, 0.4, 7.5)))


def test_activations(program):
    problem = attention.load_problem(attention.ACTIVATIONS)
    o, _, _ = prove(program, problem)
    want, _ = problem.reference()
    assert reference.relative_error(o, want) <= 0.015  # the CPU study of Lean P: 0.0098 at the median


def test_equal_keys_are_exact(program):
    """All keys alike: P is the same byte everywhere, so O is the mean of V to bf16 and LSE is exact to f32."""
    p = attention.random_problem(8, seq=64, heads=1)
    k = np.broadcast_to(p.k[:, :1], p.k.shape).copy()
    from attrs import evolve
    p = evolve(p, k=k)
    o, lse, _ = run(program, p)
    want_o, want_lse = p.reference()
    np.testing.assert_allclose(o, want_o, atol=2 ** -8 * np.abs(want_o).max())
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)


def test_nothing_outside_the_output_is_written(program):
    """O rows in a larger buffer: the gaps between rows and around the tensor keep their pattern."""
    p = attention.random_problem(9, seq=77, heads=2)
    launch = attention.launch(ENTRY, program, p)
    row = 2 * 128 * 2 + 64  # bytes, padded
    big = np.full(77 * row // 2 + 512, 0xABCD, np.uint16)
    launch.buffers["o"] = big
    launch.outputs.discard("o")
    offsets = {a.name: a.offset for a in program.info.args}
    for entry in launch.kernarg:
        if entry["offset"] == offsets["o_row_stride"]:
            entry["u32"] = row
        if entry["offset"] == offsets["o_batch_stride"]:
            entry["u64"] = 77 * row
    got = emulate.run(program, launch).buffers["o"]
    rows = got[:77 * row // 2].reshape(77, row // 2)
    want, _ = p.reference()
    assert reference.relative_error(reference.decode_bf16(rows[:, :256].reshape(77, 2, 128)).astype(np.float64), want[0]) <= 0.04
    assert (rows[:, 256:] == 0xABCD).all() and (got[77 * row // 2:] == 0xABCD).all()


def test_checker_is_clean(program):
    assert check.check(program) == []


def test_assembles_and_reads_back(program):
    """LLVM takes the text without a warning (assemble raises on one), and the code object holds the same instructions."""
    code = asm.assemble(program)
    back = codeobject.read(code, "fp8_hd128.hsaco")[0]
    text = lambda p: [asm.instruction_text(i) for i in p.instructions if not i.mnemonic.startswith(("s_branch", "s_cbranch"))]
    assert text(back)[:len(text(program))] == text(program)
    targets = lambda p: [p.target(i) for i in p.instructions if i.mnemonic.startswith(("s_branch", "s_cbranch"))]
    assert targets(back) == targets(program)
    assert (back.info.arch_vgprs + 7) // 8 == (program.info.arch_vgprs + 7) // 8
    assert back.info.lds_bytes == program.info.lds_bytes and back.info.kernarg_size == program.info.kernarg_size
    layout = lambda p: [(a.name, a.offset, a.size, a.kind == "pointer") for a in p.info.args]
    assert layout(back) == layout(program)
    assert int.from_bytes(code[48:52], "little") == asm.E_FLAGS


@pytest.mark.skipif(not (shutil.which("llvm-objdump-22")), reason="needs llvm-objdump of LLVM 22 (Debian package llvm-22)")
def test_llvm_disassembles_the_same(program, tmp_path):
    f = tmp_path / "k.hsaco"
    f.write_bytes(asm.assemble(program))
    listing = subprocess.run(["llvm-objdump-22", "-d", "--no-show-raw-insn", str(f)], capture_output=True, text=True, check=True).stdout
    got = [line.split("//")[0].strip() for line in listing.splitlines() if "//" in line]
    branch = lambda t: t.startswith(("s_branch", "s_cbranch"))
    # LLVM's text through our parser, so that only the meaning counts; a branch's distance is compared above
    fragment = parse.parse("\n".join(t for t in got if not branch(t)))[0]
    want = [str(i) for i in program.instructions]
    assert [t.split()[0] for t in got][:len(want)] == [t.split()[0] for t in want]
    assert [str(i) for i in fragment.instructions][:sum(not branch(t) for t in want)] == [t for t in want if not branch(t)]

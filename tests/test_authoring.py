"""Operand checks at the call, registers, loops, streams, and that every message names its Python line."""
import inspect
import re
from pathlib import Path

import pytest

from cdna4dsl import asm, stubs
from cdna4dsl.authoring import AuthoringError, Kernel, bits, m0, off, vcc
from cdna4dsl.schedule import interleave


def kernel():
    return Kernel("t", workgroup=(64, 1, 1))


def refused(pattern, action):
    """The action raises an AuthoringError that matches and that begins with this file and a line of the caller."""
    with pytest.raises(AuthoringError, match=pattern) as e:
        action()
    assert re.match(r"tests/test_authoring\.py:\d+: ", str(e.value)), str(e.value)


@pytest.mark.parametrize("pattern,emit", [
    ("v_fma_f23.*did you mean v_fma_f32", lambda k, v, s: k.emit("v_fma_f23", v[0], v[1], v[2], v[3])),
    ("4 operand", lambda k, v, s: k.v_fma_f32(v[0], v[1], v[2], v[3], v[4])),
    ("src2", lambda k, v, s: k.v_fma_f32(v[0], v[1], v[2])),
    ("even|align", lambda k, v, s: k.v_pk_fma_f32(v[1:3], v[2:4], v[4:6], v[6:8])),
    ("16", lambda k, v, s: k.v_mfma_f32_32x32x16_bf16(v[0:8], v[8:12], v[12:16], 0)),
    ("literal", lambda k, v, s: k.v_fma_f32(v[0], v[1], 3.7, v[2])),
    ("SGPR|vgpr|VGPR", lambda k, v, s: k.v_mov_b32(s[0], v[0])),
    ("SGPR|constant bus", lambda k, v, s: k.v_fma_f32(v[0], s[0], s[1], v[2])),
    ("offset", lambda k, v, s: k.ds_read_b32(v[0], v[1], offset=70000)),
    ("gls|modifier", lambda k, v, s: k.ds_read_b32(v[0], v[1], gls=True)),
    ("float", lambda k, v, s: k.v_add_u32(v[0], 1.5, v[1])),
    ("32 bits", lambda k, v, s: k.v_mov_b32(v[0], 1 << 40)),
    ("text", lambda k, v, s: k.v_mov_b32(v[0], "v1")),
])
def test_refusals(pattern, emit):
    k = kernel()
    v, s = k.vgpr("v", 16), k.sgpr("s", 4)
    refused(pattern, lambda: emit(k, v, s))


def test_register_file_is_finite():
    k = kernel()
    k.vgpr("big", 200)
    refused(r"'more' needs 100 v register.*live: big \(200\)", lambda: k.vgpr("more", 100))
    refused("lds=", lambda: Kernel("x", lds=200000))
    refused("workgroup", lambda: Kernel("x", workgroup=(2048, 1, 1)))


def test_scope_frees_and_reuses():
    k = kernel()
    with k.scope():
        a = k.vgpr("a", 8)
    assert k.vgpr("b", 8).index == a.index
    refused("freed twice|not allocated", lambda: k.free(k.vgpr("c")[0], a[0], a[0]))


def test_unterminated_loop_and_missing_label_and_end():
    def loop():
        k = kernel()
        with k.loop("forever"):
            k.s_nop(0)
    refused("loop 'forever' is never closed", loop)
    k = kernel()
    k.s_branch("nowhere")
    k.s_endpgm()
    refused("no label 'nowhere'", k.finalize)
    refused("no s_endpgm", kernel().finalize)


def test_python_line_stays_on_the_instruction():
    k = kernel()
    i = k.v_mov_b32(k.vgpr("x"), 1); line = inspect.currentframe().f_lineno
    assert i.python == ("tests/test_authoring.py", line)
    k.s_endpgm()
    assert f"@tests/test_authoring.py:{line}" in asm.to_text(k.finalize())


def test_assembler_errors_come_back_on_the_python_line():
    k = kernel()
    v = k.vgpr("v", 8, at=2)
    i = k.v_pk_mul_f32(v[0:2], v[2:4], v[4:6])
    i.operands["src0"] = v[1:3]  # past the checks at the call
    k.s_endpgm()
    with pytest.raises(asm.AsmError, match=r"tests/test_authoring\.py:\d+: error"):
        asm.assemble(k.finalize())


def test_inline_constants_and_numbers():
    k = kernel()
    v = k.vgpr("v", 4)
    texts = [str(i) for i in (k.v_add_f32(v[0], 1, v[1]), k.v_mul_f32(v[0], 3.5, v[1]), k.v_add_u32(v[0], -16, v[1]),
                              k.v_add_u32(v[0], 65, v[1]), k.v_mov_b32(v[0], bits(0x3F800000)), k.v_fma_f32(v[0], -v[1], abs(v[2]), v[3]))]
    assert texts == ["v_add_f32_e32 v1, 1.0, v2".replace("v1, 1.0, v2", f"{v[0]}, 1.0, {v[1]}"), f"v_mul_f32_e32 {v[0]}, 0x40600000, {v[1]}",
                     f"v_add_u32_e32 {v[0]}, -16, {v[1]}", f"v_add_u32_e32 {v[0]}, 0x41, {v[1]}", f"v_mov_b32_e32 {v[0]}, 1.0",
                     f"v_fma_f32 {v[0]}, -{v[1]}, |{v[2]}|, {v[3]}"]


def test_interleave():
    k = kernel()
    a, b = k.vgpr("a", 8), k.vgpr("b", 8)
    with k.stream() as anchor:
        for x in a[0:3]:
            k.v_mov_b32(x, 1)
    with k.stream() as fill:
        for x in b[0:7]:
            k.v_mov_b32(x, 2)
    woven = [i.writes()[0] for i in interleave(anchor, fill, 2)]
    assert woven == [a[0], b[0], b[1], a[1], b[2], b[3], a[2], b[4], b[5], b[6]]
    with k.stream() as clash:
        k.v_add_f32(b[7], a[0], b[7])
    with pytest.raises(AuthoringError, match=r"test_authoring\.py:\d+.*test_authoring\.py:\d+"):
        interleave(anchor, clash, 1)


def test_stubs_are_current():
    path = Path(stubs.__file__).with_name("authoring.pyi")
    assert path.read_text() == stubs.text(), "run python -m cdna4dsl.stubs"


def test_every_public_operand_form_assembles():
    """One kernel with LDS-DMA, off, vcc and m0 operands through LLVM."""
    k = Kernel("t", workgroup=(64, 1, 1), lds=4096)
    v, s = k.vgpr("v", 16), k.sgpr("s", 8)
    k.s_mov_b32(m0, 0)
    k.buffer_load_dwordx4(None, v[0], s[0:4], 0, offen=True, lds=True)
    k.global_load_dwordx4(v[4:8], v[0:2], off, offset=-16)
    k.v_cmp_lt_f32(vcc, v[0], v[1])
    k.v_cmp_lt_f32(s[4:6], v[0], v[1])
    k.v_cndmask_b32(v[0], v[1], v[2], s[4:6])
    k.v_cvt_pk_fp8_f32(v[0], v[1], v[2], op_sel=[0, 0, 0, 1])
    k.waitcnt(vmcnt=0)
    k.s_endpgm()
    assert asm.assemble(k.finalize())[:4] == b"\x7fELF"

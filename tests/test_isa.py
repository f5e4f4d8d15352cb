"""The specs load, every fact has a source, and bad spec text is refused with its place."""
import pytest

from cdna4dsl import isa

M = isa.load()


def test_every_instruction_has_a_source_and_a_unit():
    for i in M.instructions.values():
        assert i.cite.sources and i.unit in ("valu", "matrix", "lds", "vmem", "salu", "branch", "none"), i.mnemonic


def test_opcodes_are_unique_in_their_encoding():
    seen = {}
    for i in M.instructions.values():
        for f in i.forms:
            key = (f.encoding.replace("VOP3SD", "VOP3").replace("MFMA", "VOP3P") if f.encoding != "MFMA_SCALE" else f.encoding, f.opcode)
            assert seen.setdefault(key, i.mnemonic) == i.mnemonic, key
            assert f.opcode < 1 << M.encodings[f.encoding].fields["op"].width


def test_encodings_do_not_overlap_their_fields():
    for e in M.encodings.values():
        used = set()
        for f in e.fields.values():
            span = set(range(f.low, f.high + 1))
            # SMEM's and VOP2's implied operands share no bits; an overlap is a typing error
            assert not used & span and max(span) < e.bits, (e.name, f.name)
            used |= span


def test_passes_match_the_manual():
    """ISA table 28: passes of 4 clk."""
    table = {"v_mfma_f32_32x32x64_f8f6f4": 16, "v_mfma_f32_16x16x128_f8f6f4": 8, "v_mfma_f32_16x16x32_fp8_fp8": 4,
             "v_mfma_f32_32x32x16_fp8_fp8": 8, "v_mfma_f32_32x32x16_bf16": 8, "v_mfma_f32_16x16x32_bf16": 4}
    for name, passes in table.items():
        assert M.instructions[name].passes == passes and M.instructions[name].latency == 4 * passes


def test_implicit_state_follows_from_the_semantics():
    i = M.instructions
    assert i["s_addc_u32"].implicit_reads == {"scc"} and i["s_addc_u32"].implicit_writes == {"scc"}
    assert i["s_cbranch_vccz"].implicit_reads == {"vcc"} and i["v_add_f32"].implicit_reads == {"exec"}
    assert i["s_and_saveexec_b64"].implicit_writes == {"exec", "scc"} and not i["v_mfma_f32_16x16x32_bf16"].implicit_reads


@pytest.mark.parametrize("old,new,message", [
    ("op 0 :", "op zero :", r"salu\.isa:\d+:\d+"),
    ("class salu from XML", "class nosuch from XML", "unknown class 'nosuch'"),
    ("from XML, PCODE {", "from NOSUCH {", "unknown source 'NOSUCH'"),
    ("  s_mov_b64 ", "  s_mov_b32 ", "defined twice"),
    ("family SOP1", "family SOP9", "unknown encoding SOP9"),
])
def test_bad_specs_are_refused(tmp_path, monkeypatch, old, new, message):
    for f in isa.SPEC_DIR.iterdir():
        if f.is_file():
            text = f.read_text()
            (tmp_path / f.name).write_text(text.replace(old, new, 1) if f.name == "salu.isa" else text)
    monkeypatch.setattr(isa, "SPEC_DIR", tmp_path)
    with pytest.raises(isa.SpecError, match=message):
        isa.load.__wrapped__()

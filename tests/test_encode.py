"""Our bytes against LLVM's for every spec'd instruction and form, and the decoder as the encoder's inverse."""
import io
import random
import subprocess
import sys

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given, settings, strategies as st

from cdna4dsl import asm, codeobject, encode, isa, parse
from cdna4dsl.authoring import Kernel
from cdna4dsl.operands import choose_form, operand_dwords, validate
from cdna4dsl.program import Imm, Instruction, Off, Reg, encode_waitcnt, special

M = isa.load()
INTS = [Imm.of(n) for n in (0, 1, 64, -1, -16)]
FLOATS = [Imm.of(x) for x in (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0)] + [Imm(0x3E22F983)]
LITERALS = [Imm.of(n) for n in (65, -17, 0x12345678)] + [Imm.of(3.25)]


def candidates(rng: random.Random, spec, form, o, mods):
    """A random operand of the kind, boundaries included; validate() throws out what does not fit."""
    n = operand_dwords(spec, o, mods)
    v = lambda bank="v", n=n: Reg(bank, rng.choice([0, 2, 256 - n - n % 2, rng.randrange(0, 256 - n, 2 if n > 1 else 1)]), n)
    align = 1 if n == 1 else 2 if n == 2 else 4
    s = lambda n=n: Reg("s", rng.choice([0, 4, (100 - n) // align * align, rng.randrange(0, 100 - n, align)]), n)
    constants = INTS + (FLOATS if n == 1 else []) + (LITERALS if n == 1 else [])
    wide = [special("vcc"), special("exec")] if n == 2 else [special("m0"), special("vcc_lo"), special("exec_hi")] if n == 1 else []
    kind = o.kind
    if kind == "vgpr":
        return v()
    if kind == "vreg":
        return v(rng.choice("va"))
    if kind == "vcsrc":
        return rng.choice([v("v"), v("a"), *(INTS + FLOATS)])
    if kind == "src":
        value = rng.choice([v(), v(), s(), *wide, *constants] if n == 1 else [v(), s(), *INTS])
        if isinstance(value, Reg) and o.element == "f32" and form.encoding in ("VOP3", "VOP3SD") and rng.random() < 0.5:
            value = rng.choice([-value, abs(value), -abs(value)])
        return value
    if kind == "sreg":
        return rng.choice([s(), s(), *wide])
    if kind == "ssrc":
        return rng.choice([s(), *wide, *constants])
    if kind == "mask":
        return rng.choice([special("vcc"), s()])
    if kind in ("imm", "label"):
        low, high = (0, 15) if spec.mnemonic == "s_nop" else (-32768, 32767) if o.type == "i16" else (0, 3) if spec.mnemonic == "s_setprio" else (0, 127)
        return Imm.of(rng.choice([low, high, rng.randint(low, high)]))
    if kind == "waitcnt":
        return Imm(encode_waitcnt(rng.choice([0, 3, 16, 62, 63]), rng.choice([0, 7]), rng.choice([0, 9, 15])))
    if kind == "saddr":
        return mods["_saddr"]
    if kind == "smoff":
        return rng.choice([Imm.of(0), Imm.of(0xFFFFF), Imm.of(-4), s(1), special("m0")])
    if kind == "vaddr":
        count = mods.get("offen", 0) + mods.get("idxen", 0) if spec.family == "MUBUF" else 2 if isinstance(mods["_saddr"], Off) else 1
        return v(n=count) if count else Off()
    raise AssertionError(kind)


def modifiers(rng, spec, form):
    mods = {}
    limits = {"DS": 65535, "MUBUF": 4095}
    for name in spec.modifiers + (("clamp", "omod") if form.encoding in ("VOP3", "VOP3SD") else ()):
        if rng.random() < 0.5:
            continue
        if name == "offset":
            high = limits.get(form.encoding, 4095)
            mods[name] = rng.choice([1, high, -4096 if form.encoding == "GLOBAL" else 16])
        elif name in ("cbsz", "blgp"):
            mods[name] = rng.randrange(1, 5)
        elif name == "op_sel":
            mods[name] = 8 if form.encoding == "VOP3" else rng.randrange(1, 4)
        elif name in ("op_sel_hi", "neg_lo", "neg_hi"):
            scaled = form.encoding == "MFMA_SCALE"
            sources = 2 if scaled else sum(o.name.startswith("src") for o in spec.operands)
            value = rng.randrange(0, 1 << sources)
            mods[name] = value | (7 & ~((1 << sources) - 1)) if name == "op_sel_hi" and not scaled else value
        elif name == "omod":
            # LLVM takes omod where the result is a float and denormals are flushed
            if any(o.out and o.element == "f32" for o in spec.operands):
                mods[name] = rng.randrange(1, 4)
        elif name == "clamp":
            if any(o.out and o.element == "f32" for o in spec.operands):
                mods[name] = 1
        else:
            mods[name] = 1
    return {k: v for k, v in mods.items() if v or k == "op_sel_hi" and form.encoding == "VOP3P"}


def corpus(count: int, seed: int = 0) -> list[Instruction]:
    """``count`` valid instructions a form, no branches (their bytes are compared in whole kernels)."""
    rng, out = random.Random(seed), []
    for spec in M.instructions.values():
        if any(o.kind == "label" for o in spec.operands):
            continue
        for form in spec.forms:
            made = tries = 0
            while made < count and tries < 400:
                tries += 1
                mods = modifiers(rng, spec, form)
                hidden = {**mods, "_saddr": rng.choice([Off(), Reg("s", 2 * rng.randrange(50), 2)])}
                dma = mods.get("lds")
                ops = {o.name: candidates(rng, spec, form, o, hidden) for o in spec.operands if not (dma and o.name == "vdata")}
                if form.suffix == "_e32" and (mods or choose_form(spec, ops, mods) != form):
                    continue
                if mods.get("op_sel_hi") == 7:
                    del mods["op_sel_hi"]
                if validate(spec, form, ops, mods):
                    continue
                out.append(Instruction(spec, form, ops, mods))
                made += 1
            assert made, f"no valid operands found for {spec.mnemonic} {form.encoding}"
    return out


def llvm_bytes(lines: list[str], folder) -> bytes:
    s, o = folder / "x.s", folder / "x.o"
    s.write_text("\n".join(lines) + "\n")
    subprocess.run([sys.executable, "-m", "ziglang", "clang", "-cc1as", "-triple", asm.TRIPLE, "-target-cpu", asm.CPU, "-filetype", "obj",
                    str(s), "-o", str(o)], check=True, capture_output=True, text=True)
    return ELFFile(io.BytesIO(o.read_bytes())).get_section_by_name(".text").data()


CORPUS = corpus(12)


def test_bytes_equal_llvm(tmp_path):
    assert len(CORPUS) > 2000 and {i.mnemonic for i in CORPUS} | {n for n in M.instructions if "branch" in n} == set(M.instructions)
    data, at = llvm_bytes([asm.instruction_text(i) for i in CORPUS], tmp_path), 0
    for inst in CORPUS:
        ours = encode.encode(inst)
        assert ours == data[at:at + len(ours)], (str(inst), ours.hex(), data[at:at + len(ours)].hex())
        at += len(ours)
    assert at == len(data)


def same(a: Instruction, b: Instruction) -> bool:
    return str(a) == str(b) and a.operands == b.operands and a.mods == b.mods and a.form == b.form


def test_decode_inverts_encode_and_parse_inverts_print():
    for inst in CORPUS:
        data = encode.encode(inst)
        back, size = encode.decode(data)
        assert size == len(data) and same(back, inst), (str(inst), str(back))
    text = "\n".join(asm.instruction_text(i) for i in CORPUS)
    for inst, back in zip(CORPUS, parse.parse(text)[0].instructions, strict=True):
        assert same(back, inst), (str(inst), str(back))


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=0, max_size=20))
def test_random_bytes_decode_or_say_so(data):
    try:
        inst, size = encode.decode(data)
    except encode.DecodeError as e:
        assert "offset" in str(e)
    else:
        assert encode.encode(inst, address=0, labels=encode._Anywhere()) == data[:size]


@pytest.fixture(scope="module")
def code():
    k = Kernel("small", workgroup=(128, 2, 1), lds=1024)
    k.arg("p", "pointer")
    with k.loop("again") as loop:
        k.v_add_u32(k.vgpr("x"), 1, k.workitem_id)
        loop.again("scc1")
    k.s_endpgm()
    return asm.assemble(k.finalize())


def test_branches_and_descriptor_survive(code):
    back, = codeobject.read(code)
    assert [i.mnemonic for i in back.instructions] == ["v_add_u32", "s_cbranch_scc1", "s_endpgm"]
    assert back.target(back.instructions[1]) == 0
    assert back.info.workgroup == (128, 2, 1) and back.info.lds_bytes == 1024 and back.info.kernarg_size == 8


def test_damaged_files_end_in_an_error_or_a_program(code):
    rng = random.Random(1)
    cases = [code[:n] for n in range(0, len(code), 64)]
    for _ in range(500):
        b = bytearray(code)
        for _ in range(rng.choice([1, 4, 30])):
            b[rng.randrange(len(b))] = rng.randrange(256)
        cases.append(bytes(b))
    failed = 0
    for data in cases:
        try:
            codeobject.read(data, "x.hsaco")
        except codeobject.CodeObjectError as e:
            assert "x.hsaco" in str(e)
            failed += 1
    assert failed > len(code) // 64

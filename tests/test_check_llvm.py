"""Wait states against LLVM's hazard recogniser on random programs; every known difference is named below with its reason."""
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from attrs import evolve

import hazard_oracle
from cdna4dsl import asm, check, isa, parse
from cdna4dsl.operands import choose_form, operand_dwords, validate
from cdna4dsl.program import EXEC, M0, VCC, Imm, Instruction, Off, Program, Reg

LLVM_BIN = os.environ.get("LLVM_BIN", "/usr/lib/llvm-22/bin")
pytestmark = pytest.mark.skipif(not (Path(LLVM_BIN) / "llc").exists(), reason=f"no LLVM 22 with AMDGPU in {LLVM_BIN} (Debian: llvm-22; or set LLVM_BIN)")

M = isa.load()
# The instructions whose hazards are held to LLVM's; hazards.isa has no rules yet that only others need (v_div_fmas, s_getreg, DGEMM, ...).
HELD = set((Path(__file__).parent / "data" / "hazards_held_to_llvm.txt").read_text().split())
SPECS = [s for s in M.instructions.values() if s.mnemonic in HELD and s.unit != "branch" and s.mnemonic not in ("s_endpgm", "s_nop", "s_sleep", "s_setprio", "s_waitcnt")]
GROUPS = [[s for s in SPECS if test(s)] for test in (
    lambda s: s.unit == "matrix", lambda s: s.unit == "valu" and s.family in ("VOP1", "VOP2", "VOP3P"), lambda s: s.unit == "valu",
    lambda s: {"trans", "subdword", "permlane", "lane"} & set(s.classes), lambda s: s.family == "VOPC",
    lambda s: s.unit in ("lds", "vmem"), lambda s: s.unit in ("salu", "none"))]
WEIGHTS = [6, 4, 3, 4, 2, 5, 2]
PROGRAMS, LENGTH, SEED = 300, 30, 950


def operand(rng, spec, o, mods):
    n = operand_dwords(spec, o, mods)
    vector = lambda: Reg("a" if o.kind in ("vreg", "vcsrc") and rng.random() < 0.3 else "v", rng.choice(range(0, 10, 2 if n > 1 else 1)) + rng.choice((0, 0, 16)), n)
    scalar = lambda: Reg("s", rng.choice(range(0, 8, min(n, 4))), n)
    if o.kind == "mask":
        return rng.choice((VCC, scalar(), EXEC if spec.family == "VOPC" else VCC))
    if o.kind in ("vgpr", "vreg"):
        return vector()
    if o.kind == "vcsrc":
        return Imm(0) if rng.random() < 0.3 else vector()
    if o.kind == "src":
        return rng.choice((vector(), vector(), scalar() if n <= 2 else vector(), Imm(rng.randrange(64)) if n == 1 else vector()))
    if o.kind == "vaddr":
        count = bool(mods.get("offen")) if spec.family == "MUBUF" else mods["_count"]
        return Reg("v", 2 * rng.randrange(4), count) if count else Off()
    if o.kind == "saddr":
        return Off() if mods["_count"] == 2 else Reg("s", 2 * rng.randrange(4), 2)
    if o.kind == "sreg":
        return rng.choice((scalar(), M0)) if n == 1 and spec.unit == "salu" and spec.family != "SMEM" else scalar()
    if o.kind == "ssrc":
        return rng.choice((scalar(), Imm(rng.randrange(64)))) if n == 1 else scalar()
    return Imm(rng.randrange(64)) if o.kind in ("imm", "smoff") else Imm(0xC07F)


def instruction(rng, spec) -> Instruction:
    while True:
        mods = {}
        if spec.family == "MUBUF":
            mods = {"offen": rng.randrange(2), "lds": int("lds" in spec.modifiers and rng.random() < 0.5)}
        elif spec.family == "GLOBAL":
            mods = {"_count": rng.choice((1, 2))}
        elif "op_sel" in spec.modifiers and "subdword" in spec.classes:
            mods = {"op_sel": rng.choice((0, 8))}
        elif spec.mnemonic.endswith("f8f6f4"):
            mods = {"cbsz": rng.choice((0, 0, 2, 4)), "blgp": rng.choice((0, 0, 2, 4))}
        operands = {o.name: operand(rng, spec, o, mods) for o in spec.operands if not (mods.get("lds") and o.name == "vdata")}
        if spec.unit == "matrix" and rng.random() < 0.5:
            operands["src2"] = operands["vdst"]
        mods = {k: v for k, v in mods.items() if v and k[0] != "_"}
        form = choose_form(spec, operands, mods)
        inst = Instruction(spec, form, operands, mods)
        if not validate(spec, form, operands, mods):
            return inst


def nop(n: int) -> Instruction:
    return Instruction(M.instructions["s_nop"], M.instructions["s_nop"].forms[0], {"simm16": Imm(n - 1)})


def generate(rng, shape: str) -> list[str]:
    """Lines of a random program. shape: straight, loop (one block), or skip (a forward branch).

    A branch inside a loop is left out: LLVM's search visits each block once, by whichever path comes first, and then
    misses the shorter path. tests/test_check.py has such programs.
    """
    lines = []
    for _ in range(LENGTH):
        if rng.random() < 0.25:
            lines.append(f"s_nop {rng.randrange(16) if rng.random() < 0.5 else rng.randrange(3)}")
        else:
            lines.append(asm.instruction_text(instruction(rng, rng.choice(rng.choices(GROUPS, WEIGHTS)[0]))))
    start, end = sorted(rng.sample(range(LENGTH), 2))
    if shape == "loop":
        lines[start] = f"NAME:\n{lines[start]}"
        lines[end] = "s_cbranch_scc1 NAME"
    elif shape == "skip":
        lines[start] = "s_cbranch_vccz NAME"
        lines[end] = f"NAME:\n{lines[end]}"
    return lines


# Between programs of one run, so that nothing reaches from one into the next.
SEPARATOR = ["s_nop 15", "s_nop 15"]


def llvm_needs(programs: list[str]) -> list[list[int]]:
    """Wait states that LLVM inserts before each instruction of each program."""
    text = "\n".join(p + "\n" + "\n".join(SEPARATOR) for p in programs) + "\ns_endpgm\n"
    needs = iter([r["need"] for r in hazard_oracle.run(text) if not r["asm"].startswith("<inserted>")])
    out = []
    for p in programs:
        count = sum(not line.endswith(":") for line in p.splitlines())
        out.append([next(needs) for _ in range(count)])
        for _ in SEPARATOR:
            assert next(needs) == 0
    return out


# -- where LLVM 22.1.8 is known to differ -----------------------------------------------------------------------------
# Each says whether it explains the difference at instruction ``at``: ``f`` is a finding that LLVM does not have, or None
# where LLVM asks for more.
def units(registers) -> set:
    return {(r.bank, u) for r in registers for u in r.units}


def touched(inst: Instruction) -> set:
    return units(inst.reads() + inst.writes())


def lookback(f, program, at):
    """LLVM looks back 19 instructions, and a 16-pass result needs 20 wait states (llvm 222040)."""
    return f and (f.have, f.need) == (19, 20)


def different_opcode(f, program, at):
    """SrcC of another opcode on the very registers is not forwarded; LLVM 22 asks for nothing (llvm 218363)."""
    producer, consumer = program.instructions[f.producer] if f else None, program.instructions[at]
    return f and f.rule == "xdl_srcc_partial" and producer.spec is not consumer.spec and producer.operands["vdst"] == consumer.operands["src2"]


def nearest_matrix(f, program, at):
    """LLVM looks at the nearest MFMA that overlaps an operand, though an earlier, longer one may still be running."""
    nearer = program.instructions[f.producer + 1:at] if f else ()
    return f and f.rule.startswith("xdl_") and any(i.spec.unit == "matrix" and touched(i) & touched(program.instructions[at]) for i in nearer)


def mixed_paths(f, program, at):
    """Where paths meet, LLVM takes the distance of the nearest MFMA and the passes of the one it visited last."""
    label = max((t for t in program.labels.values() if t <= at), default=None)
    if label is None or sum(check.wait_states(i) for i in program.instructions[label:at]) >= 20:
        return False
    consumer = touched(program.instructions[at])
    return (not f or f.rule.startswith("xdl_")) and sum(i.spec.unit == "matrix" and bool(touched(i) & consumer) for i in program.instructions) >= 2


def memory_after_wide_store(f, program, at):
    """A load over the data of a wide store: 1 in the manual, nothing in LLVM."""
    return f and f.rule == "wide_store_war_memory"


def mask_operand(f, program, at):
    """A lane mask written by a VALU needs no wait: 0 in the manual, and AITER has thousands of such sites; 2 in LLVM."""
    consumer = program.instructions[at]
    masks = units(consumer.operands[o.name] for o in consumer.spec.operands if o.kind == "mask" and o.inp)
    return not f and any(i.spec.unit == "valu" and units(i.writes()) & masks for i in program.instructions[max(0, at - 2):at])


def packed_f32(f, program, at):
    """LLVM takes op_sel_hi of v_pk_*_f32 for a write to half a register."""
    return not f and at > 0 and "packed32" in program.instructions[at - 1].spec.classes


def lds_dma_as_valu(f, program, at):
    """LLVM marks LDS-DMA loads as VALU instructions too, and so wants their addresses as late as a VALU source."""
    return not f and program.instructions[at].is_lds_dma


KNOWN = (lookback, different_opcode, nearest_matrix, mixed_paths, memory_after_wide_store, mask_operand, packed_f32, lds_dma_as_valu)


RULES = {h.name for h in M.hazards}


def by_instruction(program: Program) -> dict[int, list[check.Finding]]:
    found: dict[int, list[check.Finding]] = {}
    for f in check.check(program):
        if f.rule in RULES:
            found.setdefault(f.index, []).append(f)
    return found


def insert(program: Program, at: int, missing: int) -> Program:
    """With so many wait states before instruction ``at``, behind the labels that stand there."""
    pads = [nop(min(16, missing - k)) for k in range(0, missing, 16)]
    return evolve(program, instructions=program.instructions[:at] + pads + program.instructions[at:],
                  labels={name: t + (len(pads) if t > at else 0) for name, t in program.labels.items()})


def compare(text: str, llvm: list[int]) -> tuple[str | None, int]:
    """(name of a known difference or None, instructions compared); AssertionError for any other difference.

    LLVM inserts what it asks for as it goes on, so that is inserted here too. After a known difference the two are no
    longer in the same place: the rest of the program is not compared.
    """
    program = parse.parse(text)[0]
    found, at = by_instruction(program), 0
    for n, need in enumerate(llvm):
        here, insts = found.get(at, []), program.instructions
        ours = max((f.need - f.have for f in here), default=0)
        if ours != need:
            excuses = [next((k.__name__ for k in KNOWN if k(f, program, at)), None)
                       for f in ([f for f in here if f.need - f.have > need] or [None])]
            assert all(excuses), f"wait states missing before '{insts[at]}' (line {insts[at].line}): {ours}, LLVM {need}; {[f.message for f in here]}\n{text}"
            return excuses[0], n
        if need:
            count = len(insts)
            program = insert(program, at, need)
            at += len(program.instructions) - count
            found = by_instruction(program)
        at += 1
    return None, len(llvm)


def test_wait_states_equal_llvms():
    rng = random.Random(SEED)
    texts = []
    for n in range(PROGRAMS):
        texts.append("\n".join(generate(rng, ("straight", "loop", "skip", "straight")[n % 4])).replace("NAME", f"L{n}_"))
    needs = llvm_needs(texts)
    results = [compare(t, n) for t, n in zip(texts, needs)]
    known = Counter(name for name, _ in results if name)
    # enough of it was compared, and LLVM did ask for something
    assert sum(count for _, count in results) > 0.7 * PROGRAMS * LENGTH and sum(n > 0 for p in needs for n in p) > PROGRAMS, known


def test_attention_kernel_needs_nothing_from_llvm():
    """LLVM's recogniser on the whole FP8 kernel: only its documented false alarm on masks read by v_cndmask (facts: LLVM 22
    asks 2 where the manual asks 0; AITER has thousands of such sites)."""
    import attention
    from cdna4dsl import asm
    text = "\n".join(line for line in asm.to_text(attention.KERNELS["fp8_hd128"].program()).split(".Lend_")[0].splitlines()
                     if not line.startswith("."))
    asked = [r for r in hazard_oracle.run(text) if r["need"]]
    assert all(r["asm"].startswith("v_cndmask_b32") and r["need"] <= 2 for r in asked), asked[:5]

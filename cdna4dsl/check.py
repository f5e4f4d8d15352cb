"""Static checks of a program: missing wait states and waits by dataflow over the control-flow graph, and its structure.

gfx950 interlocks no matrix result and no memory result: a missing ``s_nop`` or ``s_waitcnt`` is silent garbage. The
wait-state rules are data (``isa_specs/hazards.isa``); wait states are counted as LLVM counts them, 1 an instruction
and N + 1 for ``s_nop N``, over the shortest path. What addresses decide (which LDS bytes) is left to the emulator.
"""
from __future__ import annotations

import functools
import heapq
from collections import Counter
from typing import Callable, Iterator, TypeVar

from attrs import define, evolve, field, frozen

from . import isa
from .isa import HazardRule, InstructionSpec, Machine, OperandSpec, SpecError
from .program import EXEC, M0, VCC, Imm, Instruction, Label, Program, Reg, decode_waitcnt

_State = TypeVar("_State")
_VM_MAX, _LGKM_MAX = 63, 15    # counts at which s_waitcnt does not wait

# -- registers as bits of a number: v0..v255, a0..a255, s0..s127 (with vcc, m0, exec) ------------------------------
_FILES = {"v": (0, 256), "a": (256, 256), "s": (512, 128)}
# Initialised by hardware whatever the descriptor says: flat_scratch, xnack_mask, exec.
_HARDWARE_SGPRS = (102, 103, 104, 105, 126, 127)


@functools.lru_cache(None)
def _bits(bank: str, index: int, count: int) -> int:
    base, size = _FILES[bank]
    end = min(index + count, size)
    return ((1 << end - index) - 1) << base + index if 0 <= index < end else 0


def _mask(r: Reg) -> int:
    return _bits(r.bank, r.index, r.count)


def _units(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _names(mask: int) -> str:
    """Registers of a mask for a message: v0, v[4:7]."""
    runs: list[list] = []
    for u in _units(mask):
        bank, base = next((b, base) for b, (base, size) in _FILES.items() if base <= u < base + size)
        if runs and runs[-1][0] == bank and runs[-1][2] + 1 == u - base:
            runs[-1][2] += 1
        else:
            runs.append([bank, u - base, u - base])
    return ", ".join(Reg(b, low, high - low + 1).plain for b, low, high in runs)


@frozen
class Finding:
    """``have`` and ``need`` are wait states, or for a wait the s_waitcnt that would cover. ``index`` and ``producer`` (of
    a wait-state finding) are places in the program."""
    rule: str
    severity: str  # error, warning, note
    line: int | None
    instruction: str
    index: int
    python: str | None
    have: int | str | None
    need: int | str | None
    message: str
    producer: int | None = None


def _finding(program: Program, index: int, rule: str, severity: str, message: str, have=None, need=None, producer=None) -> Finding:
    i = program.instructions[index]
    return Finding(rule, severity, i.line, str(i), index, f"{i.python[0]}:{i.python[1]}" if i.python else None, have, need, message, producer)


def _said(i: Instruction) -> str:
    return f"'{i}' ({i.where})"


# -- control flow -----------------------------------------------------------------------------------------------------
@frozen
class Block:
    """Instructions start..end-1; successors are block numbers."""
    start: int
    end: int
    successors: tuple[int, ...]


def _effect(spec: InstructionSpec) -> str | None:
    """branch, end, barrier, waitcnt, ... for program control."""
    first = spec.semantics[0]
    return first[1] if first[0] == "call" else None


_effect_of = functools.lru_cache(None)(_effect)


def _always(spec: InstructionSpec) -> bool:
    return spec.semantics[0][2][0] == ("num", 1)


def _control_flow(program: Program) -> tuple[list[Block], list[Finding]]:
    insts, findings, targets = program.instructions, [], {}
    total = len(insts)
    for n, i in enumerate(insts):
        if _effect_of(i.spec) != "branch":
            continue
        label = next((o for o in i.operands.values() if isinstance(o, Label)), None)
        target = program.labels.get(label.name) if label else None
        if target is None or not 0 <= target <= total:
            what = f"there is no label '{label.name}'" if label else "its target is a number, not a label"
            findings.append(_finding(program, n, "unknown-target", "error", f"{_said(i)}: {what}; the code behind it is not checked"))
        else:
            targets[n] = target
            if target == total and program.info:
                findings.append(_finding(program, n, "past-the-end", "error", f"{_said(i)} branches past the last instruction"))
    leaders = {0} | set(targets.values()) | {n + 1 for n, i in enumerate(insts) if _effect_of(i.spec) in ("branch", "end")}
    starts = sorted(s for s in leaders if s < total)
    number = {s: b for b, s in enumerate(starts)}
    blocks = []
    for b, start in enumerate(starts):
        end = starts[b + 1] if b + 1 < len(starts) else total
        last = insts[end - 1]
        effect = _effect_of(last.spec)
        after = []
        if effect != "end" and not (effect == "branch" and _always(last.spec)):
            after.append(end)
        if end - 1 in targets:
            after.append(targets[end - 1])
        blocks.append(Block(start, end, tuple(number[a] for a in dict.fromkeys(after) if a in number)))
    return blocks, findings


def _flow(blocks: list[Block], entry: _State, transfer: Callable[[int, _State], _State],
          merge: Callable[[_State, _State], _State]) -> dict[int, _State]:
    """State at the start of each reachable block, at the fixpoint."""
    states, work, queued = {0: entry}, [0], {0}
    while work:
        b = heapq.heappop(work)
        queued.discard(b)
        out = transfer(b, states[b])
        for s in blocks[b].successors:
            new = merge(states[s], out) if s in states else out
            if s not in states or new != states[s]:
                states[s] = new
                if s not in queued:
                    queued.add(s)
                    heapq.heappush(work, s)
    return states


# -- the vocabulary of the hazard rules -------------------------------------------------------------------------------
def _is_store(spec: InstructionSpec) -> bool:
    return spec.unit == "vmem" and not any(o.out for o in spec.operands)


def _wide_store(spec: InstructionSpec, inst: Instruction | None) -> bool:
    return (_is_store(spec) and any(o.name in ("vdata", "data") and o.dwords > 2 for o in spec.operands)
            and not (inst and isinstance(inst.operands.get("soffset"), Reg)))


# word -> does it name this instruction? With inst None: can it name one of this spec?
_CLASSES: dict[str, Callable[[InstructionSpec, Instruction | None], bool]] = {
    "valu": lambda s, i: s.unit == "valu",
    "valu_not_trans": lambda s, i: s.unit == "valu" and "trans" not in s.classes,
    "salu": lambda s, i: s.unit == "salu" and "smem" not in s.classes,
    "lds": lambda s, i: s.unit == "lds",
    "vmem": lambda s, i: s.unit == "vmem",
    "wide_store": _wide_store,
    "lds_dma": lambda s, i: i.is_lds_dma if i else "lds" in s.modifiers,
    # a result written to part of a register: the high half by op_sel[3]
    "subdword": lambda s, i: "subdword" in s.classes and (i is None or bool(i.mods.get("op_sel", 0) & 8)),
}
_VECTOR_KINDS = {"vgpr", "vreg", "vcsrc", "src", "vaddr"}
_SCALAR_KINDS = {"sreg", "ssrc", "src", "mask", "saddr", "smoff"}
# word -> is this an operand of that sort?
_WHAT: dict[str, Callable[[InstructionSpec, OperandSpec], bool]] = {
    "vgpr": lambda s, o: o.kind in _VECTOR_KINDS,
    "srcc": lambda s, o: o.name == "src2",
    "srcab": lambda s, o: o.name in ("src0", "src1", "scale0", "scale1"),
    "sgpr": lambda s, o: o.kind in _SCALAR_KINDS,
    "constant": lambda s, o: o.kind == "src",
    "mask": lambda s, o: o.kind == "mask",
    "lane_select": lambda s, o: "lane" in s.classes and o.name == "src1",
    "data": lambda s, o: o.name in ("vdata", "data", "data0"),
    "vccz": lambda s, o: o.kind == "src",
    "m0": lambda s, o: o.kind in _SCALAR_KINDS,
    "exec": lambda s, o: o.kind in _SCALAR_KINDS,
    "vcc": lambda s, o: o.kind in _SCALAR_KINDS,
}
_BANKS = {"vgpr": "va", "srcc": "va", "srcab": "va", "data": "va"}  # the others: s
_STATE = {"m0": M0, "exec": EXEC, "vcc": VCC}
_FLAGS = {251: VCC, 252: EXEC}  # src_vccz, src_execz
_VERBS = {"writes": (False, True), "reads": (True, False), "uses": (True, True)}


@frozen
class Side:
    """One side of a rule: classes, which operands (read, written), and their sort."""
    classes: tuple[str, ...]
    reads: bool
    writes: bool
    what: str

    def names(self, spec: InstructionSpec, inst: Instruction | None = None) -> bool:
        return any(_CLASSES[c](spec, inst) if c in _CLASSES else c in spec.classes for c in self.classes)

    def operands(self, spec: InstructionSpec) -> tuple[str, ...]:
        return tuple(o.name for o in spec.operands if (o.inp and self.reads or o.out and self.writes) and _WHAT[self.what](spec, o))

    def implicit(self, spec: InstructionSpec) -> Reg | None:
        """m0, exec or vcc, touched without an operand. Every vector instruction runs under exec."""
        if self.what not in _STATE:
            return None
        touched = self.writes and self.what in spec.implicit_writes or self.reads and (
            self.what in spec.implicit_reads or self.what == "exec" and spec.unit in ("valu", "matrix", "vmem", "lds")
            or self.what == "m0" and "lds" in spec.modifiers)
        return _STATE[self.what] if touched else None

    def registers(self, inst: Instruction, names: tuple[str, ...], implicit: Reg | None) -> list[tuple[int, int]]:
        """(first register, bits) of each operand concerned."""
        found = [implicit] if implicit else []
        for name in names:
            r = inst.operands.get(name)
            if isinstance(r, Reg):
                if self.what == "vccz":
                    r = _FLAGS.get(r.index) if r.bank == "s" else None
                elif r.bank not in _BANKS.get(self.what, "s") or self.what in _STATE and not _mask(r) & _mask(_STATE[self.what]):
                    r = None
                if r:
                    found.append(r)
        return [(r.index, _mask(r)) for r in found]


@frozen
class Rule:
    spec: HazardRule
    producer: Side
    consumer: Side
    relation: str
    same_op: bool | None

    def need(self, passes: int | None) -> int:
        wait = self.spec.wait
        if 0 in wait:
            return wait[0]
        if passes not in wait:
            raise SpecError(f"hazard {self.spec.name}: no wait states for {passes} passes; it has {', '.join(map(str, wait))}")
        return wait[passes]

    def holds(self, producer: Instruction, p: tuple[int, int], consumer: Instruction, c: tuple[int, int]) -> bool:
        if not p[1] & c[1]:
            return False
        same, same_op = p[1] == c[1], producer.spec is consumer.spec
        if self.same_op is not None and self.same_op != same_op:
            return False
        return self.relation == "overlap" or (self.relation == "same") == (same and (same_op or self.relation == "same"))


def _side(rule: HazardRule, words: tuple[str, ...], machine: Machine) -> Side:
    verb = next((n for n, w in enumerate(words) if w in _VERBS), None)
    unknown = [w for w in words[:verb] if w not in _CLASSES and w not in machine.timings]
    if verb is None or verb == 0 or verb + 2 != len(words):
        raise SpecError(f"hazard {rule.name}: '{' '.join(words)}' is not CLASS... {'|'.join(_VERBS)} WHAT")
    if unknown or words[-1] not in _WHAT:
        raise SpecError(f"hazard {rule.name}: unknown word '{(unknown or words[-1:])[0]}'")
    return Side(words[:verb], *_VERBS[words[verb]], words[-1])


def _rule(rule: HazardRule, machine: Machine) -> Rule:
    relation, *extra = rule.relation
    if relation not in ("overlap", "same", "partial") or any(w not in ("same_op", "other_op") for w in extra) or len(extra) > 1:
        raise SpecError(f"hazard {rule.name}: unknown relation '{' '.join(rule.relation)}'")
    return Rule(rule, _side(rule, rule.producer, machine), _side(rule, rule.consumer, machine), relation, extra[0] == "same_op" if extra else None)


@functools.lru_cache(None)
def _rules() -> tuple[Rule, ...]:
    machine = isa.load()
    return tuple(_rule(h, machine) for h in machine.hazards)


@functools.lru_cache(None)
def _rules_for(spec: InstructionSpec, producer: bool) -> tuple[tuple[int, Rule, Side, tuple[str, ...], Reg | None], ...]:
    """Rules whose producer (consumer) can be an instruction of this spec, with the operands concerned."""
    found = []
    for n, rule in enumerate(_rules()):
        side = rule.producer if producer else rule.consumer
        if side.names(spec):
            names, implicit = side.operands(spec), side.implicit(spec)
            if names or implicit:
                found.append((n, rule, side, names, implicit))
    return tuple(found)


def rules_of(spec: InstructionSpec) -> list[HazardRule]:
    """Wait-state rules that can concern an instruction, as producer or consumer."""
    numbers = sorted({n for producer in (True, False) for n, *_ in _rules_for(spec, producer)})
    return [_rules()[n].spec for n in numbers]


# -- wait states ------------------------------------------------------------------------------------------------------
def passes(inst: Instruction) -> int | None:
    """Passes of a matrix instruction; f8f6f4 takes half when A and B are both FP6 or FP4 (cbsz and blgp 2 and up)."""
    p = inst.spec.passes
    if p and inst.mnemonic.endswith("_f8f6f4") and inst.mods.get("cbsz", 0) >= 2 and inst.mods.get("blgp", 0) >= 2:
        return p // 2
    return p


@frozen
class Hazard:
    """What a producer leaves behind: for each rule the registers and the wait states; ``reach`` is the largest."""
    entries: tuple[tuple[int, Rule, int, list[tuple[int, int]]], ...]
    reach: int


def _hazard(inst: Instruction) -> Hazard | None:
    entries = []
    for n, rule, side, names, implicit in _rules_for(inst.spec, True):
        if not side.names(inst.spec, inst):
            continue
        need = rule.need(passes(inst))
        registers = need and side.registers(inst, names, implicit)
        if registers:
            entries.append((n, rule, need, registers))
    return Hazard(tuple(entries), max(e[2] for e in entries)) if entries else None


def _consumed(inst: Instruction) -> dict[int, list[tuple[int, int]]]:
    found = {}
    for n, _, side, names, implicit in _rules_for(inst.spec, False):
        if side.names(inst.spec, inst):
            registers = side.registers(inst, names, implicit)
            if registers:
                found[n] = registers
    return found


def wait_states(inst: Instruction) -> int:
    """Wait states that an instruction itself is."""
    if inst.mnemonic == "s_nop":
        return (inst.operands["simm16"].bits & 15) + 1
    return 1


@frozen
class Shortfall:
    """A producer too near: ``have`` of ``need`` wait states."""
    rule: Rule
    producer: int
    registers: int
    have: int
    need: int


def _check_wait_states(program: Program, blocks: list[Block]) -> list[Finding]:
    insts = program.instructions
    hazards = [_hazard(i) for i in insts]
    lengths = [sum(wait_states(i) for i in insts[b.start:b.end]) for b in blocks]

    def tail(block: Block) -> dict[int, int]:
        """Producers of the block whose hazards outlive it, with the wait states since."""
        out, age = {}, 0
        for n in range(block.end - 1, block.start - 1, -1):
            if age >= _longest_wait():
                break
            if hazards[n] and age < hazards[n].reach:
                out[n] = age
            age += wait_states(insts[n])
        return out
    tails = [tail(b) for b in blocks]

    def transfer(b: int, state: dict[int, int]) -> dict[int, int]:
        out = {p: age + lengths[b] for p, age in state.items() if age + lengths[b] < hazards[p].reach}
        return {**out, **tails[b]}

    def merge(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
        return {p: min(a.get(p, 99), b.get(p, 99)) for p in a.keys() | b.keys()}

    findings = []
    for b, state in sorted(_flow(blocks, {}, transfer, merge).items()):
        findings += _block_wait_states(program, blocks[b], state, hazards)
    return findings


@functools.lru_cache(None)
def _longest_wait() -> int:
    return max(max(r.spec.wait.values()) for r in _rules())


def _block_wait_states(program: Program, block: Block, state: dict[int, int], hazards: list[Hazard | None]) -> list[Finding]:
    """One pass. What a finding asks for counts as inserted for those after it in the block: one cause, one finding."""
    findings: list[Finding] = []
    # producer -> (clock when it issued, wait states asked for by then)
    window = {p: (-1 - age, 0) for p, age in state.items()}
    clock = asked = 0
    for n in range(block.start, block.end):
        inst = program.instructions[n]
        shorts = _shortfalls(program, inst, window, hazards, clock, asked)
        if shorts:
            asked += max(s.need - s.have - (asked - window[s.producer][1]) for s in shorts)
            findings += [_shortfall_finding(program, n, s) for s in shorts]
        window.pop(n, None)
        if hazards[n]:
            window[n] = (clock, asked)
        clock += wait_states(inst)
        if len(window) > 8:
            window = {p: w for p, w in window.items() if clock - w[0] - 1 < hazards[p].reach}
    return findings


def _shortfalls(program: Program, inst: Instruction, window, hazards, clock: int, asked: int) -> list[Shortfall]:
    """The worst rule of each producer that is too near, then the worst producer of each rule."""
    consumed = _consumed(inst) if window else None
    if not consumed:
        return []
    worst: dict[int, Shortfall] = {}
    for p, (issued, asked_then) in window.items():
        have = clock - issued - 1
        fixed = have + asked - asked_then
        if fixed >= hazards[p].reach:
            continue
        for n, rule, need, registers in hazards[p].entries:
            if fixed >= need or n not in consumed:
                continue
            hit = 0
            for r in registers:
                for c in consumed[n]:
                    if rule.holds(program.instructions[p], r, inst, c):
                        hit |= r[1] & c[1]
            if hit and (p not in worst or need > worst[p].need):
                worst[p] = Shortfall(rule, p, hit, have, need)
    by_rule: dict[str, Shortfall] = {}
    for s in worst.values():
        name = s.rule.spec.name
        if name not in by_rule or s.need - s.have > by_rule[name].need - by_rule[name].have:
            by_rule[name] = s
    return list(by_rule.values())


def _shortfall_finding(program: Program, n: int, s: Shortfall) -> Finding:
    rule, inst, producer = s.rule.spec, program.instructions[n], program.instructions[s.producer]
    missing = s.need - s.have
    note = f"; {rule.cite.note}" if rule.cite.note else ""
    loop = " around the loop" if s.producer >= n else ""
    message = (f"{_said(inst)} comes {s.have} wait state(s) after {_said(producer)}{loop}; {_names(s.registers)} needs {s.need}: "
               f"add s_nop {min(missing, 16) - 1}{' and more' if missing > 16 else ''} between ({rule.name}: {', '.join(rule.cite.sources)}{note})")
    return _finding(program, n, rule.name, rule.severity, message, s.have, s.need, s.producer)


# -- s_waitcnt --------------------------------------------------------------------------------------------------------
def _counter(spec: InstructionSpec) -> str | None:
    """What an instruction counts on until it is done: vm, lds or smem."""
    return "vm" if spec.unit == "vmem" else "lds" if spec.unit == "lds" else "smem" if "smem" in spec.classes else None


_counter_of = functools.lru_cache(None)(_counter)
_COUNT_NAME = {"vm": "vmcnt", "lds": "lgkmcnt", "smem": "lgkmcnt"}
_COUNT_MAX = {"vm": _VM_MAX, "lds": _LGKM_MAX, "smem": _LGKM_MAX}


@frozen
class Touch:
    """Register bits that an instruction reads and writes, implied state included."""
    reads: int
    writes: int


def _touch(inst: Instruction) -> Touch:
    reads = writes = 0
    for r in inst.reads():
        reads |= _mask(r)
    for r in inst.writes():
        writes |= _mask(r)
    for name in inst.spec.implicit_reads:
        reads |= _mask(_STATE[name]) if name in _STATE else 0
    for name in inst.spec.implicit_writes:
        writes |= _mask(_STATE[name]) if name in _STATE else 0
    return Touch(reads | (_mask(M0) if inst.is_lds_dma else 0), writes)


@define
class Pending:
    """Loads under way. loads[counter][register bit number] = (how many of its counter were issued up to it, index).

    ``issued`` restarts at 0 in each block, so numbers of earlier loads are 0 and below. Between blocks only differences
    count; min(younger) over the paths is the wait that covers on all of them.
    """
    loads: dict[str, dict[int, tuple[int, int]]] = field(factory=lambda: {"vm": {}, "lds": {}, "smem": {}})
    smem: bool = False
    issued: dict[str, int] = field(factory=lambda: {"vm": 0, "lds": 0, "smem": 0})
    bits: dict[str, int] = field(factory=lambda: {"vm": 0, "lds": 0, "smem": 0}, eq=False)

    def younger(self, counter: str, unit: int) -> int:
        return min(self.issued[counter] - self.loads[counter][unit][0], _COUNT_MAX[counter])

    def keep(self, counter: str, test: Callable[[int], bool]) -> None:
        kept = {u: v for u, v in self.loads[counter].items() if test(u)}
        if len(kept) != len(self.loads[counter]):
            self.loads[counter] = kept
            self.bits[counter] = sum(1 << u for u in kept)

    def wait(self, vmcnt: int, lgkmcnt: int) -> None:
        if vmcnt < _VM_MAX:
            self.keep("vm", lambda u: self.younger("vm", u) < vmcnt)
        if lgkmcnt == 0:
            self.keep("smem", lambda u: False)
            self.smem = False
        if lgkmcnt == 0 or lgkmcnt < _LGKM_MAX and not self.smem:
            self.keep("lds", lambda u: self.younger("lds", u) < lgkmcnt)

    def issue(self, counter: str, index: int, writes: int) -> None:
        self.issued[counter] += 1
        self.smem |= counter == "smem"
        self.bits[counter] |= writes
        for u in _units(writes):
            self.loads[counter][u] = (self.issued[counter], index)


def _start(p: Pending) -> Pending:
    """A block's own copy, counted from 0."""
    loads = {c: {u: (-p.younger(c, u), v[1]) for u, v in d.items()} for c, d in p.loads.items()}
    return Pending(loads, p.smem, bits={c: sum(1 << u for u in d) for c, d in loads.items()})


def _merge_pending(a: Pending, b: Pending) -> Pending:
    """Both counted from 0: the larger number is the younger load, which the smaller count covers."""
    loads = {c: {u: max(a.loads[c].get(u, (-99, 0)), b.loads[c].get(u, (-99, 0))) for u in a.loads[c].keys() | b.loads[c].keys()} for c in a.loads}
    return Pending(loads, a.smem or b.smem)


def _check_waits(program: Program, blocks: list[Block], touches: list[Touch]) -> list[Finding]:
    insts = program.instructions

    def run(b: int, entry: Pending, findings: list[Finding] | None = None) -> Pending:
        p = _start(entry)
        for n in range(blocks[b].start, blocks[b].end):
            inst, counter = insts[n], _counter_of(insts[n].spec)
            if findings is not None:
                findings += _uncovered(program, n, touches[n], p)
            if inst.mnemonic == "s_waitcnt":
                counts = decode_waitcnt(inst.operands["simm16"].bits)
                p.wait(counts["vmcnt"], counts["lgkmcnt"])
            elif counter:
                p.issue(counter, n, 0 if inst.is_lds_dma else touches[n].writes)
        return _start(p)

    findings: list[Finding] = []
    for b, state in sorted(_flow(blocks, Pending(), run, _merge_pending).items()):
        run(b, state, findings)
    return findings


def _uncovered(program: Program, n: int, touch: Touch, p: Pending) -> list[Finding]:
    """Findings for registers of instruction n that are still loading; then goes on as if it had waited."""
    findings, inst = [], program.instructions[n]
    own = _counter_of(inst.spec)
    for counter in ("vm", "lds", "smem"):
        # loads of a counter that returns in order may overwrite one another
        in_order = counter == own and counter != "smem"
        hit = p.bits[counter] & (touch.reads if in_order else touch.reads | touch.writes)
        if not hit:
            continue
        unit = min(_units(hit), key=lambda u: p.younger(counter, u))
        load = program.instructions[p.loads[counter][unit][1]]
        count = min(p.younger(counter, unit), _COUNT_MAX[counter] - 1) if counter != "smem" and not (counter == "lds" and p.smem) else 0
        need = f"{_COUNT_NAME[counter]}({count})"
        read = bool(hit & touch.reads)
        why = " (scalar loads return out of order: only 0 covers)" if counter != "vm" and p.smem else ""
        message = (f"{_said(inst)} {'reads' if read else 'overwrites'} {_names(hit)}, which {_said(load)} may still be loading on some path: "
                   f"s_waitcnt {need} must stand between{why} (ISA, s_waitcnt)")
        findings.append(_finding(program, n, "wait-read" if read else "wait-overwrite", "error", message, "pending", need))
        p.wait(count if counter == "vm" else _VM_MAX, _LGKM_MAX if counter == "vm" else count)
        p.keep(counter, lambda u: not hit >> u & 1)
    return findings


# -- LDS-DMA ----------------------------------------------------------------------------------------------------------
@frozen
class Dma:
    """An LDS-DMA load under way: younger VMEM instructions, barriers since, no vmcnt wait since, no LDS-DMA since."""
    younger: int
    barriers: int
    unwaited: bool
    youngest: bool


def _check_lds_dma(program: Program, blocks: list[Block]) -> list[Finding]:
    insts = program.instructions
    if not any(i.is_lds_dma for i in insts):
        return []

    def run(b: int, entry: dict[int, Dma], findings: list[Finding] | None = None) -> dict[int, Dma]:
        state = entry
        for n in range(blocks[b].start, blocks[b].end):
            inst, effect = insts[n], _effect_of(insts[n].spec)
            if findings is not None:
                suspects = _dma_suspects(inst, state)
                if suspects:
                    findings.append(_dma_finding(program, n, suspects[0]))
                    state = {d: v for d, v in state.items() if d not in suspects}
            if inst.spec.unit == "vmem":
                dma = inst.is_lds_dma
                state = {d: Dma(v.younger + 1, v.barriers, v.unwaited, v.youngest and not dma) for d, v in state.items() if v.younger < _VM_MAX}
                if dma:
                    state[n] = Dma(0, 0, True, True)
            elif effect == "barrier":
                state = {d: evolve(v, barriers=min(v.barriers + 1, 2)) for d, v in state.items()}
            elif inst.mnemonic == "s_waitcnt" and (count := decode_waitcnt(inst.operands["simm16"].bits)["vmcnt"]) < _VM_MAX:
                state = {d: evolve(v, unwaited=False) for d, v in state.items() if v.younger < count}
        return state

    def merge(a: dict[int, Dma], b: dict[int, Dma]) -> dict[int, Dma]:
        out = {}
        for d in a.keys() | b.keys():
            u, v = a.get(d, b.get(d)), b.get(d, a.get(d))
            out[d] = Dma(min(u.younger, v.younger), max(u.barriers, v.barriers), u.unwaited or v.unwaited, u.youngest or v.youngest)
        return out

    findings: list[Finding] = []
    for b, state in sorted(_flow(blocks, {}, run, merge).items()):
        run(b, state, findings)
    return findings


def _dma_suspects(inst: Instruction, state: dict[int, Dma]) -> list[int]:
    effect = _effect_of(inst.spec)
    if effect == "end":
        return sorted(state, reverse=True)
    if inst.spec.unit == "lds" and any(o.out for o in inst.spec.operands):
        return [d for d, v in state.items() if v.unwaited and (v.barriers >= 2 or v.barriers == 1 and v.youngest)]
    return []


def _dma_finding(program: Program, n: int, dma: int) -> Finding:
    inst, load = program.instructions[n], program.instructions[dma]
    if _effect_of(inst.spec) == "end":
        return _finding(program, n, "lds-dma-at-end", "warning", f"{_said(inst)} is reached on some path while {_said(load)} may still write LDS, which may "
                        "by then belong to another workgroup: wait for vmcnt first", "pending", "vmcnt(0)")
    return _finding(program, n, "lds-dma-unwaited", "warning", f"{_said(inst)} follows a barrier, but no s_waitcnt vmcnt stands between {_said(load)} and that "
                    "barrier, which does not wait for loads: if the data is what is read here, wait first. A guess without addresses; the emulator's strict "
                    "mode decides", "pending", "vmcnt before s_barrier")


# -- structure --------------------------------------------------------------------------------------------------------
def _initial(program: Program) -> int:
    """Registers that hold something at the start: all of them for a fragment."""
    info = program.info
    if info is None:
        return -1
    sgprs = (0, 1, *range(2, 2 + sum(info.workgroup_id)), *_HARDWARE_SGPRS)
    return _bits("v", 0, 1) | sum(_bits("s", i, 1) for i in sgprs)


def _check_undefined(program: Program, blocks: list[Block], touches: list[Touch]) -> list[Finding]:
    written = [functools.reduce(lambda m, t: m | t.writes, touches[b.start:b.end], 0) for b in blocks]
    states = _flow(blocks, _initial(program), lambda b, s: s | written[b], lambda a, b: a | b)
    findings = []
    for b, known in sorted(states.items()):
        for n in range(blocks[b].start, blocks[b].end):
            inst = program.instructions[n]
            # the half that a sub-dword result keeps is no read that matters
            kept = touches[n].writes if "subdword" in inst.spec.classes else 0
            unknown = touches[n].reads & ~known & ~kept
            if unknown:
                findings.append(_finding(program, n, "undefined-register", "error", f"{_said(inst)} reads {_names(unknown)}, which nothing has written"))
            known |= touches[n].writes | unknown
    return findings


def _check_flow(program: Program, blocks: list[Block]) -> list[Finding]:
    findings, insts = [], program.instructions
    reached = _flow(blocks, True, lambda b, s: s, lambda a, b: a)
    previous = True
    for b, block in enumerate(blocks):
        if b not in reached and previous:
            findings.append(_finding(program, block.start, "unreachable", "note", f"{_said(insts[block.start])} is never reached; unreachable code is not checked"))
        previous = b in reached
        last = insts[block.end - 1]
        effect = _effect_of(last.spec)
        falls = effect != "end" and not (effect == "branch" and _always(last.spec))
        if program.info and b in reached and block.end == len(insts) and falls:
            findings.append(_finding(program, block.end - 1, "past-the-end", "error", f"execution runs past {_said(last)}: s_endpgm is missing"))
    return findings


def _past_file(r: Reg, program: Program) -> str | None:
    info, end = program.info, r.index + r.count
    if r.bank in "va":
        bank = {"v": "VGPRs", "a": "AGPRs"}[r.bank]
        if end > 256:
            return f"{r.plain} is past the register file of 256 {bank}"
        declared = info and {"v": info.accum_offset if info.arch_vgprs else 0, "a": info.acc_vgprs}[r.bank]
        if info and info.arch_vgprs and end > declared:
            return f"{r.plain} is past the {declared} {bank} that the kernel descriptor allots"
    elif r.index < 102 < end or end > 128 and r.index < 235:
        return f"{r.plain} is past the 102 SGPRs"
    return None


def _check_each(program: Program) -> list[Finding]:
    findings, info = [], program.info
    for n, inst in enumerate(program.instructions):
        for o in inst.operands.values():
            problem = _past_file(o, program) if isinstance(o, Reg) else None
            if problem:
                findings.append(_finding(program, n, "register-file", "error", f"{_said(inst)}: {problem}"))
        if inst.mnemonic == "s_nop" and inst.operands["simm16"].bits > 15:
            value = inst.operands["simm16"].bits
            findings.append(_finding(program, n, "s_nop-range", "error", f"{_said(inst)} is {(value & 15) + 1} wait state(s), not {value + 1}: only 4 bits count (ISA)",
                                     (value & 15) + 1, value + 1))
        if "packed32" in inst.spec.classes and inst.mods.get("op_sel"):
            findings.append(_finding(program, n, "erratum-packed-op_sel", "warning", f"{_said(inst)}: op_sel on a packed f32 instruction can drop the low lane's "
                                     "accumulation on gfx950 (ROCm/rocMLIR pull 2459, ROCM-29896): use op_sel_hi only, or two scalar operations"))
    machine = isa.load()
    if info and info.total_vgprs > machine.param("chip.vgprs"):
        findings.append(_finding(program, 0, "register-file", "error", f"{program.name} takes {info.total_vgprs} VGPRs; a wave has {machine.param('chip.vgprs')}",
                                 info.total_vgprs, machine.param("chip.vgprs")))
    if info and info.lds_bytes > machine.param("lds.bytes"):
        findings.append(_finding(program, 0, "lds-size", "error", f"{program.name} takes {info.lds_bytes} bytes of LDS; a CU has {machine.param('lds.bytes')}",
                                 info.lds_bytes, machine.param("lds.bytes")))
    return findings


# -- entry points -----------------------------------------------------------------------------------------------------
def check(program: Program, *, launch=None) -> list[Finding]:
    """Everything found, in program order. ``launch`` is accepted for callers that hold one; static checks need none."""
    if not program.instructions:
        return []
    blocks, findings = _control_flow(program)
    touches = [_touch(i) for i in program.instructions]
    findings += _check_each(program) + _check_flow(program, blocks) + _check_undefined(program, blocks, touches)
    findings += _check_wait_states(program, blocks) + _check_waits(program, blocks, touches) + _check_lds_dma(program, blocks)
    return sorted(findings, key=lambda f: f.index)


def failing(findings: list[Finding]) -> bool:
    """Whether any finding is more than a note."""
    return any(f.severity != "note" for f in findings)


def summary(findings: list[Finding]) -> dict:
    """Counts by severity and by rule."""
    severities = Counter(f.severity for f in findings)
    return {**{s: severities[s] for s in ("error", "warning", "note")}, "rules": dict(sorted(Counter(f.rule for f in findings).items()))}


def to_json(findings: list[Finding], program: Program) -> dict:
    """The findings as plain data."""
    keys = ("rule", "severity", "line", "instruction", "python", "have", "need", "message")
    return {"findings": [{k: getattr(f, k) for k in keys} for f in findings],
            "summary": {"instructions": len(program.instructions), **summary(findings)}}

"""Authoring kernels in Python: one method an instruction, typed registers, labels and loops.

    k = Kernel("copy", workgroup=(64, 1, 1))
    src, dst = k.arg("src", "pointer"), k.arg("dst", "pointer")
    ...
    k.s_endpgm()
    program = k.finalize()

Every instruction method is made from the specs and checks its operands at the call. The Python file and line that
called it stay on the instruction, so that every later message can name them.
"""
from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Iterator

from attrs import define, evolve

from . import isa
from .operands import choose_form, validate
from .program import EXEC, M0, VCC, Arg, Imm, Instruction, KernelInfo, Label, Off, Operand, Program, Reg, encode_waitcnt

off = Off()
vcc, exec_mask, m0 = VCC, EXEC, M0

_KINDS = {"pointer": 8, "u64": 8, "u32": 4, "i32": 4, "f32": 4}
_OWN = Path(__file__).resolve().parent
_ROOT = _OWN.parent


class AuthoringError(ValueError):
    """A mistake in a kernel's Python; the message starts with the file and line that made it."""


def bits(pattern: int) -> Imm:
    """A 32-bit pattern as it stands, also where an operand is f32."""
    return Imm(pattern & 0xFFFFFFFF)


@functools.lru_cache(None)
def _shown(file: str) -> str | None:
    """A source file's name for messages: relative to the project, else its own; None for this package's own plumbing."""
    path = Path(file)
    if path.parent == _OWN or path.name == "contextlib.py":
        return None
    try:
        name = path.resolve().relative_to(_ROOT).as_posix()
    except ValueError:
        return path.name
    return name if name.split("/")[0] in ("attention", "docs", "tests") else path.name


def python_place() -> tuple[str, int]:
    """(file, line) of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back and _shown(frame.f_code.co_filename) is None:
        frame = frame.f_back
    return _shown(frame.f_code.co_filename) or Path(frame.f_code.co_filename).name, frame.f_lineno


def _fail(message: str) -> None:
    file, line = python_place()
    raise AuthoringError(f"{file}:{line}: {message}")


@define
class _Bank:
    """Which registers of a file are taken, and by whom."""
    letter: str
    size: int
    owner: dict[int, str]
    high: int = 0

    def take(self, name: str, count: int, align: int, at: int | None) -> Reg:
        starts = range(0, self.size - count + 1, align) if at is None else (at,)
        for start in starts:
            if start + count <= self.size and not any(i in self.owner for i in range(start, start + count)):
                for i in range(start, start + count):
                    self.owner[i] = name
                self.high = max(self.high, start + count)
                return Reg(self.letter, start, count, name=name)
        live: dict[str, int] = {}
        for n in self.owner.values():
            live[n] = live.get(n, 0) + 1
        where = f"at {self.letter}{at}" if at is not None else f"aligned to {align}"
        values = ", ".join(f"{n} ({c})" for n, c in sorted(live.items(), key=lambda x: -x[1]))
        _fail(f"'{name}' needs {count} {self.letter} register(s) {where}: does not fit, {self.size - len(self.owner)} of "
              f"{self.size} are free; live: {values}. Free one with k.free() or end its scope")
        raise AssertionError


@define
class Loop:
    """A loop being written; ``again`` closes it."""
    kernel: "Kernel"
    label: str
    closed: bool = False

    def again(self, condition: str | None = None) -> None:
        """Branch back to the top: always, or if ``condition``: scc0, scc1, vccz, vccnz, execz or execnz."""
        self.kernel.emit("s_branch" if condition is None else f"s_cbranch_{condition}", self.label)
        self.closed = True


class Kernel:
    """A kernel under construction.

    name: symbol. workgroup: (x, y, z) work-items, at most 1024 together. lds: bytes, at most 163840.
    modes: fields of KernelInfo (float_denorm_32=3, fp16_ovfl=False, ...).
    At start s[0:1] (``kernarg``) points to the arguments, ``workgroup_id`` holds the SGPRs of the workgroup's x, y, z
    and v0 (``workitem_id``) is x | y << 10 | z << 20 (ISA, initial wave state).
    """

    def __init__(self, name: str, workgroup: tuple[int, int, int] = (64, 1, 1), lds: int = 0, **modes):
        machine = isa.load()
        items = workgroup[0] * workgroup[1] * workgroup[2]
        if not 1 <= items <= machine.param("chip.max_workgroup") or min(workgroup) < 1:
            _fail(f"workgroup {workgroup}: 1 to {machine.param('chip.max_workgroup')} work-items")
        if not 0 <= lds <= machine.param("lds.bytes"):
            _fail(f"lds={lds}: 0 to {machine.param('lds.bytes')} bytes")
        try:
            self.info = KernelInfo(name, tuple(workgroup), lds, **modes)
        except TypeError as e:
            _fail(str(e))
        self.name = name
        self.machine = machine
        self._banks = {"v": _Bank("v", machine.param("chip.arch_vgprs"), {}), "a": _Bank("a", 256, {}), "s": _Bank("s", machine.param("chip.sgprs"), {})}
        self._program = Program(name, [], info=self.info, source=python_place()[0])
        self._out = self._program.instructions
        self._open: list[Loop] = []
        self._args: list[Arg] = []
        self.kernarg = self.sgpr("kernarg", 2, at=0)
        self.workgroup_id = tuple(self.sgpr(f"workgroup_id_{c}", at=2 + i) for i, c in enumerate("xyz"))
        self.workitem_id = self.vgpr("workitem_id", at=0)

    # -- arguments and registers --------------------------------------------------------------------------------
    def arg(self, name: str, kind: str) -> Arg:
        """Next kernel argument: "pointer", "u64" (8 bytes), "u32", "i32" or "f32" (4), at its natural alignment."""
        if kind not in _KINDS:
            _fail(f"argument '{name}': kind '{kind}'; one of {', '.join(_KINDS)}")
        if any(a.name == name for a in self._args):
            _fail(f"argument '{name}' twice")
        size = _KINDS[kind]
        end = self._args[-1].offset + self._args[-1].size if self._args else 0
        self._args.append(Arg(name, -(-end // size) * size, size, kind))
        return self._args[-1]

    def vgpr(self, name: str, count: int = 1, *, align: int | None = None, at: int | None = None) -> Reg:
        """``count`` consecutive VGPRs, even-aligned if more than one (the ISA's rule for 64 bits and more), or pinned."""
        return self._banks["v"].take(name, count, align or (2 if count > 1 else 1), at)

    def agpr(self, name: str, count: int = 1, *, align: int | None = None, at: int | None = None) -> Reg:
        """Like vgpr, in the accumulation half of the file."""
        return self._banks["a"].take(name, count, align or (2 if count > 1 else 1), at)

    def sgpr(self, name: str, count: int = 1, *, align: int | None = None, at: int | None = None) -> Reg:
        """``count`` consecutive SGPRs: pairs even-aligned, four and more aligned to 4 (ISA, SGPR alignment)."""
        return self._banks["s"].take(name, count, align or (1 if count == 1 else 2 if count == 2 else 4), at)

    def free(self, *regs: Reg) -> None:
        """Give registers back; an error for one that is not taken."""
        for r in regs:
            for i in r.units:
                if self._banks[r.bank].owner.pop(i, None) is None:
                    _fail(f"{r.bank}{i} is not allocated (freed twice?)")

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Registers allocated inside are freed at its end."""
        before = {b: dict(k.owner) for b, k in self._banks.items()}
        yield
        for b, k in self._banks.items():
            k.owner = {i: n for i, n in k.owner.items() if before[b].get(i) == n}

    # -- control flow -------------------------------------------------------------------------------------------
    def label(self, name: str) -> str:
        """Put a label here; branches may name it before or after."""
        if self._out is not self._program.instructions:
            _fail(f"label '{name}' inside a stream: a stream is a straight list of instructions")
        if name in self._program.labels:
            _fail(f"label '{name}' twice")
        self._program.labels[name] = len(self._out)
        return name

    @contextlib.contextmanager
    def loop(self, name: str) -> Iterator[Loop]:
        """``with k.loop("kv") as kv: ...; kv.again("scc1")``. An error if nothing branches back."""
        loop = Loop(self, self.label(name))
        place = python_place()
        self._open.append(loop)
        yield loop
        self._open.pop()
        if not loop.closed:
            raise AuthoringError(f"{place[0]}:{place[1]}: loop '{name}' is never closed; end it with loop.again(condition)")

    def comment(self, text: str) -> None:
        """A comment line before the next instruction."""
        self._program.comments.setdefault(len(self._out), []).append(text)

    @contextlib.contextmanager
    def stream(self) -> Iterator[list[Instruction]]:
        """Instructions emitted inside go to the list it yields instead of the kernel; ``place`` puts them in."""
        outer, self._out = self._out, []
        try:
            yield self._out
        finally:
            self._out = outer

    def place(self, instructions: list[Instruction]) -> None:
        """Append a stream (or several, woven)."""
        self._out.extend(instructions)

    # -- instructions -------------------------------------------------------------------------------------------
    def emit(self, mnemonic: str, *operands, comment: str | None = None, **mods) -> Instruction:
        """Append one instruction. Operands in assembly order: Reg, int, float, Imm (``bits``), ``off``, a label name,
        None for one that is left out (vdata with lds). A Python int for an f32 operand means the number.
        AuthoringError if an operand or modifier does not fit; the message says what would."""
        spec = self.machine.instructions.get(mnemonic)
        if spec is None:
            import difflib
            near = difflib.get_close_matches(mnemonic, self.machine.instructions, 3)
            _fail(f"unknown instruction '{mnemonic}'" + (f"; did you mean {', '.join(near)}?" if near else ""))
        if len(operands) > len(spec.operands):
            _fail(f"{mnemonic} takes {len(spec.operands)} operand(s) ({', '.join(o.name for o in spec.operands)}), got {len(operands)}")
        ops: dict[str, Operand] = {}
        for o, value in zip(spec.operands, operands):
            if value is None:
                continue
            try:
                ops[o.name] = self._operand(o, value)
            except (ValueError, TypeError) as e:
                _fail(f"{mnemonic}: operand {o.name}: {e}")
        values = {}
        for name, value in mods.items():
            values[name] = sum(int(b) << i for i, b in enumerate(value)) if isinstance(value, (list, tuple)) else int(value)
        form = choose_form(spec, ops, values)
        problems = validate(spec, form, ops, values)
        if problems:
            _fail(f"{mnemonic}: " + "; ".join(problems))
        inst = Instruction(spec, form, ops, {k: v for k, v in values.items() if v or k == "op_sel_hi" and form.encoding == "VOP3P"}, comment, python_place())
        self._out.append(inst)
        return inst

    @staticmethod
    def _operand(spec: isa.OperandSpec, value) -> Operand:
        if isinstance(value, (Reg, Imm, Label, Off)):
            return evolve(value, name=None) if isinstance(value, Reg) else value
        if isinstance(value, str):
            if spec.kind == "label":
                return Label(value)
            raise TypeError(f"a {spec.kind} operand cannot be the text '{value}'")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"a {spec.kind} operand cannot be a {type(value).__name__}")
        if spec.element in ("f32", "f16") and isinstance(value, int):
            value = float(value) if value else 0
        if spec.element not in ("f32", "f16", "f64", "b32") and isinstance(value, float):
            raise TypeError(f"a {spec.element} operand cannot be the float {value}; use bits() for a pattern")
        return Imm.of(value)

    def waitcnt(self, *, vmcnt: int = 63, lgkmcnt: int = 15, expcnt: int = 7) -> Instruction:
        """s_waitcnt until at most so many operations of a counter are outstanding; a counter left out is not waited for."""
        return self.emit("s_waitcnt", encode_waitcnt(vmcnt, expcnt, lgkmcnt))

    def wait_states(self, count: int) -> None:
        """At least ``count`` wait states (issue slots of 4 clk) by s_nop, up to 16 each."""
        while count > 0:
            self.emit("s_nop", min(count, 16) - 1)
            count -= 16

    def finalize(self) -> Program:
        """The finished program, register counts and kernarg layout filled in. AuthoringError for an open loop, a
        missing s_endpgm or a branch to a label that does not exist."""
        p = self._program
        if self._open:
            _fail(f"loop '{self._open[-1].label}' is still open")
        if not any(i.mnemonic == "s_endpgm" for i in p.instructions):
            _fail(f"kernel '{self.name}' has no s_endpgm")
        for inst in p.instructions:
            for o in inst.operands.values():
                if isinstance(o, Label) and o.name not in p.labels:
                    raise AuthoringError(f"{inst.where}: {inst.mnemonic}: no label '{o.name}'; labels: {', '.join(p.labels) or 'none'}")
        high = {"v": 1, "a": 0, "s": 5}
        for inst in p.instructions:
            for r in (*inst.reads(), *inst.writes()):
                if r.bank != "s" or r.index < 102:
                    high[r.bank] = max(high[r.bank], r.index + r.count)
        end = self._args[-1].offset + self._args[-1].size if self._args else 0
        self.info.arch_vgprs, self.info.acc_vgprs, self.info.sgprs = high["v"], high["a"], high["s"]
        self.info.args, self.info.kernarg_size = tuple(self._args), -(-end // 8) * 8
        return p


def _method(mnemonic: str, spec: isa.InstructionSpec):
    def method(self, *operands, comment=None, **mods):
        return self.emit(mnemonic, *operands, comment=comment, **mods)
    method.__name__ = mnemonic
    method.__qualname__ = f"Kernel.{mnemonic}"
    method.__doc__ = f"{mnemonic} {', '.join(o.name for o in spec.operands)}: {spec.semantics_text} (isa_specs/{spec.where})"
    return method


for _name, _spec in isa.load().instructions.items():
    setattr(Kernel, _name, _method(_name, _spec))

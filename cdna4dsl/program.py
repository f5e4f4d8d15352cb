"""The form every tool shares: registers, operands, instructions and programs.

A Program comes from the authoring layer, from assembly text or from a code object, and goes to emission, the
checker, the emulator and the simulator. Nothing here knows an instruction; that is ``isa``.
"""
from __future__ import annotations

import struct
from typing import Iterator, Union

from attrs import define, evolve, field, frozen

from .isa import Form, InstructionSpec

# Scalar registers with names: (index, dwords). Operand codes of the ISA, section 'scalar operands'.
SPECIAL = {
    "flat_scratch": (102, 2), "xnack_mask": (104, 2), "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1),
    "m0": (124, 1), "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1),
}
_SPECIAL_NAMES = {v: k for k, v in SPECIAL.items()}
# Read-only scalar sources without a register number behind them.
SOURCE_NAMES = {"src_vccz": 251, "src_execz": 252, "src_scc": 253}
_SOURCE_TEXT = {v: k for k, v in SOURCE_NAMES.items()}
# Inline floating constants: f32 bits -> (operand code, text). ISA, 'inline constants'.
INLINE_FLOATS = {
    0x3F000000: (240, "0.5"), 0xBF000000: (241, "-0.5"), 0x3F800000: (242, "1.0"), 0xBF800000: (243, "-1.0"),
    0x40000000: (244, "2.0"), 0xC0000000: (245, "-2.0"), 0x40800000: (246, "4.0"), 0xC0800000: (247, "-4.0"),
    0x3E22F983: (248, "0.15915494"),
}


@frozen
class Reg:
    """``count`` consecutive 32-bit registers from ``index``; bank "v", "a" or "s" (vcc, exec, m0 are in "s").

    ``neg`` and ``abs`` are the source modifiers of float operands. ``name`` is only for people.
    """
    bank: str
    index: int
    count: int = 1
    neg: bool = False
    abs: bool = False
    name: str | None = field(default=None, eq=False)

    def __getitem__(self, key: int | slice) -> "Reg":
        """One register, or a range of them (step 1); IndexError outside the range."""
        if isinstance(key, slice):
            start, stop, step = key.indices(self.count)
            if step != 1 or stop <= start:
                raise IndexError(f"{self}[{key.start}:{key.stop}] is empty or has a step")
        else:
            start = key + self.count if key < 0 else key
            stop = start + 1
            if not 0 <= start < self.count:
                raise IndexError(f"{self} has {self.count} register(s); no [{key}]")
        return evolve(self, index=self.index + start, count=stop - start)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator["Reg"]:
        return (self[i] for i in range(self.count))

    def __neg__(self) -> "Reg":
        return evolve(self, neg=not self.neg)

    def __abs__(self) -> "Reg":
        return evolve(self, abs=True, neg=False)

    @property
    def units(self) -> range:
        """Register numbers covered."""
        return range(self.index, self.index + self.count)

    @property
    def plain(self) -> str:
        """Assembly text without modifiers."""
        if self.bank == "s":
            if (self.index, self.count) in _SPECIAL_NAMES:
                return _SPECIAL_NAMES[self.index, self.count]
            if self.index in _SOURCE_TEXT:
                return _SOURCE_TEXT[self.index]
        return f"{self.bank}{self.index}" if self.count == 1 else f"{self.bank}[{self.index}:{self.index + self.count - 1}]"

    def __str__(self) -> str:
        text = f"|{self.plain}|" if self.abs else self.plain
        return f"-{text}" if self.neg else text


def special(name: str) -> Reg:
    """vcc, exec, m0, ... as a Reg."""
    index, count = SPECIAL[name]
    return Reg("s", index, count)


VCC, EXEC, M0 = special("vcc"), special("exec"), special("m0")


@frozen
class Imm:
    """A 32-bit constant. ``bits`` is unsigned; inline if the ISA has an operand code for it, else a literal."""
    bits: int

    @classmethod
    def of(cls, value: int | float) -> "Imm":
        """From a Python number: an int is its two's complement, a float its f32 bits. ValueError past 32 bits."""
        if isinstance(value, float):
            return cls(struct.unpack("<I", struct.pack("<f", value))[0])
        if not -(1 << 31) <= value < 1 << 32:
            raise ValueError(f"constant {value} does not fit in 32 bits")
        return cls(value & 0xFFFFFFFF)

    @property
    def signed(self) -> int:
        return self.bits - (1 << 32) if self.bits >> 31 else self.bits

    @property
    def inline_code(self) -> int | None:
        """The 9-bit operand code if the constant is inline, else None."""
        if self.bits <= 64:
            return 128 + self.bits
        if -16 <= self.signed < 0:
            return 192 - self.signed
        return INLINE_FLOATS[self.bits][0] if self.bits in INLINE_FLOATS else None

    def __str__(self) -> str:
        if self.bits in INLINE_FLOATS:
            return INLINE_FLOATS[self.bits][1]
        return str(self.signed) if self.inline_code is not None else hex(self.bits)


@frozen
class Label:
    """A branch target by name."""
    name: str

    def __str__(self) -> str:
        return self.name


@frozen
class Off:
    """The word ``off``: no address register."""

    def __str__(self) -> str:
        return "off"


Operand = Union[Reg, Imm, Label, Off]


@define(eq=False)
class Instruction:
    """One machine instruction.

    operands: by the spec's operand names; an absent one (vdata with lds) is missing from the dict.
    mods: modifier name -> int (flags 1; op_sel and the like as a bit mask; bit i belongs to source i).
    python: (file, line) that emitted it. line: line in the assembly text it was read from.
    """
    spec: InstructionSpec
    form: Form
    operands: dict[str, Operand]
    mods: dict[str, int] = field(factory=dict)
    comment: str | None = None
    python: tuple[str, int] | None = None
    line: int | None = None

    @property
    def mnemonic(self) -> str:
        return self.spec.mnemonic

    @property
    def where(self) -> str:
        """For messages: Python place if known, else the text line."""
        if self.python:
            return f"{self.python[0]}:{self.python[1]}"
        return f"line {self.line}" if self.line is not None else "?"

    def reads(self) -> list[Reg]:
        """Registers read through operands (implicit state is ``spec.implicit_reads``)."""
        return [o for s in self.spec.operands if s.inp and isinstance(o := self.operands.get(s.name), Reg)]

    def writes(self) -> list[Reg]:
        return [o for s in self.spec.operands if s.out and isinstance(o := self.operands.get(s.name), Reg)]

    @property
    def is_lds_dma(self) -> bool:
        """A memory load whose data goes to LDS (at M0 + offset) instead of registers."""
        return bool(self.mods.get("lds"))

    def __str__(self) -> str:
        from .asm import instruction_text
        return instruction_text(self)


# s_waitcnt: field -> (bit ranges of simm16, low part first), maximum. ISA section 4.4.
WAITCNT_MAX = {"vmcnt": 63, "expcnt": 7, "lgkmcnt": 15}


def encode_waitcnt(vmcnt: int = 63, expcnt: int = 7, lgkmcnt: int = 15) -> int:
    """simm16 of s_waitcnt; a count at its maximum does not wait."""
    return (vmcnt & 15) | expcnt << 4 | lgkmcnt << 8 | (vmcnt >> 4) << 14


def decode_waitcnt(simm16: int) -> dict[str, int]:
    """{"vmcnt", "expcnt", "lgkmcnt"} of an s_waitcnt."""
    return {"vmcnt": simm16 & 15 | simm16 >> 14 << 4, "expcnt": simm16 >> 4 & 7, "lgkmcnt": simm16 >> 8 & 15}


@frozen
class Arg:
    """A kernel argument: byte offset and size in the kernarg segment; kind "pointer", "u32", "i32", "u64" or "f32"."""
    name: str
    offset: int
    size: int
    kind: str


@define
class KernelInfo:
    """What the kernel descriptor and the metadata say. Registers are counts; sizes are bytes.

    sgpr layout at start: s[0:1] kernarg pointer, then the workgroup ids x, y, z (those enabled).
    fp16_ovfl etc. are bits of MODE. workgroup_id: which of x, y, z arrive in SGPRs.
    """
    name: str
    workgroup: tuple[int, int, int]
    lds_bytes: int = 0
    kernarg_size: int = 0
    args: tuple[Arg, ...] = ()
    arch_vgprs: int = 0
    acc_vgprs: int = 0
    sgprs: int = 0
    workgroup_id: tuple[bool, bool, bool] = (True, True, True)
    private_bytes: int = 0
    float_denorm_32: int = 0      # 0 flush in and out, 3 keep
    float_denorm_16_64: int = 3
    float_round_32: int = 0       # 0 nearest even
    dx10_clamp: bool = True
    ieee_mode: bool = False
    fp16_ovfl: bool = True

    @property
    def accum_offset(self) -> int:
        """First AGPR's place in the unified file: arch VGPRs rounded up to 4, at least 4."""
        return max(4, -(-self.arch_vgprs // 4) * 4)

    @property
    def total_vgprs(self) -> int:
        return self.accum_offset + self.acc_vgprs if self.acc_vgprs else max(1, self.arch_vgprs)


@define(eq=False)
class Program:
    """Instructions in order, labels (name -> index of the instruction that follows), and the kernel's descriptor
    (None for a bare fragment). ``source`` names the file for messages."""
    name: str
    instructions: list[Instruction]
    labels: dict[str, int] = field(factory=dict)
    info: KernelInfo | None = None
    source: str = "?"
    comments: dict[int, list[str]] = field(factory=dict)  # lines of comment before an instruction

    def target(self, instruction: Instruction) -> int | None:
        """Index a branch goes to, or None if it is no branch. ValueError for an unknown label."""
        for o in instruction.operands.values():
            if isinstance(o, Label):
                if o.name not in self.labels:
                    raise ValueError(f"{instruction.where}: {instruction.mnemonic}: no label '{o.name}'")
                return self.labels[o.name]
        return None

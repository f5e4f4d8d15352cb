"""Instruction bytes from the specs and back; no assembler needed.

``decode`` accepts only what ``encode`` would write: a bit that no operand or modifier explains is an error.
"""
from __future__ import annotations

import functools
import struct

from attrs import evolve

from .isa import Encoding, Form, InstructionSpec, OperandSpec, load
from .operands import operand_dwords
from .program import INLINE_FLOATS, Imm, Instruction, Label, Off, Operand, Reg, SOURCE_NAMES

_LITERAL = 255
_FLOAT_BITS = {code: bits for bits, (code, _) in INLINE_FLOATS.items()}
_SADDR_OFF = 0x7F


class DecodeError(ValueError):
    """Bytes that are no instruction the specs know; names the offset and the word."""


def _field_name(encoding: Encoding, operand: OperandSpec) -> str | None:
    """Field that holds an operand; None if it is implied (vcc). A compare's result lies where VOP3 has vdst."""
    if operand.name in encoding.fields:
        return operand.name
    if operand.name == "sdst" and encoding.name == "VOP3":
        return "vdst"
    return None


def _code(o: Operand) -> int:
    """9-bit source operand code (ISA, source operands)."""
    if isinstance(o, Reg):
        return 256 + o.index if o.bank in "va" else o.index
    inline = o.inline_code
    return _LITERAL if inline is None else inline


def _value(inst: Instruction, f, held: dict[str, Operand], address: int, labels) -> int:
    kind, mods = f.kind, inst.mods
    if f.value is not None:
        return f.value
    if f.name == "op":
        return inst.form.opcode
    o = held.get(f.name)
    if kind in ("vgpr", "sdst"):
        return o.index if isinstance(o, Reg) else 0
    if kind in ("src", "ssrc"):
        return 0 if o is None else _code(o)
    if kind in ("sgpr2", "sgpr4"):
        return o.index // int(kind[4:])
    if kind == "saddr":
        return _SADDR_OFF if isinstance(o, Off) else o.index
    if kind == "acc":
        return int(any(isinstance(inst.operands.get(n), Reg) and inst.operands[n].bank == "a" for n in f.args))
    if kind == "each":
        return sum(1 << i for i, n in enumerate(f.args) if isinstance(held.get(n), Reg) and getattr(held[n], f.name))
    if kind == "smem_imm":
        return int(isinstance(inst.operands["soffset"], Imm) or "offset" in mods)
    if kind == "smem_soffset_en":
        return int(isinstance(inst.operands["soffset"], Reg) and "offset" in mods)
    if kind == "smem_offset":
        off = inst.operands["soffset"]
        return mods["offset"] if "offset" in mods else off.index if isinstance(off, Reg) else off.signed
    if kind == "smem_soffset":
        return inst.operands["soffset"].index if "offset" in mods else 0
    if kind == "op_sel_hi01":
        return mods.get("op_sel_hi", 7) & 3
    if kind == "op_sel_hi2":
        return mods.get("op_sel_hi", 7) >> 2 & 1
    if isinstance(o, Label):
        if labels is None or o.name not in labels:
            raise ValueError(f"{inst.where}: {inst.mnemonic}: no label '{o.name}'")
        distance = (labels[o.name] - address - 4) // 4
        if not -32768 <= distance <= 32767:
            raise ValueError(f"{inst.where}: {inst.mnemonic} {o.name} is {distance} dwords away; 16 bits reach -32768 to 32767")
        return distance
    return o.signed if isinstance(o, Imm) else mods.get(f.name, 0)


def size(inst: Instruction) -> int:
    """Bytes of the instruction, literal included."""
    e = load().encodings[inst.form.encoding]
    return e.bits // 8 + (4 if e.literal and any(isinstance(o, Imm) and s.kind in ("src", "ssrc") and o.inline_code is None
                                                  for s in inst.spec.operands if (o := inst.operands.get(s.name)) is not None) else 0)


def encode(inst: Instruction, *, address: int = 0, labels: dict[str, int] | None = None) -> bytes:
    """The instruction's bytes. labels: byte address of each label, for branches; address: this instruction's own."""
    e = load().encodings[inst.form.encoding]
    held = {name: inst.operands[o.name] for o in inst.spec.operands if o.name in inst.operands and (name := _field_name(e, o))}
    word = 0
    for f in e.fields.values():
        word |= (_value(inst, f, held, address, labels) & (1 << f.width) - 1) << f.low
    data = word.to_bytes(e.bits // 8, "little")
    if size(inst) > len(data):
        data += next(struct.pack("<I", o.bits) for o in held.values() if isinstance(o, Imm) and o.inline_code is None)
    return data


@functools.lru_cache(None)
def _tables():
    """Encodings with the mask and value of their fixed bits, the most specific first, and (encoding, opcode) -> spec."""
    m = load()
    fixed = []
    for e in m.encodings.values():
        mask = value = 0
        for f in e.fields.values():
            if f.value is not None and f.name in ("enc", "seg", "prefix"):
                mask |= (1 << f.width) - 1 << f.low
                value |= f.value << f.low
        fixed.append((e, mask, value))
    fixed.sort(key=lambda x: -bin(x[1]).count("1"))
    return fixed, {(f.encoding, f.opcode): (s, f) for s in m.instructions.values() for f in s.forms}


def _bits(word: int, f) -> int:
    return word >> f.low & (1 << f.width) - 1


def _source(code: int, dwords: int, bank: str, literal) -> Operand:
    if code >= 256:
        return Reg(bank, code - 256, dwords)
    if code <= 127:
        return Reg("s", code, dwords)
    if code <= 192:
        return Imm(code - 128)
    if code <= 208:
        return Imm(192 - code & 0xFFFFFFFF)
    if code in _FLOAT_BITS:
        return Imm(_FLOAT_BITS[code])
    if code in SOURCE_NAMES.values():
        return Reg("s", code)
    if code == _LITERAL:
        return Imm(literal())
    raise DecodeError(f"operand code {code} names nothing")


def decode(data: bytes, offset: int = 0) -> tuple[Instruction, int]:
    """(instruction, size in bytes) at ``offset``. A branch's target is Label("L_<byte offset, hex>").

    DecodeError for truncated data and for anything that is no instruction of the specs.
    """
    if offset < 0 or offset + 4 > len(data):
        raise DecodeError(f"offset {offset:#x}: the code ends inside an instruction")
    first = int.from_bytes(data[offset:offset + 4], "little")
    fixed, by_opcode = _tables()
    for e, mask, value in fixed:
        n = e.bits // 8
        if first & mask & 0xFFFFFFFF != value & 0xFFFFFFFF or offset + n > len(data):
            continue
        word = int.from_bytes(data[offset:offset + n], "little")
        if word & mask == value and (found := by_opcode.get((e.name, _bits(word, e.fields["op"])))):
            try:
                inst = _decode(*found, e, word, data, offset)
                again = encode(inst, address=offset, labels=_Anywhere())
            except (DecodeError, IndexError, ValueError, KeyError, AttributeError) as error:
                raise DecodeError(f"offset {offset:#x}: {first:#010x} is not an instruction: {error}") from None
            if again != bytes(data[offset:offset + len(again)]):
                raise DecodeError(f"offset {offset:#x}: {first:#010x} ({inst.mnemonic}) has bits set that no operand explains")
            return inst, len(again)
    raise DecodeError(f"offset {offset:#x}: {first:#010x} is not an instruction")


class _Anywhere(dict):
    """Labels by their own names: L_<offset>."""

    def __contains__(self, name):
        return True

    def __getitem__(self, name):
        return int(name[2:], 16)


def _decode(spec: InstructionSpec, form: Form, e: Encoding, word: int, data: bytes, offset: int) -> Instruction:
    def literal() -> int:
        at = offset + e.bits // 8
        if not e.literal or at + 4 > len(data):
            raise DecodeError("a literal is missing")
        return int.from_bytes(data[at:at + 4], "little")

    get = lambda name: _bits(word, e.fields[name])
    mods: dict[str, int] = {}
    for name in spec.modifiers + (("clamp", "omod") if form.encoding in ("VOP3", "VOP3SD") else ()):
        if name == "op_sel_hi" and "op_sel_hi2" in e.fields:
            value = get("op_sel_hi") | get("op_sel_hi2") << 2
            if value != 7:
                mods[name] = value
        elif name in e.fields and (value := get(name)):
            f = e.fields[name]
            mods[name] = value - (1 << f.width) if f.kind == "signed" and value >> f.width - 1 else value
    if spec.family == "SMEM" and get("soffset_en") and get("imm"):
        value = get("offset")
        mods["offset"] = value - (1 << 21) if value >> 20 else value
    ops: dict[str, Operand] = {}
    dma = mods.get("lds") and "lds" in spec.modifiers
    for o in spec.operands:
        name = _field_name(e, o)
        if dma and o.name == "vdata":
            continue
        if name is None:
            ops[o.name] = Reg("s", 106, 2)
            continue
        f = e.fields[name]
        code, dwords = _bits(word, f), operand_dwords(spec, o, mods)
        acc = next((x for x in e.fields.values() if x.kind == "acc" and o.name in x.args), None)
        if o.name == "src2" and spec.unit == "matrix":
            acc = e.fields["acc_cd"]
        bank = "a" if acc is not None and _bits(word, acc) else "v"
        if o.kind == "label":
            ops[o.name] = Label(f"L_{offset + 4 + 4 * (code - (1 << 16) if code >> 15 else code):x}")
        elif o.kind in ("imm", "waitcnt"):
            ops[o.name] = Imm.of(code - (1 << 16) if o.type == "i16" and code >> 15 else code)
        elif o.kind == "smoff":
            if get("soffset_en"):
                ops[o.name] = Reg("s", get("soffset"))
            else:
                value = get("offset")
                ops[o.name] = Imm.of(value - (1 << 21) if value >> 20 else value) if get("imm") else Reg("s", value & 127)
        elif o.kind == "saddr":
            ops[o.name] = Off() if code == _SADDR_OFF else Reg("s", code, 2)
        elif o.kind == "vaddr":
            count = bool(mods.get("offen")) + bool(mods.get("idxen")) if spec.family == "MUBUF" else 2 if get("saddr") == _SADDR_OFF else 1
            ops[o.name] = Reg("v", code, count) if count else Off()
        elif f.kind in ("src", "ssrc"):
            ops[o.name] = _source(code, dwords, bank, literal)
        elif f.kind in ("sgpr2", "sgpr4"):
            ops[o.name] = Reg("s", code * int(f.kind[4:]), dwords)
        elif f.kind == "sdst" or o.kind in ("sreg", "mask"):
            ops[o.name] = Reg("s", code, dwords)
        else:
            ops[o.name] = Reg(bank, code, dwords)
        r = ops[o.name]
        if isinstance(r, Reg) and r.bank in "va" and r.index + r.count > 256:
            raise DecodeError(f"{o.name} is past the register file")
        for modifier in ("neg", "abs"):
            field = e.fields.get(modifier)
            if field is not None and o.name in field.args and _bits(word, field) >> field.args.index(o.name) & 1:
                ops[o.name] = evolve(ops[o.name], **{modifier: True})
    return Instruction(spec, form, ops, mods)

"""Which operands and modifiers an instruction takes, and which encoding it gets. Shared by authoring and parsing."""
from __future__ import annotations

from .isa import Form, InstructionSpec, OperandSpec, load
from .program import Imm, Label, Off, Operand, Reg

# Register numbers of each bank that exist: VGPRs and AGPRs 256 each; SGPRs 0..101, then special registers to 127.
_FILE = {"v": 256, "a": 256}
_MOD_LIMITS = {"offset": {"DS": (0, 65535), "MUBUF": (0, 4095), "GLOBAL": (-4096, 4095), "SMEM": (-(1 << 20), (1 << 20) - 1)},
               "cbsz": {"MFMA": (0, 4), "MFMA_SCALE": (0, 4)}, "abid": {"MFMA": (0, 15)}, "blgp": {"MFMA": (0, 4), "MFMA_SCALE": (0, 4)}, "op_sel": {"MFMA_SCALE": (0, 3)}, "op_sel_hi": {"MFMA_SCALE": (0, 3)}, "omod": {"VOP3": (0, 3), "VOP3SD": (0, 3)}}
_SHORT = {"VOP1", "VOP2", "VOPC"}
_IMPLIED = {"clamp", "omod"}  # every VOP3 form has them


# Registers of an f8f6f4 operand by its format (cbsz for A, blgp for B): e4m3, e5m2, e2m3, e3m2, e2m1. ISA 7.1.
_F8F6F4_DWORDS = (8, 8, 6, 6, 4)


def operand_dwords(spec: InstructionSpec, o: OperandSpec, mods: dict[str, int]) -> int:
    """Registers an operand has under these modifiers."""
    if spec.mnemonic.endswith("_f8f6f4") and o.name in ("src0", "src1"):
        code = mods.get("cbsz" if o.name == "src0" else "blgp", 0)
        return _F8F6F4_DWORDS[code] if code < len(_F8F6F4_DWORDS) else o.dwords
    return o.dwords


def _is_float(spec: OperandSpec) -> bool:
    return spec.element in ("f32", "f16", "f64")


def choose_form(spec: InstructionSpec, operands: dict[str, Operand], mods: dict[str, int]) -> Form:
    """The shortest form that can hold the operands, as LLVM chooses it."""
    short = spec.forms[0]
    if len(spec.forms) == 1 or short.encoding not in _SHORT:
        return short
    if any(mods.get(m) for m in _IMPLIED | {"op_sel"}):
        return spec.forms[-1]
    for o in spec.operands:
        value = operands.get(o.name)
        if o.kind == "mask" and not (isinstance(value, Reg) and (value.index, value.count) == (106, 2)):
            return spec.forms[-1]
        if isinstance(value, Reg) and (value.neg or value.abs):
            return spec.forms[-1]
        if o.name == "src1" and not (isinstance(value, Reg) and value.bank == "v"):
            return spec.forms[-1]
    return short


def _register(o: OperandSpec, r: Reg, dwords: int) -> str | None:
    if r.count != dwords:
        return f"{r.plain} is {r.count} register(s); {o.type} needs {dwords}"
    if r.bank in _FILE:
        if r.index < 0 or r.index + r.count > _FILE[r.bank]:
            return f"{r.plain} is past the register file; {r.bank}0 to {r.bank}{_FILE[r.bank] - 1} exist"
        if dwords > 1 and r.index % 2:
            return f"{r.plain} is misaligned; 64 bits and more start at an even register"
        return None
    if r.index >= 251:
        return None if dwords == 1 and not o.out else f"{r.plain} cannot be written"
    end = r.index + r.count
    if end > 128 or r.index < 0 or (r.index <= 101 < end - 1) or 108 <= r.index < 124:
        return f"{r.plain} is past the scalar registers; s0 to s101, vcc, m0 and exec exist"
    align = 1 if dwords == 1 else 2 if dwords == 2 else 4
    if r.index % align:
        return f"{r.plain} is misaligned; {dwords} SGPRs start at a multiple of {align}"
    return None


def _operand(spec: InstructionSpec, form: Form, o: OperandSpec, value: Operand, mods: dict[str, int]) -> str | None:
    kind, dwords = o.kind, operand_dwords(spec, o, mods)
    if kind == "label":
        return None if isinstance(value, (Label, Imm)) else "expected a label"
    if kind in ("imm", "waitcnt"):
        if not isinstance(value, Imm):
            return "expected a number"
        low, high = (-32768, 65535)
        return None if low <= value.signed <= high else f"{value.signed} does not fit in 16 bits"
    if kind == "saddr":
        if isinstance(value, Off):
            return None
        return _register(o, value, 2) if isinstance(value, Reg) and value.bank == "s" else "expected an SGPR pair or off"
    if kind == "smoff":
        if isinstance(value, Imm):
            low, high = _MOD_LIMITS["offset"]["SMEM"]
            return None if low <= value.signed <= high else f"offset {value.signed} bytes; {low} to {high} fit"
        return _register(o, value, 1) if isinstance(value, Reg) and value.bank == "s" else "expected an SGPR or a byte offset"
    if kind == "vaddr":
        return _vaddr(spec, o, value, mods)
    if isinstance(value, (Label, Off)):
        return f"expected a register{' or a number' if 'src' in kind else ''}, got '{value}'"
    if isinstance(value, Imm):
        return _constant(form, o, value)
    if (value.neg or value.abs) and not (_is_float(o) and form.encoding in ("VOP3", "VOP3SD") and o.inp):
        return f"'{value}': a neg or abs modifier needs a float source of a VOP3 encoding"
    banks = {"vgpr": "v", "vreg": "va", "vcsrc": "va", "src": "vs", "sreg": "s", "ssrc": "s", "mask": "s"}[kind]
    if value.bank not in banks:
        names = {"v": "VGPR", "a": "AGPR", "s": "SGPR"}
        return f"{value.plain} is a {names[value.bank]}; expected {' or '.join(names[b] for b in banks)}"
    if o.out and value.bank == "s" and value.index >= 124 and (spec.family == "SMEM" or "lane" in spec.classes):
        return f"{spec.mnemonic} cannot write {value.plain}; SGPRs and vcc it can"
    return _register(o, value, dwords)


def _vaddr(spec, o, value, mods) -> str | None:
    if spec.family == "MUBUF":
        count = bool(mods.get("offen")) + bool(mods.get("idxen"))
        if count == 0:
            return None if isinstance(value, Off) else "an address register needs offen or idxen; without them write off"
    else:
        count = 2 if mods.get("_saddr_off") else 1
    if not isinstance(value, Reg) or value.bank != "v":
        return f"expected {count} VGPR(s)"
    if value.count != count:
        why = "" if spec.family == "MUBUF" else ": a 64-bit address with off, a 32-bit offset with an SGPR pair"
        return f"{value.plain} is {value.count} register(s), expected {count}{why}"
    return _register(o, value, count)


def _constant(form: Form, o: OperandSpec, value: Imm) -> str | None:
    if o.kind not in ("src", "ssrc", "vcsrc"):
        return f"the constant {value} stands where a register must"
    if value.inline_code is None and (o.kind == "vcsrc" or not load().encodings[form.encoding].literal):
        return f"{value} is no inline constant (-16..64, 0.5, 1, 2, 4 and their negatives, 1/(2 pi)), and {form.encoding} takes no literal"
    return None


def validate(spec: InstructionSpec, form: Form, operands: dict[str, Operand], mods: dict[str, int]) -> list[str]:
    """Everything wrong with operands and modifiers; each message says what would be right. Empty if all is well."""
    problems = []
    if isinstance(operands.get("saddr"), Off):
        mods = {**mods, "_saddr_off": 1}
    dma = bool(mods.get("lds")) and "lds" in spec.modifiers
    for o in spec.operands:
        value = operands.get(o.name)
        if value is None:
            if not (dma and o.name == "vdata"):
                problems.append(f"operand {o.name} is missing ({', '.join(x.name for x in spec.operands)})")
            continue
        if dma and o.name == "vdata":
            problems.append("with lds the data goes to LDS: leave vdata out")
            continue
        problem = _operand(spec, form, o, value, mods)
        if problem:
            problems.append(f"operand {o.name}: {problem}")
    for name in operands.keys() - {o.name for o in spec.operands}:
        problems.append(f"there is no operand '{name}' ({', '.join(x.name for x in spec.operands)})")
    problems += _modifiers(spec, form, mods)
    literals = {str(v) for o in spec.operands if o.kind in ("src", "ssrc") and isinstance(v := operands.get(o.name), Imm) and v.inline_code is None}
    if len(literals) > 1:
        problems.append(f"{len(literals)} literals ({', '.join(sorted(literals))}); an instruction holds one")
    if not problems and spec.unit == "valu":
        problems += _constant_bus(spec, operands)
    if not problems and spec.unit == "matrix":
        problems += _mfma(operands)
    if spec.mnemonic == "s_nop" and not problems and operands["simm16"].bits > 15:
        problems.append(f"s_nop {operands['simm16']}: 0 to 15 (1 to 16 wait states)")
    return problems


def _modifiers(spec: InstructionSpec, form: Form, mods: dict[str, int]) -> list[str]:
    problems = []
    allowed = set(spec.modifiers) | (_IMPLIED if form.encoding in ("VOP3", "VOP3SD") else set())
    for name, value in mods.items():
        if name.startswith("_"):
            continue
        if name not in allowed:
            problems.append(f"{spec.mnemonic} has no modifier '{name}'" + (f"; it has {', '.join(sorted(allowed))}" if allowed else ""))
            continue
        low, high = _MOD_LIMITS.get(name, {}).get(form.encoding, (0, 15 if name in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi") else 1))
        if not low <= value <= high:
            problems.append(f"{name}:{value} is out of range; {low} to {high}")
    return problems


def _constant_bus(spec: InstructionSpec, operands: dict[str, Operand]) -> list[str]:
    """A VALU instruction of gfx9 reads at most one scalar: an SGPR (or pair, VCC) or a literal."""
    scalars = set()
    for o in spec.operands:
        value = operands.get(o.name)
        if not o.inp:
            continue
        if isinstance(value, Reg) and value.bank == "s":
            scalars.add(value.plain)
        elif isinstance(value, Imm) and value.inline_code is None:
            scalars.add(str(value))
    return [f"reads {len(scalars)} scalars ({', '.join(sorted(scalars))}); the constant bus carries one SGPR or literal"] if len(scalars) > 1 else []


def _mfma(operands: dict[str, Operand]) -> list[str]:
    d, c = operands["vdst"], operands["src2"]
    if isinstance(c, Reg):
        if c.bank != d.bank:
            return [f"vdst {d.plain} and src2 {c.plain} are in different banks; C and D are both VGPRs or both AGPRs"]
        if set(c.units) & set(d.units) and c.units != d.units:
            return [f"src2 {c.plain} overlaps vdst {d.plain} in part; they are the same registers or disjoint"]
    return []

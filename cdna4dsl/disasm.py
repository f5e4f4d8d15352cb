"""Disassembly: any gfx950 ELF file as text that an assembler takes again.

``listing`` reads the file, ``text`` prints it. What is carried: every code section with its symbols, every kernel
descriptor, and the metadata. What is not (relocations, data sections) is named in ``Listing.notes``. Unlike
``codeobject.read``, which gives programs to run, nothing here needs to be an instruction: a dword that is none is printed
as ``.long`` and decoding goes on behind it.
"""
from __future__ import annotations

import bisect
import io
import math
import re
import struct

import msgpack
import numpy as np
from attrs import evolve, field, frozen
from elftools.common.exceptions import ELFError
from elftools.common.utils import struct_parse
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from .asm import TRIPLE, CPU, instruction_text
from .codeobject import CodeObjectError
from .encode import DecodeError, decode
from .operands import validate
from .program import Imm, Instruction, Label, Reg, decode_waitcnt, encode_waitcnt

_EM_AMDGPU, _MACH_MASK, _MACH_GFX950 = 224, 0xFF, 0x4F
_MACHINES = {0x2F: "gfx908", 0x3F: "gfx90a", 0x40: "gfx940", 0x4B: "gfx941", 0x4C: "gfx942", 0x4F: "gfx950"}
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_RELA, _SHT_NOTE, _SHT_NOBITS, _SHT_REL, _SHT_DYNSYM = 1, 2, 4, 7, 8, 9, 11
_SHF_ALLOC, _SHF_EXEC, _SHF_COMPRESSED = 2, 4, 0x800
_NT_AMDGPU_METADATA = 32
# Limits that keep time and memory in proportion to honest files (AITER's largest kernel: 0.2 MB of code).
MAX_CODE, MAX_NAME, MAX_NAMES, MAX_SYMBOLS, MAX_NOTE = 16 << 20, 1 << 16, 64 << 20, 1 << 20, 32 << 20
_SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
_TYPES = {0: "notype", 1: "object", 2: "function", 10: "amdgpu_hsa_kernel"}
_BINDINGS = {0: "local", 1: "globl", 2: "weak"}
_VISIBILITIES = ("default", "internal", "hidden", "protected")
# What linkers and compilers put between and behind functions: zeros, s_nop 0, s_code_end (no instruction on gfx9, but
# what LLVM pads with, so that instruction fetch never reads foreign bytes).
_CODE_END, _S_NOP = 0xBF9F0000, 0xBF800000
_PADDING = {0: "zero", _S_NOP: "s_nop 0", _CODE_END: "s_code_end"}
_LONGEST = 16         # bytes of the longest instruction (MFMA with block scales)
_RUN = 8              # from so many equal padding dwords on, one .fill
_PLAIN_NAME = re.compile(r"[A-Za-z_.$][\w.$]*\Z", re.A)


# -- what a listing is ------------------------------------------------------------------------------------------------
@frozen
class Item:
    """``size`` bytes at ``offset`` of the section. kind: instruction, data (no instruction) or padding."""
    offset: int
    size: int
    kind: str
    text: str
    note: str | None = None


@frozen
class Symbol:
    """A symbol of a code section. offset and size: bytes; ``label``: its name as assemblers take it."""
    name: str
    offset: int
    size: int
    type: str
    binding: str
    visibility: str
    label: str


@frozen
class CodeSection:
    """``targets`` maps the byte offsets that branches go to, to their generated labels."""
    name: str
    align: int
    data: bytes = field(repr=False)
    items: tuple[Item, ...] = field(repr=False)
    symbols: tuple[Symbol, ...] = ()
    targets: dict[int, str] = field(factory=dict)

    @property
    def unknown(self) -> int:
        """How many items are no instruction (padding is not counted)."""
        return sum(i.kind == "data" for i in self.items)


@frozen
class Descriptor:
    """A kernel descriptor: 64 bytes; ``directives`` are the .amdhsa_ values that give the same bytes, or None if there are
    none, and ``why`` says what they cannot express."""
    kernel: str
    label: str
    raw: bytes
    directives: dict[str, int] | None
    why: str | None = None
    symbol: Symbol | None = None


@frozen
class Listing:
    """Everything ``text`` prints. metadata: the decoded note, or None. notes: what the text does not carry."""
    source: str
    target: str
    version: int
    sections: tuple[CodeSection, ...]
    descriptors: tuple[Descriptor, ...]
    metadata: dict | None
    notes: tuple[str, ...] = ()

    @property
    def unknown(self) -> int:
        """How many items of all sections are no instruction."""
        return sum(s.unknown for s in self.sections)

    def to_json(self) -> dict:
        """As plain data: bytes as hex, offsets in bytes of the section."""
        return {
            "source": self.source, "target": self.target, "code_object_version": self.version, "unknown": self.unknown,
            "notes": list(self.notes),
            "kernels": [{"name": d.kernel, "descriptor": d.raw.hex(), "directives": d.directives, "why": d.why} for d in self.descriptors],
            "metadata": _jsonable(self.metadata),
            "sections": [{"name": s.name, "bytes": len(s.data), "unknown": s.unknown,
                          "symbols": [{"name": y.name, "offset": y.offset, "size": y.size, "type": y.type} for y in s.symbols],
                          "targets": {label: offset for offset, label in s.targets.items()},
                          "items": [{"offset": i.offset, "size": i.size, "kind": i.kind, "text": i.text} for i in s.items]}
                         for s in self.sections],
        }


def _jsonable(value):
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_jsonable(v) for v in value]
    return value.hex() if isinstance(value, bytes) else value


# -- kernel descriptors -----------------------------------------------------------------------------------------------
# Directive -> (byte, lowest bit, bits) of the 32-bit (16-bit from byte 56 on) word. LLVM AMDGPUUsage, 'kernel descriptor', for
# gfx90a and later 9.x with architected flat scratch. Those that hold no plain number are in _GRANULES.
_FIELDS = {
    "group_segment_fixed_size": (0, 0, 32), "private_segment_fixed_size": (4, 0, 32), "kernarg_size": (8, 0, 32),
    "accum_offset": (44, 0, 6), "tg_split": (44, 16, 1),
    "next_free_vgpr": (48, 0, 6), "next_free_sgpr": (48, 6, 4),
    "float_round_mode_32": (48, 12, 2), "float_round_mode_16_64": (48, 14, 2), "float_denorm_mode_32": (48, 16, 2),
    "float_denorm_mode_16_64": (48, 18, 2), "dx10_clamp": (48, 21, 1), "ieee_mode": (48, 23, 1), "fp16_overflow": (48, 26, 1),
    "enable_private_segment": (52, 0, 1), "user_sgpr_count": (52, 1, 5), "system_sgpr_workgroup_id_x": (52, 7, 1),
    "system_sgpr_workgroup_id_y": (52, 8, 1), "system_sgpr_workgroup_id_z": (52, 9, 1), "system_sgpr_workgroup_info": (52, 10, 1),
    "system_vgpr_workitem_id": (52, 11, 2), "exception_fp_ieee_invalid_op": (52, 24, 1), "exception_fp_denorm_src": (52, 25, 1),
    "exception_fp_ieee_div_zero": (52, 26, 1), "exception_fp_ieee_overflow": (52, 27, 1), "exception_fp_ieee_underflow": (52, 28, 1),
    "exception_fp_ieee_inexact": (52, 29, 1), "exception_int_div_zero": (52, 30, 1),
    "user_sgpr_dispatch_ptr": (56, 1, 1), "user_sgpr_queue_ptr": (56, 2, 1), "user_sgpr_kernarg_segment_ptr": (56, 3, 1),
    "user_sgpr_dispatch_id": (56, 4, 1), "user_sgpr_private_segment_size": (56, 6, 1), "uses_dynamic_stack": (56, 11, 1),
    "user_sgpr_kernarg_preload_length": (58, 0, 7), "user_sgpr_kernarg_preload_offset": (58, 7, 9),
}
_DESCRIPTOR, _ENTRY = 64, slice(16, 24)
_MAX_SGPRS = 102      # what .amdhsa_next_free_sgpr takes
_USER_SGPRS = {"user_sgpr_dispatch_ptr": 2, "user_sgpr_queue_ptr": 2, "user_sgpr_kernarg_segment_ptr": 2, "user_sgpr_dispatch_id": 2,
               "user_sgpr_private_segment_size": 1}


def directives(raw: bytes) -> dict[str, int]:
    """.amdhsa_ values of a 64-byte kernel descriptor, all that gfx950 has. ``descriptor_bytes`` is the inverse."""
    values = {}
    for name, (at, low, bits) in _FIELDS.items():
        word = int.from_bytes(raw[at:at + (2 if at >= 56 else 4)], "little")
        values[name] = word >> low & (1 << bits) - 1
    values["accum_offset"] = (values["accum_offset"] + 1) * 4
    values["next_free_vgpr"] = (values["next_free_vgpr"] + 1) * 8
    # The assembler adds six for VCC, flat scratch and xnack_mask whatever the reserve directives say, and counts in eights.
    sgprs = values["next_free_sgpr"] * 8 + 2
    values["next_free_sgpr"] = min(sgprs, _MAX_SGPRS) if sgprs - 8 < _MAX_SGPRS else sgprs
    return values


def descriptor_bytes(values: dict[str, int]) -> bytes:
    """The 64 bytes that LLVM's assembler makes of all the values of ``directives``; the code's distance (bytes 16 to 23) is 0."""
    raw = bytearray(_DESCRIPTOR)
    sgprs = max(values["next_free_sgpr"], values["user_sgpr_count"] if values["user_sgpr_kernarg_preload_length"] else 0)
    coded = {**values, "accum_offset": values["accum_offset"] // 4 - 1, "next_free_vgpr": -(-max(1, values["next_free_vgpr"]) // 8) - 1,
             "next_free_sgpr": -(-(sgprs + 6) // 8) - 1}
    for name, (at, low, bits) in _FIELDS.items():
        n = 2 if at >= 56 else 4
        word = int.from_bytes(raw[at:at + n], "little") | (coded[name] & (1 << bits) - 1) << low
        raw[at:at + n] = word.to_bytes(n, "little")
    return bytes(raw)


def _inexpressible(raw: bytes, values: dict[str, int]) -> str | None:
    """Why the directives would not assemble to these bytes, or None."""
    if values["user_sgpr_kernarg_preload_length"] and values["user_sgpr_count"] > values["next_free_sgpr"]:
        return f"{values['user_sgpr_count']} user SGPRs with a kernarg preload, and only {values['next_free_sgpr']} SGPRs"
    again = descriptor_bytes(values)
    extra = [f"byte {i}: {a ^ b:#x}" for i, (a, b) in enumerate(zip(raw, again)) if a != b and not 16 <= i < 24]
    if extra:
        return f"bits without a directive are set ({', '.join(extra)})"
    if values["next_free_sgpr"] > _MAX_SGPRS:
        return f"{values['next_free_sgpr']} SGPRs; the directive takes {_MAX_SGPRS}"
    if values["accum_offset"] > -(-values["next_free_vgpr"] // 4) * 4:
        return f"accum_offset {values['accum_offset']} is past the {values['next_free_vgpr']} VGPRs"
    implied = sum(n for name, n in _USER_SGPRS.items() if values[name]) + values["user_sgpr_kernarg_preload_length"]
    if values["user_sgpr_count"] < implied:
        return f"user_sgpr_count {values['user_sgpr_count']} is less than the {implied} that are enabled"
    if values["system_vgpr_workitem_id"] > 2:
        return "system_vgpr_workitem_id 3 is reserved"
    end = 4 * (values["user_sgpr_kernarg_preload_length"] + values["user_sgpr_kernarg_preload_offset"])
    if values["user_sgpr_kernarg_preload_length"] and values["kernarg_size"] and end > values["kernarg_size"]:
        return f"the kernarg preload ends at byte {end} of {values['kernarg_size']}"
    return None


# -- ELF --------------------------------------------------------------------------------------------------------------
@frozen
class _Section:
    index: int
    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


def _cstring(table: bytes, at: int, source: str) -> str:
    if not 0 <= at < len(table):
        raise CodeObjectError(f"{source}: a name at {at}, past the string table of {len(table)} bytes")
    end = table.find(b"\0", at, at + MAX_NAME)
    if end < 0:
        raise CodeObjectError(f"{source}: a name without an end, or longer than {MAX_NAME} bytes")
    return table[at:end].decode("utf-8", "replace")


def _sections(data: bytes, source: str) -> tuple[ELFFile, list[_Section]]:
    if data[:4] != b"\x7fELF":
        raise CodeObjectError(f"{source}: no ELF file" + (" (empty)" if not data else ""))
    if len(data) < 64:
        raise CodeObjectError(f"{source}: truncated: {len(data)} bytes do not hold an ELF header")
    if data[4] != 2 or data[5] != 1:
        raise CodeObjectError(f"{source}: a {'32' if data[4] == 1 else '64' if data[4] == 2 else '?'}-bit ELF file of "
                              f"{'little' if data[5] == 1 else 'big'} endian; gfx950 is 64-bit little endian")
    elf = ELFFile(io.BytesIO(data))
    if elf["e_machine"] not in ("EM_AMDGPU", _EM_AMDGPU):
        raise CodeObjectError(f"{source}: an ELF file for {elf['e_machine']}, not AMDGPU")
    mach = elf["e_flags"] & _MACH_MASK
    if mach != _MACH_GFX950:
        name = _MACHINES.get(mach)
        raise CodeObjectError(f"{source}: built for AMDGPU machine {mach:#x}{f' ({name})' if name else ''}; gfx950 is {_MACH_GFX950:#x}")
    if elf["e_shoff"] == 0:
        raise CodeObjectError(f"{source}: no section headers (stripped of them?)")
    if elf["e_shentsize"] != 64:
        raise CodeObjectError(f"{source}: section headers of {elf['e_shentsize']} bytes; 64 is right")
    end = elf["e_shoff"] + 64 * max(1, elf["e_shnum"])
    if end > len(data):
        raise CodeObjectError(f"{source}: truncated: section headers end at {end}, the file at {len(data)}")
    count = elf.num_sections()
    if elf["e_shoff"] + 64 * count > len(data):
        raise CodeObjectError(f"{source}: truncated: {count} section headers end at {elf['e_shoff'] + 64 * count}, the file at {len(data)}")
    headers = [struct_parse(elf.structs.Elf_Shdr, elf.stream, elf["e_shoff"] + 64 * i) for i in range(count)]
    kinds = np.frombuffer(data, "<u4", 16 * count, elf["e_shoff"])[1::16].tolist()   # as numbers, whatever pyelftools calls them
    for h, kind in zip(headers, kinds):
        if kind not in (0, _SHT_NOBITS) and h["sh_offset"] + h["sh_size"] > len(data):
            raise CodeObjectError(f"{source}: truncated: a section ends at {h['sh_offset'] + h['sh_size']}, the file at {len(data)}")
    names = b""
    strings = elf.get_shstrndx()
    if 0 < strings < count:
        names = data[headers[strings]["sh_offset"]:headers[strings]["sh_offset"] + headers[strings]["sh_size"]]
    out, total = [], 0
    for i, (h, kind) in enumerate(zip(headers, kinds)):
        name = _cstring(names, h["sh_name"], source) if names else ""
        total += len(name)
        if total > MAX_NAMES:
            raise CodeObjectError(f"{source}: more than {MAX_NAMES} bytes of section names")
        out.append(_Section(i, name, kind, h["sh_flags"], h["sh_addr"], h["sh_offset"], h["sh_size"],
                            h["sh_link"], h["sh_info"], h["sh_addralign"], h["sh_entsize"]))
    return elf, out


def _bytes(data: bytes, s: _Section) -> bytes:
    return data[s.offset:s.offset + s.size]


def _symbol_rows(data: bytes, sections: list[_Section], wanted: set[int], source: str) -> list[tuple[str, int, int, int, int, int]]:
    """(name, section, value, size, info, other) of symbols in the wanted sections and of every descriptor (*.kd)."""
    tables = [s for s in sections if s.type in (_SHT_SYMTAB, _SHT_DYNSYM)]
    for kind in (_SHT_SYMTAB, _SHT_DYNSYM):
        if sum(s.type == kind for s in tables) > 1:
            raise CodeObjectError(f"{source}: more than one symbol table of a kind")
    rows, seen, total = [], set(), 0
    for table in sorted(tables, key=lambda s: s.type):       # the full table first: it has the local names too
        if table.size % 24 or table.entry not in (0, 24):
            raise CodeObjectError(f"{source}: section {table.name}: {table.size} bytes of {table.entry}-byte symbols; 24 is right")
        if not 0 < table.link < len(sections):
            raise CodeObjectError(f"{source}: section {table.name} has no string table")
        strings = _bytes(data, sections[table.link]) if sections[table.link].type != _SHT_NOBITS else b""
        all_rows = np.frombuffer(data, _SYMBOL, table.size // 24, table.offset)
        where = all_rows["section"]
        rows_here = all_rows[(where > 0) & (where < len(sections)) & (all_rows["name"] > 0) & ~np.isin(all_rows["info"] & 15, (3, 4))]
        # a name ends at the first NUL behind its start; descriptors are those that end in .kd there
        ends = np.flatnonzero(np.frombuffer(strings, np.uint8) == 0)
        at = np.searchsorted(ends, rows_here["name"])
        if len(rows_here) and (not len(ends) or int(at.max()) >= len(ends)):
            raise CodeObjectError(f"{source}: section {table.name}: a symbol's name is past the string table")
        lengths = ends[at] - rows_here["name"] if len(rows_here) else np.zeros(0, np.int64)
        kd_ends = np.array([m.end() - 1 for m in re.finditer(rb"\.kd\0", strings)], dtype=np.int64)
        keep = np.isin(rows_here["section"], list(wanted)) | (np.isin(ends[at], kd_ends) & (lengths > 3) if len(rows_here) else False)
        rows_here, lengths = rows_here[keep], lengths[keep]
        total += int(lengths.sum())
        if len(rows_here) > MAX_SYMBOLS or total > MAX_NAMES or len(lengths) and int(lengths.max()) > MAX_NAME:
            raise CodeObjectError(f"{source}: section {table.name}: more than {MAX_SYMBOLS} symbols of code, or names longer "
                                  f"than {MAX_NAME} bytes")
        for name_at, info, other, section, value, size in rows_here.tolist():
            name = _cstring(strings, name_at, source)
            if (name, section, value) not in seen:
                seen.add((name, section, value))
                rows.append((name, section, value, size, info, other))
    return rows


def _label(name: str, used: dict[str, int]) -> str:
    """The name as a label that no other symbol has; quoted, or with other characters, if assemblers need it. used: labels taken,
    with the number that the next of the same name tries."""
    if _PLAIN_NAME.match(name):
        label = name
    elif name.isascii() and name.isprintable() and '"' not in name and "\\" not in name:
        label = f'"{name}"'
    else:
        label = re.sub(r"[^\w.$]", lambda m: f"_x{ord(m[0]):x}_", name, flags=re.A)
        label = label if _PLAIN_NAME.match(label) else f"_{label}"
    first, base = label, label.strip('"')
    while label in used:
        used[first] += 1
        label = f'"{base}.{used[first]}"' if label[0] == '"' else f"{base}.{used[first]}"
    used[label] = 1
    return label


# -- code -------------------------------------------------------------------------------------------------------------
def _terminal(text: str) -> bool:
    """Whether nothing falls through behind the instruction."""
    return text.split(None, 1)[0] in ("s_endpgm", "s_branch", "s_setpc_b64", "s_endpgm_saved", "s_rfe_b64")


def _refused(inst: Instruction) -> str | None:
    """Why no assembler makes these bytes of the instruction's text, or None."""
    if inst.mnemonic == "s_waitcnt" and encode_waitcnt(**decode_waitcnt(bits := inst.operands["simm16"].bits)) != bits:
        return "s_waitcnt with bits that belong to no counter"
    # often the second half of an instruction that the specs lack
    problems = validate(inst.spec, inst.form, inst.operands, inst.mods) if inst.mnemonic != "s_nop" else []
    # behind s101 only names stand in text
    problems += [f"{r.plain} has no name" for r in inst.operands.values()
                 if isinstance(r, Reg) and r.bank == "s" and r.index + r.count > 102 and re.match(r"s[\d\[]", r.plain)]
    return f"not an instruction: {inst.mnemonic}: {problems[0]}" if problems else None


def _decode_all(code: bytes, cuts: list[int], sized: list[tuple[int, int]]):
    """[(offset, size, kind, text, note, branch target or None)]; an instruction never reaches over a cut (a symbol)."""
    out = []
    end = len(code) & ~3
    words = np.frombuffer(code, "<u4", end // 4)
    run_ends = np.empty(len(words), np.int64)
    changes = np.flatnonzero(np.append(words[1:] != words[:-1], True)) + 1 if len(words) else np.zeros(0, np.int64)
    if len(words):
        run_ends = np.repeat(changes, np.diff(np.concatenate(([0], changes))))
    cuts = sorted({c for c in cuts if c % 4 == 0 and 0 < c < end} | {end})
    starts = [s for s, _ in sized]
    reach = np.maximum.accumulate([e for _, e in sized]).tolist() if sized else []
    cache: dict[bytes, tuple[int, str, str | None]] = {}
    offset, cut, open_end = 0, 0, True          # open_end: nothing falls through to here
    while offset < end:
        while cuts[cut] <= offset:
            cut += 1
        limit, word = cuts[cut], int(words[offset // 4])
        if word in _PADDING:
            k = bisect.bisect_right(starts, offset) - 1
            inside = k >= 0 and reach[k] > offset
            run = min(int(run_ends[offset // 4]), limit // 4) - offset // 4
            if not inside and (run >= _RUN and (open_end or word != _S_NOP) or word == _CODE_END):
                # with a run: break it where a symbol starts, which ``limit`` does
                text = f".fill {run}, 4, {word:#x}" if run > 1 else f".long {word:#010x}"
                out.append((offset, 4 * run, "padding", text, _PADDING[word], None))
                offset, open_end = offset + 4 * run, True
                continue
        key = code[offset:offset + _LONGEST]
        if key in cache:
            size, line, note = cache[key]
            label = None
        else:
            try:
                inst, size = decode(code, offset)
                label = next((o for o in inst.operands.values() if isinstance(o, Label)), None)
                note = _refused(inst)
                line = inst if label else "" if note else instruction_text(inst)
            except DecodeError:
                size, line, label, note = 4, "", None, "not an instruction"
            if not label:
                cache[key] = size, line, note
        if offset + size > limit:
            note = "not an instruction: it would reach over the next symbol"
        if note:
            out.append((offset, 4, "data", f".long {word:#010x}", note, None))
            offset, open_end = offset + 4, False
            continue
        if label:
            out.append((offset, size, "instruction", line, None, int(label.name[2:], 16)))
            open_end = line.mnemonic == "s_branch"
        else:
            out.append((offset, size, "instruction", line, None, None))
            open_end = _terminal(line)
        offset += size
    if end < len(code):
        out.append((end, len(code) - end, "data", ".byte " + ", ".join(f"{b:#04x}" for b in code[end:]), "not an instruction", None))
    return out


def _code_section(s: _Section, code: bytes, symbols: list[Symbol], number: int, used: dict[str, int]) -> CodeSection:
    decoded = _decode_all(code, [y.offset for y in symbols], sorted((y.offset, y.offset + y.size) for y in symbols if y.size))
    starts = {d[0] for d in decoded} | {len(code)}
    prefix = f"L{number or ''}_"
    wanted = sorted({d[5] for d in decoded if d[5] is not None and d[5] in starts})
    at = {y.label: y.offset for y in symbols}
    while any(f"{prefix}{t:x}" in used and at.get(f"{prefix}{t:x}") != t for t in wanted):
        prefix = "L" + prefix
    targets = {t: f"{prefix}{t:x}" for t in wanted}
    used.update(dict.fromkeys(targets.values(), 1))
    items = []
    for offset, size, kind, line, note, target in decoded:
        if target is not None:
            inst = line
            if target in targets:
                operand = Label(targets[target])
            else:
                operand = Imm((target - offset - 4) // 4 & 0xFFFF)
                note = f"to {target:#x}, where no instruction starts"
            line = instruction_text(evolve(inst, operands={n: operand if isinstance(o, Label) else o for n, o in inst.operands.items()}))
        items.append(Item(offset, size, kind, line, note))
    return CodeSection(s.name or ".text", max(4, s.align), code, tuple(items), tuple(symbols), targets)


# -- metadata ---------------------------------------------------------------------------------------------------------
def _metadata(data: bytes, sections: list[_Section], source: str) -> dict | None:
    if sum(s.size for s in sections if s.type == _SHT_NOTE) > len(data):
        raise CodeObjectError(f"{source}: note sections overlap")
    for s in sections:
        if s.type != _SHT_NOTE:
            continue
        at, end = s.offset, s.offset + s.size
        while at + 12 <= end:
            name_size, size, kind = struct.unpack_from("<III", data, at)
            begin = at + 12 + -(-name_size // 4) * 4
            if kind == _NT_AMDGPU_METADATA and name_size <= 16 and data[at + 12:at + 12 + name_size].rstrip(b"\0") == b"AMDGPU":
                if begin + size > end:
                    raise CodeObjectError(f"{source}: truncated: the metadata note ends at {begin + size}, its section at {end}")
                if size > MAX_NOTE:
                    raise CodeObjectError(f"{source}: {size} bytes of metadata; {MAX_NOTE} are the limit")
                notes = msgpack.unpackb(data[begin:begin + size], strict_map_key=False)
                if not isinstance(notes, dict):
                    raise CodeObjectError(f"{source}: the metadata is a {type(notes).__name__}, not a map")
                return notes
            at = begin + -(-size // 4) * 4
    return None


_PLAIN_YAML = re.compile(r"[A-Za-z_.$][\w.$-]*\Z", re.A)


def _ambiguous(word: str) -> bool:
    """Whether LLVM's YAML reader takes the word for a number or a truth value, quoted or not: only a tag keeps it text."""
    if word in ("", "true", "false") or word.lower().startswith(("nan(", "-nan(", "+nan(")):
        return True
    for kind in (float, lambda w: int(w, 0)):
        try:
            kind(word)
            return True
        except ValueError:
            pass
    return False


def _scalar(value) -> str:
    if value is None:
        return '!nil ""'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"!float {value!r}" if math.isfinite(value) else f"!float {'-' if value < 0 else ''}.{'nan' if math.isnan(value) else 'inf'}"
    if not isinstance(value, str):
        raise CodeObjectError(f"the metadata holds a {type(value).__name__}, which .amdgpu_metadata cannot express")
    tag = "!str " if _ambiguous(value) else ""
    if _PLAIN_YAML.match(value):
        return tag + value
    # one line, and nothing in it that an assembler takes for a comment
    code = lambda n: f"\\x{n:02x}" if n < 256 else f"\\u{n:04x}" if n < 65536 else f"\\U{n:08x}"
    escaped = "".join(c if 32 <= ord(c) < 127 and c not in '"\\;/#' else code(ord(c)) for c in value)
    return f'{tag}"{escaped}"'


def _yaml(value, indent: int) -> list[str]:
    """Lines of a map or a list, in the shape in which LLVM prints them."""
    out, pad = [], " " * indent
    entries = value.items() if isinstance(value, dict) else ((None, v) for v in value)
    for k, v in entries:
        head = pad + (f"{_scalar(k)}:" if isinstance(value, dict) else "-")
        if isinstance(v, (dict, list)) and v:
            if isinstance(v, list) and not any(isinstance(x, (dict, list)) for x in v):
                out.append(f"{head} [{', '.join(_scalar(x) for x in v)}]")
                continue
            inner = _yaml(v, indent + 2)
            if isinstance(value, dict):
                out += [head, *inner]
            else:
                out += [f"{head} {inner[0][indent + 2:]}", *inner[1:]]
        else:
            out.append(f"{head} {'{}' if v == {} else '[]' if v == [] else _scalar(v)}")
    return out


# -- entry points -----------------------------------------------------------------------------------------------------
def listing(data: bytes, source: str = "?") -> Listing:
    """Everything in a gfx950 ELF file (code object or relocatable object) that an assembler can make again.

    CodeObjectError, with ``source`` in it, for another machine, a damaged or truncated file, and one past the limits.
    """
    try:
        return _listing(data, source)
    except CodeObjectError as e:
        raise e if str(e).startswith(f"{source}: ") else CodeObjectError(f"{source}: {e}") from None
    except (ELFError, ConstructError, msgpack.exceptions.UnpackException, ValueError, KeyError, IndexError, TypeError, AttributeError,
            AssertionError, struct.error, OverflowError, MemoryError, RecursionError, UnicodeError, OSError) as e:
        # pyelftools and msgpack raise many kinds for a truncated or corrupted file
        raise CodeObjectError(f"{source}: damaged or truncated code object: {type(e).__name__}: {e}") from None


def _target(flags: int) -> str:
    """Target id: gfx950 with the sramecc and xnack settings that the file insists on."""
    setting = lambda name, bits: {2: f":{name}-", 3: f":{name}+"}.get(bits, "")
    return f"{TRIPLE}--{CPU}{setting('sramecc', flags >> 10 & 3)}{setting('xnack', flags >> 8 & 3)}"


def _listing(data: bytes, source: str) -> Listing:
    elf, sections = _sections(data, source)
    code = [s for s in sections if s.flags & _SHF_EXEC and s.type == _SHT_PROGBITS and s.size]
    if not code:
        raise CodeObjectError(f"{source}: no code section")
    if any(s.flags & _SHF_COMPRESSED for s in code):
        raise CodeObjectError(f"{source}: the code is compressed")
    if sum(s.size for s in code) > MAX_CODE:
        raise CodeObjectError(f"{source}: {sum(s.size for s in code)} bytes of code; {MAX_CODE} are the limit")
    for a, b in zip(*(lambda x: (x, x[1:]))(sorted(code, key=lambda s: s.offset))):
        if a.offset + a.size > b.offset:
            raise CodeObjectError(f"{source}: code sections {a.name} and {b.name} overlap")
    relocatable = elf["e_type"] == "ET_REL"
    base = lambda s: 0 if relocatable else s.address
    by_index = {s.index: s for s in code}
    rows = _symbol_rows(data, sections, set(by_index), source)
    used: dict[str, int] = {}
    symbols: dict[int, list[Symbol]] = {i: [] for i in by_index}
    kernels, found = [], {}
    # globals first: if two symbols have one name, the global keeps it
    for name, section, value, size, info, other in sorted(rows, key=lambda r: (r[4] >> 4 == 0, r[1], r[2], r[0])):
        s = sections[section]
        offset = value - base(s)
        if not 0 <= offset <= s.size:
            raise CodeObjectError(f"{source}: symbol {name} is outside section {s.name}")
        kind, binding = _TYPES.get(info & 15, "notype"), _BINDINGS.get(info >> 4, "local")
        symbol = Symbol(name, offset, size, kind, binding, _VISIBILITIES[other & 3], "")
        if name.endswith(".kd") and section not in by_index:
            kernels.append((symbol, s))
        elif section in by_index:
            if size and offset + size > s.size:
                raise CodeObjectError(f"{source}: symbol {name} reaches past section {s.name}")
            symbol = evolve(symbol, label=_label(name, used))
            symbols[section].append(symbol)
            found.setdefault(name, (symbol, s))
    kernels.sort(key=lambda x: (x[1].index, x[0].offset, x[0].name))
    descriptors = [_descriptor(k, s, data, found, base, relocatable, source) for k, s in kernels]
    parts = tuple(_code_section(s, _bytes(data, s), sorted(symbols[s.index], key=lambda y: y.offset), n, used) for n, s in enumerate(code))
    notes = [f"{s.size // s.entry if s.entry else '?'} relocations of {sections[s.info].name}" for s in sections
             if s.type in (_SHT_RELA, _SHT_REL) and s.info < len(sections) and s.info in by_index and s.size]
    kd_bytes = {}
    for _, s in kernels:
        kd_bytes[s.index] = kd_bytes.get(s.index, 0) + _DESCRIPTOR
    notes += [f"{s.size - kd_bytes.get(s.index, 0)} bytes of {s.name}" for s in sections
              if s.type in (_SHT_PROGBITS, _SHT_NOBITS) and s.flags & _SHF_ALLOC and s.index not in by_index
              and s.size > kd_bytes.get(s.index, 0)
              and s.name != ".relro_padding"]
    # EI_ABIVERSION 2, 3, 4 are code object versions 4, 5, 6
    return Listing(source, _target(elf["e_flags"]), data[8] + 2, parts, tuple(descriptors), _metadata(data, sections, source), tuple(notes))


def _descriptor(symbol: Symbol, s: _Section, data: bytes, found, base, relocatable: bool, source: str) -> Descriptor:
    name = symbol.name[:-3]
    if s.type == _SHT_NOBITS or symbol.offset + _DESCRIPTOR > s.size:
        raise CodeObjectError(f"{source}: symbol {symbol.name} reaches past section {s.name}")
    if name not in found:
        raise CodeObjectError(f"{source}: {symbol.name} has no kernel symbol {name}")
    kernel, section = found[name]
    raw = data[s.offset + symbol.offset:s.offset + symbol.offset + _DESCRIPTOR]
    values = directives(raw)
    why = _inexpressible(raw, values)
    distance = int.from_bytes(raw[_ENTRY], "little", signed=True)
    if not relocatable and base(s) + symbol.offset + distance != base(section) + kernel.offset:
        why = f"its code is {distance} bytes away, which is not where {name} is"
    if kernel.label.startswith('"') or kernel.label != name:
        why = why or "the kernel's name is none that .amdhsa_kernel takes"
    return Descriptor(name, kernel.label, raw, None if why else values, why, symbol)


def _visibility(label: str, y: Symbol) -> list[str]:
    out = [f".{y.binding} {label}"] if y.binding != "local" else []
    return out + ([f".{y.visibility} {label}"] if y.visibility != "default" else [])


def _section_text(s: CodeSection, number: int, offsets: bool) -> list[str]:
    name = s.name if _PLAIN_NAME.match(s.name) else '"' + re.sub(r'[^ -~]|["\\\\]', "_", s.name) + '"'
    align = max(2, min(16, s.align.bit_length() - 1))
    out = [".text" if name == ".text" else f'.section {name},"ax",@progbits', f".p2align {align}"]
    labels: dict[int, list[str]] = {}
    starts, odd = {i.offset for i in s.items} | {len(s.data)}, []
    for y in s.symbols:
        out += _visibility(y.label, y) + ([f".type {y.label},@{y.type}"] if y.type != "notype" else [])
        if y.offset in starts:
            labels.setdefault(y.offset, []).append(y.label)
        else:
            odd.append(y)
    for offset, label in s.targets.items():
        if label not in labels.get(offset, ()):
            labels.setdefault(offset, []).append(label)
    begin = next((names[0] for at, names in labels.items() if at == 0), None)
    if odd and begin is None:
        begin = f".Lbegin{number}"
        labels[0] = [begin]
    for i in s.items:
        out += [f"{name}:" for name in labels.get(i.offset, ())]
        raw = s.data[i.offset:i.offset + min(i.size, 16)].hex()
        notes = [i.note] if i.note else []
        if offsets:
            n = len(s.data[i.offset:i.offset + min(i.size, 16)]) // 4 * 8
            words = " ".join(f"{int.from_bytes(bytes.fromhex(raw[k:k + 8]), 'little'):08x}" for k in range(0, n, 8)) + raw[n:]
            notes.insert(0, f"{i.offset:06x}: {words}" + (" ..." if i.size > 16 else ""))
        line = "  " + i.text
        out.append(f"{line:<70} // {'  '.join(notes)}" if notes else line)
    out += [f"{name}:" for name in labels.get(len(s.data), ())]
    out += [f".set {y.label}, {begin}+{y.offset}" for y in odd]
    return out + [f".size {y.label}, {y.size}" for y in s.symbols if y.size]


def _descriptor_text(d: Descriptor) -> list[str]:
    if d.directives is not None:
        values = {k: v for k, v in d.directives.items() if v or k != "uses_dynamic_stack"}   # from code object version 5 on
        return [f".amdhsa_kernel {d.kernel}", *(f"  .amdhsa_{k} {v}" for k, v in values.items()), ".end_amdhsa_kernel"]
    label = f'"{d.label.strip(chr(34))}.kd"' if d.label.startswith('"') else f"{d.label}.kd"
    words = [f"{w:#010x}" for w in struct.unpack("<16I", d.raw)]
    return [f"// the descriptor of {_comment(d.kernel)} as data: {d.why}", *_visibility(label, d.symbol), f".type {label},@object",
            f".size {label}, 64", f"{label}:",
            f"  .long {', '.join(words[:4])}", f"  .quad {d.label}-{label}", f"  .long {', '.join(words[6:])}"]


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def text(listing: Listing, *, offsets: bool = False) -> str:
    """Assembly text in LLVM's dialect. offsets: a comment with byte offset and encoding on each line."""
    name = _comment(listing.source).replace("*/", "")
    out = [f"// {name}", f'.amdgcn_target "{listing.target}"']
    if listing.version >= 4:
        out.append(f".amdhsa_code_object_version {listing.version}")
    out += [f"// not carried: {_comment(n)}" for n in listing.notes]
    for number, s in enumerate(listing.sections):
        out += _section_text(s, number, offsets)
    if listing.descriptors:
        out += ['.section .rodata,"a",@progbits', ".p2align 6"]
        for d in listing.descriptors:
            out += _descriptor_text(d)
    if listing.metadata is not None:
        out += [".amdgpu_metadata", "---", *(_yaml(listing.metadata, 0) or ["{}"]), "...", ".end_amdgpu_metadata"]
    return "\n".join(out) + "\n"

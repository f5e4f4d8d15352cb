"""Reads gfx950 code objects (.co, .hsaco) and relocatable objects (.o): kernels, descriptors, metadata, instructions."""
from __future__ import annotations

import io
import struct

import msgpack
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from .encode import DecodeError, decode
from .program import Arg, KernelInfo, Label, Program

_PADDING = (bytes(4), (0xBF800000).to_bytes(4, "little"), (0xBF9F0000).to_bytes(4, "little"))
_EM_AMDGPU, _MACH_MASK, _MACH_GFX950 = 224, 0xFF, 0x4F
_NT_AMDGPU_METADATA = 32
_DESCRIPTOR = 64
_KIND = {("by_value", 4): "u32", ("by_value", 8): "u64"}


class CodeObjectError(ValueError):
    """A file that is no gfx950 code object, or is damaged; names the file and what is wrong."""


def read(data: bytes, source: str = "?") -> list[Program]:
    """Every kernel of an ELF file, in the order of its symbols. CodeObjectError for anything else."""
    try:
        return _read(data, source)
    except CodeObjectError:
        raise
    except DecodeError as e:
        raise CodeObjectError(f"{source}: {e}") from None
    except (ELFError, msgpack.exceptions.UnpackException, ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError,
            struct.error, OverflowError, MemoryError, RecursionError, UnicodeError) as e:
        # pyelftools and msgpack raise many kinds for a truncated or corrupted file
        raise CodeObjectError(f"{source}: damaged or truncated code object: {type(e).__name__}: {e}") from None


def _read(data: bytes, source: str) -> list[Program]:
    if data[:4] != b"\x7fELF":
        raise CodeObjectError(f"{source}: no ELF file" + (" (empty)" if not data else ""))
    elf = ELFFile(io.BytesIO(data))
    if elf["e_machine"] not in ("EM_AMDGPU", _EM_AMDGPU):
        raise CodeObjectError(f"{source}: an ELF file for {elf['e_machine']}, not AMDGPU")
    mach = elf["e_flags"] & _MACH_MASK
    if mach != _MACH_GFX950:
        raise CodeObjectError(f"{source}: built for AMDGPU machine {mach:#x}; gfx950 is {_MACH_GFX950:#x}")
    if elf["e_shoff"] + elf["e_shnum"] * elf["e_shentsize"] > len(data):
        raise CodeObjectError(f"{source}: truncated: section headers end at {elf['e_shoff'] + elf['e_shnum'] * elf['e_shentsize']}, the file at {len(data)}")
    sections = list(elf.iter_sections())
    for s in sections:
        if s["sh_type"] != "SHT_NOBITS" and s["sh_offset"] + s["sh_size"] > len(data):
            raise CodeObjectError(f"{source}: truncated: section {s.name} ends at {s['sh_offset'] + s['sh_size']}, the file at {len(data)}")
    symbols = {}
    for table in sections:
        if table["sh_type"] in ("SHT_SYMTAB", "SHT_DYNSYM"):
            for s in table.iter_symbols():
                if s.name:
                    symbols[s.name] = s
    metadata = _metadata(sections)
    programs = [_kernel(name[:-3], symbols, sections, metadata, source) for name in symbols if name.endswith(".kd")]
    if not programs:
        raise CodeObjectError(f"{source}: no kernel (no symbol ends in .kd)")
    return programs


def _metadata(sections) -> dict[str, dict]:
    """Kernel name -> its metadata map."""
    for section in sections:
        if section["sh_type"] == "SHT_NOTE":
            raw, at = section.data(), 0
            while at + 12 <= len(raw):
                name_size, size, kind = struct.unpack_from("<III", raw, at)
                begin = at + 12 + -(-name_size // 4) * 4
                if kind == _NT_AMDGPU_METADATA and raw[at + 12:at + 12 + name_size].rstrip(b"\0") == b"AMDGPU":
                    notes = msgpack.unpackb(raw[begin:begin + size], strict_map_key=False)
                    return {k[".name"]: k for k in notes.get("amdhsa.kernels", [])}
                at = begin + -(-size // 4) * 4
    return {}


def _bytes_at(symbol, size: int, sections, source: str) -> tuple[bytes, object, int]:
    """(bytes, section, offset in the section) of a symbol."""
    index = symbol["st_shndx"]
    if not isinstance(index, int) or not 0 <= index < len(sections):
        raise CodeObjectError(f"{source}: symbol {symbol.name} is in no section")
    section = sections[index]
    start = symbol["st_value"] - section["sh_addr"]
    if start < 0 or start + size > section["sh_size"]:
        raise CodeObjectError(f"{source}: symbol {symbol.name} reaches past section {section.name}")
    return section.data()[start:start + size], section, start


def _code(symbol, symbols, sections, source: str) -> bytes:
    """A kernel's bytes. Without a size (assembly that gives none) they end at the next function or the section's end,
    and what pads that end (zero dwords, s_nop 0 and s_code_end) is no code."""
    size = symbol["st_size"]
    if size:
        return _bytes_at(symbol, size, sections, source)[0]
    _, section, start = _bytes_at(symbol, 0, sections, source)
    begins = [s["st_value"] - section["sh_addr"] for s in symbols.values() if s["st_shndx"] == symbol["st_shndx"] and s["st_info"]["type"] == "STT_FUNC"]
    end = min((b for b in begins if b > start), default=section["sh_size"])
    code = section.data()[start:end]
    code = code[:len(code) // 4 * 4]
    while code[-4:] in _PADDING:
        code = code[:-4]
    if not code:
        raise CodeObjectError(f"{source}: kernel {symbol.name} has no code")
    return code


def _kernel(name: str, symbols, sections, metadata, source: str) -> Program:
    if name not in symbols:
        raise CodeObjectError(f"{source}: {name}.kd has no kernel symbol {name}")
    descriptor, _, _ = _bytes_at(symbols[name + ".kd"], _DESCRIPTOR, sections, source)
    code = _code(symbols[name], symbols, sections, source)
    notes = metadata.get(name, {})
    lds, private, kernarg = struct.unpack_from("<III", descriptor, 0)
    rsrc3, rsrc1, rsrc2, properties = struct.unpack_from("<IIIH", descriptor, 44)
    total = ((rsrc1 & 63) + 1) * 8
    accum = ((rsrc3 & 63) + 1) * 4
    flat = int(notes.get(".max_flat_workgroup_size", 64))
    workgroup = tuple(notes.get(".reqd_workgroup_size", (flat, 1, 1)))
    args = tuple(Arg(a.get(".name", f"arg{i}"), a[".offset"], a[".size"],
                     "pointer" if a[".value_kind"] == "global_buffer" else _KIND.get((a[".value_kind"], a[".size"]), a[".value_kind"]))
                 for i, a in enumerate(notes.get(".args", ())))
    agprs = int(notes.get(".agpr_count", max(0, total - accum)))
    info = KernelInfo(
        name, workgroup, lds, kernarg, args, min(total, accum) if agprs else min(total, 256), agprs, max(1, min(102, ((rsrc1 >> 6 & 15) + 1) * 8 - 6)),
        tuple(bool(rsrc2 >> b & 1) for b in (7, 8, 9)), private, rsrc1 >> 16 & 3, rsrc1 >> 18 & 3, rsrc1 >> 12 & 3,
        bool(rsrc1 >> 21 & 1), bool(rsrc1 >> 23 & 1), bool(rsrc1 >> 26 & 1))
    return _instructions(name, code, info, source)


def _instructions(name: str, code: bytes, info: KernelInfo, source: str) -> Program:
    instructions, index_at, offset = [], {}, 0
    while offset < len(code):
        index_at[offset] = len(instructions)
        try:
            inst, size = decode(code, offset)
        except DecodeError as e:
            raise CodeObjectError(f"{source}: {name}: {e}") from None
        instructions.append(inst)
        offset += size
    index_at[offset] = len(instructions)
    labels = {}
    for inst in instructions:
        for o in inst.operands.values():
            if isinstance(o, Label):
                target = int(o.name[2:], 16)
                if target not in index_at:
                    raise CodeObjectError(f"{source}: {name}: {inst.mnemonic} goes to offset {target:#x}, where no instruction starts")
                labels[o.name] = index_at[target]
    return Program(name, instructions, labels, info, source)

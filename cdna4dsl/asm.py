"""Programs to LLVM assembly text, and text to a code object that ROCm loads.

``to_text`` computes every directive (registers, LDS, kernarg, metadata) from the program. ``assemble`` uses ROCm's
clang where ROCM_PATH or the PATH has one that knows gfx950, else the LLVM inside the ziglang package.
"""
from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from attrs import define

from .program import Imm, Instruction, KernelInfo, Label, Program, Reg, WAITCNT_MAX, decode_waitcnt

TRIPLE, CPU = "amdgcn-amd-amdhsa", "gfx950"
# e_flags of an object that loads with xnack and sramecc on or off: EF_AMDGPU_MACH_AMDGCN_GFX950 | xnack any | sramecc any.
E_FLAGS = 0x54F

_FLAGS = ("idxen", "offen", "glc", "sc0", "nt", "sc1", "lds", "gds")
_NUMBERS = ("offset", "cbsz", "abid", "blgp")
_BITS = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")


@define
class AsmError(Exception):
    """The assembler or the linker refused; ``problems`` hold (place, message), the place a Python line if known."""
    problems: list[tuple[str, str]]

    def __str__(self) -> str:
        return "\n".join(f"{where}: {message}" for where, message in self.problems)


def _bits_text(inst: Instruction, name: str, mask: int) -> str:
    sources = sum(1 for o in inst.spec.operands if o.name.startswith("src"))
    bits = [mask >> i & 1 for i in range(sources)]
    if name == "op_sel" and inst.form.encoding == "VOP3":
        bits.append(mask >> 3 & 1)  # the destination's half
    return f"{name}:[{','.join(map(str, bits))}]"


def instruction_text(inst: Instruction) -> str:
    """One instruction in LLVM syntax, without label or comment."""
    words = []
    for spec in inst.spec.operands:
        o = inst.operands.get(spec.name)
        if o is None:
            continue
        if spec.kind == "waitcnt":
            counts = decode_waitcnt(o.bits)
            waits = {k: v for k, v in counts.items() if v != WAITCNT_MAX[k]} or counts
            words.append(" ".join(f"{k}({v})" for k, v in waits.items()))
        elif spec.kind == "smoff" and isinstance(o, Imm):
            words.append(hex(o.signed))
        elif spec.kind == "imm":
            words.append(str(o.signed) if spec.type != "b16" else hex(o.bits) if o.bits > 64 else str(o.bits))
        else:
            words.append(str(o))
    text = inst.mnemonic + inst.form.suffix + (" " + ", ".join(words) if words else "")
    mods = inst.mods
    for name in _BITS:
        default = 7 if name == "op_sel_hi" and inst.form.encoding == "VOP3P" else 0
        if name in mods and mods[name] & 7 != default & 7 or name == "op_sel" and mods.get(name):
            text += " " + _bits_text(inst, name, mods[name])
    if mods.get("clamp"):
        text += " clamp"
    if mods.get("omod"):
        text += " " + ("mul:2", "mul:4", "div:2")[mods["omod"] - 1]
    for name in _FLAGS[:2]:
        text += f" {name}" if mods.get(name) else ""
    for name in _NUMBERS:
        text += f" {name}:{mods[name]}" if mods.get(name) else ""
    for name in _FLAGS[2:]:
        text += f" {name}" if mods.get(name) else ""
    return text


_VALUE_KIND = {"pointer": "global_buffer"}


def _directives(info: KernelInfo, name: str) -> list[str]:
    x, y, z = info.workgroup_id
    values = {
        "group_segment_fixed_size": info.lds_bytes, "private_segment_fixed_size": info.private_bytes,
        "kernarg_size": info.kernarg_size, "user_sgpr_kernarg_segment_ptr": 1, "user_sgpr_count": 2,
        "system_sgpr_workgroup_id_x": int(x), "system_sgpr_workgroup_id_y": int(y), "system_sgpr_workgroup_id_z": int(z),
        "system_vgpr_workitem_id": 2 if info.workgroup[2] > 1 else 1 if info.workgroup[1] > 1 else 0,
        "next_free_vgpr": info.total_vgprs, "accum_offset": info.accum_offset, "next_free_sgpr": max(1, info.sgprs),
        "reserve_vcc": 1, "float_round_mode_32": info.float_round_32, "float_denorm_mode_32": info.float_denorm_32,
        "float_denorm_mode_16_64": info.float_denorm_16_64, "dx10_clamp": int(info.dx10_clamp),
        "ieee_mode": int(info.ieee_mode), "fp16_overflow": int(info.fp16_ovfl),
    }
    return [f".amdhsa_kernel {name}", *(f"  .amdhsa_{k} {v}" for k, v in values.items()), ".end_amdhsa_kernel"]


def _metadata(info: KernelInfo, name: str) -> list[str]:
    flat = info.workgroup[0] * info.workgroup[1] * info.workgroup[2]
    lines = [".amdgpu_metadata", "---", "amdhsa.version: [1, 2]", f"amdhsa.target: {TRIPLE}--{CPU}", "amdhsa.kernels:",
             f"  - .name: {name}", f"    .symbol: {name}.kd", f"    .kernarg_segment_size: {info.kernarg_size}",
             "    .kernarg_segment_align: 8", f"    .group_segment_fixed_size: {info.lds_bytes}",
             f"    .private_segment_fixed_size: {info.private_bytes}", "    .wavefront_size: 64",
             f"    .sgpr_count: {info.sgprs + 6}", f"    .vgpr_count: {info.total_vgprs}", f"    .agpr_count: {info.acc_vgprs}",
             f"    .max_flat_workgroup_size: {flat}", f"    .reqd_workgroup_size: [{', '.join(map(str, info.workgroup))}]"]
    lines.append("    .args:" if info.args else "    .args: []")
    for a in info.args:
        lines += [f"      - .name: {a.name}", f"        .offset: {a.offset}", f"        .size: {a.size}",
                  f"        .value_kind: {_VALUE_KIND.get(a.kind, 'by_value')}"]
        if a.kind == "pointer":
            lines.append("        .address_space: global")
    return lines + ["...", ".end_amdgpu_metadata"]


def text_and_lines(program: Program, *, places: bool = True) -> tuple[str, dict[int, Instruction]]:
    """Assembly text and a map from its line numbers (from 1) to instructions.

    places: end each line with ``; @file:line``, the Python line that emitted it.
    """
    out: list[str] = []
    info = program.info
    if info:
        out += [f'.amdgcn_target "{TRIPLE}--{CPU}"', ".text", f".globl {program.name}", ".p2align 8",
                f".type {program.name},@function", f"{program.name}:"]
    by_index: dict[int, list[str]] = {}
    for label, index in program.labels.items():
        by_index.setdefault(index, []).append(label)
    lines: dict[int, Instruction] = {}
    for index, inst in enumerate(program.instructions):
        out += [f"  ; {c}" for c in program.comments.get(index, ())]
        out += [f"{label}:" for label in by_index.get(index, ())]
        tail = "; ".join(filter(None, (inst.comment, f"@{inst.python[0]}:{inst.python[1]}" if places and inst.python else None)))
        line = "  " + instruction_text(inst)
        out.append(f"{line:<70} ; {tail}" if tail else line)
        lines[len(out)] = inst
    out += [f"{label}:" for label in by_index.get(len(program.instructions), ())]
    if info:
        # instruction fetch runs ahead of s_endpgm: pad so that it never reads foreign bytes
        out += [f".Lend_{program.name}:", f".size {program.name}, .Lend_{program.name}-{program.name}",
                ".fill 64, 4, 0xBF9F0000", '.section .rodata,"a",@progbits', ".p2align 6",
                *_directives(info, program.name), *_metadata(info, program.name)]
    return "\n".join(out) + "\n", lines


def to_text(program: Program, *, places: bool = True) -> str:
    """Assembly text of the program; a bare instruction list if it has no kernel descriptor."""
    return text_and_lines(program, places=places)[0]


def _run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


@functools.lru_cache(None)
def rocm_clang() -> str | None:
    """Path of a clang from ROCM_PATH or the PATH that assembles gfx950, or None."""
    root = os.environ.get("ROCM_PATH")
    candidates = [str(Path(root) / sub) for sub in ("llvm/bin/clang", "bin/amdclang")] if root else []
    for c in filter(None, (*candidates, shutil.which("amdclang"), shutil.which("clang"))):
        if Path(c).exists():
            with tempfile.TemporaryDirectory() as d:
                probe = Path(d) / "p.s"
                probe.write_text("ds_read_b64_tr_b8 v[0:1], v2\n")
                if _run([c, "-x", "assembler", "-target", TRIPLE, f"-mcpu={CPU}", str(probe), "-o", f"{d}/p.co"]).returncode == 0:
                    return c
    return None


def tool_name() -> str:
    """Which assembler ``assemble`` uses, for people."""
    return rocm_clang() or "ziglang"


def _problems(stderr: str, source: str, lines: dict[int, Instruction]) -> list[tuple[str, str]]:
    found = []
    for m in re.finditer(r"^[^\n:]+:(\d+):(\d+): (error|warning): (.*)\n([^\n]*)", stderr, re.M):
        number = int(m[1])
        inst = lines.get(number)
        where = inst.where if inst and inst.python else f"{source}:{number}:{m[2]}"
        found.append((where, f"{m[3]}: {m[4]}: {(str(inst) if inst else m[5].strip())}"))
    return found


def assemble(program_or_text: Program | str, *, source: str = "input.s") -> bytes:
    """Code object (ELF, e_flags 0x54f) of a program or of assembly text. AsmError if LLVM objects or even warns."""
    text, lines = (program_or_text, {}) if isinstance(program_or_text, str) else text_and_lines(program_or_text)
    with tempfile.TemporaryDirectory(prefix="cdna4-") as folder:
        s, o, co = (str(Path(folder) / f"k.{e}") for e in ("s", "o", "hsaco"))
        Path(s).write_text(text)
        clang = rocm_clang()
        if clang:
            steps = [[clang, "-x", "assembler", "-target", TRIPLE, f"-mcpu={CPU}", s, "-o", co]]
        else:
            zig = [sys.executable, "-m", "ziglang"]
            steps = [[*zig, "clang", "-cc1as", "-triple", TRIPLE, "-target-cpu", CPU, "-filetype", "obj", s, "-o", o],
                     [*zig, "ld.lld", "-shared", o, "-o", co]]
        for step in steps:
            r = _run(step)
            problems = _problems(r.stderr, source, lines)
            if r.returncode or problems:
                raise AsmError(problems or [(source, (r.stderr.strip() or f"{step[0]} exited {r.returncode}")[-2000:])])
        return Path(co).read_bytes()


def write_atomic(path: str | Path, data: bytes | str) -> Path:
    """Write to a temporary name beside ``path``, then rename: nobody sees half a file."""
    path = Path(path)
    if not path.name:
        raise IsADirectoryError(21, "a file's name is missing", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data if isinstance(data, bytes) else data.encode())
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except BaseException:
        os.unlink(tmp)
        raise
    return path

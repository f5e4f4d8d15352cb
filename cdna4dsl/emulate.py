"""Runs a program's machine instructions on the CPU: all waves as numpy arrays, strict about what hardware would not forgive.

Waves at the same place run together; where control flow differs the group furthest behind goes first, so that loops
come together again. Semantics come from the specs, compiled once an instruction.

Strict mode (the default) reports, as faults: a register read or overwritten before the load that fills it is waited
for; a register or LDS bytes never written; LDS filled by LDS-DMA used before the wait; two waves on the same LDS dword
without a barrier after the first access was complete; a result used before the wait states of ``hazards.isa`` have
passed (mfma-wait for matrix results); a transposing LDS read under a partial EXEC or at an odd address.

Model notes. Raw buffers (stride 0): each dword is in range if its offset (vaddr + immediate) + 4 <= num_records -
soffset; else loads give 0 and stores are dropped. LDS-DMA writes LDS at M0[17:0] + immediate + lane x size. A bare
fragment (no descriptor) has all of LDS, its registers count as written, and f32 denormals are flushed.
"""
from __future__ import annotations

import functools
from typing import Callable

import numpy as np
from attrs import define, field, frozen

from . import matrix, numerics as nm
from .check import _consumed, _hazard, wait_states
from .isa import InstructionSpec, load
from .launch import Launch
from .program import Imm, Instruction, KernelInfo, Label, Off, Program, Reg, decode_waitcnt

U32, I32, U64, F32 = np.uint32, np.int32, np.uint64, np.float32
_BASE = 0x7F00_0000_0000      # virtual address of the first buffer
_GAP = 1 << 16                # unmapped bytes between buffers
_VCC, _M0, _EXEC = 106, 124, 126
_LANES = np.arange(64)
_MAX_FAULTS = 100
MAX_INSTRUCTIONS = 2_000_000  # a wave, before a run counts as endless


@frozen
class Fault:
    """What strict mode found. wave: (workgroup, wave in it); lanes: which; cause: index of the instruction to blame."""
    kind: str
    message: str
    index: int
    where: str
    mnemonic: str
    wave: tuple[int, int]
    lanes: tuple[int, ...] = ()
    cause: int | None = None


@define
class EmulationError(Exception):
    """The run cannot go on; ``fault`` says where and why."""
    fault: Fault

    def __str__(self) -> str:
        f = self.fault
        lanes = f", lane {f.lanes[0]}" if f.lanes else ""
        return f"{f.where}: {f.mnemonic}: {f.message} (workgroup {f.wave[0]}, wave {f.wave[1]}{lanes})"


@define
class WaveTrace:
    """What one wave executed: instruction indices in order, and the LDS byte addresses of its LDS accesses by position."""
    index: np.ndarray
    lds_address: dict[int, np.ndarray] = field(factory=dict)


@define
class Result:
    """buffers after the run; written: which bytes of the outputs were stored to; faults; traces of the recorded
    workgroups; executed: wave instructions."""
    buffers: dict[str, np.ndarray]
    written: dict[str, np.ndarray]
    faults: list[Fault]
    trace: dict[int, list[WaveTrace]]
    executed: int


# ---- semantics to Python ---------------------------------------------------------------------------------------
_CASTS = {"u32": U32, "i32": I32, "u64": U64, "i64": np.int64}


def _cast(name):
    dtype = _CASTS[name]

    def cast(x):
        return np.asarray(x).astype(dtype)
    return cast


def _to_f32(x):
    return np.asarray(x).astype(F32)


_STATELESS = {
    **{name: _cast(name) for name in _CASTS}, "f32": _to_f32, "fma": nm.fma, "fmax": nm.fmax, "fmin": nm.fmin, "med3": nm.med3,
    "rndne": np.rint, "floor": np.floor, "exp2": lambda x: np.exp2(x.astype(np.float64)).astype(F32),
    "log2": lambda x: np.log2(x.astype(np.float64)).astype(F32), "rcp": lambda x: (1.0 / x.astype(np.float64)).astype(F32),
    "rsq": lambda x: (1.0 / np.sqrt(x.astype(np.float64))).astype(F32), "sqrt": lambda x: np.sqrt(x.astype(np.float64)).astype(F32),
    "f32_to_bf16": nm.f32_to_bf16, "f32_to_u32": lambda x: nm.float_to_int(x, U32), "f32_to_i32": lambda x: nm.float_to_int(x, I32),
    "byte_perm": nm.byte_perm, "transpose": nm.transpose, "mfma": matrix.mfma, "smfmac": matrix.smfmac, "mfma_scale": matrix.mfma_scale,
}
_WORDS = {*matrix.KINDS, *matrix.RESULTS}
_EFFECTS_ON_OPERANDS = {"permlane_swap"}


def _source(spec: InstructionSpec) -> str:
    """The semantics as a Python function of (E, operands read...); it returns the operands written, in order."""
    reads = [o.name for o in spec.operands if o.inp and o.kind not in ("label", "waitcnt")]
    special: dict[str, bool] = {}

    def expr(n) -> str:
        tag = n[0]
        if tag == "num":
            return repr(n[1])
        if tag == "name":
            name = n[1]
            if name in ("scc", "vcc", "exec", "m0"):
                return f"{name}_" if special.get(name) else f"E.{name}()"
            if name in _WORDS:
                return repr(name)
            if name in spec.modifiers:
                return f"E.mod({name!r})"
            if spec.operands and any(o.name == name and o.kind in ("label", "waitcnt") for o in spec.operands):
                return f"E.operand({name!r})"
            return name
        if tag == "call":
            args = ", ".join(expr(a) for a in n[2])
            return f"{n[1]}({args})" if n[1] in _STATELESS else f"E.{n[1]}({args})"
        if tag == "un":
            return f"np.logical_not({expr(n[2])})" if n[1] == "!" else f"({n[1]}{expr(n[2])})"
        if tag == "if":
            return f"np.where({', '.join(expr(x) for x in n[1:])})"
        op = {"&&": "&", "||": "|", "/": "//"}.get(n[1], n[1])
        return f"({expr(n[2])} {op} {expr(n[3])})"

    body = []
    for st in spec.semantics:
        if st[0] == "assign":
            name = st[1]
            value = expr(st[2])
            if name in ("scc", "vcc", "exec", "m0"):
                special[name] = True
                name += "_"
            body.append(f"{name} = {value}")
        elif st[1] in _EFFECTS_ON_OPERANDS:
            names = [a[1] for a in st[2] if a[0] == "name"]
            body.append(f"{', '.join(names)} = {expr(st)}")
        else:
            body.append(expr(st))
    body += [f"E.set_{name}({name}_)" for name in special]
    outs = [o.name for o in spec.operands if o.out]
    body.append(f"return ({''.join(o + ', ' for o in outs)})" if outs else "return ()")
    # with lds the destination is absent: loads return None for it
    return f"def {spec.mnemonic}(E, {', '.join(reads)}):\n" + "".join(f"    {line}\n" for line in body)


def _calls(node) -> set[str]:
    """Every builtin that a piece of semantics calls."""
    if not isinstance(node, tuple):
        return set()
    own = {node[1]} if node and node[0] == "call" else set()
    return own.union(*(_calls(child) for child in node))


@functools.lru_cache(None)
def _semantics(spec: InstructionSpec) -> Callable | None:
    """None if the semantics are missing or call something unknown."""
    if not spec.semantics_text or any(c not in _STATELESS and not hasattr(_Machine, c) for c in _calls(spec.semantics)):
        return None
    scope = {"np": np, **_STATELESS}
    exec(compile(_source(spec), f"<semantics of {spec.mnemonic}>", "exec"), scope)
    return scope[spec.mnemonic]


# ---- machine state ---------------------------------------------------------------------------------------------
class _Machine:
    """State of the waves of some workgroups, and the operations that the compiled semantics call (E)."""

    def __init__(self, program: Program, launch: Launch, groups: np.ndarray, memory: "_Memory", strict: bool, params: dict, record: set[int]):
        self.program, self.launch, self.memory, self.strict, self.params = program, launch, memory, strict, params
        info = program.info or KernelInfo(program.name, tuple(launch.workgroup))
        self.info = info
        items = int(np.prod(launch.workgroup))
        self.per_group = per_group = -(-items // 64)
        self.groups = groups
        count = len(groups) * per_group
        self.count = count
        high = {"v": 1, "a": 0}
        for inst in program.instructions:
            for r in (*inst.reads(), *inst.writes()):
                if r.bank in high:
                    high[r.bank] = max(high[r.bank], r.index + r.count)
        self.v = np.zeros((high["v"], count, 64), U32)
        self.a = np.zeros((high["a"], count, 64), U32)
        self.s = np.zeros((128, count), U32)
        self.scc_ = np.zeros(count, bool)
        self.exec_ = np.zeros((count, 64), bool)
        self.all_active = True
        self.group_of = np.repeat(np.arange(len(groups)), per_group)
        self.wave_in_group = np.tile(np.arange(per_group), len(groups))
        self.lds_bytes = info.lds_bytes if program.info else load().param("lds.bytes")
        self.lds = np.zeros((len(groups), max(4, -(-self.lds_bytes // 4) * 4)), np.uint8)
        self.flush = info.float_denorm_32 == 0
        self.u8_rounding = self.param("numerics.cvt_pk_u8_rounding")
        if self.param("numerics.mfma_accumulate") != "exact":
            raise ValueError(f"numerics.mfma_accumulate = {self.param('numerics.mfma_accumulate')}; this version knows exact")
        self.faults: list[Fault] = []
        self.seen: set = set()
        self.w: slice | np.ndarray = slice(None)
        self.n = count
        self.pc = 0
        self.branch_to = None
        self.recorded = np.isin(groups[self.group_of], list(record)) if record else None
        self.lds_log: list[tuple[int, np.ndarray]] = []
        self.steps = 0
        self._initial_state(items)
        self._init_strict()

    def param(self, name):
        return self.params.get(name, load().param(name))

    def _initial_state(self, items: int) -> None:
        x, y, _ = self.launch.workgroup
        item = self.wave_in_group[:, None] * 64 + _LANES
        self.exec_[:] = item < items
        self.v[0] = (item % x | item // x % y << 10 | item // (x * y) << 20).astype(U32)
        self._store_exec()
        self.s[0], self.s[1] = self.memory.kernarg & 0xFFFFFFFF, self.memory.kernarg >> 32
        gx, gy, _ = self.launch.grid
        ids = (self.groups % gx, self.groups // gx % gy, self.groups // (gx * gy))
        at = 2
        for enabled, number in zip(self.info.workgroup_id, ids):
            if enabled:
                self.s[at] = number[self.group_of]
                at += 1
        self.initial_sgprs = at

    # -- strict bookkeeping --
    def _init_strict(self) -> None:
        count = self.count
        self.vm_issued, self.vm_done = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.ds_issued, self.ds_done = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.sm_issued, self.sm_done = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.slot = np.zeros(count, np.int64)
        units = {"v": len(self.v), "a": len(self.a), "s": 128}
        self.pending = {bank: np.zeros((n, count), np.int64) for bank, n in units.items()}   # sequence number of the load
        self.pending_by = {bank: np.zeros((n, count), np.int8) for bank, n in units.items()}  # 1 vm, 2 lds, 3 smem
        self.pending_at = {bank: np.zeros((n, count), np.int32) for bank, n in units.items()}  # its instruction
        self.written = {bank: np.zeros((n, count), bool) for bank, n in units.items()}
        whole = self.program.info is None
        for bank in units:
            self.written[bank][:] = whole
        self.written["v"][0] = True
        self.written["s"][:self.initial_sgprs] = True
        self.written["s"][[*range(102, 106), 126, 127]] = True  # flat_scratch, xnack_mask, exec
        self.watch_pending: set = set()
        self.watch_unwritten = {(b, i) for b, n in units.items() for i in range(n) if not self.written[b][i].all()}
        dwords = self.lds.shape[1] // 4
        groups = len(self.groups)
        shape = (groups, dwords)
        self.lds_written = np.zeros(shape, bool)
        self.lds_owner = np.full(shape, -1, np.int16)       # wave that last issued a write
        self.lds_writer, self.lds_write_epoch = np.full(shape, -1, np.int16), np.full(shape, -1, np.int32)
        self.lds_reader, self.lds_read_epoch = np.full(shape, -1, np.int16), np.full(shape, -1, np.int32)
        self.lds_pending = np.zeros(shape, np.int32)        # number of the LDS-DMA access that still fills it
        self.epoch = np.zeros(groups, np.int32)             # barriers passed
        self.dma: list[_LdsAccess] = []                     # LDS-DMA loads not yet waited for
        self.ds_open: list[_LdsAccess] = []                 # ds_* accesses not yet waited for
        self.dma_count = 0
        self.pairs = _close_pairs(self.program) if self.strict else {}
        self.issued_at = {p: np.full(count, -1000, np.int64) for pairs in self.pairs.values() for p, *_ in pairs}

    def fault(self, kind: str, message: str, bad: np.ndarray, cause: int | None = None, lanes: np.ndarray | None = None) -> None:
        """Record a fault once an instruction and kind. bad: which waves of the running group."""
        key = (kind, self.pc)
        if key in self.seen or len(self.faults) >= _MAX_FAULTS:
            return
        self.seen.add(key)
        wave = int(np.arange(self.count)[self.w][int(np.argmax(bad))])
        self.faults.append(self.make_fault(kind, message, wave, tuple(int(x) for x in np.flatnonzero(lanes)) if lanes is not None else (), cause))

    def make_fault(self, kind, message, wave: int, lanes=(), cause=None) -> Fault:
        inst = self.program.instructions[min(self.pc, len(self.program.instructions) - 1)]
        return Fault(kind, message, self.pc, inst.where, str(inst), (int(self.groups[self.group_of[wave]]), int(self.wave_in_group[wave])), lanes, cause)

    def stop(self, kind: str, message: str, wave_of_group: int = 0, lane: int | None = None) -> None:
        wave = int(np.arange(self.count)[self.w][wave_of_group])
        raise EmulationError(self.make_fault(kind, message, wave, () if lane is None else (lane,)))

    def place(self, index: int) -> str:
        inst = self.program.instructions[index]
        return f"'{inst}' ({inst.where})"

    # -- state by name, for the semantics --
    def scc(self):
        return self.scc_[self.w]

    def set_scc(self, value) -> None:
        self.scc_[self.w] = value

    def pair(self, index: int) -> np.ndarray:
        return self.s[index, self.w].astype(U64) | self.s[index + 1, self.w].astype(U64) << U64(32)

    def vcc(self):
        return self.pair(_VCC)

    def exec(self):
        return self.pair(_EXEC)

    def m0(self):
        return self.s[_M0, self.w]

    def set_exec(self, value) -> None:
        bits = np.broadcast_to(np.asarray(value, U64), (self.n,))
        self.s[_EXEC, self.w], self.s[_EXEC + 1, self.w] = (bits & U64(0xFFFFFFFF)).astype(U32), (bits >> U64(32)).astype(U32)
        self.exec_[self.w] = self.unpack(bits)
        self.all_active = bool(self.exec_.all())

    def _store_exec(self) -> None:
        bits = self.pack(self.exec_)
        self.s[_EXEC], self.s[_EXEC + 1] = (bits & U64(0xFFFFFFFF)).astype(U32), (bits >> U64(32)).astype(U32)
        self.all_active = bool(self.exec_.all())

    @staticmethod
    def pack(lanes: np.ndarray) -> np.ndarray:
        return np.packbits(lanes, axis=-1, bitorder="little").view(U64)[..., 0]

    @staticmethod
    def unpack(bits: np.ndarray) -> np.ndarray:
        return np.unpackbits(np.ascontiguousarray(bits)[:, None].view(np.uint8), axis=-1, bitorder="little").astype(bool)

    def active(self) -> np.ndarray:
        return self.exec_[self.w]

    def mod(self, name: str) -> int:
        return self.inst.mods.get(name, 0)

    def operand(self, name: str):
        return self.inst.operands[name]

    def op_sel(self, bit) -> bool:
        return bool(self.inst.mods.get("op_sel", 0) >> bit & 1)

    # -- VALU helpers --
    def lane_bit(self, mask):
        return self.unpack(np.broadcast_to(mask, (self.n,)))

    def lane_mask(self, condition):
        return self.pack(np.broadcast_to(condition, (self.n, 64)) & self.active())

    def first_lane(self, value):
        active = self.active()
        first = np.where(active.any(axis=1), np.argmax(active, axis=1), 0)
        return np.broadcast_to(value, (self.n, 64))[np.arange(self.n), first]

    def f32_to_u8(self, x):
        return nm.f32_to_u8(x, self.u8_rounding)

    def f32_to_fp8(self, x):
        return nm.f32_to_fp8(x, self.info.fp16_ovfl)

    def permlane_swap(self, width: int, a, b):
        """Odd rows of ``width`` lanes of a change places with the even rows of b."""
        a, b = a.copy(), b.copy()
        ra, rb = a.reshape(self.n, -1, 2, width), b.reshape(self.n, -1, 2, width)
        ra[:, :, 1], rb[:, :, 0] = rb[:, :, 0].copy(), ra[:, :, 1].copy()
        return a, b

    # -- control --
    def branch(self, condition, label) -> None:
        self.branch_to = np.broadcast_to(np.asarray(condition, bool), (self.n,))

    def barrier(self) -> None:
        pass  # the scheduler acts

    end = nop = barrier

    def setprio(self, level) -> None:
        pass  # no effect on results

    def waitcnt(self, operand) -> None:
        counts = decode_waitcnt(operand.bits)
        w = self.w
        if counts["vmcnt"] < 63:
            self.vm_done[w] = np.maximum(self.vm_done[w], self.vm_issued[w] - counts["vmcnt"])
            if self.dma:
                self._publish_dma()
        if counts["lgkmcnt"] < 15:
            n = counts["lgkmcnt"]
            if n == 0:
                self.sm_done[w] = self.sm_issued[w]
                self.ds_done[w] = self.ds_issued[w]
            else:
                ordered = self.sm_issued[w] == self.sm_done[w]  # SMEM returns out of order: only 0 covers
                self.ds_done[w] = np.where(ordered, np.maximum(self.ds_done[w], self.ds_issued[w] - n), self.ds_done[w])
            if self.ds_open:
                self.ds_open = [a for a in self.ds_open if (a.sequence > self.ds_done[a.waves]).any()]

    # -- memory --
    def smem_load(self, dwords: int, base, offset):
        offset = np.asarray(offset)
        # an immediate is signed, a register unsigned
        address = base + (offset.astype(np.int64).astype(U64) if offset.dtype == I32 else offset.astype(U64))
        address = (address & ~U64(3))[:, None] + U64(4) * np.arange(dwords, dtype=U64)
        data = self.memory.load(self, np.broadcast_to(address, (self.n, dwords)), None)
        self.sm_issued[self.w] += 1
        return data.T

    def _flat(self, address, saddr, offset):
        a = np.asarray(address)
        a = a.astype(U64) if saddr is None else saddr[:, None] + a.astype(U64)
        return np.broadcast_to(a + U64(offset & 0xFFFFFFFFFFFFFFFF), (self.n, 64))

    def global_load(self, dwords: int, address, saddr, offset):
        a = self._flat(address, saddr, offset)
        active = self.active()
        data = [self.memory.load(self, a + U64(4 * d), active) for d in range(dwords)]
        self.vm_issued[self.w] += 1
        return np.stack(data)

    def global_store(self, dwords: int, address, data, saddr, offset) -> None:
        a = self._flat(address, saddr, offset)
        active = self.active()
        for d in range(dwords):
            self.memory.store(self, a + U64(4 * d), data[d], active)
        self.vm_issued[self.w] += 1

    def _buffer(self, dwords: int, vaddr, rsrc, soffset, offset):
        """(addresses [dwords, n, 64], in range)."""
        stride = rsrc[1] >> U32(16) & U32(0x3FFF)
        if stride.any() or self.inst.mods.get("idxen"):
            self.stop("semantics", "structured buffers (stride, idxen) have no semantics yet", int(np.argmax(stride != 0)))
        base = rsrc[0].astype(U64) | (rsrc[1] & U32(0xFFFF)).astype(U64) << U64(32)
        soffset = np.broadcast_to(np.asarray(soffset).astype(U64), (self.n,))
        inside = np.zeros((self.n, 64), U64) if vaddr is None else np.broadcast_to(np.asarray(vaddr).astype(U64), (self.n, 64))
        inside = inside + U64(offset) + U64(4) * np.arange(dwords, dtype=U64)[:, None, None]
        limit = rsrc[2].astype(np.int64) - soffset.astype(np.int64)
        return base[:, None] + soffset[:, None] + inside, inside.astype(np.int64) + 4 <= limit[:, None]

    def buffer_load(self, dwords: int, vaddr, rsrc, soffset, offset):
        address, inside = self._buffer(dwords, vaddr, rsrc, soffset, offset)
        active = self.active()
        data = np.stack([self.memory.load(self, address[d], inside[d] & active) for d in range(dwords)])
        self.vm_issued[self.w] += 1
        if not self.inst.is_lds_dma:
            return data
        at = (self.m0() & U32(0x3FFFF))[:, None].astype(np.int64) + offset + _LANES * 4 * dwords
        self._lds_write(at, data, active, dma=True)
        return None

    def buffer_store(self, dwords: int, data, vaddr, rsrc, soffset, offset) -> None:
        address, inside = self._buffer(dwords, vaddr, rsrc, soffset, offset)
        active = self.active()
        for d in range(dwords):
            self.memory.store(self, address[d], data[d], inside[d] & active)
        self.vm_issued[self.w] += 1

    # -- LDS --
    def _lds_range(self, at: np.ndarray, size: int, active: np.ndarray) -> None:
        bad = active & ((at < 0) | (at + size > self.lds_bytes))
        if bad.any():
            wave, lane = np.argwhere(bad)[0]
            self.stop("lds-range", f"LDS address {int(at[wave, lane]):#x} + {size} is past the {self.lds_bytes} bytes allocated", int(wave), int(lane))
        odd = active & (at % min(size, 4) != 0)
        if odd.any():
            wave, lane = np.argwhere(odd)[0]
            self.stop("lds-alignment", f"LDS address {int(at[wave, lane]):#x} is not aligned", int(wave), int(lane))

    def _lds_access(self, at: np.ndarray, dwords: int, active: np.ndarray, sequence: np.ndarray, write: bool) -> "_LdsAccess":
        row, lane = np.nonzero(active)
        index = at[row, lane][:, None] // 4 + np.arange(dwords)
        waves = np.arange(self.count)[self.w]
        number = self.wave_in_group[waves].astype(np.int16)
        return _LdsAccess(waves, sequence[self.w].copy(), row, lane, self.group_of[waves[row]][:, None], index, number[row][:, None], write)

    def _log_lds(self, at: np.ndarray, active: np.ndarray) -> None:
        if self.recorded is not None:
            rows = self.recorded[self.w]
            if rows.any():
                self.lds_log.append((self.steps, np.arange(self.count)[self.w][rows], np.where(active, at, -1)[rows].astype(U32)))

    def lds_load(self, dwords: int, address, offset):
        at = np.broadcast_to(np.asarray(address).astype(np.int64) + offset, (self.n, 64))
        active = self.active()
        self._lds_range(at, 4 * dwords, active)
        self.ds_issued[self.w] += 1
        self._log_lds(at, active)
        access = self._lds_access(at, dwords, active, self.ds_issued, False)
        if self.strict:
            if "lds_tr" in self.inst.spec.classes:
                self._transpose_checks(at, active)
            self._lds_read_checks(access)
            self.ds_open.append(access)
        found = self.lds.view(U32)[access.group, access.index]
        if len(access.row) == self.n * 64:
            return np.moveaxis(found.reshape(self.n, 64, dwords), 2, 0)
        data = np.zeros((dwords, self.n, 64), U32)
        data[:, access.row, access.lane] = found.T
        return data

    def _transpose_checks(self, at, active) -> None:
        if not active.all():
            self.fault("transpose-exec", "lanes give each other data: EXEC must be all ones", ~active.all(1), lanes=~active[int(np.argmin(active.all(1)))])
        odd = active & (at % 8 != 0)
        if odd.any():
            wave = int(np.argmax(odd.any(1)))
            self.fault("transpose-alignment", f"LDS address {int(at[odd][0]):#x} is not a multiple of 8", odd.any(1), lanes=odd[wave])

    def _lds_fault(self, kind: str, message: str, access: "_LdsAccess", bad: np.ndarray) -> None:
        """bad: which dwords [active lanes, dwords] of the access."""
        lanes, waves = np.zeros(64, bool), np.zeros(self.n, bool)
        hit = bad.any(axis=1)
        first = access.row[int(np.argmax(hit))]
        lanes[access.lane[hit & (access.row == first)]] = True
        waves[first] = True
        self.fault(kind, message, waves, lanes=lanes)

    def _lds_read_checks(self, a: "_LdsAccess") -> None:
        at = a.group, a.index
        bad = self.lds_pending[at] != 0
        if bad.any():
            self._lds_fault("lds-dma-pending", "reads LDS that an LDS-DMA load fills; the issuing wave has not waited for it (vmcnt)", a, bad)
        bad = ~self.lds_written[at]
        if bad.any():
            self._lds_fault("lds-unwritten", "reads LDS bytes that were never written", a, bad)
        bad = (self.lds_writer[at] != a.number) & (self.lds_write_epoch[at] == self.epoch[a.group])
        if bad.any():
            other = int(self.lds_writer[at][bad][0])
            self._lds_fault("lds-race", f"reads LDS that wave {other} wrote, with no s_barrier since that write was complete", a, bad)
        self._mark_read(a, slice(None))

    def _mark_read(self, a: "_LdsAccess", which) -> None:
        """Remember the reader of each dword in this epoch; -2 for several."""
        group, index, number = a.group[which], a.index[which], a.number[which]
        epoch = self.epoch[group]
        others = (self.lds_read_epoch[group, index] == epoch) & (self.lds_reader[group, index] != number)
        self.lds_reader[group, index] = reader = np.where(others, np.int16(-2), number)
        clash = self.lds_reader[group, index] != reader     # waves that read it in this same step
        if clash.any():
            self.lds_reader[np.broadcast_to(group, index.shape)[clash], index[clash]] = -2
        self.lds_read_epoch[group, index] = epoch

    def lds_store(self, dwords: int, address, offset, data) -> None:
        at = np.broadcast_to(np.asarray(address).astype(np.int64) + offset, (self.n, 64))
        self.ds_issued[self.w] += 1
        self._lds_write(at, data, self.active(), dma=False)

    def _lds_write(self, at, data, active, dma: bool) -> None:
        dwords = data.shape[0]
        at = np.broadcast_to(at, (self.n, 64))
        self._lds_range(at, 4 * dwords, active)
        self._log_lds(at, active)
        a = self._lds_access(at, dwords, active, self.vm_issued if dma else self.ds_issued, True)
        if self.strict:
            self._lds_write_checks(a, dma)
            self.lds_written[a.group, a.index] = True
            if dma:
                self.dma_count += 1
                a.serial = self.dma_count
                self.dma.append(a)
            else:
                self.ds_open.append(a)
                self._mark_written(a, slice(None))
            self.lds_pending[a.group, a.index] = a.serial
        self.lds.view(U32)[a.group, a.index] = np.broadcast_to(data, (dwords, self.n, 64))[:, a.row, a.lane].T

    def _mark_written(self, a: "_LdsAccess", which) -> None:
        group, index = a.group[which], a.index[which]
        self.lds_writer[group, index] = a.number[which]
        self.lds_write_epoch[group, index] = self.epoch[group]

    def _lds_write_checks(self, a: "_LdsAccess", dma: bool) -> None:
        at, epoch = (a.group, a.index), self.epoch[a.group]
        filling = self.lds_pending[at] != 0
        if filling.any():
            bad = filling & (self.lds_owner[at] != a.number) if dma else filling
            if bad.any():
                self._lds_fault("lds-dma-pending", "overwrites LDS that an LDS-DMA load still fills (vmcnt)", a, bad)
        read = (self.lds_reader[at] != a.number) & (self.lds_read_epoch[at] == epoch)
        wrote = (self.lds_writer[at] != a.number) & (self.lds_write_epoch[at] == epoch)
        self.lds_owner[at] = a.number
        wrote |= self.lds_owner[at] != a.number             # waves that write it in this same step
        for bad, what in ((read, "read"), (wrote, "wrote")):
            if bad.any():
                self._lds_fault("lds-race", f"writes LDS that another wave {what}, with no s_barrier since that access was complete", a, bad)

    def _publish_dma(self) -> None:
        """LDS-DMA data that a wait has covered is in LDS from now on."""
        keep = []
        for a in self.dma:
            covered = a.sequence <= self.vm_done[a.waves]
            if covered.any():
                row, column = np.nonzero(covered[a.row][:, None] & (self.lds_pending[a.group, a.index] == a.serial))
                group, index = a.group[row, 0], a.index[row, column]
                self.lds_pending[group, index] = 0
                self.lds_writer[group, index] = a.number[row, 0]
                self.lds_write_epoch[group, index] = self.epoch[group]
            if not covered.all():
                keep.append(a)
        self.dma = keep

    def pass_barrier(self, ready: np.ndarray) -> None:
        """Workgroups pass a barrier. LDS accesses that their waves have not waited for are of the next epoch too."""
        self.epoch[ready] += 1
        for a in self.ds_open:
            late = ((a.sequence > self.ds_done[a.waves]) & ready[self.group_of[a.waves]])[a.row]
            if late.any():
                (self._mark_written if a.write else self._mark_read)(a, late)

    # -- register checks around one instruction --
    def before(self, code: "_Code") -> None:
        w = self.w
        if self.watch_pending and not self.watch_pending.isdisjoint(code.touched):
            self._check_pending(code)
        if self.watch_unwritten and not self.watch_unwritten.isdisjoint(code.used):
            for bank, unit in self.watch_unwritten & code.used:
                bad = ~self.written[bank][unit, w]
                if bad.any():
                    self.fault("unwritten", f"reads {Reg(bank, unit).plain}, which was never written", np.atleast_1d(bad))
        for producer, rule, unit, need in self.pairs.get(self.pc, ()):
            passed = self.slot[w] - self.issued_at[producer][w] - 1
            if (passed < need).any():
                kind = "mfma-wait" if self.program.instructions[producer].spec.unit == "matrix" else "wait-states"
                self.fault(kind, f"uses {unit} {int(passed.min())} wait states after {self.place(producer)}; {rule} needs {need}", passed < need, producer)

    def _done(self, kind, wave_slice):
        return np.choose(kind, [np.iinfo(np.int64).max * np.ones_like(self.vm_done[wave_slice]), self.vm_done[wave_slice], self.ds_done[wave_slice], self.sm_done[wave_slice]])

    def _check_pending(self, code) -> None:
        w = self.w
        for bank, unit in list(self.watch_pending & code.touched):
            kind = self.pending_by[bank][unit, w]
            bad = np.atleast_1d(self.pending[bank][unit, w] > self._done(kind, w))
            if code.loads in (1, 2) and (bank, unit) not in code.read:
                bad &= np.atleast_1d(kind) != code.loads     # loads of one kind return in order
            if bad.any():
                at = int(np.argmax(bad))
                cause = int(np.atleast_1d(self.pending_at[bank][unit, w])[at])
                counter = ("", "vmcnt", "lgkmcnt", "lgkmcnt")[int(np.atleast_1d(kind)[at])]
                verb = "reads" if (bank, unit) in code.read else "overwrites"
                self.fault("pending-load", f"{verb} {Reg(bank, unit).plain} before {self.place(cause)} is waited for ({counter})", bad, cause)
            kind = self.pending_by[bank][unit]
            if not (self.pending[bank][unit] > self._done(kind, slice(None))).any():
                self.watch_pending.discard((bank, unit))

    def after(self, code: "_Code") -> None:
        w = self.w
        for bank, unit in code.write:
            if (bank, unit) in self.watch_unwritten:
                self.written[bank][unit, w] = True
                if self.written[bank][unit].all():
                    self.watch_unwritten.discard((bank, unit))
        if code.loads:
            issued = (None, self.vm_issued, self.ds_issued, self.sm_issued)[code.loads]
            for bank, unit in code.write:
                self.pending[bank][unit, w] = issued[w]
                self.pending_by[bank][unit, w] = code.loads
                self.pending_at[bank][unit, w] = self.pc
                self.watch_pending.add((bank, unit))
        if self.pc in self.issued_at:
            self.issued_at[self.pc][w] = self.slot[w]
        self.slot[w] += code.slots


@define(eq=False)
class _LdsAccess:
    """The LDS dwords of one instruction. waves and their counter values; for each active lane: its row among the waves,
    lane, workgroup, dwords and wave number (columns). serial: of an LDS-DMA load, else 0."""
    waves: np.ndarray
    sequence: np.ndarray
    row: np.ndarray
    lane: np.ndarray
    group: np.ndarray
    index: np.ndarray
    number: np.ndarray
    write: bool
    serial: int = 0


def _close_pairs(program: Program) -> dict[int, list[tuple[int, str, str, int]]]:
    """Consumer -> (producer, rule, register, wait states needed) of every pair that some path brings too close."""
    instructions = program.instructions
    before: list[list[int]] = [[] for _ in range(len(instructions) + 1)]
    for n, inst in enumerate(instructions):
        target = program.target(inst)
        if target is not None and target <= len(instructions):
            before[target].append(n)
        if inst.mnemonic not in ("s_branch", "s_endpgm"):
            before[n + 1].append(n)
    hazards = [_hazard(i) for i in instructions]
    slots = [wait_states(i) for i in instructions]
    found: dict[int, list[tuple[int, str, str, int]]] = {}
    if not any(hazards):
        return found
    longest = max(h.reach for h in hazards if h)
    for n, inst in enumerate(instructions):
        consumed = _consumed(inst)
        ages, work = {}, [(p, 0) for p in before[n]] if consumed else []
        while work:
            p, age = work.pop()
            if age >= longest or ages.get(p, longest) <= age:
                continue
            ages[p] = age
            work += [(q, age + slots[p]) for q in before[p]]
        for p, age in ages.items():
            for number, rule, need, registers in hazards[p].entries if hazards[p] and age < hazards[p].reach else ():
                if age < need and rule.spec.severity == "error":
                    shared = [(c, x) for c in consumed.get(number, ()) for x in registers if rule.holds(instructions[p], x, inst, c)]
                    if shared:
                        (_, mine), (_, theirs) = shared[0]
                        found.setdefault(n, []).append((p, rule.spec.name, _unit_name(mine & theirs), need))
    return found


def _unit_name(bits: int) -> str:
    """Name of the lowest register in a mask of the checker (v0-v255, a0-a255, s0-s127)."""
    unit = (bits & -bits).bit_length() - 1
    return Reg("vas"[min(unit // 256, 2)], unit % 256).plain


class _Memory:
    """Every buffer and the kernarg segment in one arena of bytes, with unmapped gaps between."""

    def __init__(self, launch: Launch, kernarg_size: int):
        self.names = list(launch.buffers)
        starts, at = [], 0
        for name in self.names:
            starts.append(at)
            at += -(-max(1, launch.buffers[name].nbytes) // _GAP) * _GAP + _GAP
        self.kernarg = _BASE + at
        addresses = {n: _BASE + s for n, s in zip(self.names, starts)}
        data = launch.kernarg_bytes(addresses, kernarg_size)
        starts.append(at)
        sizes = [launch.buffers[n].nbytes for n in self.names] + [len(data)]
        self.starts = np.array(starts, np.int64)
        self.ends = self.starts + np.array(sizes, np.int64)
        self.arena = np.zeros((at + len(data) + 7) // 4 * 4, np.uint8)
        self.stored = np.zeros(len(self.arena), bool)
        for name, start in zip(self.names, starts):
            raw = np.ascontiguousarray(launch.buffers[name]).reshape(-1).view(np.uint8)
            self.arena[start:start + raw.size] = raw
        self.arena[at:at + len(data)] = np.frombuffer(data, np.uint8)

    def _offsets(self, machine: _Machine, address: np.ndarray, active: np.ndarray | None) -> np.ndarray:
        """Arena offsets of dwords; inactive lanes get 0. Stops at the first address outside every buffer."""
        offset = (address - U64(_BASE)).astype(np.int64)
        if active is not None:
            offset = np.where(active, offset, self.starts[0])
            if not active.any():
                return np.zeros_like(offset)
        which = np.clip(np.searchsorted(self.starts, offset, side="right") - 1, 0, None)
        bad = (offset < self.starts[which]) | (offset + 4 > self.ends[which])
        if active is not None:
            bad &= active
            offset = np.where(active, offset, 0)
        if bad.any():
            wave, lane = np.argwhere(bad)[0]
            value = int(address[wave, lane])
            near = [f"{n} is {_BASE + int(s):#x} to {_BASE + int(e):#x}" for n, s, e in zip([*self.names, "kernarg"], self.starts, self.ends)]
            machine.stop("wild-address", f"address {value:#x} lies in no buffer; {'; '.join(near)}", int(wave), None if active is None else int(lane))
        return offset

    def load(self, machine: _Machine, address: np.ndarray, active: np.ndarray | None) -> np.ndarray:
        """uint32 at each address; 0 where inactive."""
        offset = self._offsets(machine, address, active)
        if not (offset & 3).any():
            data = self.arena.view(U32)[offset >> 2]
        else:
            data = np.ascontiguousarray(self.arena[offset[..., None] + np.arange(4)]).view(U32)[..., 0]
        return data if active is None else np.where(active, data, U32(0))

    def store(self, machine: _Machine, address: np.ndarray, data: np.ndarray, active: np.ndarray) -> None:
        offset = self._offsets(machine, address, active)[active]
        at = offset[:, None] + np.arange(4)
        self.arena[at] = np.ascontiguousarray(np.broadcast_to(data, active.shape)[active])[:, None].view(np.uint8)
        self.stored[at] = True


def _to_bits(x) -> np.ndarray:
    """uint32 of a 32-bit result of any type."""
    x = np.asarray(x)
    if x.dtype == U32:
        return x
    if x.dtype.kind == "f":
        return np.ascontiguousarray(x, F32).view(U32)
    return x.view(U32) if x.dtype == I32 and x.flags.c_contiguous else x.astype(U32)


# ---- instructions to closures ----------------------------------------------------------------------------------
_LOADS = {"vmem": 1, "lds": 2, "salu": 3}


class _Code:
    """One instruction, decoded: how to run it, what it touches."""

    def __init__(self, inst: Instruction):
        self.inst = inst
        spec = inst.spec
        self.unit = spec.unit
        self.vector = spec.unit in ("valu", "matrix", "lds", "vmem")
        self.function = _semantics(spec)
        self.inputs = [(o, inst.operands.get(o.name)) for o in spec.operands if o.inp and o.kind not in ("label", "waitcnt")]
        self.outputs = [(o, inst.operands.get(o.name)) for o in spec.operands if o.out]
        self.read = {(r.bank, i) for r in inst.reads() for i in r.units if r.bank != "s" or i < 251}
        self.write = {(r.bank, i) for r in inst.writes() for i in r.units}
        names = {"vcc": (_VCC, _VCC + 1), "exec": (_EXEC, _EXEC + 1), "m0": (_M0,)}
        self.read |= {("s", i) for n in spec.implicit_reads - {"scc", "exec"} for i in names[n]}
        masks = {251: _VCC, 252: _EXEC}                       # src_vccz, src_execz
        self.read |= {("s", masks[r.index] + half) for r in inst.reads() if r.bank == "s" and r.index in masks for half in (0, 1)}
        if inst.is_lds_dma:
            self.read.add(("s", _M0))
        self.write |= {("s", i) for n in spec.implicit_writes - {"scc"} for i in names[n]}
        self.touched = self.read | self.write
        # a result of part of a register keeps the rest, whatever it is: that is no use of it
        self.used = self.read - self.write if "subdword" in spec.classes else self.read
        self.kind = {"s_barrier": "barrier", "s_endpgm": "end"}.get(inst.mnemonic, "branch" if spec.unit == "branch" else "run")
        self.loads = _LOADS.get(spec.unit, 0) if self.write and (spec.unit in ("vmem", "lds") or spec.family == "SMEM") else 0
        self.slots = wait_states(inst)
        self.flush_float = spec.unit == "valu"
        self.packed = spec.family == "VOP3P"

    def run(self, m: _Machine) -> None:
        m.inst = self.inst
        if self.function is None:
            m.stop("semantics", f"{self.inst.spec.where} gives no semantics that the emulator knows")
        if m.strict:
            m.before(self)
        values = [self._get(m, o, x, i) for i, (o, x) in enumerate(self.inputs)]
        try:
            with np.errstate(all="ignore"):
                results = self.function(m, *values)
        except NotImplementedError as e:
            m.stop("semantics", str(e))
        if len(results) > 1:   # v_swap and the like: results may be views of the registers about to change
            results = [np.array(r) for r in results]
        for (o, reg), value in zip(self.outputs, results):
            if reg is not None:
                self._put(m, o, reg, value)
        if m.strict:
            m.after(self)
        else:
            m.slot[m.w] += self.slots

    def _get(self, m: _Machine, o, x, position: int):
        element, dwords = o.element, o.dwords
        if x is None or isinstance(x, Off):
            return None
        if isinstance(x, Imm):
            return self._constant(m, o, x, position)
        if x.bank == "s":
            if x.index >= 251:
                raw = [{251: m.vcc() == 0, 252: m.exec() == 0, 253: m.scc()}[x.index].astype(U32)]
            else:
                raw = [m.s[i, m.w] for i in x.units]
            if self.vector and o.kind in ("src", "vcsrc"):
                raw = [r[:, None] for r in raw]
        else:
            file = m.v if x.bank == "v" else m.a
            if x.count >= 4 or o.kind == "vreg":      # memory data and matrix operands keep their registers apart
                block = file[x.index:x.index + x.count]
                return block if isinstance(m.w, slice) else block[:, m.w]
            raw = [file[i, m.w] for i in x.units]
        if element in ("u64", "b64", "i64") and x.count == 2:
            return raw[0].astype(U64) | raw[1].astype(U64) << U64(32)
        if x.count > 1:
            if self.packed and element == "f32":
                return self._packed(m, raw, position)
            return np.stack(raw)
        return self._typed(m, raw[0], element, x)

    def _packed(self, m: _Machine, raw, position: int):
        """The halves of a packed operand that op_sel and op_sel_hi choose, negated as neg_lo and neg_hi say: [2, n, lanes]."""
        mods = self.inst.mods
        out = []
        for half, select, negate in ((0, "op_sel", "neg_lo"), (1, "op_sel_hi", "neg_hi")):
            choice = mods.get(select, 7 if half else 0) >> position & 1
            value = raw[choice if len(raw) > 1 else 0].view(F32)
            value = nm.flush(value) if m.flush else value
            out.append(-value if mods.get(negate, 0) >> position & 1 else value)
        return np.stack(out)

    def _typed(self, m: _Machine, raw, element: str, reg=None):
        if element == "f32":
            value = raw.view(F32) if raw.flags.c_contiguous else np.ascontiguousarray(raw).view(F32)
            if m.flush and self.flush_float:
                value = nm.flush(value)
            if reg is not None and reg.abs:
                value = np.abs(value)
            return -value if reg is not None and reg.neg else value
        if element in ("i32", "i16"):
            return raw.view(I32) if raw.flags.c_contiguous else np.ascontiguousarray(raw).view(I32)
        return raw

    def _constant(self, m: _Machine, o, x: Imm, position: int):
        if self.unit == "matrix":
            if o.element == "i32":
                return x.signed
            whole = o.element == "f64" and x.inline_code < 240   # an inline integer: its 64 bits
            return float(np.int64(x.signed).view(np.float64) if whole else np.uint32(x.bits).view(F32))
        if o.kind == "imm":
            return I32((x.bits & 0xFFFF ^ 0x8000) - 0x8000 if o.type == "i16" else x.signed)
        if o.kind == "smoff":
            return np.array([x.signed], I32)
        shape = (1, 1) if self.vector and o.kind == "src" else (1,)
        if o.element in ("u64", "b64", "i64"):
            # inline integers and signed literals are sign-extended, other literals are not
            value = x.signed if x.inline_code is not None or o.element == "i64" else x.bits
            return np.full(shape, value, np.int64).view(U64)
        raw = np.full(shape, x.bits, U32)
        if o.dwords > 1 and self.packed:
            return self._packed(m, [raw], position)
        return self._typed(m, raw, o.element)

    def _put(self, m: _Machine, o, reg: Reg, value) -> None:
        if value is None:
            return
        if reg.bank == "s":
            self._put_scalar(m, o, reg, value)
            return
        file = m.v if reg.bank == "v" else m.a
        if o.element == "f32" and self.unit == "valu":
            value = self._result(m, value)
        if o.element in ("u64", "b64", "i64") and o.kind == "vgpr":
            value = np.asarray(value, U64)
            parts = [(value & U64(0xFFFFFFFF)).astype(U32), (value >> U64(32)).astype(U32)]
        elif o.kind == "vreg" or reg.count > 1:
            parts = value
        else:
            parts = [value]
        masked = self.unit != "matrix" and not m.all_active
        for i, part in zip(reg.units, parts):
            part = _to_bits(part)
            if not masked:
                file[i, m.w] = part
            elif isinstance(m.w, slice):
                np.copyto(file[i], np.broadcast_to(part, (m.n, 64)), where=m.exec_)
            else:
                file[i, m.w] = np.where(m.active(), part, file[i, m.w])

    def _result(self, m: _Machine, value):
        value = np.asarray(value, F32)
        if m.flush:
            value = nm.flush(value)
        omod = self.inst.mods.get("omod")
        if omod:
            value = value * F32((1, 2, 4, 0.5)[omod])
        if self.inst.mods.get("clamp"):
            value = np.clip(np.where(np.isnan(value) & m.info.dx10_clamp, F32(0), value), F32(0), F32(1))
        return value

    def _put_scalar(self, m: _Machine, o, reg: Reg, value) -> None:
        value = np.asarray(value)
        if reg.count == 2 and value.dtype == U64:
            parts = [(value & U64(0xFFFFFFFF)).astype(U32), (value >> U64(32)).astype(U32)]
        elif reg.count == 1:
            parts = [value.astype(np.int64).astype(U32) if value.dtype != U32 else value]
        else:
            parts = list(value)
        for i, part in zip(reg.units, parts):
            m.s[i, m.w] = part
        if reg.index <= _EXEC + 1 and reg.index + reg.count > _EXEC and reg.bank == "s":
            m.set_exec(m.pair(_EXEC))


# ---- scheduling ------------------------------------------------------------------------------------------------
def run(program: Program, launch: Launch, *, strict: bool = True, max_instructions: int = MAX_INSTRUCTIONS,
        progress: Callable[[float], None] | None = None, params: dict | None = None, record: set[int] | None = None,
        memory_bytes: int = 1 << 29) -> Result:
    """Run a launch to its end.

    strict: see the module. max_instructions: of one wave, before the run counts as endless. progress: called with the
    fraction of waves that have ended. params: overrides of spec parameters (numerics.cvt_pk_u8_rounding). record:
    linear workgroup numbers to trace. memory_bytes: bounds the state of the workgroups that run together.
    Raises EmulationError where hardware would hang or fault, LaunchError if the launch does not fit the program.
    """
    from .launch import LaunchError
    info = program.info
    items = int(np.prod(launch.workgroup))
    if info and tuple(info.workgroup) != (64, 1, 1) and items != int(np.prod(info.workgroup)):
        raise LaunchError(f"{launch.source}: workgroup {list(launch.workgroup)}; {program.name} was built for {list(info.workgroup)}")
    need = info.kernarg_size if info else 0
    given = launch.kernarg_end()
    if need and given > need:
        raise LaunchError(f"{launch.source}: kernarg reaches offset {given}; {program.name} takes {need} bytes")
    for name in params or {}:
        load().param(name)  # a KeyError names the nearest
    code = [_Code(i) for i in program.instructions]
    for i in program.instructions:
        program.target(i)  # an unknown label is an error before anything runs
    memory = _Memory(launch, need)
    total = int(np.prod([int(n) for n in launch.grid]))
    waves = -(-items // 64)
    each = waves * 64 * 4 * 280 + (info.lds_bytes if info else load().param("lds.bytes")) * 7
    batch = max(1, min(total, memory_bytes // each, max(1, 256 // waves)))
    faults, trace, executed = [], {}, 0
    for first in range(0, total, batch):
        groups = np.arange(first, min(first + batch, total))
        machine = _Machine(program, launch, groups, memory, strict, params or {}, record or set())
        report = progress and (lambda f: progress((first + f * len(groups)) / total))
        log = _run_batch(machine, code, max_instructions, report)
        executed += machine.steps_of_waves
        faults += [f for f in machine.faults if not any((f.kind, f.index) == (g.kind, g.index) for g in faults)]
        if record:
            trace.update(_traces(machine, log, record))
    buffers, written = {}, {}
    for name, start in zip(memory.names, memory.starts):
        old = launch.buffers[name]
        raw = memory.arena[start:start + old.nbytes]
        buffers[name] = raw.copy().view(old.dtype).reshape(old.shape)
        if name in launch.outputs:
            written[name] = memory.stored[start:start + old.nbytes].copy()
    return Result(buffers, written, faults[:_MAX_FAULTS], trace, executed)


def _run_batch(m: _Machine, code: list[_Code], limit: int, progress) -> list:
    """Runs every wave of the batch to s_endpgm. Returns the log of (pc, waves) if something is recorded."""
    everyone = np.arange(m.count)
    groups: list[tuple[int, np.ndarray]] = [(0, everyone)]   # runnable: place, waves
    waiting = np.zeros(m.count, bool)
    waiting_at = np.zeros(m.count, np.int64)
    ended = np.zeros(m.count, bool)
    log: list = []
    m.steps_of_waves = 0
    counted = np.zeros(m.count, np.int64)
    targets = [m.program.target(c.inst) if c.kind == "branch" else None for c in code]

    def make(waves):
        m.w = slice(None) if len(waves) == m.count else waves
        m.n = len(waves)

    while groups:
        groups.sort(key=lambda g: g[0])
        pc, waves = groups.pop(0)
        while groups and groups[0][0] == pc:
            waves = np.sort(np.concatenate([waves, groups.pop(0)[1]]))
        stop = groups[0][0] if groups else -1
        make(waves)
        started = m.steps
        while True:
            if pc >= len(code):
                m.pc = len(code) - 1
                m.stop("no-end", "the program runs past its last instruction; s_endpgm is missing")
            c = code[pc]
            m.pc = pc
            m.steps += 1
            if m.recorded is not None:
                log.append((pc, waves))
            c.run(m)
            if c.kind == "run":
                pc += 1
            elif c.kind == "branch":
                taken = m.branch_to
                target = targets[pc]
                if taken.all():
                    pc = target
                elif not taken.any():
                    pc += 1
                else:
                    groups += [(pc + 1, waves[~taken]), (target, waves[taken])]
                    break
                if m.steps - started + counted[waves[0]] > limit:
                    _endless(m, pc, limit)
            else:
                if c.kind == "end":
                    ended[waves] = True
                    if progress:
                        progress(float(ended.mean()))
                else:
                    waiting[waves], waiting_at[waves] = True, pc + 1
                groups += _release(m, waiting, waiting_at, ended)
                break
            if pc == stop or stop >= 0 and pc > stop:
                groups.append((pc, waves))
                break
        counted[waves] += m.steps - started
        m.steps_of_waves += (m.steps - started) * len(waves)
        if counted[waves[0]] > limit:
            _endless(m, pc, limit)
    if waiting.any():
        wave = int(np.argmax(waiting))
        m.w, m.n, m.pc = np.array([wave]), 1, int(waiting_at[wave]) - 1
        m.stop("barrier", "waits at a barrier that other waves of the workgroup never reach")
    return log


def _endless(m: _Machine, pc: int, limit: int) -> None:
    inside = [n for n, i in m.program.labels.items() if i <= m.pc]
    label = max(inside, key=lambda n: m.program.labels[n]) if inside else "the program's start"
    m.stop("endless", f"still running after {limit} instructions, in the loop at '{label}'")


def _release(m: _Machine, waiting, waiting_at, ended) -> list:
    """Workgroups whose living waves all wait go on."""
    there = (waiting | ended).reshape(len(m.groups), m.per_group)
    ready = there.all(axis=1) & waiting.reshape(there.shape).any(axis=1)
    if not ready.any():
        return []
    m.pass_barrier(ready)
    free = waiting & ready[m.group_of]
    waiting[free] = False
    out = []
    for pc in np.unique(waiting_at[free]):
        out.append((int(pc), np.flatnonzero(free & (waiting_at == pc))))
    return out


def _traces(m: _Machine, log, record: set[int]) -> dict[int, list[WaveTrace]]:
    """Per-wave instruction lists of the recorded workgroups in this batch."""
    wanted = np.flatnonzero(m.recorded)
    positions = {int(w): [] for w in wanted}
    steps = {int(w): [] for w in wanted}
    pcs = np.array([pc for pc, _ in log], np.int32)
    member: dict[int, np.ndarray] = {}
    keep: dict[int, np.ndarray] = {}
    ids = np.array([id(w) for _, w in log])
    for _, waves in log:
        keep.setdefault(id(waves), waves)
    for wave in wanted:
        has = {i: bool((w == wave).any()) for i, w in keep.items()}
        at = np.array([has[i] for i in ids], bool)
        steps[int(wave)] = np.flatnonzero(at)
        positions[int(wave)] = pcs[at]
    out: dict[int, list[WaveTrace]] = {}
    for wave in wanted:
        out.setdefault(int(m.groups[m.group_of[wave]]), []).append(WaveTrace(positions[int(wave)]))
    where = {int(w): (int(m.groups[m.group_of[w]]), int(m.wave_in_group[w])) for w in wanted}
    for step, waves, addresses in m.lds_log:
        for wave, row in zip(waves, addresses):
            g, i = where[int(wave)]
            out[g][i].lds_address[int(np.searchsorted(steps[int(wave)], step - 1))] = row
    return out

"""A cycle model of one compute unit: where the clocks of a kernel go.

Every number comes from ``isa_specs`` (timing.isa, chip.isa) and can be overridden by its name. What is modelled: in-order
issue of each wave, one instruction a wave and a category in each SIMD's slot, priorities, the matrix pipe and what may run
beside it, the VALU, both LDS buses with their queues and bank conflicts, the texture unit, memory latency, s_waitcnt,
barriers. What is not: instruction fetch, caches (a load takes vmem.level's latency), other compute units, the clock.
"""
from __future__ import annotations

import functools
import heapq
from bisect import bisect_right, insort
from collections import deque

import numpy as np
from attrs import define, evolve, field, frozen

from . import isa, stats
from .program import Imm, Instruction, Program, decode_waitcnt

CATEGORIES = ("matrix", "valu", "salu", "lds", "vmem", "branch", "internal")
REASONS = ("matrix pipe", "matrix shadow", "valu", "vmcnt", "lgkmcnt", "barrier", "lds queue", "vmem queue", "issue slot",
           "s_nop", "branch", "valu result")
_PIPE, _SHADOW, _VALU_BUSY, _VMCNT, _LGKMCNT, _BARRIER, _LDS_QUEUE, _VMEM_QUEUE, _SLOT, _NOP, _BRANCH, _RESULT = range(12)
_MFMA, _VALU, _SALU, _LDS, _VMEM, _SMEM, _JUMP, _WAIT, _SYNC, _PRIO, _END, _IDLE = range(12)
_UNIT = (0, 1, 2, 3, 4, 2, 5, 6, 6, 6, 6, 6)  # kind -> CATEGORIES
_NEVER = 1 << 60


class SimulationError(RuntimeError):
    """The traces or the parameters do not fit the program."""


@define(eq=False)
class Trace:
    """What one wave executed: instruction indices in order; LDS byte addresses by position, one a lane."""
    index: np.ndarray
    lds_address: dict[int, np.ndarray] = field(factory=dict)


@frozen(eq=False)
class Events:
    """One entry an executed instruction (arrays of equal length, ordered by issue), and one a stall.

    unit indexes CATEGORIES. end: the unit is free, or for memory the data is there. stall_reason indexes REASONS.
    """
    wave: np.ndarray
    simd: np.ndarray
    index: np.ndarray
    issue: np.ndarray
    end: np.ndarray
    unit: np.ndarray
    stall_wave: np.ndarray
    stall_index: np.ndarray
    stall_start: np.ndarray
    stall_end: np.ndarray
    stall_reason: np.ndarray


@define(eq=False)
class SimResult:
    """The outcome. Shares are of ``clk``, averaged over the CU's units of the kind; stalls are clk summed over waves.

    loop: the busiest innermost loop in its steady state (the middle half of its iterations), or None.
    stall_by_instruction: index -> {reason: clk}. window: (start, end) clk of the loop's steady state.
    """
    kernel: str
    clk: int
    clock_mhz: int | float
    waves_per_simd: int
    units: dict[str, dict[str, float]]
    loop: dict | None
    stalls: dict[str, int]
    tflops: float | None
    peak_fraction: float | None
    stall_by_instruction: dict[int, dict[str, int]]
    instructions: int
    events: Events | None = None
    window: tuple[int, int] | None = None

    def to_json(self) -> dict:
        return {k: getattr(self, k) for k in ("kernel", "clk", "clock_mhz", "waves_per_simd", "units", "loop", "stalls",
                                              "tflops", "peak_fraction")}


# ---- LDS banks ---------------------------------------------------------------------------------------------------

@functools.lru_cache(None)
def _phases(text: str) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """(banks, lanes of each phase) of an lds.phases parameter."""
    banks, _, rest = text.partition(":")
    phases = []
    for part in rest.split(";"):
        lanes = []
        for r in part.split(","):
            low, _, high = r.strip().partition("-")
            lanes += range(int(low), int(high or low) + 1)
        phases.append(tuple(lanes))
    if max(map(max, phases)) < 32:
        phases += [tuple(lane + 32 for lane in p) for p in phases]
    return int(banks), tuple(phases)


def bank_clocks(addresses, dwords: int, kind: str, mask=None, *, params: dict | None = None) -> int:
    """clk that one access holds its 128 B/clk bus.

    addresses: a byte address a lane (64). kind: "read" (transposed reads too) or "write". mask: active lanes, as 64
    booleans or an int; a lane whose address is past the end of LDS counts as inactive too. Without a
    conflict this is 256 bytes a dword over the bus width: b32 2, b64 4, b128 8.
    """
    get = _params(params)
    banks, phases = _phases(get(f"lds.phases.{kind}_b{32 * dwords}"))
    address = np.asarray(addresses, dtype=np.int64) // 4
    if mask is None:
        active = [True] * 64
    else:
        active = [bool(mask >> i & 1) for i in range(64)] if isinstance(mask, int) else list(mask)
    first = address.tolist()
    end = get("lds.bytes") // 4
    active = [on and word < end for on, word in zip(active, first)]
    turns = 0
    for lanes in phases:
        words = {first[lane] + d for lane in lanes if active[lane] for d in range(dwords)}
        fullest = [0] * banks
        for w in words:
            fullest[w % banks] += 1
        turns += max(fullest)
    return -(-turns * banks * 4 // get("lds.bus_bytes_per_clk"))


def _params(overrides: dict | None):
    machine = isa.load()
    if not overrides:
        return machine.param
    for name in overrides:
        machine.param(name)  # KeyError with the nearest name
    return lambda name: overrides[name] if name in overrides else machine.param(name)


# ---- traces without a launch -------------------------------------------------------------------------------------

def straight_trace(program: Program, loop_iterations: int = 8, *, waves: int | None = None) -> list[Trace]:
    """Traces by walking the code: each loop runs ``loop_iterations`` times, forward conditional branches fall through."""
    order, taken, at, last = [], {}, 0, len(program.instructions)
    while at < last:
        order.append(at)
        inst = program.instructions[at]
        if inst.mnemonic == "s_endpgm":
            break
        target = program.target(inst) if inst.spec.unit == "branch" else None
        if target is None or target > at and inst.mnemonic != "s_branch":
            at += 1
        elif target > at or taken.setdefault(at, 0) < loop_iterations - 1:
            if target <= at:
                taken[at] += 1
            at = target
        else:
            taken[at] = 0
            at += 1
        if len(order) > 5_000_000:
            raise SimulationError(f"{program.name}: more than 5,000,000 instructions a wave; lower loop_iterations={loop_iterations}")
    trace = Trace(np.array(order, np.int32))
    return [trace] * (waves or _waves(program) or 1)


def _waves(program: Program) -> int | None:
    return -(-int(np.prod(program.info.workgroup)) // 64) if program.info else None


def occupancy(program: Program, waves: int, *, params: dict | None = None) -> int:
    """Waves a SIMD that registers and LDS allow, in whole workgroups of ``waves`` waves; 0 if not even one fits."""
    get, info = _params(params), program.info
    groups = stats.occupancy(info.total_vgprs if info else 1, info.lds_bytes if info else 0, waves, get).workgroups_per_cu
    return -(-groups * waves // get("chip.simds_per_cu"))


# ---- one instruction, as the model sees it -----------------------------------------------------------------------

def _dwords(inst: Instruction) -> int:
    """Dwords a lane that a memory instruction moves, by its name."""
    name = inst.mnemonic
    for text, n in (("x16", 16), ("x8", 8), ("x4", 4), ("x3", 3), ("x2", 2), ("b128", 4), ("b96", 3), ("b64", 2)):
        if text in name:
            return n
    return 1


def _simm(inst: Instruction) -> int:
    return next((o.bits for o in inst.operands.values() if isinstance(o, Imm)), 0)


class _Code:
    """The program as parallel lists: kind, category bit, clocks, and what else the kind needs (``extra``)."""

    def __init__(self, program: Program, get):
        slot = get("issue.slot")
        shared = get("issue.shared_memory_port")
        category = {_MFMA: 1 if get("matrix.other_wave_after") else 32, _VALU: 1, _SALU: 2, _SMEM: 2, _LDS: 4, _VMEM: 4 if shared else 8, _JUMP: 16}
        n = len(program.instructions)
        self.kind, self.category, self.clk, self.extra = [0] * n, [0] * n, [slot] * n, [None] * n
        self.producer = [0] * n   # a memory instruction: how many instructions before it a VALU wrote what it reads (0: none near)
        written = [None] * n
        near = -(-get("issue.valu_to_memory") // slot)
        for i, inst in enumerate(program.instructions):
            spec, name = inst.spec, inst.mnemonic
            if spec.unit == "matrix":
                kind, self.clk[i] = _MFMA, (spec.passes or 4) * 4
            elif spec.unit == "valu":
                kind, self.clk[i] = _VALU, spec.issue
                self.extra[i] = "packed32" in spec.classes
                written[i] = {(r.bank, u) for r in inst.writes() for u in r.units}
            elif spec.unit == "lds":
                kind, dwords = _LDS, _dwords(inst)
                action = "write" if name.startswith("ds_write") else "read"
                self.extra[i] = (dwords, action, get(f"lds.{action}_latency"))
                self.clk[i] = spec.issue
            elif spec.unit == "vmem":
                kind, dwords = _VMEM, _dwords(inst)
                service = get("vmem.service_x4" if dwords > 2 else f"vmem.service_x{dwords}")
                lds_clk = -(-dwords * 256 // get("lds.bus_bytes_per_clk")) if inst.is_lds_dma else 0
                self.extra[i] = (service, lds_clk)
            elif "smem" in spec.classes:
                kind, self.extra[i] = _SMEM, 2 if _dwords(inst) > 1 else 1
            elif spec.unit == "salu":
                kind = _SALU
            elif spec.unit == "branch":
                kind, self.extra[i] = _JUMP, spec.latency
            elif name == "s_waitcnt":
                counts = decode_waitcnt(_simm(inst))
                kind, self.extra[i] = _WAIT, (counts["vmcnt"], counts["lgkmcnt"])
            elif name == "s_barrier":
                kind = _SYNC
            elif name == "s_setprio":
                kind, self.extra[i] = _PRIO, _simm(inst) & 3
            elif name == "s_endpgm":
                kind = _END
            else:
                kind = _IDLE
                if name == "s_nop":
                    self.clk[i] = slot * ((_simm(inst) & 15) + 1)
                elif name == "s_sleep":
                    self.clk[i] = slot + get("issue.sleep") * (_simm(inst) & 127)
            self.kind[i], self.category[i] = kind, category.get(kind, 0)
            if kind in (_LDS, _VMEM):
                reads = {(r.bank, u) for r in inst.reads() for u in r.units}
                for back in range(1, min(near, i + 1)):
                    if written[i - back] and written[i - back] & reads:
                        self.producer[i] = back
                        break


class _BankCache:
    """bank_clocks of recorded addresses; a pattern moved by whole rows of banks is the same pattern."""

    def __init__(self, params):
        self.params, self.seen = params, {}

    def __call__(self, addresses, dwords, action):
        a = np.asarray(addresses, dtype=np.int64)
        key = (a - (a[0] & ~255)).tobytes(), dwords, action
        if key not in self.seen:
            self.seen[key] = bank_clocks(a, dwords, action, params=self.params)
        return self.seen[key]


# ---- the model ---------------------------------------------------------------------------------------------------

def simulate(program: Program, traces: list, *, params: dict | None = None, waves: int | None = None, flops: float | None = None,
             useful_matrix_clk: float | None = None, peak: str | None = None, workgroups: int = 1, record: bool = True) -> SimResult:
    """Run the traces of one workgroup (``workgroups`` copies of it) on one compute unit.

    traces: one a wave, with ``.index`` and ``.lds_address`` (position -> byte address a lane); ``waves`` repeats or cuts
    them. params: overrides by parameter name. flops: of one workgroup; tflops and peak_fraction assume that every CU of the
    chip does the same. peak: "fp8" or "bf16", by default from the program's MFMAs. useful_matrix_clk: per SIMD, instead of
    flops / peak. record: keep what the timeline needs. Raises SimulationError.
    """
    get = _params(params)
    if not traces:
        raise SimulationError(f"{program.name}: no traces")
    if waves:
        traces = [traces[i % len(traces)] for i in range(waves)]
    code = _Code(program, get)
    last = len(program.instructions) - 1
    for t in traces:
        if len(t.index) and int(np.max(t.index)) > last:
            raise SimulationError(f"{program.name}: a trace names instruction {int(np.max(t.index))}; the program ends at {last}")
    per_group = len(traces)
    run = _run(program, code, [t for _ in range(workgroups) for t in traces], per_group, get, params, record)
    return _result(program, code, run, get, per_group, workgroups, flops, useful_matrix_clk, peak, record, params)


@define
class _Run:
    traces: list
    simd: list[int]
    issued: list[list[int]]
    memory: list[list[tuple[int, int]]]
    stalls: dict[int, int]
    stall_log: list[list[int]]
    lds_clk: int
    vmem_clk: int


def _run(program, code, traces, per_group, get, params, record) -> _Run:
    kind, category, clk, extra, producer = code.kind, code.category, code.clk, code.extra, code.producer
    slot, simds = get("issue.slot"), get("chip.simds_per_cu")
    shadow, other_shadow, packed_after = get("matrix.coexecute_after"), get("matrix.other_wave_after"), get("matrix.packed32_after")
    to_memory, barrier_latency = get("issue.valu_to_memory"), get("barrier.latency")
    lds_entries, lds_bus = get("lds.queue"), get("lds.bus_bytes_per_clk")
    wave_share = lds_bus / get("lds.wave_bytes_per_clk")
    least = 256 // lds_bus  # clk of an access of one dword a lane: what read_latency holds
    level = get("vmem.level")
    if level not in ("l2", "dram"):
        raise SimulationError(f"vmem.level is '{level}'; expected l2 or dram")
    vmem_latency = get("vmem.l2_latency" if level == "l2" else "vmem.latency")
    vmem_queue, vmem_most, lgkm_most = get("vmem.queue"), get("vmem.max_outstanding"), get("lgkm.max_outstanding")
    smem_latency = get("smem.latency")
    banks = _BankCache(params)

    count = len(traces)
    index = [np.asarray(t.index).tolist() for t in traces]
    address = [t.lds_address or {} for t in traces]
    length = [len(x) for x in index]
    simd = [w % simds for w in range(count)]
    group = [w // per_group for w in range(count)]
    issued: list[list[int]] = [[] for _ in traces]
    memory: list[list[tuple[int, int]]] = [[] for _ in traces]
    stalls: dict[int, int] = {}
    log: list[list[int]] = []
    ready = [simd[w] if length[w] else _NEVER for w in range(count)]
    position, priority = [0] * count, [0] * count
    vm = [deque() for _ in traces]
    lgkm: list[list[int]] = [[] for _ in traces]
    last_vm, last_lds, lds_free = [0] * count, [0] * count, [0] * count
    order = [[w for w in range(count) if simd[w] == s] for s in range(simds)]
    valu_free, pipe_free, matrix_wave = [0] * simds, [0] * simds, [-1] * simds
    own_until, other_until, packed_until = [0] * simds, [0] * simds, [0] * simds
    bus_free, queue, arriving = [0, 0], [[], []], [[], []]
    texture_free, texture = 0, deque()
    lds_clk = vmem_clk = 0
    alive = [sum(1 for w in range(count) if group[w] == g and length[w]) for g in range(count // per_group)]
    waiting: list[list[tuple[int, int, int]]] = [[] for _ in alive]
    due = [_NEVER] * simds
    heap = []
    for s in range(simds):
        if order[s]:
            due[s] = s
            heap.append((s, s))
    heapq.heapify(heap)

    def release(g, t):
        """All living waves of a workgroup are at the barrier."""
        for w, since, i in waiting[g]:
            s = simd[w]
            at = t + barrier_latency
            at += (s - at) % slot
            ready[w] = at
            if at > since:
                stalls[i << 4 | _BARRIER] = stalls.get(i << 4 | _BARRIER, 0) + at - since
                if record:
                    log.append([w, i, since, at, _BARRIER])
            if at < due[s]:
                due[s] = at
                heapq.heappush(heap, (at, s))
        waiting[g] = []

    while heap:
        t, s = heapq.heappop(heap)
        if due[s] != t:
            continue
        due[s] = _NEVER
        used = 0
        waves = order[s]
        for w in waves:
            if ready[w] > t:
                continue
            p = position[w]
            i = index[w][p]
            k = kind[i]
            c = category[i]
            until = 0
            reason = _SLOT
            following = t + slot
            if used & c:
                until = t + slot
            elif k == _VALU:
                until, reason = valu_free[s], _VALU_BUSY
                busy = own_until[s] if matrix_wave[s] == w else other_until[s]
                if extra[i] and packed_until[s] > busy:
                    busy = packed_until[s]
                if busy > until:
                    until, reason = busy, _SHADOW
                if until <= t:
                    valu_free[s] = t + clk[i]
            elif k == _MFMA:
                until, reason = valu_free[s], _VALU_BUSY
                if pipe_free[s] > until:
                    until, reason = pipe_free[s], _PIPE
                if until <= t:
                    d = clk[i]
                    most = d - slot if d > slot + slot else slot
                    pipe_free[s] = t + d
                    if other_shadow:
                        valu_free[s] = t + slot
                    matrix_wave[s] = w
                    own_until[s] = t + (shadow if shadow < most else most)
                    other_until[s] = t + (other_shadow if other_shadow < most else most)
                    packed_until[s] = t + d + packed_after
            elif k == _LDS:
                pair = s >> 1
                entries, outstanding = queue[pair], lgkm[w]
                while entries and entries[0] <= t:
                    heapq.heappop(entries)
                if outstanding and outstanding[0] <= t:
                    del outstanding[:bisect_right(outstanding, t)]
                back = producer[i]
                if back and p >= back and index[w][p - back] == i - back and issued[w][p - back] + to_memory > t:
                    until, reason = issued[w][p - back] + to_memory, _RESULT
                elif len(entries) >= lds_entries:
                    until, reason = entries[0], _LDS_QUEUE
                elif len(outstanding) >= lgkm_most:
                    until, reason = outstanding[0], _LGKMCNT
                else:
                    coming = arriving[pair]
                    while coming and coming[0][0] <= t:
                        at, d = heapq.heappop(coming)
                        bus_free[pair] = max(bus_free[pair], at) + d
                        lds_clk += d
                    dwords, action, latency = extra[i]
                    lanes = address[w].get(p)
                    d = dwords * least if lanes is None else banks(lanes, dwords, action)
                    start = max(t, bus_free[pair], lds_free[w])
                    bus_free[pair] = max(bus_free[pair], t) + d
                    lds_free[w] = start + d * wave_share
                    lds_clk += d
                    heapq.heappush(entries, start + d)
                    done = max(last_lds[w], start + latency + d - least)
                    last_lds[w] = done
                    insort(outstanding, done)
                    if record:
                        memory[w].append((p, done))
            elif k == _VMEM:
                outstanding = vm[w]
                while texture and texture[0] <= t:
                    texture.popleft()
                while outstanding and outstanding[0] <= t:
                    outstanding.popleft()
                back = producer[i]
                if back and p >= back and index[w][p - back] == i - back and issued[w][p - back] + to_memory > t:
                    until, reason = issued[w][p - back] + to_memory, _RESULT
                elif len(texture) >= vmem_queue:
                    until, reason = texture[0], _VMEM_QUEUE
                elif len(outstanding) >= vmem_most:
                    until, reason = outstanding[0], _VMCNT
                else:
                    d, dma = extra[i]
                    start = max(t, texture_free)
                    texture_free = start + d
                    vmem_clk += d
                    texture.append(start)
                    done = max(last_vm[w], start + vmem_latency)
                    if dma:
                        heapq.heappush(arriving[s >> 1], (done, dma))
                        done += dma
                    last_vm[w] = done
                    outstanding.append(done)
                    if record:
                        memory[w].append((p, done))
            elif k == _WAIT:
                most_vm, most_lgkm = extra[i]
                outstanding = vm[w]
                if len(outstanding) > most_vm:
                    until, reason = outstanding[len(outstanding) - most_vm - 1], _VMCNT
                outstanding = lgkm[w]
                if len(outstanding) > most_lgkm:
                    at = outstanding[len(outstanding) - most_lgkm - 1]
                    if at > until:
                        until, reason = at, _LGKMCNT
            elif k == _SMEM:
                outstanding = lgkm[w]
                if outstanding and outstanding[0] <= t:
                    del outstanding[:bisect_right(outstanding, t)]
                if len(outstanding) >= lgkm_most:
                    until, reason = outstanding[0], _LGKMCNT
                else:
                    for _ in range(extra[i]):
                        insort(outstanding, t + smem_latency)
                    if record:
                        memory[w].append((p, t + smem_latency))
            elif k == _IDLE:
                following = t + clk[i]
                reason = _NOP
            elif k == _JUMP:
                if p + 1 < length[w] and index[w][p + 1] != i + 1:
                    following = t + extra[i]
                    reason = _BRANCH

            if until > t:  # blocked: nothing can change before ``until`` except for the worse
                until = int(until + 0.999)
                until += (s - until) % slot
                ready[w] = until
                key = i << 4 | reason
                stalls[key] = stalls.get(key, 0) + until - t
                if record:
                    tail = log[-1] if log else None
                    if tail and tail[3] == t and tail[0] == w and tail[1] == i and tail[4] == reason:
                        tail[3] = until
                    else:
                        log.append([w, i, t, until, reason])
                continue

            used |= c
            issued[w].append(t)
            p += 1
            position[w] = p
            ready[w] = following
            if k >= _JUMP:
                if k == _SYNC:
                    g = group[w]
                    if per_group > 1:
                        ready[w] = _NEVER
                        waiting[g].append((w, t + slot, i))
                        if len(waiting[g]) == alive[g]:
                            release(g, t)
                elif k == _PRIO:
                    priority[w] = extra[i]
                    order[s] = sorted(order[s], key=lambda x: (-priority[x], x))
                elif (k == _IDLE or k == _JUMP) and following > t + slot:
                    # an s_nop's own slot is its issue; the rest of it, and a taken branch's latency, are lost
                    key = i << 4 | reason
                    stalls[key] = stalls.get(key, 0) + following - t - slot
                    if record:
                        log.append([w, i, t + slot, following, reason])
            if p == length[w] or k == _END:
                position[w] = length[w]
                ready[w] = _NEVER
                g = group[w]
                alive[g] -= 1
                if waiting[g] and len(waiting[g]) == alive[g]:
                    release(g, t)
        at = min([ready[w] for w in waves])
        if at < due[s]:
            due[s] = at
            heapq.heappush(heap, (at, s))

    for coming in arriving:
        lds_clk += sum(d for _, d in coming)
    return _Run(traces, simd, issued, memory, stalls, log, lds_clk, vmem_clk)


# ---- the outcome -------------------------------------------------------------------------------------------------

def _loops(program: Program) -> list[tuple[int, int]]:
    """(first, last) instruction of each innermost loop."""
    spans = set()
    for i, inst in enumerate(program.instructions):
        target = program.target(inst) if inst.spec.unit == "branch" else None
        if target is not None and target <= i:
            spans.add((target, i))
    return [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]


def _steady(index: np.ndarray, first: int, last: int) -> tuple[int, int, int, int] | None:
    """Of the longest stay in a loop: (position, position, iterations between them, iterations); the two positions are
    header visits around its middle half. None if the loop never repeats."""
    heads = np.flatnonzero(index == first)
    if len(heads) < 2:
        return None
    outside = np.concatenate([[0], np.cumsum((index < first) | (index > last))])
    broken = np.flatnonzero(outside[heads[1:]] != outside[heads[:-1]])
    starts, ends = np.concatenate([[0], broken + 1]), np.concatenate([broken, [len(heads) - 1]])
    longest = int(np.argmax(ends - starts))
    a, b = int(starts[longest]), int(ends[longest])
    if a == b:
        return None
    quarter = (b - a) // 4
    return int(heads[a + quarter]), int(heads[b - quarter]), b - a - 2 * quarter, b - a + 1


def _result(program, code, run, get, per_group, workgroups, flops, useful_clk, peak, record, params) -> SimResult:
    kinds, clks = np.array(code.kind), np.array(code.clk)
    simds = get("chip.simds_per_cu")
    index = [np.asarray(t.index)[:len(x)] for t, x in zip(run.traces, run.issued)]
    issued = [np.array(x, dtype=np.int64) for x in run.issued]
    total = max(int(x[-1]) + get("issue.slot") for x in issued if len(x))
    per_kind = np.zeros(12)
    for ix in index:
        per_kind += np.bincount(kinds[ix], weights=clks[ix], minlength=12)

    matrix_clk = per_kind[_MFMA] / simds
    if peak is None:
        names = [inst.mnemonic for inst in program.instructions if inst.spec.unit == "matrix"]
        peak = "bf16" if names and all(n.endswith(("_bf16", "_f16")) for n in names) else "fp8"
    rate = get(f"chip.flop_per_clk_cu.{peak}")
    if flops is not None and useful_clk is None:
        useful_clk = flops / rate
    useful_clk = matrix_clk if useful_clk is None else useful_clk * workgroups
    units = {
        "matrix": {"busy": matrix_clk / total, "useful": useful_clk / total},
        "valu": {"busy": per_kind[_VALU] / simds / total},
        "lds": {"busy": run.lds_clk / (simds // 2) / total},
        "vmem": {"busy": run.vmem_clk / total},
        "salu": {"busy": (per_kind[_SALU] + per_kind[_SMEM]) / simds / total},
    }
    units = {u: {k: round(float(v), 6) for k, v in d.items()} for u, d in units.items()}

    loop, window = None, None
    loops = _loops(program)
    if loops:
        visits = np.zeros(len(program.instructions) + 1)
        for ix in index:
            visits[:-1] += np.bincount(ix, minlength=len(program.instructions))
        cumulative = np.concatenate([[0], np.cumsum(visits)])
        for first, last in sorted(loops, key=lambda a: cumulative[a[0]] - cumulative[a[1] + 1]):
            spans = [(w, st) for w, ix in enumerate(index) if (st := _steady(ix, first, last))]
            if spans:
                break
        if spans:
            starts = [issued[w][st[0]] for w, st in spans]
            ends = [issued[w][st[1]] for w, st in spans]
            window = int(np.mean(starts)), int(np.mean(ends))
            busy = 0.0
            for ix, at in zip(index, issued):
                m = kinds[ix] == _MFMA
                begin, end = at[m], at[m] + clks[ix[m]]
                busy += np.clip(np.minimum(end, window[1]) - np.maximum(begin, window[0]), 0, None).sum()
            share = busy / simds / (window[1] - window[0])
            label = next((n for n, i in program.labels.items() if i == first), f"instruction {first}")
            loop = {"label": label, "iterations": spans[0][1][3],
                    "clk_per_iteration": round(float(np.mean([(e - b) / st[2] for b, e, (_, st) in zip(starts, ends, spans)])), 2),
                    "matrix_busy": round(float(share), 6),
                    "matrix_useful": round(float(share * min(1.0, useful_clk / matrix_clk)), 6) if matrix_clk else 0.0}

    stalls, by_instruction = {}, {}
    for key, value in run.stalls.items():
        reason = REASONS[key & 15]
        stalls[reason] = stalls.get(reason, 0) + value
        by_instruction.setdefault(key >> 4, {})[reason] = value
    clock = get("chip.clock_mhz")
    cus = get("chip.xcds") * get("chip.cus_per_xcd")
    done = None if flops is None else flops * workgroups / total
    result = SimResult(
        program.name, total, clock, occupancy(program, per_group, params=params), units, loop,
        dict(sorted(stalls.items(), key=lambda x: -x[1])), None if done is None else round(done * cus * clock / 1e6, 3),
        None if done is None else round(done / rate, 6), by_instruction, sum(map(len, index)), window=window)
    if not record:
        return result

    waves, ends = [], []
    for w, (ix, at) in enumerate(zip(index, issued)):
        end = at + clks[ix]
        if run.memory[w]:
            where, when = np.array(run.memory[w]).T
            end[where.astype(int)] = np.ceil(when)
        ends.append(end)
        waves.append(np.full(len(ix), w, np.int16))
    wave, ix, at, end = map(np.concatenate, (waves, index, issued, ends))
    order = np.argsort(at, kind="stable")
    wave, ix, at, end = wave[order], ix[order].astype(np.int32), at[order], end[order].astype(np.int64)
    log = np.array(run.stall_log, dtype=np.int64).reshape(-1, 5)
    return evolve(result, events=Events(wave, np.array(run.simd, np.int8)[wave], ix, at, end, np.array(_UNIT, np.int8)[kinds[ix]],
                                        *(log[:, c] for c in range(5))))

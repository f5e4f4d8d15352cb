"""What a program is made of: instruction mix, code bytes, natural loops, registers, occupancy. Static: nothing is run.

Counts are of instructions in the code, each once: a loop's are those of one iteration if every branch inside it falls
through, and hold the code of the loops inside it once.
"""
from __future__ import annotations

import re
from collections import Counter

from attrs import asdict, field, frozen
from rich.console import Group
from rich.table import Table
from rich.text import Text

from . import encode, isa
from .check import Block, _control_flow
from .isa import InstructionSpec
from .program import Program, Reg

# In the order of the table; every instruction is in exactly one.
CATEGORIES = ("MFMA", "VALU", "trans", "SALU", "SMEM", "LDS", "VMEM", "wait", "nop", "branch", "other")
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_")


@frozen
class Mix:
    """Counts of instructions: by category (CATEGORIES), by unit and by class of isa_specs; ``bytes`` of code; ``flops`` of
    matrix instructions of one wave (multiply and add are two; sparse ones count as dense ones of their name)."""
    instructions: int
    bytes: int
    flops: int
    categories: dict[str, int]
    units: dict[str, int]
    classes: dict[str, int]


@frozen
class Loop:
    """A natural loop. parent: its number in ``Stats.loops``, or None; depth 0 is outermost. first, last: instruction
    indices; offset: byte offset of the first; lines: (lines of the) code lines of both. cache_bytes: of the instruction
    cache, whole lines."""
    label: str
    depth: int
    parent: int | None
    first: int
    last: int
    offset: int
    where: tuple[str, str]
    mix: Mix
    cache_bytes: int
    fits_cache: bool


@frozen
class Registers:
    """Registers that the code names, against those the descriptor allots (None for a fragment). sgprs without vcc, m0, exec."""
    vgprs_used: int
    agprs_used: int
    sgprs_used: int
    vgprs: int | None
    agprs: int | None
    sgprs: int | None


@frozen
class Occupancy:
    """Workgroups a compute unit holds at once, and what keeps it from more.

    waves_per_simd: the mean over the SIMDs. limits: waves a SIMD that each resource alone allows. limited_by: those with
    the least. cliff: what the next more workgroup takes, or None if the wave slots are the limit: waves_per_simd then,
    vgprs and lds_bytes (the most that are allowed), and vgprs_fewer and lds_bytes_fewer than now. spare_vgprs,
    spare_lds_bytes: how many more cost nothing.
    """
    workgroups_per_cu: int
    waves_per_workgroup: int
    waves_per_simd: float
    limits: dict[str, float]
    limited_by: tuple[str, ...]
    cliff: dict[str, float] | None
    spare_vgprs: int
    spare_lds_bytes: int


@frozen
class Stats:
    """Of one program. lds_bytes, workgroup and occupancy are None for a fragment. irreducible: jumps back into the middle of a
    loop, as (from, to) instruction indices; they make no natural loop."""
    kernel: str
    source: str
    mix: Mix
    loops: tuple[Loop, ...]
    registers: Registers
    lds_bytes: int | None
    workgroup: tuple[int, int, int] | None
    occupancy: Occupancy | None
    cache_bytes: int
    cache_size: int
    irreducible: tuple[tuple[int, int], ...] = field(default=())

    def to_json(self) -> dict:
        """As plain data."""
        return asdict(self)


# -- mix --------------------------------------------------------------------------------------------------------------
def category(spec: InstructionSpec) -> str:
    """One of CATEGORIES."""
    name = spec.mnemonic
    if name.startswith("s_waitcnt"):
        return "wait"
    if name == "s_nop":
        return "nop"
    if "smem" in spec.classes:
        return "SMEM"
    if spec.unit == "valu":
        return "trans" if "trans" in spec.classes else "VALU"
    return {"matrix": "MFMA", "salu": "SALU", "lds": "LDS", "vmem": "VMEM", "branch": "branch"}.get(spec.unit, "other")


def flops(spec: InstructionSpec) -> int:
    """Floating (or integer) operations of one matrix instruction, all lanes; 0 for any other. From the sizes in its name."""
    if spec.unit != "matrix" or not (m := _SHAPE.search(spec.mnemonic)):
        return 0
    rows, columns, depth, blocks = (int(g or 1) for g in m.groups())
    return 2 * rows * columns * depth * blocks


def _mix(program: Program, indices, sizes: list[int]) -> Mix:
    specs = Counter()
    total = 0
    for n in indices:
        specs[program.instructions[n].spec] += 1
        total += sizes[n]
    categories, units, classes = Counter(), Counter(), Counter()
    work = 0
    for spec, count in specs.items():
        categories[category(spec)] += count
        units[spec.unit] += count
        work += count * flops(spec)
        for c in dict.fromkeys(spec.classes):
            classes[c] += count
    return Mix(sum(specs.values()), total, work, {c: categories[c] for c in CATEGORIES}, dict(sorted(units.items())),
               dict(sorted(classes.items())))


# -- loops ------------------------------------------------------------------------------------------------------------
def _dominators(blocks: list[Block]) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """Of each reachable block, entry and exit time in the dominator tree (a dominates b if a's span holds b's), and its place
    in postorder.
    (Cooper, Harvey, Kennedy: a simple, fast dominance algorithm.)"""
    order, seen, stack = [], {0}, [(0, iter(blocks[0].successors))]
    while stack:
        b, following = stack[-1]
        for s in following:
            if s not in seen:
                seen.add(s)
                stack.append((s, iter(blocks[s].successors)))
                break
        else:
            order.append(b)
            stack.pop()
    rank = {b: n for n, b in enumerate(order)}        # postorder
    before: dict[int, list[int]] = {b: [] for b in order}
    for b in order:
        for s in blocks[b].successors:
            before[s].append(b)
    up = {0: 0}
    changed = True
    while changed:
        changed = False
        for b in reversed(order[:-1]):
            new = None
            for p in before[b]:
                if p not in up:
                    continue
                a, c = p, new
                while c is not None and a != c:
                    while rank[a] < rank[c]:
                        a = up[a]
                    while rank[c] < rank[a]:
                        c = up[c]
                new = a
            if up.get(b) != new:
                up[b], changed = new, True
    children: dict[int, list[int]] = {b: [] for b in order}
    for b, p in up.items():
        if b:
            children[p].append(b)
    span, clock, work = {}, 0, [(0, False)]
    while work:
        b, done = work.pop()
        clock += 1
        if done:
            span[b] = (span[b][0], clock)
        else:
            span[b] = (clock, clock)
            work += [(b, True), *((c, False) for c in children[b])]
    return span, rank


def _natural_loops(blocks: list[Block]) -> tuple[dict[int, set[int]], list[tuple[int, int]]]:
    """(header block -> blocks of its loop, irreducible jumps back as block numbers)."""
    span, rank = _dominators(blocks)
    dominates = lambda a, b: span[a][0] <= span[b][0] and span[b][1] <= span[a][1]
    before: dict[int, list[int]] = {b: [] for b in span}
    for b in span:
        for s in blocks[b].successors:
            before[s].append(b)
    loops: dict[int, set[int]] = {}
    odd = []
    for b in sorted(span):
        for s in blocks[b].successors:
            if dominates(s, b):
                body = loops.setdefault(s, {s})
                work = [b]
                while work:
                    x = work.pop()
                    if x not in body:
                        body.add(x)
                        work += before[x]
            elif rank[s] >= rank[b]:
                odd.append((b, s))
    return loops, odd


def _cache_bytes(ranges, line: int) -> int:
    """Bytes of instruction cache that the byte ranges take, kernel start at a line's."""
    lines: set[int] = set()
    for begin, end in ranges:
        lines.update(range(begin // line, -(-end // line)))
    return len(lines) * line


def _loops(program: Program, blocks: list[Block], sizes: list[int], offsets: list[int]) -> tuple[list[Loop], list[tuple[int, int]]]:
    found, odd = _natural_loops(blocks)
    m = isa.load()
    names: dict[int, list[str]] = {}
    for label, index in program.labels.items():
        names.setdefault(index, []).append(label)
    headers = sorted(found, key=lambda h: (blocks[h].start, -len(found[h])))
    place = {h: n for n, h in enumerate(headers)}
    depth: dict[int, int] = {}
    out = []
    for h in headers:
        outer = [o for o in headers if o != h and h in found[o] and len(found[o]) > len(found[h])]
        parent = min(outer, key=lambda o: len(found[o])) if outer else None
        depth[h] = 0 if parent is None else len(outer)
        body = sorted(found[h])
        first, last = blocks[body[0]].start, blocks[body[-1]].end - 1
        start = blocks[h].start
        cache = _cache_bytes(((offsets[blocks[b].start], offsets[blocks[b].end]) for b in body), m.param("icache.line"))
        mix = _mix(program, (n for b in body for n in range(blocks[b].start, blocks[b].end)), sizes)
        out.append(Loop(names.get(start, [f"{offsets[start]:#x}"])[0], depth[h], None if parent is None else place[parent], first, last,
                        offsets[start], (_where(program, first, offsets), _where(program, last, offsets)), mix, cache,
                        cache <= m.param("icache.bytes")))
    return out, [(blocks[b].end - 1, blocks[s].start) for b, s in odd]


def _where(program: Program, index: int, offsets: list[int]) -> str:
    """Python place or text line; the byte offset if the program was read from a code object."""
    i = program.instructions[index]
    return f"{i.python[0]}:{i.python[1]}" if i.python else str(i.line) if i.line is not None else f"{offsets[index]:#x}"


# -- registers and occupancy ------------------------------------------------------------------------------------------
def _registers(program: Program) -> Registers:
    used = {"v": 0, "a": 0, "s": 0}
    for i in program.instructions:
        for o in i.operands.values():
            if isinstance(o, Reg) and (o.bank != "s" or o.index + o.count <= isa.load().param("chip.sgprs")):
                used[o.bank] = max(used[o.bank], o.index + o.count)
    info = program.info
    allotted = (info.arch_vgprs, info.acc_vgprs, info.sgprs) if info else (None, None, None)
    return Registers(used["v"], used["a"], used["s"], *allotted)


def occupancy(vgprs: int, lds_bytes: int, waves: int, get=None) -> Occupancy:
    """Of workgroups of so many waves with so many VGPRs (arch and acc together) a lane and bytes of LDS."""
    get = get or isa.load().param
    simds, slots, granule, lds_granule = get("chip.simds_per_cu"), get("chip.waves_per_simd"), get("chip.vgpr_granule"), get("lds.granule")
    allotted = -(-max(1, vgprs) // granule) * granule
    lds = -(-lds_bytes // lds_granule) * lds_granule
    by_vgprs = min(slots, get("chip.vgprs") // allotted)
    most = min(simds * slots // waves, get("chip.workgroups_per_cu") if waves > 1 else simds * slots)
    groups = {"VGPR": simds * by_vgprs // waves, "LDS": get("lds.bytes") // lds if lds else most, "wave slots": most}
    least = min(groups.values())
    limited = tuple(k for k, v in groups.items() if v == least)
    if "wave slots" in limited:
        limited = ("wave slots" if least * waves == simds * slots else "workgroup size",)

    def most_vgprs(n: int) -> int:
        return min(get("chip.vgprs") // -(-n * waves // simds) // granule * granule, get("chip.vgprs"))

    def most_lds(n: int) -> int:
        return get("lds.bytes") // n // lds_granule * lds_granule

    cliff = None
    following = least + 1
    if following <= most and most_vgprs(following):
        cliff = {"waves_per_simd": following * waves / simds,
                 "vgprs": most_vgprs(following), "vgprs_fewer": max(0, vgprs - most_vgprs(following)),
                 "lds_bytes": most_lds(following), "lds_bytes_fewer": max(0, lds_bytes - most_lds(following))}
    at_least = max(1, least)
    return Occupancy(least, waves, least * waves / simds, {k: v * waves / simds for k, v in groups.items()}, limited, cliff,
                     max(0, most_vgprs(at_least) - vgprs), max(0, most_lds(at_least) - lds_bytes))


# -- entry points -----------------------------------------------------------------------------------------------------
def stats(program: Program) -> Stats:
    """Everything about a program that needs no run. A fragment has no occupancy. SpecError if a parameter is missing."""
    sizes = [encode.size(i) for i in program.instructions]
    offsets = [0]
    for n in sizes:
        offsets.append(offsets[-1] + n)
    loops, odd = [], []
    if program.instructions:
        blocks, _ = _control_flow(program)
        loops, odd = _loops(program, blocks, sizes, offsets)
    info = program.info
    get = isa.load().param
    occupied = None
    if info:
        x, y, z = info.workgroup
        occupied = occupancy(info.total_vgprs, info.lds_bytes, max(1, -(-x * y * z // get("chip.lanes"))))
    lds, workgroup = (info.lds_bytes, tuple(info.workgroup)) if info else (None, None)
    return Stats(program.name, program.source, _mix(program, range(len(sizes)), sizes), tuple(loops), _registers(program), lds, workgroup,
                 occupied, _cache_bytes([(0, offsets[-1])], get("icache.line")), get("icache.bytes"), tuple(odd))


def _number(x: float) -> str:
    return f"{x:g}"


def cliff_text(o: Occupancy) -> str | None:
    """'8 VGPRs fewer would give 3 waves a SIMD', or None if nothing would."""
    if o.cliff is None:
        return None
    parts = [f"{int(o.cliff[k])} {unit}" for k, unit in (("vgprs_fewer", "VGPRs"), ("lds_bytes_fewer", "bytes of LDS")) if o.cliff[k]]
    return f"{' and '.join(parts)} fewer would give {_number(o.cliff['waves_per_simd'])} waves a SIMD" if parts else None


def render(s: Stats):
    """A rich renderable for people: a table of the mix a loop, then registers and occupancy."""
    title = Text(f"{s.kernel}: {s.mix.instructions} instructions, {s.mix.bytes} bytes")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("loop", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("to", no_wrap=True)
    shown = [c for c in CATEGORIES if s.mix.categories[c]]
    for column in ("instructions", "bytes", *shown, "MFLOP"):
        table.add_column(column, justify="right", no_wrap=True)

    def row(name, first, last, mix):
        table.add_row(Text(name), Text(first), Text(last), str(mix.instructions), str(mix.bytes), *(str(mix.categories[c]) for c in shown),
                      f"{mix.flops / 1e6:.3f}" if mix.flops else "")

    row("(all)", "", "", s.mix)
    for loop in s.loops:
        row("  " * (loop.depth + 1) + loop.label, *loop.where, loop.mix)
    lines = [f"classes: {', '.join(f'{k} {v}' for k, v in sorted(s.mix.classes.items(), key=lambda x: -x[1]))}"]
    for loop in s.loops:
        if not loop.fits_cache:
            lines.append(f"loop {loop.label} takes {loop.cache_bytes} bytes of instruction cache, more than the {s.cache_size} there are")
    if s.loops and all(loop.fits_cache for loop in s.loops):
        largest = max(loop.cache_bytes for loop in s.loops)
        lines.append(f"instruction cache: every loop fits; the largest takes {largest} of {s.cache_size} bytes")
    lines += [f"jump back into the middle of a loop: instruction {a} to {b}" for a, b in s.irreducible]
    r = s.registers
    of = lambda n: "" if n is None else f" of {n}"
    lines.append(f"registers: {r.vgprs_used}{of(r.vgprs)} VGPRs, {r.agprs_used}{of(r.agprs)} AGPRs, {r.sgprs_used}{of(r.sgprs)} SGPRs")
    if s.occupancy:
        o = s.occupancy
        lines.append(f"LDS: {s.lds_bytes} bytes; workgroup of {o.waves_per_workgroup} wave(s)")
        fit = "" if o.workgroups_per_cu else "the workgroup does not fit on a compute unit: "
        lines.append("; ".join(filter(None, (
            f"occupancy: {fit}{_number(o.waves_per_simd)} wave(s) a SIMD ({o.workgroups_per_cu} workgroup(s) a CU), "
            f"limited by {', '.join(o.limited_by)}", cliff_text(o),
            f"{o.spare_vgprs} VGPRs and {o.spare_lds_bytes} bytes of LDS more cost nothing"))))
    return Group(table, *(Text(line) for line in lines))

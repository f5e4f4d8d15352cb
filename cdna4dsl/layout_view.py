"""Draws where a matrix instruction's elements are: matrix -> register and lane, and lane and register -> element."""
from __future__ import annotations

import colorsys
import io
from pathlib import Path

import numpy as np
from attrs import evolve
from PIL import Image, ImageDraw, ImageFont

from .asm import instruction_text, write_atomic
from .isa import InstructionSpec
from .matrix import FORMATS, Layout, Shape, index_set, layout

_WIDTH = 140


def shape_of(spec: InstructionSpec) -> Shape:
    """The shape in the semantics of a matrix instruction; ValueError if it is none."""
    for statement in spec.semantics:
        call = statement[2] if statement[0] == "assign" else statement
        if call[0] == "call" and call[1] in ("mfma", "smfmac", "mfma_scale"):
            args = [a[1] for a in call[2]]
            if call[1] == "mfma":
                return Shape(*args[:7])
            if call[1] == "smfmac":
                return Shape(*args[:3], 1, *args[3:6], sparse=True)
            return Shape(*args[:3], 1, "f8f6f4", "f8f6f4", "f32")
    raise ValueError(f"{spec.mnemonic} is no matrix instruction")


def operands(spec: InstructionSpec) -> list[str]:
    """What ``text`` and ``png`` draw: A, B, D (C is the same), index, scale A, scale B."""
    scaled = any(o.name == "scale0" for o in spec.operands)
    return ["A", *["index"] * shape_of(spec).sparse, "B", "D", *["scale A", "scale B"] * scaled]


def _prepare(spec, operand, cbsz, abid, blgp):
    shape = shape_of(spec)
    if shape.a == "f8f6f4":
        shape = evolve(shape, a_format=cbsz, b_format=blgp)
    names = operands(spec)
    if operand is not None:
        operand = "D" if operand == "C" else operand
        if operand not in names:
            raise ValueError(f"{spec.mnemonic} has no layout '{operand}'; it has {', '.join(names)}")
        names = [operand]
    chosen = index_set(shape, cbsz, abid) if shape.sparse else 0
    return shape, [(name, layout(shape, name, chosen if name == "index" else 0)) for name in names]


def _title(spec: InstructionSpec, s: Shape) -> str:
    kind = lambda k, f: f"{k} ({FORMATS[f]})" if k == "f8f6f4" else k
    blocks = f", {s.blocks} blocks" if s.blocks > 1 else ""
    sparse = f"; A is sparse: {s.m} x {s.k // 2} stored" if s.sparse else ""
    return (f"{spec.mnemonic}: D = A x B + {'D' if s.sparse else 'C'}; A {s.m} x {s.k} {kind(s.a, s.a_format)}, "
            f"B {s.k} x {s.n} {kind(s.b, s.b_format)}, D {s.m} x {s.n} {s.d}{blocks}{sparse}")


def _about(name: str, s: Shape, lay: Layout) -> str:
    rows, columns = int(lay.row.max()) + 1, int(lay.column.max()) + 1
    what = {"D": "D (and C)", "index": "index: the two bits of each element of A"}.get(name, name)
    note = {"index": "; A[i][c] is k = 4 (c / 2) + index", "A": "; column c is one of k = 4 (c / 2) .. + 3" if s.sparse else "",
            "scale A": "; the byte by op_sel_hi, op_sel", "scale B": "; the byte by op_sel_hi, op_sel"}.get(name, "")
    n = lay.registers
    return f"{what}[{lay.axes[0]}][{lay.axes[1]}], {rows} x {columns}, {lay.bits} bits an element, {n} register{'s' * (n > 1)} a lane{note}"


def _span(a: int, b: int) -> str:
    return f"{a}" if a == b else f"{a}-{b}"


def _bits(first: int, last: int) -> str:
    """Registers of bits first to last, with the bits if they are no whole registers."""
    part = f"[{last % 32}:{first % 32}]" if (first % 32 or last % 32 != 31) and first // 32 == last // 32 else ""
    return f"v{_span(first // 32, last // 32)}{part}"


def _runs(*keys: np.ndarray, limit: np.ndarray | None = None, only: int | None = None) -> list[tuple[int, int]]:
    """(first, last) along axis 0 of stretches over which one key (``only``: that one) grows by the same step and the others stay.
    limit: entries of a run share this."""
    steps = []
    for at in range(len(keys[0]) - 1):
        step = tuple(int(d[0]) if len(d := np.unique(key[at + 1] - key[at])) == 1 else None for key in keys)
        grows = [x for x, d in enumerate(step) if d != 0]
        ok = len(grows) == 1 and (step[grows[0]] or 0) > 0 and only in (None, grows[0]) and (limit is None or limit[at] == limit[at + 1])
        steps.append(step if ok else None)
    out, start = [], 0
    for at, step in enumerate([*steps, None]):
        if step is None or step != steps[start]:
            out.append((start, at))
            start = at + 1
    return out


def _maps(lay: Layout):
    """lane and first bit of each element: [blocks, rows, columns]."""
    size = tuple(int(x.max()) + 1 for x in (lay.block, lay.row, lay.column))
    lane, bit = np.zeros(size, int), np.zeros(size, int)
    items, lanes = np.indices(lay.row.shape)
    at = lay.block, lay.row, lay.column
    lane[at], bit[at] = lanes, lay.base + items * lay.bits
    return lane, bit


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    line = lambda r: " ".join(x.rjust(w) for x, w in zip(r, widths)).rstrip()
    return [line(head), *map(line, rows)]


def _fits(lines: list[str], rows: int) -> bool:
    return max(map(len, lines)) <= _WIDTH - 2 and len(lines) <= rows + 1


def _matrix_text(lay: Layout) -> list[str]:
    """Block 0 as a matrix of v<register>.<lane>: by registers if that fits, else by ranges of lanes and registers too."""
    lane, bit = _maps(lay)
    part = 32 % lay.bits == 0 and lay.bits < 32             # elements share registers and none lies across two
    for only, limited in ((1, True), (None, True), (None, False)):
        rows, columns = (_runs(l, b // lay.bits, only=only, limit=(
            b[:, 0] // 32 if limited and part else np.arange(len(b)) if only and lay.bits >= 32 else None))
            for l, b in ((lane[0], bit[0]), (lane[0].T, bit[0].T)))
        cells = []
        for r0, r1 in rows:
            cells.append([_span(r0, r1)])
            for c0, c1 in columns:
                l, b = lane[0, r0:r1 + 1, c0:c1 + 1], bit[0, r0:r1 + 1, c0:c1 + 1]
                cells[-1].append(f"{_bits(int(b.min()), int(b.max()) + lay.bits - 1)}.{_span(int(l.min()), int(l.max()))}")
        lines = _table([f"{lay.axes[0]}\\{lay.axes[1]}", *(_span(*c) for c in columns)], cells)
        if _fits(lines, 32):
            break
    step = lambda x: int((x[1] - x[0]).flat[0]) if len(x) > 1 else 0
    blocks = [f"{what} + {n} b" for what, n in (("lane", step(lane)), ("register", step(bit) // 32)) if n]
    return lines + ([f"block b: {', '.join(blocks)}"] if blocks else [])


def _item_runs(lay: Layout) -> list[tuple[int, int]]:
    """(first, last) item of each register, apart where elements are no neighbours; FP6 lies across registers."""
    register = (lay.base + np.arange(lay.items) * lay.bits) // 32
    return _runs(lay.row, lay.column, limit=None if lay.bits == 6 else register)


def _register_text(lay: Layout) -> list[str]:
    """Lane x register -> element, lanes and, if need be, registers by ranges."""
    lanes = _runs(lay.row.T, lay.column.T, limit=lay.block[0])
    groups = [_item_runs(lay), _runs(lay.row, lay.column, limit=lay.block[:, 0])]
    for registers in groups:
        rows = []
        for l0, l1 in lanes:
            rows.append([_span(l0, l1)])
            for t0, t1 in registers:
                part = slice(t0, t1 + 1), slice(l0, l1 + 1)
                cell = ",".join(_span(int(x[part].min()), int(x[part].max())) for x in (lay.row, lay.column))
                rows[-1].append(f"b{lay.block[t0, l0]} {cell}" if lay.block.any() else cell)
        head = [_bits(lay.base + t0 * lay.bits, lay.base + (t1 + 1) * lay.bits - 1) for t0, t1 in registers]
        lines = _table(["lane", *head], rows)
        if _fits(lines, 64):
            break
    return lines


def text(spec: InstructionSpec, operand: str | None = None, *, cbsz: int = 0, abid: int = 0, blgp: int = 0) -> str:
    """Tables of at most 140 columns, both directions; v2.17 is register 2 of lane 17. cbsz and blgp choose the formats of f8f6f4,
    cbsz and abid the set of indices."""
    shape, layouts = _prepare(spec, operand, cbsz, abid, blgp)
    out = [_title(spec, shape)]
    for name, lay in layouts:
        out += ["", _about(name, shape, lay)]
        out.append(f"  element {lay.axes[0]}, {lay.axes[1]} -> register.lane" + (" (block 0)" if lay.block.any() else ""))
        out += ["  " + x for x in _matrix_text(lay)]
        out += [f"  lane, register -> element {lay.axes[0]},{lay.axes[1]}"] + ["  " + x for x in _register_text(lay)]
    return "\n".join(out) + "\n"


# ---- picture -----------------------------------------------------------------------------------------------------
_DARK, _GREY, _LINE = (30, 30, 30), (105, 105, 105), (150, 150, 150)
_LANE_HIGH = 15                      # pixels of a lane in the right table


def _font(size: int):
    return ImageFont.load_default(size)


def _colours(count: int) -> list[tuple[int, int, int]]:
    """A light colour a register; neighbours are far apart in hue."""
    around = [(i * 0.381966) % 1 for i in range(count)]
    return [tuple(int(255 * c) for c in colorsys.hls_to_rgb(h, 0.80 - 0.10 * (i // 8 % 2), 0.75)) for i, h in enumerate(around)]


def _box(draw, x0, y0, x1, y1, fill, label, size) -> None:
    draw.rectangle((x0, y0, x1, y1), fill=fill, outline=_LINE)
    draw.text(((x0 + x1) / 2, (y0 + y1) / 2 + 0.5), label, fill=_DARK, font=_font(size), anchor="mm")


def _draw_matrix(lay: Layout, colours):
    """(width, height, function that draws at x, y): each block's matrix; a box is what a register of a lane holds."""
    lane, bit = _maps(lay)
    blocks, rows, columns = lane.shape
    down = lay.axes[0] == "k"        # the axis that goes through registers; D has every element on its own
    per = max(1, 32 // lay.bits) if lay.items > 1 else 1
    wide, high = (26, max(4, 16 // per)) if down else (max(26 / per, 6.5), 16)
    w, h = round(columns * wide), round(rows * high)
    across = {1: 1, 2: 2, 4: 2, 16: 4}[blocks] if w < 500 else 1
    gap_x, gap_y = 56, 44
    register = bit // 32
    key = lane * 64 + register

    def draw_at(draw, x, y):
        for b in range(blocks):
            left, top = x + 36 + b % across * (w + gap_x), y + 22 + b // across * (h + gap_y)
            if blocks > 1:
                draw.text((left, top - 34), f"block {b}", fill=_DARK, font=_font(14))
            for i in range(0, columns, max(1, round(26 / wide))):
                at, anchor = (i + 0.5, "ms") if wide >= 26 else (i, "ls")
                draw.text((left + at * wide, top - 3), str(i), fill=_GREY, font=_font(11), anchor=anchor)
            for i in range(0, rows, max(1, round(16 / high))):
                draw.text((left - 4, top + i * high), str(i), fill=_GREY, font=_font(11), anchor="ra")
            seen = np.zeros((rows, columns), bool)
            for r in range(rows):
                for c in range(columns):
                    if seen[r, c]:
                        continue
                    r1, c1 = r, c
                    while down and r1 + 1 < rows and key[b, r1 + 1, c] == key[b, r, c]:
                        r1 += 1
                    while not down and c1 + 1 < columns and key[b, r, c1 + 1] == key[b, r, c]:
                        c1 += 1
                    seen[r:r1 + 1, c:c1 + 1] = True
                    box = left + c * wide, top + r * high, left + (c1 + 1) * wide, top + (r1 + 1) * high
                    _box(draw, *map(round, box), colours[register[b, r, c]], str(lane[b, r, c]), 12)
    lines = -(-blocks // across)
    return 36 + across * w + (across - 1) * gap_x, 22 + lines * h + (lines - 1) * gap_y + (34 if blocks > 1 else 0), draw_at


def _draw_lanes(lay: Layout, colours):
    """(width, height, function that draws at x, y): lanes by registers, with the elements in them."""
    bit = lay.base + np.arange(lay.items) * lay.bits
    groups = _item_runs(lay)
    label = lambda t, l: ("b%d " % lay.block[t[0], l] if lay.block.any() else "") + ",".join(
        _span(int(x[t[0], l]), int(x[t[1], l])) for x in (lay.row, lay.column))
    measure = ImageDraw.Draw(Image.new("L", (1, 1)))
    head = [_bits(int(bit[a]), int(bit[b]) + lay.bits - 1) for a, b in groups]
    words = [*(label(t, l) for t in groups for l in (0, 31, 63)), *head]
    wide = max(30, max(round(measure.textlength(w, font=_font(12))) for w in words) + 14)
    halves = 1 if wide * len(groups) > 1000 else 2
    per, w = 64 // halves, wide * len(groups)

    def draw_at(draw, x, y):
        for half in range(halves):
            left = x + half * (w + 60) + 30
            draw.text((left - 6, y + 16), "lane", fill=_GREY, font=_font(11), anchor="rs")
            for g in range(len(groups)):
                draw.text((left + (g + 0.5) * wide, y + 17), head[g], fill=_DARK, font=_font(13), anchor="ms")
            for n in range(per):
                lane, top = half * per + n, y + 22 + n * _LANE_HIGH
                draw.text((left - 6, top + _LANE_HIGH / 2), str(lane), fill=_GREY, font=_font(11), anchor="rm")
                for g, t in enumerate(groups):
                    fill = (238, 238, 238) if lay.bits == 6 else colours[bit[t[0]] // 32]        # FP6: one box for six registers
                    _box(draw, left + g * wide, top, left + (g + 1) * wide, top + _LANE_HIGH, fill, label(t, lane), 12)
    return 30 + halves * w + (halves - 1) * 60, 22 + per * _LANE_HIGH, draw_at


def png(spec: InstructionSpec, path: str | Path, operand: str | None = None, *, cbsz: int = 0, abid: int = 0, blgp: int = 0) -> Path:
    """Draw what ``text`` tells: left the matrix, in each box the lane; right lanes by registers, in each box the element. Colours
    are registers."""
    shape, layouts = _prepare(spec, operand, cbsz, abid, blgp)
    colours = _colours(max(lay.registers for _, lay in layouts))
    parts = [(_about(name, shape, lay), lay, _draw_matrix(lay, colours), _draw_lanes(lay, colours)) for name, lay in layouts]
    second = 24 + max(p[2][0] for p in parts) + 60
    width = max(second + max(p[3][0] for p in parts) + 30, 900)
    height = 100 + sum(74 + max(p[2][1], p[3][1]) + 30 for p in parts)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((24, 14), _title(spec, shape), fill=_DARK, font=_font(22))
    x = 24
    draw.text((x, 60), "register", fill=_GREY, font=_font(15), anchor="lm")
    x += 66
    for i, colour in enumerate(colours):
        _box(draw, x, 50, x + 30, 70, colour, f"v{i}", 13)
        x += 34
    y = 100
    for about, lay, left, right in parts:
        draw.line((24, y, width - 24, y), fill=_LINE)
        draw.text((24, y + 10), about, fill=_DARK, font=_font(18))
        multi = 22 if lay.block.any() else 0
        draw.text((24, y + 36), f"down {lay.axes[0]}, across {lay.axes[1]}; in a box: lane", fill=_GREY, font=_font(14))
        draw.text((second, y + 36), f"in a box: {'block ' if multi else ''}{lay.axes[0]},{lay.axes[1]}", fill=_GREY, font=_font(14))
        left[2](draw, 24, y + 58 + multi)
        right[2](draw, second, y + 58)
        y += 74 + max(left[1], right[1]) + 30
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return write_atomic(path, buffer.getvalue())

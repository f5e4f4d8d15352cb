"""Pictures of a simulation: a trace for Perfetto or chrome://tracing, and a PNG."""
from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .asm import instruction_text, write_atomic
from .program import Program
from .simulate import CATEGORIES, REASONS, SimResult

# What a wave does, in the order of the legend. The first five are instructions in their issue slot, the rest is waiting.
COLOURS = {
    "MFMA": (31, 88, 170), "VALU": (214, 105, 10), "LDS": (27, 140, 90), "memory": (128, 62, 160), "scalar": (120, 120, 120),
    "waits for matrix or VALU": (255, 217, 170), "waits for LDS or scalar loads": (175, 226, 196), "waits for memory": (217, 190, 234),
    "barrier": (246, 170, 178), "slot goes to another wave": (250, 235, 95), "s_nop, branch": (214, 214, 214),
}
_DARK_MFMA = (12, 50, 110)
_UNIT_COLOUR = ("MFMA", "VALU", "scalar", "LDS", "memory", "scalar", "scalar")
_REASON_COLOUR = {
    "matrix pipe": "waits for matrix or VALU", "matrix shadow": "waits for matrix or VALU", "valu": "waits for matrix or VALU",
    "valu result": "waits for matrix or VALU", "vmcnt": "waits for memory", "vmem queue": "waits for memory",
    "lgkmcnt": "waits for LDS or scalar loads", "lds queue": "waits for LDS or scalar loads", "barrier": "barrier",
    "issue slot": "slot goes to another wave", "s_nop": "s_nop, branch", "branch": "s_nop, branch",
}
_MATRIX, _VALU = CATEGORIES.index("matrix"), CATEGORIES.index("valu")


def _events(result: SimResult):
    if result.events is None:
        raise ValueError(f"{result.kernel}: simulated with record=False; a timeline needs its events")
    return result.events


def chrome_trace(result: SimResult, program: Program, path: str | Path, *, limit: int = 60_000) -> Path:
    """Write Chrome trace JSON. Process = SIMD; threads = its matrix pipe, its VALU and its waves; 1 us = 1 clk.

    At most ``limit`` instructions, the earliest; ``otherData`` says if some were left out.
    """
    e = _events(result)
    n = min(limit, len(e.issue))
    texts, places = {}, {}
    for i in np.unique(e.index[:n]).tolist():
        inst = program.instructions[i]
        texts[i], places[i] = instruction_text(inst), inst.where
    out = []
    for simd in np.unique(e.simd).tolist():
        out.append({"ph": "M", "name": "process_name", "pid": simd, "tid": 0, "args": {"name": f"SIMD {simd}"}})
        names = {0: "matrix pipe", 1: "VALU", **{10 + w: f"wave {w}" for w in np.unique(e.wave[e.simd == simd]).tolist()}}
        out += [{"ph": "M", "name": "thread_name", "pid": simd, "tid": t, "args": {"name": x}} for t, x in names.items()]
    reasons: dict[tuple[int, int, int], str] = {}
    simd_of = dict(zip(e.wave.tolist(), e.simd.tolist()))
    horizon = int(e.issue[n - 1]) if n < len(e.issue) else result.clk
    for w, i, start, end, r in zip(*(a.tolist() for a in (e.stall_wave, e.stall_index, e.stall_start, e.stall_end, e.stall_reason))):
        if start >= horizon:
            continue
        reasons[w, i, end] = REASONS[r]
        out.append({"ph": "X", "name": f"stall: {REASONS[r]}", "pid": simd_of[w], "tid": 10 + w, "ts": start, "dur": end - start,
                    "args": {"stall": REASONS[r], "for": texts.get(i, ""), "at": places.get(i, "")}})
    slot = int(min(np.diff(np.unique(e.issue[e.simd == e.simd[0]])), default=4))
    for w, simd, i, issue, end, unit in zip(*(a[:n].tolist() for a in (e.wave, e.simd, e.index, e.issue, e.end, e.unit))):
        args = {"at": places[i]}
        if (w, i, issue) in reasons:
            args["stall"] = reasons[w, i, issue]
        if CATEGORIES[unit] in ("lds", "vmem"):
            args["data_at"] = end
        out.append({"ph": "X", "name": texts[i], "pid": simd, "tid": 10 + w, "ts": issue, "dur": slot, "args": args})
        if unit in (_MATRIX, _VALU):
            out.append({"ph": "X", "name": texts[i], "pid": simd, "tid": 0 if unit == _MATRIX else 1, "ts": issue, "dur": end - issue,
                        "args": {"wave": w, "at": places[i]}})
    other = {"kernel": result.kernel, "clk": result.clk, "time unit": "1 us here is 1 clk", "instructions left out": len(e.issue) - n}
    return write_atomic(path, json.dumps({"traceEvents": out, "displayTimeUnit": "ns", "otherData": other}, separators=(",", ":")))


def _font(size: int):
    return ImageFont.load_default(size)


def _window(result: SimResult, program: Program) -> tuple[int, int]:
    """About two iterations from the middle of the loop, or the start of the program."""
    e = _events(result)
    if result.loop and result.window:
        label = result.loop["label"]
        head = program.labels[label] if label in program.labels else int(label.rsplit(" ", 1)[1])
        visits = e.issue[(e.wave == e.wave[np.flatnonzero(e.index == head)[0]]) & (e.index == head)]
        middle = int(visits[np.argmin(np.abs(visits - sum(result.window) / 2))])
        clk = result.loop["clk_per_iteration"]
        start = max(0, int(middle - 0.02 * clk))
        return start, min(result.clk, int(start + 2.04 * clk) + 1)
    return 0, min(result.clk, 6000)


def _ruler(span: int) -> int:
    """A round distance between ticks: 8 to 20 of them."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if span / (step * factor) <= 16:
                return step * factor
        step *= 10


def png(result: SimResult, program: Program, path: str | Path, window: tuple[int, int] | None = None, *, width: int = 1800) -> Path:
    """Draw each SIMD's matrix pipe, VALU and waves. window: (start, end) clk; by default two iterations of the loop."""
    e = _events(result)
    start, end = window or _window(result, program)
    start, end = max(0, int(start)), min(result.clk, int(end))
    if end <= start:
        raise ValueError(f"window {start}..{end} clk is empty; the kernel takes {result.clk} clk")
    span = end - start
    left, right, row, gap = 190, 100, 24, 5
    plot = width - left - right

    def strip(begins, ends, colours, edge=None):
        """One row at a clk a pixel, averaged down to the plot's width."""
        line = np.full((span, 3), 250, np.uint8)
        for a, b, c in zip(np.clip(begins - start, 0, span).tolist(), np.clip(ends - start, 0, span).tolist(), colours):
            line[a:b] = c
        if edge is not None:  # a dark edge where an instruction starts
            inside = begins[(begins >= start) & (begins < end)] - start
            for d in range(max(1, round(1.2 * span / plot))):
                line[np.minimum(inside + d, span - 1)] = edge
        return Image.fromarray(line[None]).resize((plot, row), Image.Resampling.BOX)

    seen = (e.issue < end) & (e.end > start)
    stalled = (e.stall_start < end) & (e.stall_end > start)
    unit_rgb = [COLOURS[n] for n in _UNIT_COLOUR]
    reason_rgb = [COLOURS[_REASON_COLOUR[r]] for r in REASONS]
    rows: list[tuple[str, Image.Image | None, str]] = []
    simds = np.unique(e.simd).tolist()
    for simd in simds:
        rows.append((f"SIMD {simd}", None, ""))
        here = seen & (e.simd == simd)
        for unit, name, edge in ((_MATRIX, "matrix pipe", _DARK_MFMA), (_VALU, "VALU", None)):
            m = here & (e.unit == unit)
            a, b = e.issue[m], e.end[m]
            busy = np.clip(np.minimum(b, end) - np.maximum(a, start), 0, None).sum() / span
            rows.append((name, strip(a, b, [unit_rgb[unit]] * len(a), edge), f"{busy:.0%}"))
        for w in np.unique(e.wave[e.simd == simd]).tolist():
            i, s = seen & (e.wave == w), stalled & (e.stall_wave == w)
            a = np.concatenate([e.stall_start[s], e.issue[i]])
            b = np.concatenate([e.stall_end[s], np.where(e.unit[i] == _VALU, e.end[i], e.issue[i] + 4)])
            colours = [reason_rgb[r] for r in e.stall_reason[s]] + [unit_rgb[u] for u in e.unit[i]]
            waiting = np.clip(np.minimum(e.stall_end[s], end) - np.maximum(e.stall_start[s], start), 0, None).sum() / span
            rows.append((f"wave {w}", strip(a, b, colours), f"{1 - waiting:.0%}"))

    top = 118
    bottom = top + sum(row + gap if im else row for _, im, _ in rows)
    height = bottom + 48 + 66
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    dark, grey = (30, 30, 30), (105, 105, 105)
    u = result.units
    draw.text((24, 16), f"{result.kernel}: matrix pipe {u['matrix']['busy']:.1%} busy, VALU {u['valu']['busy']:.1%}, "
                        f"LDS {u['lds']['busy']:.1%}, memory {u['vmem']['busy']:.1%}", fill=dark, font=_font(28))
    about = f"simulated, one gfx950 compute unit; {result.clk:,} clk in all, clk {start:,} to {end:,} shown"
    if result.loop:
        about += (f"; loop {result.loop['label']}: {result.loop['clk_per_iteration']:,.0f} clk an iteration, "
                  f"matrix pipe {result.loop['matrix_busy']:.1%} busy")
    draw.text((24, 54), about, fill=grey, font=_font(19))
    draw.text((width - right + 8, top - 30), "busy /", fill=grey, font=_font(16))
    draw.text((width - right + 8, top - 12), "issuing", fill=grey, font=_font(16))

    y = top
    for name, picture, share in rows:
        if picture is None:
            draw.text((24, y + 4), name, fill=dark, font=_font(19))
            y += row
            continue
        draw.text((left - 12, y + row / 2), name, fill=dark, font=_font(18), anchor="rm")
        image.paste(picture, (left, y))
        draw.rectangle((left, y, left + plot - 1, y + row - 1), outline=(200, 200, 200))
        draw.text((left + plot + 10, y + row / 2), share, fill=dark, font=_font(18), anchor="lm")
        y += row + gap

    if result.loop and result.window:  # where wave 0 begins an iteration
        label = result.loop["label"]
        head = program.labels[label] if label in program.labels else int(label.rsplit(" ", 1)[1])
        first = e.wave[np.flatnonzero(e.index == head)[0]]
        for t in e.issue[(e.wave == first) & (e.index == head) & (e.issue >= start) & (e.issue < end)].tolist():
            x = left + (t - start) * plot // span
            for a in range(top - 6, bottom, 9):
                draw.line((x, a, x, min(a + 4, bottom)), fill=dark, width=2)
            if x + 220 < left + plot:
                draw.text((x + 4, top - 22), f"wave {first} begins an iteration", fill=grey, font=_font(16))
    step = _ruler(span)
    for t in range(-(-start // step) * step, end, step):
        x = left + (t - start) * plot // span
        draw.line((x, bottom, x, bottom + 7), fill=dark, width=2)
        if x > left + plot - 50:
            continue
        draw.text((x, bottom + 11), f"{t:,}", fill=dark, font=_font(17), anchor="ma")
    draw.text((left + plot + 10, bottom + 11), "clk", fill=dark, font=_font(17))

    x, y = left, bottom + 46
    for name, colour in COLOURS.items():
        wide = draw.textlength(name, font=_font(17)) + 54
        if x + wide > width - 20 or name.startswith("waits for matrix"):
            x, y = left, y + 28
        draw.rectangle((x, y, x + 22, y + 18), fill=colour, outline=(120, 120, 120))
        draw.text((x + 30, y + 9), name, fill=dark, font=_font(17), anchor="lm")
        x += wide
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return write_atomic(path, buffer.getvalue())

"""Putting streams of instructions together by hand."""
from __future__ import annotations

from .authoring import AuthoringError
from .program import Instruction


def _touched(inst: Instruction) -> tuple[set, set]:
    """(reads, writes) of one instruction: registers as (bank, number), and SCC."""
    reads = {(r.bank, i) for r in inst.reads() for i in r.units}
    writes = {(r.bank, i) for r in inst.writes() for i in r.units}
    names = {"vcc": (106, 107), "exec": (126, 127), "m0": (124,), "scc": (253,)}
    for state, into in ((inst.spec.implicit_reads, reads), (inst.spec.implicit_writes, writes)):
        into |= {("s", i) for n in state for i in names[n]}
    return reads, writes


def interleave(anchor: list[Instruction], fill: list[Instruction], per_slot: int, *, start: int = 0) -> list[Instruction]:
    """Weave two independent streams: after each anchor instruction from number ``start`` on, ``per_slot`` of ``fill``.

    The anchor is usually the MFMAs: a slot is one MFMA's shadow. What is left of ``fill`` follows the last anchor.
    AuthoringError, naming both Python lines, if one stream writes what the other reads or writes.
    """
    if per_slot < 1:
        raise AuthoringError(f"per_slot={per_slot}: at least 1")
    readers, writers = {}, {}
    for inst in anchor:
        reads, writes = _touched(inst)
        readers.update(dict.fromkeys(reads, inst))
        writers.update(dict.fromkeys(writes, inst))
    for inst in fill:
        reads, writes = _touched(inst)
        for unit in (reads | writes) & writers.keys() | writes & readers.keys():
            other = writers.get(unit) or readers[unit]
            raise AuthoringError(f"{inst.where}: '{inst}' and '{other}' ({other.where}) share {unit[0]}{unit[1]} and one "
                                 "writes it: the streams are not independent, place them one after the other")
    woven, at = [], 0
    for number, inst in enumerate(anchor):
        woven.append(inst)
        if number >= start:
            woven += fill[at:at + per_slot]
            at += per_slot
    return woven + fill[at:]

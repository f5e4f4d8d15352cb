"""Everything short of a GPU for one kernel and one problem: build, check, emulate against float64, simulate."""
from __future__ import annotations

from pathlib import Path

import numpy as np
from attrs import frozen
from rich.table import Table

from cdna4dsl import asm, check, emulate, isa, simulate, timeline
from cdna4dsl.program import Program

from . import KernelEntry, Problem, launch, reference

O_TOLERANCE, LSE_TOLERANCE = 0.04, 0.05


@frozen
class Report:
    """What was measured; errors are against float64 attention on the same quantised inputs."""
    kernel: str
    inputs: str
    shape: str
    program: Program
    waves_per_simd: int
    findings: int
    faults: tuple
    relative_error: float
    max_abs_error: float
    lse_max_abs_error: float
    unwritten: int
    simulated: simulate.SimResult
    files: tuple[Path, ...]
    instructions: int

    @property
    def passed(self) -> bool:
        """Clean and inside the tolerances (NaN fails)."""
        return (not self.findings and not self.faults and not self.unwritten and self.relative_error <= O_TOLERANCE
                and self.lse_max_abs_error <= LSE_TOLERANCE)

    def to_json(self) -> dict:
        s = self.simulated
        return {"kernel": self.kernel, "findings": self.findings, "relative_error": self.relative_error,
                "max_abs_error": self.max_abs_error, "lse_max_abs_error": self.lse_max_abs_error, "clk": s.clk,
                "loop": s.to_json()["loop"], "tflops": s.tflops, "faults": len(self.faults), "unwritten_bytes": self.unwritten,
                "matrix_busy": s.units["matrix"]["busy"], "clock_mhz": s.clock_mhz, "inputs": self.inputs, "shape": self.shape,
                "passed": self.passed, "files": [str(f) for f in self.files]}


def heaviest_flops(entry: KernelEntry, p: Problem) -> float:
    """FLOPs that attention itself needs in the workgroup the simulator runs: the last query tile of one head."""
    seq_q, seq_kv, dim = p.q.shape[1], p.k.shape[1], p.q.shape[3]
    first = (seq_q - 1) // entry.queries * entry.queries
    rows = np.arange(first, seq_q)
    seen = np.clip(rows + seq_kv - seq_q + 1, 0, seq_kv) if entry.causal else np.full(rows.shape, seq_kv)
    return 4.0 * dim * float(seen.sum())


def lse_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest absolute difference; rows that see no key must be -inf in both."""
    empty = np.isneginf(want)
    if not (np.isneginf(got) == empty).all():
        return float("inf")
    return float(np.max(np.abs(got[~empty] - want[~empty]), initial=0.0))


def prove(entry: KernelEntry, p: Problem, folder: Path, described: str, step) -> Report:
    """Run the whole path. ``step(text)`` is a context manager that yields a progress callable. Files go to ``folder``."""
    with step(f"{entry.name}: building"):
        program = entry.program()
        files = [asm.write_atomic(folder / f"{program.name}.s", asm.to_text(program)),
                 asm.write_atomic(folder / f"{program.name}.hsaco", asm.assemble(program))]
    with step(f"{entry.name}: checking"):
        findings = [f for f in check.check(program) if check.failing([f])]
    work = launch(entry, program, p)
    with step(f"{entry.name}: emulating {work.grid[0] * work.grid[1] * work.grid[2]} workgroups") as progress:
        result = emulate.run(program, work, progress=progress, record={0})
    with step(f"{entry.name}: float64 reference"):
        want_o, want_lse = p.reference()
        got_o = reference.decode_bf16(result.buffers["o"]).astype(np.float64)
        unwritten = sum(int((~w).sum()) for w in result.written.values())
    with step(f"{entry.name}: simulating"):
        sim = simulate.simulate(program, result.trace[0], flops=heaviest_flops(entry, p))
        files += [folder / f"{program.name}.timeline.json", folder / f"{program.name}.timeline.png"]
        timeline.chrome_trace(sim, program, files[-2])
        timeline.png(sim, program, files[-1])
    batch, seq, heads, dim = p.q.shape
    shape = f"batch {batch}, {seq} x {p.k.shape[1]} tokens, {heads} heads ({p.k.shape[2]} key/value)"
    return Report(entry.name, described, shape, program, sim.waves_per_simd, len(findings), tuple(result.faults),
                  reference.relative_error(got_o, want_o), float(np.max(np.abs(got_o - want_o))),
                  lse_error(result.buffers["lse"].astype(np.float64), want_lse), unwritten, sim, tuple(files), result.executed)


def table(reports: list[Report]) -> Table:
    """The table that ``cdna4 attention`` prints: a column a kernel."""
    t = Table(title="gfx950 kernels: emulated and simulated, not run on hardware")
    t.add_column("")
    for r in reports:
        t.add_column(r.kernel, overflow="fold")
    chip = isa.load()
    cus = chip.param("chip.xcds") * chip.param("chip.cus_per_xcd")
    rows = {
        "inputs": lambda r: f"{r.inputs}\n{r.shape}",
        "result": lambda r: "ok" if r.passed else "FAILED",
        "registers": lambda r: f"{r.program.info.arch_vgprs} VGPR, {r.program.info.acc_vgprs} AGPR, {r.program.info.sgprs} SGPR",
        "LDS": lambda r: f"{r.program.info.lds_bytes} bytes",
        "waves a SIMD": lambda r: str(r.waves_per_simd),
        "checker findings": lambda r: str(r.findings),
        "emulator faults": lambda r: f"{len(r.faults)} in {r.instructions} wave instructions",
        "O relative error": lambda r: f"{r.relative_error:.4f} (at most {O_TOLERANCE}); largest {r.max_abs_error:.4g}",
        "LSE largest error": lambda r: f"{r.lse_max_abs_error:.4f} (at most {LSE_TOLERANCE})",
        "unwritten output bytes": lambda r: str(r.unwritten),
        "clk, heaviest workgroup": lambda r: str(r.simulated.clk),
        "clk a loop iteration": lambda r: "no loop was taken" if not r.simulated.loop else f"{r.simulated.loop['clk_per_iteration']:.0f} ({r.simulated.loop['label']})",
        "matrix pipe busy": lambda r: f"{r.simulated.units['matrix']['busy']:.1%} ({r.simulated.units['matrix']['useful']:.1%} useful)"
                                      + ("" if not r.simulated.loop else f"; in the loop {r.simulated.loop['matrix_busy']:.1%}"),
        "predicted TFLOP/s": lambda r: f"{r.simulated.tflops:.0f} at {r.simulated.clock_mhz} MHz, were all {cus} CUs as busy as this one",
        "files": lambda r: "\n".join(map(str, r.files)),
    }
    for label, value in rows.items():
        t.add_row(label, *(value(r) for r in reports))
    return t

"""The ``cdna4`` command. Exit codes: 0 fine, 1 findings, 2 bad input."""
from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import asm, check as checker, disasm as disassembler, emulate as emulator, isa as machine, simulate as simulator
from . import stats as statistics, target as targets, timeline
from .authoring import AuthoringError
from .codeobject import CodeObjectError
from .encode import DecodeError
from .launch import Launch, LaunchError
from .parse import ParseError
from .program import Program

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)
BAD_INPUT = (targets.TargetError, ParseError, CodeObjectError, DecodeError, AuthoringError, LaunchError, asm.AsmError, machine.SpecError)

target_argument = click.argument("target")
param_option = click.option("-p", "params", multiple=True, metavar="KEY=VALUE", help="Parameter of a Python kernel factory.")
name_option = click.option("--kernel-name", metavar="NAME", help="Which kernel, if the target has several.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


@contextlib.contextmanager
def bad_input():
    """Turns every 'your input is wrong' into its message and exit code 2."""
    try:
        yield
    except BAD_INPUT as e:
        err.print(f"error: {e}", markup=False)
        sys.exit(2)
    except OSError as e:   # a folder that cannot be made, a full disk, a file that vanished
        err.print(f"error: {e.filename or 'file'}: {e.strerror or e}", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


def _print_json(value) -> None:
    click.echo(json.dumps(value, indent=1))


class _Steps:
    """A progress bar on stderr, one line a step; silent when nobody watches."""

    def __init__(self, silent: bool):
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
                            console=err, disable=silent)

    def __enter__(self):
        self.bar.__enter__()
        return self

    def __exit__(self, *exc):
        return self.bar.__exit__(*exc)

    @contextlib.contextmanager
    def step(self, text: str):
        """Yields a function that takes the fraction done."""
        task = self.bar.add_task(text, total=1.0)
        yield lambda fraction: self.bar.update(task, completed=min(float(fraction), 1.0))
        self.bar.update(task, completed=1.0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cdna4dsl")
def main() -> None:
    """Author, assemble, check, emulate and simulate gfx950 (CDNA4) kernels; no GPU needed.

    TARGET is a .s file, a code object (.co, .hsaco, .o), module:name or path/file.py:name (a kernel or its factory).
    """


@main.command()
@target_argument
@param_option
@name_option
@click.option("-o", "--out", "folder", default="out", show_default=True, type=click.Path(file_okay=False, path_type=Path))
@json_option
def build(target, params, kernel_name, folder, as_json):
    """Write TARGET's .s and .hsaco."""
    with bad_input():
        program = targets.one(targets.load(target, targets.parameters(params)), kernel_name, target)
        if program.info is None:
            raise targets.TargetError(f"{target} is a bare code fragment: it has no .amdhsa_kernel block, so there is nothing to load")
        text = asm.to_text(program)
        code = asm.assemble(program)
        try:
            files = [asm.write_atomic(folder / f"{program.name}.s", text), asm.write_atomic(folder / f"{program.name}.hsaco", code)]
        except OSError as e:
            raise targets.TargetError(f"cannot write to {folder}: {e.strerror}") from None
    if as_json:
        _print_json({"kernel": program.name, "files": [str(f) for f in files], "bytes": len(code), "assembler": asm.tool_name()})
    else:
        for f in files:
            out.print(f"{f}  {f.stat().st_size} bytes", markup=False)


@main.command()
@target_argument
@param_option
@json_option
def check(target, params, as_json):
    """Find missing wait states and waits. Exits 1 if there are findings."""
    with bad_input():
        programs = targets.load(target, targets.parameters(params))
    results = [(p, checker.check(p)) for p in programs]
    findings = [f for _, fs in results for f in fs]
    if as_json:
        merged = {"findings": [], "summary": {}}
        for p, fs in results:
            one = checker.to_json(fs, p)
            merged["findings"] += one["findings"]
            merged["summary"][p.name] = one["summary"]
        _print_json(merged["summary"] and {"findings": merged["findings"], "summary": merged["summary"] if len(results) > 1 else one["summary"]})
    else:
        for p, fs in results:
            for f in fs:
                place = f.python or f"{p.source}:{f.line if f.line is not None else '?'}"
                out.print(f"{place}: {f.severity}: {f.rule}: {f.message}", markup=False)
            failing = sum(checker.failing([f]) for f in fs)
            out.print(f"{p.name}: {len(p.instructions)} instructions, {failing} finding(s)", markup=False)
    sys.exit(1 if checker.failing(findings) else 0)


def _summary(a: np.ndarray) -> str:
    return f"{a.dtype} {list(a.shape)}"


@main.command()
@target_argument
@param_option
@name_option
@click.option("--launch", "launch_file", required=True, metavar="FILE.json", help="Grid, buffers and kernel arguments.")
@click.option("--out", "folder", type=click.Path(file_okay=False, path_type=Path), help="Where the output buffers go as .npy.")
@click.option("--lenient", is_flag=True, help="Do what hardware would; report no faults.")
@click.option("--max-instructions", type=int, help="Stop after so many instructions of one wave.")
@json_option
def emulate(target, params, kernel_name, launch_file, folder, lenient, max_instructions, as_json):
    """Run TARGET on the CPU. Exits 1 if strict mode reports faults."""
    with bad_input():
        program = targets.one(targets.load(target, targets.parameters(params)), kernel_name, target)
        launch = Launch.from_json(launch_file)
        options = {"max_instructions": max_instructions} if max_instructions else {}
        started = time.monotonic()
        try:
            with _Steps(as_json) as steps, steps.step(f"emulating {program.name}") as progress:
                result = emulator.run(program, launch, strict=not lenient, progress=progress, **options)
        except emulator.EmulationError as e:
            if as_json:
                _print_json({"kernel": program.name, "error": _fault_json(e.fault)})
            err.print(f"error: {e}", markup=False)
            sys.exit(1)
        files = {}
        if folder:
            for name, array in result.buffers.items():
                if name in launch.outputs or not np.array_equal(array, launch.buffers[name], equal_nan=array.dtype.kind == "f"):
                    files[name] = _save(folder / f"{name}.npy", array)
    if as_json:
        _print_json({"kernel": program.name, "instructions": result.executed, "seconds": round(time.monotonic() - started, 3),
                     "faults": [_fault_json(f) for f in result.faults], "files": {n: str(f) for n, f in files.items()}})
    else:
        for f in result.faults:
            out.print(f"{f.where}: {f.kind}: {f.message}", markup=False)
        for name, f in files.items():
            out.print(f"{f}  {_summary(result.buffers[name])}", markup=False)
        out.print(f"{program.name}: {result.executed} wave instructions, {len(result.faults)} fault(s)", markup=False)
    sys.exit(1 if result.faults else 0)


def _save(path: Path, array: np.ndarray) -> Path:
    import io
    b = io.BytesIO()
    np.save(b, array)
    return asm.write_atomic(path, b.getvalue())


def _fault_json(f) -> dict:
    return {"kind": f.kind, "message": f.message, "where": f.where, "instruction": f.mnemonic, "wave": list(f.wave) if f.wave else None}


@main.command()
@target_argument
@param_option
@name_option
@click.option("--launch", "launch_file", metavar="FILE.json", help="Run it in the emulator first and simulate what was executed.")
@click.option("--workgroup", "workgroup_id", default=0, show_default=True, help="Which workgroup of the launch to simulate.")
@click.option("--timeline", "timeline_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a timeline: .png, else Perfetto/Chrome JSON.")
@click.option("--set", "overrides", multiple=True, metavar="PARAM=VALUE", help="Override a parameter, e.g. lds.read_latency=80.")
@json_option
def simulate(target, params, kernel_name, launch_file, workgroup_id, timeline_file, overrides, as_json):
    """Simulate the cycles of one workgroup of TARGET on a compute unit."""
    with bad_input():
        program = targets.one(targets.load(target, targets.parameters(params)), kernel_name, target)
        values = _overrides(overrides)
        with _Steps(as_json) as steps:
            if launch_file:
                launch = Launch.from_json(launch_file)
                groups = int(np.prod(launch.grid))
                if not 0 <= workgroup_id < groups:
                    raise LaunchError(f"--workgroup {workgroup_id}: the launch has {groups} workgroup(s)")
                try:
                    with steps.step(f"emulating {program.name}") as progress:
                        traces = emulator.run(program, launch, strict=False, progress=progress, record={workgroup_id}).trace[workgroup_id]
                except emulator.EmulationError as e:
                    err.print(f"error: {e}", markup=False)
                    sys.exit(1)
            else:
                traces = simulator.straight_trace(program)
            with steps.step(f"simulating {program.name}"):
                result = simulator.simulate(program, traces, params=values)
        if timeline_file:
            _timeline(result, program, timeline_file)
    if as_json:
        _print_json(result.to_json())
        return
    table = Table(title=f"{result.kernel}: {result.clk} clk at {result.clock_mhz} MHz, {result.waves_per_simd} wave(s) a SIMD")
    for column in ("unit", "busy", "useful"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    for unit, share in result.units.items():
        table.add_row(unit, f"{share['busy']:.1%}", f"{share['useful']:.1%}" if "useful" in share else "")
    out.print(table)
    if result.loop:
        loop = result.loop
        out.print(f"loop {loop['label']}: {loop['iterations']} iterations of {loop['clk_per_iteration']:.0f} clk, matrix pipe {loop['matrix_busy']:.1%} busy")
    if not launch_file:
        out.print("no launch: each loop was taken a fixed number of times, forward branches fell through")
    for reason, clk in sorted(result.stalls.items(), key=lambda x: -x[1])[:8]:
        out.print(f"  stalled for {reason}: {clk} clk over all waves")
    if timeline_file:
        out.print(str(timeline_file), markup=False)


def _overrides(pairs) -> dict:
    known = machine.load().params
    values = {}
    for key, value in targets.parameters(tuple(pairs)).items() if all(p.partition("=")[0].isidentifier() for p in pairs) else _dotted(pairs):
        if key not in known:
            import difflib
            near = difflib.get_close_matches(key, known, 3)
            raise targets.TargetError(f"--set {key}: no such parameter" + (f"; did you mean {', '.join(near)}?" if near else ""))
        if isinstance(known[key].value, (int, float)) != isinstance(value, (int, float)):
            raise targets.TargetError(f"--set {key}={value}: expected a {'number' if isinstance(known[key].value, (int, float)) else 'word'}")
        values[key] = value
    return values


def _dotted(pairs):
    for p in pairs:
        key, sep, value = p.partition("=")
        if not sep:
            raise targets.TargetError(f"--set {p}: expected PARAM=VALUE")
        try:
            yield key, float(value) if "." in value else int(value, 0)
        except ValueError:
            yield key, value


def _timeline(result, program: Program, path: Path) -> None:
    (timeline.png if path.suffix.lower() == ".png" else timeline.chrome_trace)(result, program, path)


@main.command()
@click.option("--kernel", "name", default="fp8_hd128", show_default=True)
@click.option("--all", "all_kernels", is_flag=True, help="Every kernel.")
@click.option("--inputs", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.npz", help="q, k, v as [batch, seq, heads, dim], float16 or float32.")
@click.option("--random", "use_random", is_flag=True, help="Gaussian inputs.")
@click.option("--seq", type=click.IntRange(1), help="Sequence length (random inputs: default 1024; else a cut of the inputs).")
@click.option("--heads", type=click.IntRange(1), help="Query heads of random inputs (default 2).")
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads of random inputs (default: as many as heads).")
@click.option("--batch", type=click.IntRange(1), help="Batch of random inputs (default 1).")
@click.option("--seed", type=click.IntRange(0), help="Seed of random inputs (default 0).")
@click.option("--scale", type=float, help="Softmax scale (default 1/sqrt(dim)).")
@click.option("-o", "--out", "folder", default="out", show_default=True, type=click.Path(file_okay=False, path_type=Path))
@json_option
def attention(name, all_kernels, inputs, use_random, seq, heads, kv_heads, batch, seed, scale, folder, as_json):
    """Build the attention kernel, check it, run its machine code on real tensors, simulate it, and show the numbers."""
    from attention import proof
    import attention as kernels
    with bad_input():
        try:
            if inputs and (use_random or any(x is not None for x in (heads, kv_heads, batch, seed))):
                raise kernels.InputError("--inputs and random inputs (--random, --seed, --heads, --kv-heads, --batch) exclude each other")
            if name not in kernels.KERNELS:
                raise kernels.InputError(f"no kernel '{name}'; there is {', '.join(kernels.KERNELS)}")
            reports = []
            for entry in kernels.KERNELS.values() if all_kernels else [kernels.KERNELS[name]]:
                if use_random or any(x is not None for x in (heads, kv_heads, batch, seed)):
                    heads_ = heads or kv_heads or 2
                    if heads_ % (kv_heads or heads_):
                        raise kernels.InputError(f"--heads {heads_} is no multiple of --kv-heads {kv_heads}")
                    problem = kernels.random_problem(seed or 0, seq=seq or 1024, heads=heads_, kv_heads=kv_heads, batch=batch or 1,
                                                     scale=scale, head_dim=entry.head_dim)
                    described = f"gaussian, seed {seed or 0}"
                else:
                    path = inputs or kernels.ACTIVATIONS
                    problem = kernels.load_problem(path, seq=seq, scale=scale, head_dim=entry.head_dim)
                    described = f"{path.name}" + ("" if inputs else ": SmolLM2 activations")
                with _Steps(as_json) as steps:
                    reports.append(proof.prove(entry, problem, folder, described, steps.step))
        except kernels.InputError as e:
            raise targets.TargetError(str(e)) from None
        except OSError as e:
            raise targets.TargetError(f"{e.filename or folder}: {e.strerror}") from None
        except emulator.EmulationError as e:
            err.print(f"error: {e}", markup=False)
            sys.exit(1)
    if as_json:
        _print_json([r.to_json() for r in reports])
    else:
        out.print(proof.table(reports))
    sys.exit(0 if all(r.passed for r in reports) else 1)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--out", "destination", type=click.Path(path_type=Path), metavar="FILE", help="Write to FILE instead of the terminal.")
@click.option("--offsets", is_flag=True, help="A comment with byte offset and encoding on each line.")
@json_option
def disasm(file, destination, offsets, as_json):
    """Disassemble a gfx950 ELF FILE to text that assembles again. Exits 1 if something in it was not an instruction."""
    with bad_input():
        try:
            data = file.read_bytes()
        except OSError as e:
            raise targets.TargetError(f"{file}: {e.strerror}") from None
        listing = disassembler.listing(data, str(file))
        content = json.dumps(listing.to_json(), indent=1) + "\n" if as_json else disassembler.text(listing, offsets=offsets)
        if destination:
            try:
                asm.write_atomic(destination, content)
            except OSError as e:
                raise targets.TargetError(f"cannot write {destination}: {e.strerror}") from None
        else:
            click.echo(content, nl=False)
    if listing.unknown:
        err.print(f"{file}: {listing.unknown} place(s) are not an instruction", markup=False)
    sys.exit(1 if listing.unknown else 0)


@main.command()
@target_argument
@param_option
@json_option
def stats(target, params, as_json):
    """Count what TARGET is made of: instruction mix, loops, code bytes, registers, occupancy."""
    with bad_input():
        results = [statistics.stats(p) for p in targets.load(target, targets.parameters(params))]
    if as_json:
        _print_json({"kernels": [s.to_json() for s in results]})
    else:
        for s in results:
            shown = statistics.render(s)
            # never squeezed: a file or a pipe has no width, and a terminal wraps
            needed = Measurement.get(out, out.options.update(width=1000), shown).maximum
            Console(highlight=False, soft_wrap=True, width=max(out.width, needed)).print(shown)


@main.command()
@click.argument("mnemonic", required=False)
@json_option
def isa(mnemonic, as_json):
    """Show an instruction (or list them all): encoding, operands, unit, clk, hazards, semantics, source."""
    m = machine.load()
    if mnemonic is None:
        if as_json:
            _print_json(sorted(m.instructions))
        else:
            out.print(f"{len(m.instructions)} instructions: " + ", ".join(sorted(m.instructions)), markup=False)
        return
    base = mnemonic.lower()
    for suffix in ("_e32", "_e64"):
        base = base.removesuffix(suffix)
    spec = m.instructions.get(base)
    if spec is None:
        import difflib
        near = difflib.get_close_matches(base, m.instructions, 3)
        err.print(f"error: no instruction '{mnemonic}' in isa_specs" + (f"; did you mean {', '.join(near)}?" if near else ""), markup=False)
        sys.exit(2)
    hazards = checker.rules_of(spec)
    if as_json:
        _print_json({"mnemonic": spec.mnemonic, "forms": [{"encoding": f.encoding, "opcode": f.opcode, "bits": m.encodings[f.encoding].bits} for f in spec.forms],
                     "operands": [{"name": o.name, "kind": o.kind, "type": o.type, "dwords": o.dwords, "out": o.out, "in": o.inp} for o in spec.operands],
                     "modifiers": list(spec.modifiers), "classes": list(spec.classes), "unit": spec.unit, "issue_clk": spec.issue, "latency_clk": spec.latency,
                     "passes": spec.passes, "semantics": spec.semantics_text, "reads": sorted(spec.implicit_reads), "writes": sorted(spec.implicit_writes),
                     "hazards": [h.name for h in hazards], "sources": {s: m.sources[s] for s in spec.cite.sources}, "where": spec.where})
        return
    out.print(f"{spec.mnemonic} {', '.join(o.name for o in spec.operands)}", markup=False)
    table = Table(show_header=False, box=None, padding=(0, 2))
    row = lambda k, v: table.add_row(k, v)
    for f in spec.forms:
        e = m.encodings[f.encoding]
        fields = ", ".join(f"{x.name} [{x.high}:{x.low}]".replace("[", "\\[") for x in e.fields.values())
        row("encoding", f"{f.encoding}{' (' + spec.mnemonic + f.suffix + ')' if f.suffix else ''}, {e.bits} bits, opcode {f.opcode}: {fields}")
    for o in spec.operands:
        row("operand", f"{o.name}: {'read and written' if o.out and o.inp else 'written' if o.out else 'read'}, {o.kind}, {o.type}, {o.dwords} dword{'s' if o.dwords > 1 else ''}")
    if spec.modifiers:
        row("modifiers", ", ".join(spec.modifiers))
    row("unit", f"{spec.unit} ({', '.join(spec.classes)})")
    row("issue", f"{spec.issue} clk")
    row("latency", f"{spec.latency} clk" + (f" ({spec.passes} passes)" if spec.passes else ""))
    for h in hazards:
        waits = ", ".join(f"{n} ({p} passes)" if p else str(n) for p, n in h.wait.items())
        row("hazard", f"{h.name}: {' '.join(h.producer)} -> {' '.join(h.consumer)}: {waits} wait states")
    row("semantics", spec.semantics_text.replace("[", "\\["))
    if spec.implicit_reads or spec.implicit_writes:
        row("implicit", f"reads {', '.join(sorted(spec.implicit_reads)) or 'nothing'}; writes {', '.join(sorted(spec.implicit_writes)) or 'nothing'}")
    for s in spec.cite.sources:
        row("source", f"{s}: {m.sources[s]}")
    row("spec", f"isa_specs/{spec.where}")
    out.print(table)


if __name__ == "__main__":
    main()

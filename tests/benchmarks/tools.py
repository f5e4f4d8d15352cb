"""How fast the tools are on the FP8 kernel: ``python tests/benchmarks/tools.py``. Best of three; not a test."""
import time

import attention
from cdna4dsl import asm, check, codeobject, emulate, parse, simulate


def best(action):
    times, result = [], None
    for _ in range(3):
        start = time.perf_counter()
        result = action()
        times.append(time.perf_counter() - start)
    return min(times), result


def main():
    entry = attention.KERNELS["fp8_hd128"]
    seconds, program = best(entry.program)
    n = len(program.instructions)
    print(f"author    {seconds:7.3f} s  {n / seconds:12,.0f} instructions/s")
    text = asm.to_text(program)
    seconds, code = best(lambda: asm.assemble(program))
    print(f"assemble  {seconds:7.3f} s")
    for name, action in (("parse", lambda: parse.parse(text)), ("decode", lambda: codeobject.read(code)), ("check", lambda: check.check(program))):
        seconds, _ = best(action)
        print(f"{name:9s} {seconds:7.3f} s  {n / seconds:12,.0f} instructions/s")
    problem = attention.random_problem(0, seq=1024, heads=4)
    launch = attention.launch(entry, program, problem)
    for strict in (True, False):
        seconds, result = best(lambda: emulate.run(program, launch, strict=strict, record={0}))
        print(f"emulate   {seconds:7.3f} s  {result.executed * 64 / seconds:12,.0f} lane instructions/s, {'strict' if strict else 'lenient'}")
    trace = result.trace[0]
    seconds, _ = best(lambda: simulate.simulate(program, trace, record=False))
    print(f"simulate  {seconds:7.3f} s  {sum(len(t.index) for t in trace) / seconds:12,.0f} instructions/s")


if __name__ == "__main__":
    main()

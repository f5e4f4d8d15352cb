"""Every s_nop and s_waitcnt of the kernel is needed, and its absence is noticed."""
import pytest

import attention
from attrs import evolve
from cdna4dsl import check, emulate
from cdna4dsl.program import Program

ENTRY = attention.KERNELS["fp8_hd128"]
PROGRAM = ENTRY.program()
SITES = [n for n, i in enumerate(PROGRAM.instructions) if i.mnemonic in ("s_nop", "s_waitcnt")]
PROBLEM = attention.random_problem(1, seq=300, seq_kv=700, heads=1)  # masked and unmasked tiles, both buffers, rescales


def without(program: Program, index: int) -> Program:
    instructions = program.instructions[:index] + program.instructions[index + 1:]
    return evolve(program, instructions=instructions, labels={n: i - (i > index) for n, i in program.labels.items()})


def test_there_is_something_to_delete():
    assert len(SITES) > 20 and not check.check(PROGRAM)


@pytest.mark.parametrize("index", SITES, ids=lambda n: f"{n}-{PROGRAM.instructions[n]}".replace(" ", "_"))
def test_deletion_is_noticed(index):
    mutant = without(PROGRAM, index)
    if check.check(mutant):  # a note counts too: the whole kernel has none
        return
    try:
        assert emulate.run(mutant, attention.launch(ENTRY, mutant, PROBLEM)).faults, f"nobody misses {PROGRAM.instructions[index]}"
    except emulate.EmulationError:
        pass


def test_barrier_deletion_is_noticed():
    for index in [n for n, i in enumerate(PROGRAM.instructions) if i.mnemonic == "s_barrier"]:
        mutant = without(PROGRAM, index)
        assert check.check(mutant) or emulate.run(mutant, attention.launch(ENTRY, mutant, PROBLEM)).faults

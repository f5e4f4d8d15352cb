"""The checker on minimal programs. Wait states come from the manual's tables (ISA 4.5, table 38) and LLVM 22, not from the rules."""
import time

import pytest
from attrs import evolve

from cdna4dsl import check, isa, parse
from cdna4dsl.authoring import Kernel
from cdna4dsl.program import Imm, KernelInfo, Program

M = isa.load()


def program(text: str, **info) -> Program:
    p = parse.parse(text)[0]
    return evolve(p, info=KernelInfo("k", (256, 1, 1), **info)) if info else p


def found(text: str, **info) -> list[tuple]:
    """(rule, line, have, need) of everything but notes."""
    return [(f.rule, f.line, f.have, f.need) for f in check.check(program(text, **info)) if check.failing([f])]


def waits(n: int) -> str:
    return "".join(f"s_nop {min(16, n - k) - 1}\n" for k in range(0, n, 16))


MFMA = {4: "v_mfma_f32_16x16x32_bf16 v[0:3], v[32:35], v[36:39], v[0:3]", 8: "v_mfma_f32_32x32x16_bf16 v[0:15], v[32:35], v[36:39], v[0:15]",
        16: "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[40:47], v[0:15]"}
# MFMA of other registers, to read v[0:3] as A, as part of C
AS_A = "v_mfma_f32_16x16x32_bf16 v[64:67], v[0:3], v[68:71], 0"
AS_C = "v_mfma_f32_16x16x32_bf16 v[64:67], v[72:75], v[68:71], v[2:5]"
DISJOINT = "v_mfma_f32_32x32x16_bf16 v[64:79], v[32:35], v[36:39], v[0:15]"

CASES = [
    *(("xdl_srcab", MFMA[p], AS_A, n) for p, n in ((4, 8), (8, 12), (16, 20))),
    *(("xdl_srcc_partial", MFMA[p], AS_C, n) for p, n in ((4, 6), (8, 10), (16, 18))),
    *(("xdl_valu", MFMA[p], "v_add_f32 v90, v3, v3", n) for p, n in ((4, 8), (8, 12), (16, 20))),
    ("xdl_valu", MFMA[8], "v_mov_b32 v15, 0", 12),
    *(("xdl_memory", MFMA[p], "global_store_dword v[90:91], v2, off", n) for p, n in ((4, 8), (8, 12), (16, 20))),
    ("xdl_memory", MFMA[16], "ds_write_b32 v90, v0", 20),
    ("xdl_memory", MFMA[16], "ds_read_b32 v0, v90", 20),
    ("xdl_war", "v_mfma_f32_16x16x32_bf16 v[0:3], v[32:35], v[36:39], v[4:7]", "v_mov_b32 v4, 0", 3),
    ("xdl_war", "v_mfma_f32_32x32x16_bf16 v[0:15], v[32:35], v[36:39], v[16:31]", "v_mov_b32 v20, 0", 7),
    ("xdl_war", "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[40:47], v[16:31]", "v_mov_b32 v31, 0", 15),
    # FP6/FP4 A and B halve the passes
    ("xdl_valu", "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:37], v[40:43], v[0:15] cbsz:2 blgp:4", "v_mov_b32 v15, 0", 12),
    ("xdl_valu", "v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[32:35], v[40:43], a[0:3] cbsz:4 blgp:4", "v_mov_b32 v0, 0", None),  # a0 is not v0
    ("xdl_memory", "v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[32:35], v[40:43], a[0:3] cbsz:4 blgp:4", "ds_write_b32 v1, a2", 8),
    ("valu_xdl", "v_mov_b32 v3, 0", AS_A, 2),
    ("valu_xdl", "v_mov_b32 v5, 0", AS_C, 2),
    ("trans_valu", "v_exp_f32 v0, v1", "v_add_f32 v2, v0, v0", 1),
    ("trans_valu", "v_exp_f32 v0, v1", "v_exp_f32 v2, v0", None),
    ("trans_valu", "v_exp_f32 v0, v1", "v_mov_b32 v0, 0", None),
    ("valu_xdl", "v_exp_f32 v0, v1", AS_A, 2),
    ("valu_permlane", "v_mov_b32 v0, v1", "v_permlane32_swap_b32 v0, v2", 2),
    ("valu_permlane", "v_mov_b32 v2, v1", "v_permlane16_swap_b32 v0, v2", 2),
    ("valu_permlane", "v_permlane32_swap_b32 v0, v2", "v_permlane32_swap_b32 v0, v3", 2),
    ("valu_readlane", "v_mov_b32 v0, v1", "v_readfirstlane_b32 s0, v0", 1),
    ("subdword_valu", "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", "v_mov_b32 v3, v0", 1),
    ("subdword_valu", "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", "v_cvt_pk_fp8_f32 v0, v1, v2", 1),
    ("subdword_valu", "v_cvt_pk_fp8_f32 v0, v1, v2", "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", None),
    ("valu_sgpr_vmem", "v_readfirstlane_b32 s4, v0", "buffer_load_dword v1, off, s[4:7], 0", 5),
    ("valu_sgpr_vmem", "v_readfirstlane_b32 s4, v0", "buffer_load_dword v1, off, s[8:11], s4", 5),
    ("valu_sgpr_vmem", "v_readfirstlane_b32 s4, v0", "global_load_dword v1, v2, s[4:5]", 5),
    ("valu_sgpr_vmem", "s_mov_b32 s4, 0", "global_load_dword v1, v2, s[4:5]", None),
    ("valu_sgpr_constant", "v_readfirstlane_b32 s4, v0", "v_mul_f32 v1, s4, v1", 2),
    ("valu_sgpr_constant", "v_cmp_eq_u32 vcc, v0, v1", "v_cndmask_b32 v2, v3, v4, vcc", None),
    ("valu_sgpr_constant", "v_readfirstlane_b32 s4, v0", "s_add_u32 s5, s4, 1", None),
    ("valu_vccz", "v_cmp_eq_u32 vcc, v0, v1", "v_mov_b32 v2, src_vccz", 5),
    ("valu_exec_xdl", "v_cmp_eq_u32 exec, v0, v1", AS_A, 4),
    ("valu_exec_lane", "v_cmp_eq_u32 exec, v10, v1", "v_readfirstlane_b32 s0, v0", 4),
    ("valu_exec_permlane", "v_cmp_eq_u32 exec, v10, v11", "v_permlane32_swap_b32 v0, v2", 4),
    ("valu_exec_vmem", "v_cmp_eq_u32 exec, v10, v11", "global_load_dword v1, v2, s[4:5]", 5),
    ("wide_store_war", "global_store_dwordx4 v[8:9], v[0:3], off", "v_mov_b32 v2, 0", 2),
    ("wide_store_war", "global_store_dwordx4 v[8:9], v[64:67], off", AS_A, 2),
    ("wide_store_war", "buffer_store_dwordx4 v[0:3], off, s[0:3], 0", "v_mov_b32 v3, 0", 2),
    ("wide_store_war", "buffer_store_dwordx4 v[0:3], off, s[0:3], s4", "v_mov_b32 v3, 0", None),
    ("wide_store_war", "global_store_dwordx2 v[8:9], v[0:1], off", "v_mov_b32 v0, 0", None),
    ("wide_store_war", "ds_write_b128 v8, v[0:3]", "v_mov_b32 v0, 0", None),
    ("wide_store_war_memory", "global_store_dwordx4 v[8:9], v[0:3], off", "ds_read_b32 v2, v8", 1),
    ("salu_m0_dma", "s_mov_b32 m0, 0", "buffer_load_dword v0, s[0:3], 0 offen lds", 1),
    ("salu_m0_dma", "s_mov_b32 m0, 0", "buffer_load_dword v1, v0, s[0:3], 0 offen", None),
    # same accumulator and opcode: forwarded; another opcode: not
    ("xdl_srcc_same", MFMA[8], MFMA[8], None),
    ("xdl_srcc_partial", MFMA[8], MFMA[8].replace("bf16", "f16"), 10),
    ("xdl_srcc_partial", MFMA[8], DISJOINT, None),
]


@pytest.mark.parametrize("rule,producer,consumer,need", CASES, ids=lambda x: str(x).split(" ")[0])
def test_wait_states(rule, producer, consumer, need):
    line = lambda text: text.count("\n")
    if need is None:
        assert found(f"{producer}\n{consumer}\n") == []
        return
    for have in {0, need - 1}:
        text = f"{producer}\n{waits(have)}{consumer}\n"
        assert found(text) == [(rule, line(text), have, need)]
    assert found(f"{producer}\n{waits(need)}{consumer}\n") == []


def test_every_rule_is_tested():
    needs_more = {"valu_sgpr_lane_select"}  # v_readlane with an SGPR selector is not in the specs
    assert {h.name for h in M.hazards} - {c[0] for c in CASES} <= needs_more


def test_other_instructions_are_one_wait_state_each():
    assert found("v_exp_f32 v0, v1\nv_mov_b32 v9, 0\nv_add_f32 v2, v0, v0\n") == []
    assert found(MFMA[4] + "\n" + "v_mov_b32 v9, 0\n" * 7 + "v_mov_b32 v0, 0\n") == [("xdl_valu", 9, 7, 8)]


def test_one_cause_one_finding():
    assert found(MFMA[16] + "\n" + "".join(f"v_mul_f32 v{i}, v{i}, v50\n" for i in range(16))) == [("xdl_valu", 2, 0, 20)]


def test_hazard_around_a_loop():
    loop = f"L:\nv_mul_f32 v90, v0, v0\ns_nop 3\n{MFMA[4]}\ns_cbranch_scc1 L\n"
    assert found(loop) == [("xdl_valu", 2, 1, 8)]
    assert found(loop.replace("s_cbranch", "s_nop 6\ns_cbranch")) == []
    assert "around the loop" in check.check(program(loop))[0].message


def test_the_short_path_decides():
    branch = f"{MFMA[4]}\ns_cbranch_scc1 SKIP\n{{}}SKIP:\nv_mul_f32 v90, v0, v0\n"
    assert found(branch.format(waits(8))) == [("xdl_valu", 5, 1, 8)]  # the s_nop stands on the long path only
    assert found(f"{waits(1)}s_cbranch_scc1 A\ns_nop 0\ns_branch B\nA:\n{MFMA[4]}\n{waits(6)}s_branch B\nB:\nv_mov_b32 v0, 0\n") == [("xdl_valu", 10, 7, 8)]


def test_short_path_in_a_loop_with_a_branch():
    # LLVM 22 misses this one: its search reaches the v_mov by the long way around first
    text = f"L:\nv_mul_f32 v8, v9, v9\ns_cbranch_vccz S\nv_mov_b32 v3, 0\nS:\n{AS_A}\ns_nop 15\ns_cbranch_scc1 L\n"
    assert found(text) == [("valu_xdl", 6, 0, 2)]


# -- s_waitcnt --------------------------------------------------------------------------------------------------------
LOADS = "global_load_dword v0, v[8:9], off\nglobal_load_dword v1, v[8:9], off\nglobal_load_dword v2, v[8:9], off\n"


@pytest.mark.parametrize("wait,reads,need", [
    ("vmcnt(2)", "v0", None), ("vmcnt(2)", "v1", "vmcnt(1)"), ("vmcnt(1)", "v1", None), ("vmcnt(0)", "v2", None), ("lgkmcnt(0)", "v0", "vmcnt(2)"),
    ("vmcnt(3)", "v0", "vmcnt(2)")])
def test_vmcnt_is_in_order(wait, reads, need):
    text = f"{LOADS}s_waitcnt {wait}\nv_mul_f32 v5, {reads}, {reads}\n"
    assert found(text) == ([("wait-read", 5, "pending", need)] if need else [])


def test_stores_and_lds_dma_count_on_vmcnt():
    text = "global_load_dword v0, v[8:9], off\nglobal_store_dword v[8:9], v5, off\nbuffer_load_dword v7, s[0:3], 0 offen lds\ns_waitcnt vmcnt({})\nv_mul_f32 v5, v0, v0\n"
    assert found(text.format(2)) == [] and found(text.format(3)) == [("wait-read", 5, "pending", "vmcnt(2)")]


def test_overwriting_a_pending_register():
    assert found("ds_read_b32 v0, v1\nv_mov_b32 v0, 0\n") == [("wait-overwrite", 2, "pending", "lgkmcnt(0)")]
    assert found("ds_read_b32 v0, v1\nds_read_b32 v0, v2\n") == []          # they return in order
    assert found("ds_read_b32 v0, v1\nv_mov_b32 v1, 0\n") == []             # the address was read at issue
    assert found("global_store_dword v[8:9], v5, off\nv_mov_b32 v5, 0\n") == []


def test_scalar_loads_are_out_of_order():
    both = "ds_read_b32 v0, v1\nds_read_b32 v2, v1\n{}s_waitcnt lgkmcnt({})\nv_mul_f32 v5, v0, v0\n"
    assert found(both.format("", 1)) == []
    assert found(both.format("s_load_dword s0, s[2:3], 0\n", 1)) == [("wait-read", 5, "pending", "lgkmcnt(0)")]
    assert found(both.format("s_load_dword s0, s[2:3], 0\n", 0)) == []
    assert found("s_load_dword s0, s[2:3], 0\ns_load_dword s1, s[2:3], 4\ns_waitcnt lgkmcnt(1)\ns_add_u32 s4, s0, 1\n") == [("wait-read", 4, "pending", "lgkmcnt(0)")]


def test_a_wait_on_one_path_is_not_enough():
    text = "ds_read_b32 v0, v1\ns_cbranch_scc1 A\ns_waitcnt lgkmcnt(0)\nA:\nv_mul_f32 v5, v0, v0\n"
    assert found(text) == [("wait-read", 5, "pending", "lgkmcnt(0)")]
    # one path issues a younger load, the other does not: the smaller count covers both
    text = "global_load_dword v0, v[8:9], off\ns_cbranch_scc1 A\nglobal_load_dword v1, v[8:9], off\nA:\ns_waitcnt vmcnt({})\nv_mul_f32 v5, v0, v0\n"
    assert found(text.format(0)) == [] and found(text.format(1)) == [("wait-read", 6, "pending", "vmcnt(0)")]


def test_wait_around_a_loop():
    text = "L:\nv_mul_f32 v5, v0, v0\nglobal_load_dword v0, v[8:9], off\n{}s_cbranch_scc1 L\n"
    assert found(text.format("")) == [("wait-read", 2, "pending", "vmcnt(0)")]
    assert found(text.format("s_waitcnt vmcnt(0)\n")) == []


def test_more_loads_than_the_counter_holds():
    loads = "global_load_dword v0, v[8:9], off\n" + "global_load_dword v1, v[8:9], off\n" * 70
    assert found(loads + "v_mul_f32 v5, v0, v0\n") == [("wait-read", 72, "pending", "vmcnt(62)")]
    assert found(loads + "s_waitcnt vmcnt(62)\nv_mul_f32 v5, v0, v0\n") == []


# -- LDS-DMA ----------------------------------------------------------------------------------------------------------
DMA = "buffer_load_dwordx4 v7, s[0:3], 0 offen lds\n"


def test_lds_dma_needs_a_wait_before_the_barrier():
    good = f"{DMA}s_waitcnt vmcnt(0)\ns_barrier\nds_read_b32 v0, v1\n"
    assert found(good) == []
    assert found(good.replace("s_waitcnt vmcnt(0)\n", "")) == [("lds-dma-unwaited", 3, "pending", "vmcnt before s_barrier")]
    # in flight for the other buffer
    assert found(f"{DMA}s_waitcnt vmcnt(0)\ns_barrier\n{DMA}ds_read_b32 v0, v1\ns_waitcnt vmcnt(0)\ns_barrier\nds_read_b32 v2, v1\n") == []
    # three buffers: a counted wait leaves the younger one in flight
    assert found(f"{DMA}{DMA}s_waitcnt vmcnt(1)\ns_barrier\nds_read_b32 v0, v1\n") == []


def test_lds_dma_at_the_end():
    assert found(f"{DMA}s_endpgm\n") == [("lds-dma-at-end", 2, "pending", "vmcnt(0)")]
    assert found(f"{DMA}s_waitcnt vmcnt(0)\ns_endpgm\n") == []
    assert found(f"s_cbranch_scc1 E\n{DMA}E:\ns_endpgm\n") == [("lds-dma-at-end", 4, "pending", "vmcnt(0)")]


# -- structure --------------------------------------------------------------------------------------------------------
INFO = {"arch_vgprs": 128}


def test_undefined_registers():
    assert found("v_add_f32 v1, v0, v2\ns_endpgm\n", **INFO) == [("undefined-register", 1, None, None)]
    assert found("v_mov_b32 v2, s4\nv_mov_b32 v3, s5\ns_endpgm\n", **INFO) == [("undefined-register", 2, None, None)]  # s4: workgroup id z
    assert found("s_cbranch_scc1 A\nv_mov_b32 v2, 0\nA:\nv_mov_b32 v3, v2\ns_endpgm\n", **INFO) == []                 # some path wrote it
    assert found("v_cvt_pk_fp8_f32 v1, v0, v0\ns_endpgm\n", **INFO) == []  # the other half follows
    assert found("s_mov_b32 m0, 0\ns_nop 0\nbuffer_load_dword v0, s[0:3], 0 offen lds\ns_waitcnt vmcnt(0)\ns_endpgm\n", **INFO) == []
    assert found("buffer_load_dword v0, s[0:3], 0 offen lds\ns_waitcnt vmcnt(0)\ns_endpgm\n", **INFO) == [("undefined-register", 1, None, None)]
    assert found("v_add_f32 v1, v0, v2\n") == []                           # a fragment starts anywhere


def test_control_flow():
    assert found("v_mov_b32 v1, 0\n", **INFO) == [("past-the-end", 1, None, None)]
    assert found("v_mov_b32 v1, 0\n") == []
    assert ("past-the-end", 1, None, None) in found("s_branch E\ns_endpgm\nE:\n", **INFO)
    note, = check.check(program("s_endpgm\nv_mov_b32 v1, v9\n", **INFO))
    assert (note.rule, note.severity, note.line) == ("unreachable", "note", 2)
    p = program("A:\ns_branch A\n")
    assert [f.rule for f in check.check(evolve(p, labels={}))] == ["unknown-target"]


def test_limits():
    p = program("s_nop 15\n")
    p.instructions[0].operands["simm16"] = Imm(19)
    assert [(f.rule, f.have, f.need) for f in check.check(p)] == [("s_nop-range", 4, 20)]
    assert found("v_mov_b32 v128, 0\ns_endpgm\n", **INFO) == [("register-file", 1, None, None)]
    assert [r for r, *_ in found("s_endpgm\n", arch_vgprs=256, acc_vgprs=264)] == ["register-file"]
    assert found("s_endpgm\n", lds_bytes=163841) == [("lds-size", 1, 163841, 163840)] and found("s_endpgm\n", lds_bytes=163840) == []


def test_packed_op_sel_erratum():
    good = "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]"
    assert found(good + " op_sel_hi:[1,0,1]\n") == []
    assert found(good + " op_sel:[0,1,0]\n") == [("erratum-packed-op_sel", 1, None, None)]


# -- the interface ----------------------------------------------------------------------------------------------------
def test_messages_name_both_places():
    k = Kernel("k", workgroup=(64, 1, 1))
    a, b = k.vgpr("a"), k.vgpr("b")
    k.v_exp_f32(a, k.workitem_id)
    k.v_add_f32(b, a, a)
    k.s_endpgm()
    p = k.finalize()
    f, = check.check(p)
    first, second = (p.instructions[n].python for n in (0, 1))
    assert f.python == f"{second[0]}:{second[1]}" and f"{first[0]}:{first[1]}" in f.message and "s_nop 0" in f.message and "LLVM22" in f.message
    data = check.to_json([f], p)
    assert data["findings"][0].keys() == {"rule", "severity", "line", "instruction", "python", "have", "need", "message"}
    assert data["summary"] == {"instructions": 3, "error": 1, "warning": 0, "note": 0, "rules": {"trans_valu": 1}}


def test_rules_of():
    assert {"trans_valu", "valu_xdl", "valu_permlane"} <= {h.name for h in check.rules_of(M.instructions["v_exp_f32"])}
    assert "salu_m0_dma" not in {h.name for h in check.rules_of(M.instructions["buffer_load_dwordx2"])} and not check.rules_of(M.instructions["s_barrier"])


@pytest.mark.parametrize("field,words,message", [
    ("producer", ("nosuch", "writes", "vgpr"), "unknown word 'nosuch'"), ("consumer", ("valu", "reads", "nosuch"), "unknown word 'nosuch'"),
    ("consumer", ("valu", "vgpr"), "is not CLASS"), ("relation", ("near",), "unknown relation")])
def test_unknown_words_are_refused(field, words, message):
    with pytest.raises(isa.SpecError, match=f"{M.hazards[0].name}.*{message}"):
        check._rule(evolve(M.hazards[0], **{field: words}), M)


def test_ten_thousand_instructions():
    body = (f"{MFMA[16]}\nds_read_b128 v[96:99], v90\nv_add_f32 v91, v92, v93\nv_exp_f32 v94, v95\ns_waitcnt lgkmcnt(0)\n"
            "global_load_dwordx4 v[100:103], v[104:105], off\n")
    one, four = (program("L:\n" + body * n + "s_cbranch_scc1 L\n") for n in (417, 1667))
    seconds = []
    for p in (one, four):
        start = time.process_time()
        assert check.check(p) == []
        seconds.append(time.process_time() - start)
    assert len(four.instructions) > 10000 and seconds[1] < 5 and seconds[1] < 8 * seconds[0] + 0.2  # linear, on a busy machine

"""A first kernel: y = a * x + y on float32, two elements a lane, with a packed multiply-add."""
import numpy as np

from cdna4dsl import asm, check, emulate, simulate
from cdna4dsl.authoring import Kernel, vcc
from cdna4dsl.launch import Launch


def axpy():
    k = Kernel("axpy", workgroup=(256, 1, 1))
    x, y, a, n = k.arg("x", "pointer"), k.arg("y", "pointer"), k.arg("a", "f32"), k.arg("n", "u32")
    x_ptr, y_ptr, scalars = k.sgpr("x", 2), k.sgpr("y", 2), k.sgpr("a_n", 2)
    k.s_load_dwordx2(x_ptr, k.kernarg, x.offset)
    k.s_load_dwordx2(y_ptr, k.kernarg, y.offset)
    k.s_load_dwordx2(scalars, k.kernarg, a.offset)          # a and n lie side by side
    # element = 2 * (256 * workgroup + work-item); byte = 4 * element
    element, byte = k.vgpr("element"), k.vgpr("byte")
    k.s_lshl_b32(k.workgroup_id[0], k.workgroup_id[0], 9)
    k.v_lshlrev_b32(element, 1, k.workitem_id)
    k.v_add_u32(element, k.workgroup_id[0], element)
    k.v_lshlrev_b32(byte, 2, element)
    k.waitcnt(lgkmcnt=0)
    k.v_cmp_gt_u32(vcc, scalars[1], element)                # lanes past the end do nothing
    saved = k.sgpr("saved_exec", 2)
    k.s_and_saveexec_b64(saved, vcc)
    k.s_cbranch_execz("done")
    xs, ys, factor = k.vgpr("xs", 2), k.vgpr("ys", 2), k.vgpr("factor", 2)
    k.global_load_dwordx2(xs, byte, x_ptr)
    k.global_load_dwordx2(ys, byte, y_ptr)
    for f in factor:
        k.v_mov_b32(f, scalars[0])
    k.waitcnt(vmcnt=0)
    k.v_pk_fma_f32(ys, factor, xs, ys)
    k.global_store_dwordx2(byte, ys, y_ptr)
    k.label("done")
    k.s_endpgm()
    return k.finalize()


if __name__ == "__main__":
    program = axpy()
    print(asm.to_text(program))                             # .s that ROCm's assembler takes
    code = asm.assemble(program)                            # code object that torch or HIP loads
    print(len(code), "bytes;", check.check(program) or "no findings")

    x, y = (np.random.default_rng(i).standard_normal(1000).astype(np.float32) for i in range(2))
    launch = Launch(grid=(2, 1, 1), workgroup=(256, 1, 1), buffers={"x": x, "y": y}, outputs=set(),
                    kernarg=[{"offset": 0, "buffer": "x"}, {"offset": 8, "buffer": "y"}, {"offset": 16, "f32": 2.5}, {"offset": 20, "u32": 1000}])
    result = emulate.run(program, launch, record={0})
    print("largest error:", np.abs(result.buffers["y"] - (np.float64(2.5) * x + y)).max(), "faults:", result.faults)

    sim = simulate.simulate(program, result.trace[0])
    print(sim.clk, "clk;", sim.stalls)

"""FP8 e4m3 causal forward attention, head dim 128, with Lean P.

One workgroup: 8 waves of 32 queries, two a SIMD. Per tile of 128 keys and wave:

    S^T = K Q^T         8 x v_mfma_f32_32x32x64_f8f6f4   a lane holds one query and 64 of the 128 keys
    P   = Lean P(S)     64 x v_fma_f32 + v_cvt_pk_u8_f32  the e4m3 byte itself, no exponential
    O^T += V^T P^T      8 x v_mfma_f32_32x32x64_f8f6f4
    l   += sum of P     2 x v_mfma_f32_16x16x128_f8f6f4   the row sum of the quantised P

Lean P: an e4m3 byte read as an integer is 8 (log2 of its value + 7), linear between powers of two. With the row's
maximum at code 126 (448.0), the byte of key j is round(8 log2(e) scale (s_j - max) + 126), saturated below at 0.
The common factor cancels because the row is divided by the sum of the bytes' own values.

K and V tiles come by LDS-DMA into two buffers each. K is read with ds_read_b128, V transposed with
ds_read_b64_tr_b8; 16-byte chunks are XOR-swizzled by row so that neither has a bank conflict. P needs no exchange of
lanes: V is read in the key order in which the S^T accumulators hold the keys.
"""
from __future__ import annotations

from cdna4dsl.authoring import Kernel, bits, m0, vcc
from cdna4dsl.program import Program, Reg
from cdna4dsl.schedule import interleave

QUERIES, KEYS, HEAD_DIM = 256, 128, 128
WAVES = 8
TOP = 126.0                    # code of the row maximum; 0x7F would be NaN
LOG2_TOP = 8.807354922057604   # log2(448), the value of code 126
NO_MAX = -float(1 << 25)       # below every dot product of 128 e4m3 pairs (at most 448^2 * 128 < 2^25)
TILE_BYTES = KEYS * HEAD_DIM
K_LDS, V_LDS = 0, 2 * TILE_BYTES
RSRC_FLAGS = 0x20000           # raw buffer, 32-bit data format (word 3 of the descriptor)

ARGS = ([(n, "pointer") for n in ("q", "k", "v", "o", "lse", "q_descale", "k_descale", "v_descale")]
        + [(f"{t}_{s}_stride", "u64") for t in ("q", "k", "v", "o", "lse") for s in ("batch", "head")]
        + [(f"{t}_row_stride", "u32") for t in ("q", "k", "v", "o")]
        + [("seqlen_q", "u32"), ("seqlen_kv", "u32"), ("heads_per_kv", "u32"), ("softmax_scale", "f32")]
        + [(f"{t}_descale_{s}_stride", "u32") for t in ("q", "k", "v") for s in ("batch", "head")])


class _Builder:
    """The kernel's registers and its pieces; ``build`` puts them in order."""

    def __init__(self, causal: bool):
        self.causal = causal
        self.k = k = Kernel("fp8_hd128" if causal else "fp8_hd128_full", workgroup=(64 * WAVES, 1, 1), lds=4 * TILE_BYTES)
        self.arg = {name: k.arg(name, kind) for name, kind in ARGS}
        self.q = [k.vgpr(f"q{s}", 8) for s in range(2)]
        self.s = [k.vgpr(f"s{t}", 16) for t in range(4)]      # S^T, 32 keys each
        self.o = [k.vgpr(f"o{d}", 16) for d in range(4)]      # O^T, 32 dims each
        self.p = [k.vgpr(f"p{h}", 8) for h in range(2)]       # P^T, 64 keys each
        self.frag = [k.vgpr(f"frag{i}", 8) for i in range(6)]  # K, then V fragments
        self.ones = k.vgpr("ones", 8)
        self.l = k.vgpr("l", 4)
        self.k_addr = [k.vgpr(f"k_addr{c}") for c in range(4)]
        self.v_addr = [k.vgpr(f"v_addr{d}") for d in range(4)]
        self.k_dma = [k.vgpr(f"k_dma{j}") for j in range(2)]
        self.v_dma = [k.vgpr(f"v_dma{j}") for j in range(2)]
        self.m = k.vgpr("row_max")
        self.bias = k.vgpr("bias")
        self.limit = k.vgpr("limit")                           # last visible key less the lane half's offset
        self.neg_inf = k.vgpr("neg_inf")
        self.t = [k.vgpr(f"t{i}") for i in range(3)]
        self.v_a = k.vgpr("v_a")

    # -- scalar helpers -----------------------------------------------------------------------------------------
    def add_scaled(self, base: Reg, index: Reg, stride: Reg, tmp: Reg) -> None:
        """base (64 bits) += index (32 bits) * stride (64 bits)."""
        k = self.k
        k.s_mul_i32(tmp[0], index, stride[0])
        k.s_mul_hi_u32(tmp[1], index, stride[0])
        k.s_add_u32(base[0], base[0], tmp[0])
        k.s_addc_u32(base[1], base[1], tmp[1])
        k.s_mul_i32(tmp[0], index, stride[1])
        k.s_add_u32(base[1], base[1], tmp[0])

    def descriptor(self, name: str, base: Reg, rows: Reg, stride: Reg, row_bytes: int, tmp: Reg) -> Reg:
        """Raw buffer descriptor of ``rows`` (at least 1) rows; loads past the last give 0, stores are dropped."""
        k = self.k
        rsrc = k.sgpr(name, 4)
        k.s_mov_b32(rsrc[0], base[0])
        k.s_and_b32(rsrc[1], base[1], 0xFFFF)
        self.records(rsrc, rows, stride, row_bytes, tmp)
        k.s_mov_b32(rsrc[3], RSRC_FLAGS)
        return rsrc

    def records(self, rsrc: Reg, rows: Reg, stride: Reg, row_bytes: int, tmp: Reg) -> None:
        k = self.k
        k.s_sub_u32(tmp[0], rows, 1)
        k.s_mul_i32(tmp[0], tmp[0], stride)
        k.s_add_u32(rsrc[2], tmp[0], row_bytes)

    # -- prologue -----------------------------------------------------------------------------------------------
    def prologue(self) -> None:
        k, arg = self.k, self.arg
        k.comment("kernel arguments")
        ptr = k.sgpr("pointers", 16)
        strides = k.sgpr("strides", 16)
        rest = k.sgpr("rest", 16)
        ds = k.sgpr("v_descale_strides", 2)
        k.s_load_dwordx16(ptr, k.kernarg, 0)
        k.s_load_dwordx16(strides, k.kernarg, arg["q_batch_stride"].offset)
        k.s_load_dwordx16(rest, k.kernarg, arg["lse_batch_stride"].offset)
        k.s_load_dwordx2(ds, k.kernarg, arg["v_descale_batch_stride"].offset)
        self.wid = wid = k.sgpr("wave")
        v = self.t
        k.v_lshrrev_b32(v[0], 6, k.workitem_id)
        lane, half = k.vgpr("lane"), k.vgpr("half")
        k.v_and_b32(lane, 63, k.workitem_id)
        k.v_readfirstlane_b32(wid, v[0])
        k.v_lshrrev_b32(half, 5, lane)
        k.waitcnt(lgkmcnt=0)
        q, kk, vv, o, lse = (ptr[2 * i:2 * i + 2] for i in range(5))
        q_ds, k_ds, v_ds = (ptr[2 * i:2 * i + 2] for i in range(5, 8))
        stride64 = {n: strides[2 * i:2 * i + 2] for i, n in enumerate((t, s) for t in "qkvo" for s in ("batch", "head"))}
        lse_strides = rest[0:2], rest[2:4]
        q_row, self.k_row, self.v_row, o_row = rest[4], rest[5], rest[6], rest[7]
        seq_q, self.seq_kv, group, scale = rest[8], rest[9], rest[10], rest[11]

        k.comment("query tile, heaviest first; key/value head = head / heads_per_kv")
        tmp = k.sgpr("tmp", 2)
        tile = k.sgpr("tile")
        batch, head = k.workgroup_id[2], k.workgroup_id[1]
        k.s_add_u32(tile, seq_q, QUERIES - 1)
        k.s_lshr_b32(tile, tile, 8)
        k.s_sub_u32(tile, tile, 1)
        k.s_sub_u32(tile, tile, k.workgroup_id[0])
        kv_head = k.sgpr("kv_head")
        k.v_cvt_f32_u32(v[0], head)
        k.v_cvt_f32_u32(v[1], group)
        k.v_add_f32(v[0], 0.5, v[0])          # (head + 1/2) / group truncates to the exact quotient
        k.v_rcp_f32(v[1], v[1])
        k.wait_states(1)
        k.v_mul_f32(v[0], v[0], v[1])
        k.v_cvt_u32_f32(v[0], v[0])
        k.wait_states(1)
        k.v_readfirstlane_b32(kv_head, v[0])

        k.comment("descales; 8 log2(e) x softmax scale x descales = a")
        dq, dk, self.dv = k.sgpr("dq"), k.sgpr("dk"), k.sgpr("dv")
        for base, sb, sh, h, out in ((q_ds, rest[12], rest[13], head, dq), (k_ds, rest[14], rest[15], kv_head, dk),
                                     (v_ds, ds[0], ds[1], kv_head, self.dv)):
            k.s_mul_i32(tmp[0], batch, sb)
            k.s_mul_i32(tmp[1], h, sh)
            k.s_add_u32(tmp[0], tmp[0], tmp[1])
            k.s_load_dword(out, base, tmp[0])
            # the offset register is read when the load issues
        k.comment("addresses")
        for name, base, h in (("q", q, head), ("k", kk, kv_head), ("v", vv, kv_head), ("o", o, head)):
            self.add_scaled(base, batch, stride64[name, "batch"], tmp)
            self.add_scaled(base, h, stride64[name, "head"], tmp)
        self.add_scaled(lse, batch, lse_strides[0], tmp)
        self.add_scaled(lse, head, lse_strides[1], tmp)
        q0 = k.sgpr("first_query")
        k.s_lshl_b32(q0, tile, 8)
        rows = k.sgpr("rows")
        k.s_sub_u32(rows, seq_q, q0)
        k.s_min_u32(rows, rows, QUERIES)
        for base, stride in ((q, q_row), (o, o_row)):
            k.s_mul_i32(tmp[0], q0, stride)
            k.s_mul_hi_u32(tmp[1], q0, stride)
            k.s_add_u32(base[0], base[0], tmp[0])
            k.s_addc_u32(base[1], base[1], tmp[1])
        k.s_lshl_b32(tmp[0], q0, 2)
        k.s_add_u32(lse[0], lse[0], tmp[0])
        k.s_addc_u32(lse[1], lse[1], 0)
        q_rsrc = self.descriptor("q_rsrc", q, rows, q_row, HEAD_DIM, tmp)
        self.o_rsrc = self.descriptor("o_rsrc", o, rows, o_row, 2 * HEAD_DIM, tmp)
        k.s_mov_b32(tmp[1], 4)
        self.lse_rsrc = self.descriptor("lse_rsrc", lse, rows, tmp[1], 4, tmp)

        k.comment("this wave's queries: B operand of S^T; lane = query, its half reads chunks 4s + 2p + half")
        query = k.vgpr("query")
        self.q_row_in_tile = query
        k.v_and_b32(query, 31, lane)
        k.s_lshl_b32(tmp[0], wid, 5)
        k.v_add_u32(query, tmp[0], query)
        q_off = v[0]
        k.v_mul_lo_u32(q_off, query, q_row)
        k.v_lshl_add_u32(q_off, half, 4, q_off)
        for s in range(2):
            for p in range(2):
                k.buffer_load_dwordx4(self.q[s][4 * p:4 * p + 4], q_off, q_rsrc, 0, offen=True, offset=64 * s + 32 * p)
        self.o_off = k.vgpr("o_off")
        k.v_mul_lo_u32(self.o_off, query, o_row)
        k.v_lshl_add_u32(self.o_off, half, 3, self.o_off)

        k.comment("number of key tiles, and the last key that each query sees (bottom-right causal)")
        self.tiles, self.full = k.sgpr("tiles"), k.sgpr("full")   # full: keys that every query of the wave sees
        shift = k.sgpr("shift")
        k.s_sub_u32(shift, self.seq_kv, seq_q)
        k.v_mov_b32(self.limit, self.seq_kv)
        if self.causal:
            k.s_add_u32(tmp[0], q0, QUERIES)
            k.s_add_i32(tmp[0], tmp[0], shift)
            k.s_min_i32(tmp[0], tmp[0], self.seq_kv)
            k.s_max_i32(self.tiles, tmp[0], 0)
            k.s_lshl_b32(tmp[0], wid, 5)
            k.s_add_i32(tmp[0], tmp[0], q0)
            k.s_add_i32(tmp[0], tmp[0], shift)
            k.s_add_i32(tmp[0], tmp[0], 1)
            k.s_min_i32(self.full, tmp[0], self.seq_kv)
            k.s_add_i32(tmp[0], q0, shift)
            k.s_add_i32(tmp[0], tmp[0], 1)
            k.v_add_u32(v[1], tmp[0], query)
            k.v_min_i32(self.limit, v[1], self.limit)
        else:
            k.s_mov_b32(self.tiles, self.seq_kv)
            k.s_mov_b32(self.full, self.seq_kv)
        k.s_add_u32(self.tiles, self.tiles, KEYS - 1)
        k.s_lshr_b32(self.tiles, self.tiles, 7)
        k.v_add_u32(self.limit, -1, self.limit)
        k.v_lshlrev_b32(v[1], 2, half)
        k.v_sub_u32(self.limit, self.limit, v[1])

        k.comment("LDS addresses. A row is 128 bytes in 8 chunks of 16; chunk c of row r lies at c ^ swizzle(r)")
        # K, ds_read_b128: lane (row i, half h) reads chunks 4s + 2p + h of row 32t + i; swizzle(r) = (r >> 1) & 7
        x, base = v[1], v[2]
        k.v_bfe_u32(x, lane, 1, 3)
        k.v_and_b32(base, 31, lane)
        k.v_lshlrev_b32(base, 7, base)
        k.v_xor_b32(x, half, x)
        for c, chunk in enumerate((0, 2, 4, 6)):
            k.v_xor_b32(v[0], chunk, x)
            k.v_lshl_add_u32(self.k_addr[c], v[0], 4, base)
        # V, ds_read_b64_tr_b8: lane pair n of a 16-lane group reads 16 dims of the group's n-th key,
        # key = 8 (n >> 2) + 4 h + (n & 3); the two groups of a half read dims 0-15 and 16-31 of 32.
        # swizzle(r) = 2 ((r >> 1 & 1) | (r >> 3 & 1) << 1): rows 0-3 and 8-11 (4-7, 12-15) fall into different banks
        n = k.vgpr("n")
        k.v_bfe_u32(n, lane, 1, 3)
        k.v_and_b32(v[0], 3, n)
        k.v_lshl_or_b32(v[0], half, 2, v[0])
        k.v_lshrrev_b32(v[1], 2, n)
        k.v_lshl_or_b32(v[0], v[1], 3, v[0])                       # key within 16
        k.v_bfe_u32(v[2], n, 1, 1)
        k.v_lshl_or_b32(v[2], v[1], 1, v[2])                       # swizzle / 2
        k.v_lshlrev_b32(v[0], 7, v[0])
        k.v_bfe_u32(v[1], lane, 4, 1)
        k.v_lshl_or_b32(v[0], v[1], 4, v[0])
        k.v_and_b32(v[1], 1, lane)
        k.v_lshl_or_b32(v[0], v[1], 3, v[0])
        for d in range(4):
            k.v_xor_b32(v[1], d, v[2])
            k.v_lshl_add_u32(self.v_addr[d], v[1], 5, v[0])
        k.free(n)

        k.comment("LDS-DMA: instruction i of a tile writes rows 8i..8i+7; this wave's are i = wave and wave + 8")
        # lane writes chunk (lane & 7) of row 8 i + (lane >> 3), so it fetches that chunk ^ swizzle(row)
        row = n
        k.v_lshrrev_b32(row, 3, lane)
        k.s_lshl_b32(tmp[0], wid, 3)
        k.v_add_u32(row, tmp[0], row)
        k.v_and_b32(v[0], 7, lane)
        k.v_bfe_u32(v[1], row, 1, 3)
        k.v_xor_b32(v[1], v[0], v[1])                              # K's chunk
        k.v_bfe_u32(v[2], row, 3, 1)
        k.v_lshlrev_b32(v[2], 1, v[2])
        k.v_bfe_u32(self.v_a, row, 1, 1)
        k.v_or_b32(v[2], v[2], self.v_a)
        k.v_lshlrev_b32(v[2], 1, v[2])
        k.v_xor_b32(v[2], v[0], v[2])                              # V's chunk
        for regs, stride, chunk in ((self.k_dma, self.k_row, v[1]), (self.v_dma, self.v_row, v[2])):
            k.v_mul_lo_u32(regs[0], row, stride)
            k.v_lshl_add_u32(regs[0], chunk, 4, regs[0])
            k.s_lshl_b32(tmp[0], stride, 6)
            k.v_add_u32(regs[1], tmp[0], regs[0])
        self.dma_lds = k.sgpr("dma_lds")
        k.s_lshl_b32(self.dma_lds, wid, 10)

        k.comment("K and V descriptors: 128 rows at a time, moved on from tile to tile")
        self.left = k.sgpr("rows_left")
        k.s_mov_b32(self.left, self.seq_kv)
        self.k_rsrc, self.v_rsrc = k.sgpr("k_rsrc", 4), k.sgpr("v_rsrc", 4)
        for rsrc, b in ((self.k_rsrc, kk), (self.v_rsrc, vv)):
            k.s_mov_b32(rsrc[0], b[0])
            k.s_and_b32(rsrc[1], b[1], 0xFFFF)
            k.s_mov_b32(rsrc[3], RSRC_FLAGS)

        k.comment("constants")
        k.waitcnt(lgkmcnt=0)
        st = self.scale_total = k.sgpr("scale_total")
        k.v_mov_b32(v[0], dq)
        k.v_mul_f32(v[0], dk, v[0])
        k.v_mul_f32(v[0], scale, v[0])
        k.wait_states(1)
        k.v_readfirstlane_b32(st, v[0])
        self.sign = k.sgpr("sign")
        k.s_cmp_lt_i32(st, 0)
        k.s_cselect_b32(self.sign, bits(0x80808080), 0)           # a negative scale: negate Q instead
        k.s_and_b32(st, st, 0x7FFFFFFF)
        self.a, self.neg_a, self.a_8, self.eps = (k.sgpr(n) for n in ("a", "neg_a", "a_8", "eps"))
        k.v_mov_b32(v[0], st)
        k.v_mul_f32(v[0], 11.541560327111707, v[0])               # 8 log2(e)
        k.v_max_f32(v[0], 2.0 ** -100, v[0])                      # a scale of 0 must not meet the mask's infinity
        k.v_min_f32(v[0], 2.0 ** 90, v[0])
        k.v_mul_f32(v[1], 0.125, v[0])
        k.v_readfirstlane_b32(self.a, v[0])
        k.v_readfirstlane_b32(self.a_8, v[1])
        k.s_xor_b32(self.neg_a, self.a, bits(0x80000000))
        k.s_mov_b32(self.eps, bits(0xB4000000))                   # -2^-23
        k.v_mov_b32(self.m, NO_MAX)
        k.v_mov_b32(self.neg_inf, bits(0xFF800000))
        for r in (*self.o, self.l):
            for x in r:
                k.v_mov_b32(x, 0)
        # Row sum by MFMA 16x16x128: lane l's P is column l & 15, k group l >> 4. Row i sums the groups whose parity is
        # that of i >> 2, so that D's lane l (rows 4 (l >> 4)..) gets the whole sum of query l & 31: no lane exchange.
        k.v_lshrrev_b32(v[0], 4, lane)
        k.v_lshrrev_b32(v[1], 2, lane)
        k.v_xor_b32(v[0], v[0], v[1])
        k.v_and_b32(v[0], 1, v[0])
        k.v_mov_b32(v[1], bits(0x38383838))                       # 1.0 in each byte
        k.v_cmp_eq_u32(vcc, 0, v[0])
        for x in self.ones:
            k.v_cndmask_b32(x, 0, v[1], vcc)
        self.tmp, self.t128 = tmp, k.sgpr("tile_end")
        k.s_mov_b32(self.t128, 0)

    # -- pieces of a tile ---------------------------------------------------------------------------------------
    def dma(self, buffer: int) -> None:
        """This wave's quarter-kilobytes of the next K and V tile into LDS buffer ``buffer``."""
        k = self.k
        k.s_min_u32(self.tmp[1], self.left, KEYS)
        for rsrc, stride, voff, lds in ((self.k_rsrc, self.k_row, self.k_dma, K_LDS), (self.v_rsrc, self.v_row, self.v_dma, V_LDS)):
            self.records(rsrc, self.tmp[1], stride, HEAD_DIM, self.tmp)
            for j in range(2):
                k.s_add_u32(m0, self.dma_lds, lds + buffer * TILE_BYTES + j * 8192)
                k.wait_states(1)
                k.buffer_load_dwordx4(None, voff[j], rsrc, 0, offen=True, lds=True)
        for rsrc, stride in ((self.k_rsrc, self.k_row), (self.v_rsrc, self.v_row)):
            k.s_lshl_b32(self.tmp[0], stride, 7)
            k.s_add_u32(rsrc[0], rsrc[0], self.tmp[0])
            k.s_addc_u32(rsrc[1], rsrc[1], 0)
        k.s_sub_u32(self.left, self.left, self.tmp[1])

    def read_k(self, t: int, buffer: int) -> None:
        k = self.k
        for s in range(2):
            for p in range(2):
                k.ds_read_b128(self.frag[(2 * t + s) % 4][4 * p:4 * p + 4], self.k_addr[2 * s + p],
                               offset=K_LDS + buffer * TILE_BYTES + t * 4096)

    def read_v(self, f: int, buffer: int) -> None:
        """V^T fragment f = 4 kk + d: dims 32d.., keys 64kk.. in the order of P."""
        k, (kk, d) = self.k, divmod(f, 4)
        for quarter in range(4):
            k.ds_read_b64_tr_b8(self.frag[f % 6][2 * quarter:2 * quarter + 2], self.v_addr[d],
                                offset=V_LDS + buffer * TILE_BYTES + kk * 8192 + quarter * 2048)

    def qk(self, buffer: int) -> None:
        k = self.k
        self.read_k(0, buffer)
        self.read_k(1, buffer)
        for t in range(4):
            k.waitcnt(lgkmcnt=0 if t == 3 else 4)
            k.v_mfma_f32_32x32x64_f8f6f4(self.s[t], self.frag[2 * t % 4], self.q[0], 0)
            k.v_mfma_f32_32x32x64_f8f6f4(self.s[t], self.frag[(2 * t + 1) % 4], self.q[1], self.s[t])
            if t < 2:
                self.read_k(t + 2, buffer)

    def mask(self, name: str) -> None:
        """Minus infinity where the key is past the query's last; skipped when the wave sees the whole tile."""
        k = self.k
        k.s_cmp_le_i32(self.t128, self.full)
        k.s_cbranch_scc1(f"unmasked_{name}")
        # limit relative to the tile's first key
        k.s_sub_u32(self.tmp[0], KEYS, self.t128)
        k.v_add_u32(self.t[0], self.tmp[0], self.limit)
        for t in range(4):
            for r in range(16):
                k.v_cmp_gt_i32(vcc, 32 * t + 8 * (r // 4) + r % 4, self.t[0])
                k.v_cndmask_b32(self.s[t][r], self.s[t][r], self.neg_inf, vcc)
        k.label(f"unmasked_{name}")

    def row_max(self, name: str) -> None:
        """Row maximum so far; when it rises in some lane, O and l are rescaled. Then the bias of this tile."""
        k, (t0, t1, t2) = self.k, self.t
        values = [x for s in self.s for x in s]
        k.v_max3_f32(t0, values[0], values[1], values[2])
        for i in range(3, 63, 2):
            k.v_max3_f32(t0, t0, values[i], values[i + 1])
        k.v_max_f32(t0, t0, values[63])
        k.v_mov_b32(t1, t0)
        k.wait_states(2)
        k.v_permlane32_swap_b32(t0, t1)
        k.v_max3_f32(t2, t0, t1, self.m)
        k.v_cmp_gt_f32(vcc, t2, self.m)
        k.s_cbranch_vccz(f"same_max_{name}")
        k.v_sub_f32(t0, self.m, t2)
        k.v_mul_f32(t0, self.a_8, t0)
        k.v_exp_f32(t0, t0)
        k.v_mov_b32(self.m, t2)
        for r in (*self.o, self.l):
            for x in r:
                k.v_mul_f32(x, t0, x)
        k.label(f"same_max_{name}")
        # bias = TOP - a max, rounded down: a code above TOP would be NaN
        k.v_mov_b32(self.bias, TOP)
        k.v_fmac_f32(self.bias, self.neg_a, self.m)
        k.v_fma_f32(self.bias, abs(self.bias), self.eps, self.bias)

    def lean_p(self, h: int) -> list:
        """Stream: the e4m3 bytes of P for keys 64h..64h+63."""
        k = self.k
        with k.stream() as out:
            for t in (2 * h, 2 * h + 1):
                for r in range(16):
                    x, dst = self.s[t][r], self.p[h][4 * (t % 2) + r // 4]
                    k.v_fma_f32(x, x, self.a, self.bias)
                    k.v_cvt_pk_u8_f32(dst, x, r % 4, dst if r % 4 else 0)
        return out

    def pv(self, h: int) -> list:
        """Stream: O^T += V^T P^T and the row sum for keys 64h..64h+63."""
        k = self.k
        with k.stream() as out:
            k.v_mfma_f32_16x16x128_f8f6f4(self.l, self.ones, self.p[h], self.l)
            for d in range(4):
                k.v_mfma_f32_32x32x64_f8f6f4(self.o[d], self.frag[(4 * h + d) % 6], self.p[h], self.o[d])
        return out

    def tile(self, buffer: int) -> None:
        k, name = self.k, str(buffer)
        k.comment(f"tile in LDS buffer {buffer}: every wave's part has landed, and nobody reads the other buffer any more")
        k.waitcnt(vmcnt=0)
        k.s_barrier()
        k.s_cmp_eq_u32(self.left, 0)
        k.s_cbranch_scc1(f"last_{name}")
        self.dma(1 - buffer)
        k.label(f"last_{name}")
        k.s_add_u32(self.t128, self.t128, KEYS)
        k.comment("S^T = K Q^T; a wave with matrix work goes before one with softmax")
        k.s_setprio(1)
        self.qk(buffer)
        k.s_setprio(0)
        for f in range(3):
            self.read_v(f, buffer)
        self.mask(name)
        k.comment("row maximum")
        self.row_max(name)
        k.comment("P of the first 64 keys")
        first = self.lean_p(0)
        k.place(first[:32])
        for f in range(3, 6):
            self.read_v(f, buffer)
        k.place(first[32:])
        k.waitcnt(lgkmcnt=0)
        k.comment("O^T += V^T P^T of the first 64 keys, with P of the last 64 in its shadow")
        k.s_setprio(1)
        k.place(interleave(self.pv(0), self.lean_p(1), 14))
        for f in range(6, 8):
            self.read_v(f, buffer)
        k.waitcnt(lgkmcnt=0)
        k.comment("O^T += V^T P^T of the last 64 keys")
        k.place(self.pv(1))
        k.s_setprio(0)

    # -- epilogue -----------------------------------------------------------------------------------------------
    def epilogue(self) -> None:
        k, (t0, t1, t2) = self.k, self.t
        k.comment("O = O^T descale / l in bf16; LSE = scale max + ln(l / 448). A row that saw no key: 0 and minus infinity")
        k.waitcnt(vmcnt=0)                                        # nothing may still write to LDS when the wave ends
        k.wait_states(5)                                          # l is an MFMA's result
        k.v_rcp_f32(t0, self.l[0])
        k.v_cmp_lg_f32(vcc, 0, self.l[0])
        k.v_log_f32(t1, self.l[0])
        k.v_cndmask_b32(t0, 0, t0, vcc)
        k.v_mul_f32(t0, self.dv, t0)
        k.v_add_f32(t1, -LOG2_TOP, t1)
        k.v_mul_f32(t1, 0.6931471805599453, t1)
        k.v_fmac_f32(t1, self.scale_total, self.m)
        k.v_lshlrev_b32(t2, 2, self.q_row_in_tile)
        k.buffer_store_dword(t1, t2, self.lse_rsrc, 0, offen=True)
        for d in range(4):
            for r in self.o[d]:
                k.v_mul_f32(r, t0, r)
            for g in range(4):
                pair = self.frag[d][2 * g:2 * g + 2]
                for i in range(2):
                    k.v_cvt_pk_bf16_f32(pair[i], self.o[d][4 * g + 2 * i], self.o[d][4 * g + 2 * i + 1])
                k.buffer_store_dwordx2(pair, self.o_off, self.o_rsrc, 0, offen=True, offset=64 * d + 16 * g)
        k.s_endpgm()

    def build(self) -> Program:
        k = self.k
        self.prologue()
        k.s_cmp_eq_u32(self.tiles, 0)
        k.s_cbranch_scc1("done")
        k.comment("left: rows of K and V not yet asked for, up to the last tile that this workgroup reads")
        k.s_lshl_b32(self.tmp[0], self.tiles, 7)
        k.s_min_u32(self.left, self.left, self.tmp[0])
        self.dma(0)
        k.comment("Q")
        k.waitcnt(vmcnt=0)
        for q in self.q:
            for x in q:
                k.v_xor_b32(x, self.sign, x)
        k.s_lshl_b32(self.tiles, self.tiles, 7)                   # from here on in keys
        with k.loop("kv") as kv:
            self.tile(0)
            k.s_cmp_ge_u32(self.t128, self.tiles)
            k.s_cbranch_scc1("done")
            self.tile(1)
            k.s_cmp_lt_u32(self.t128, self.tiles)
            kv.again("scc1")
        k.label("done")
        self.epilogue()
        return k.finalize()


def build(causal: bool = True) -> Program:
    """The kernel's program. causal: query i sees keys up to i + seqlen_kv - seqlen_q (bottom-right aligned)."""
    return _Builder(bool(causal)).build()

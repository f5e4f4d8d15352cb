"""f8f6f4 with all five formats and E8M0 block scales, against float64 on values laid out by the manual's tables."""
import numpy as np
import pytest

from cdna4dsl import matrix

ml_dtypes = pytest.importorskip("ml_dtypes")
TYPES = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn, ml_dtypes.float4_e2m1fn)
BITS = (8, 8, 6, 6, 4)


def operand(rng, rows, k, fmt):
    """(values [rows, k], block scales [rows, k / 32], registers [r, 1, 64], scale register [1, 64] with the code in byte 2)."""
    bits, groups = BITS[fmt], 64 // rows
    codes = rng.integers(0, 1 << bits, (rows, k)).astype(np.uint8)
    values = codes.view(TYPES[fmt]).astype(np.float64)
    codes = np.where(np.isfinite(values), codes, 1)
    values = codes.astype(np.uint8).view(TYPES[fmt]).astype(np.float64)
    scales = rng.integers(120, 134, (rows, k // 32))
    lanes, scale_reg = np.zeros((64, 32), np.int64), np.zeros((1, 64), np.uint32)
    for lane in range(64):
        g, row = divmod(lane, rows)
        for item in range(32):
            # FP8: v0-3 hold k = 16 g.., v4-7 k = 16 groups + 16 g..; FP6 and FP4: 32 g..
            at = 32 * g + item if bits < 8 else item // 16 * 16 * groups + 16 * g + item % 16
            lanes[lane, item] = codes[row, at]
        scale_reg[0, lane] = int(scales[row, g]) << 16
    stream = (lanes[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(64, -1)
    registers = np.packbits(stream, axis=1, bitorder="little").view(np.uint32).T[:, None, :].copy()
    return values, scales, registers, scale_reg


@pytest.mark.parametrize("m,k", [(16, 128), (32, 64)])
@pytest.mark.parametrize("a,b", [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (0, 4), (2, 3), (1, 2)])
def test_against_float64(m, k, a, b):
    rng = np.random.default_rng(m + 10 * a + b)
    left, left_scales, left_regs, left_scale = operand(rng, m, k, a)
    right, right_scales, right_regs, right_scale = operand(rng, m, k, b)
    item, lane = np.arange(m * m // 64)[:, None], np.arange(64)[None, :]
    row = 4 * (lane // 16) + item if m == 16 else 8 * (item // 4) + 4 * (lane // 32) + item % 4
    column = lane % m
    got = matrix.mfma(m, m, k, 1, "f8f6f4", "f8f6f4", "f32", left_regs, right_regs, 0.0, a, 0, b).view(np.float32)[:, 0]
    want = (left @ right.T)[row, column]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-7 * np.abs(want).max())
    expand = lambda v, s: v * 2.0 ** (np.repeat(s, 32, axis=1) - 127.0)
    got = matrix.mfma_scale(m, m, k, left_regs, right_regs, 0.0, a, b, left_scale, right_scale, 0, 3).view(np.float32)[:, 0]
    want = (expand(left, left_scales) @ expand(right, right_scales).T)[row, column]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-7 * np.abs(want).max())


def test_scale_255_is_nan():
    rng = np.random.default_rng(0)
    _, _, regs, scale = operand(rng, 32, 64, 0)
    bad = np.full_like(scale, 0xFF << 16)
    assert np.isnan(matrix.mfma_scale(32, 32, 64, regs, regs, 0.0, 0, 0, scale, bad, 0, 3).view(np.float32)).all()

"""What single operations do to arrays: conversions, fused multiply-add, matrix layouts. No machine state."""
from __future__ import annotations

import functools

import numpy as np

F32 = np.float32
U32 = np.uint32


def _e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(code & 0x7F == 0x7F, np.nan, value)


def _e5m2(code):
    exponent, mantissa = code >> 2 & 31, code & 3
    value = np.where(exponent == 0, mantissa / 4 * 2.0 ** -14, (1 + mantissa / 4) * 2.0 ** (exponent - 15.0))
    return np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)


@functools.lru_cache(None)
def fp8_table(name: str) -> np.ndarray:
    """float64[256] value of each byte; "e4m3" (OCP, no infinity) or "e5m2"."""
    code = np.arange(256)
    value = {"e4m3": _e4m3, "e5m2": _e5m2}[name](code & 0x7F)
    return np.where(code & 0x80, -value, value)


def flush(x: np.ndarray) -> np.ndarray:
    """f32 with denormals replaced by zeros of their sign."""
    small = np.abs(x) < F32(2.0 ** -126)
    return np.where(small, np.copysign(F32(0), x), x) if small.any() else x


def fma(a, b, c) -> np.ndarray:
    """f32 a * b + c with one rounding (to nearest even).

    The product is exact in f64; the sum is rounded to odd there, so that rounding it to f32 is the only rounding that
    shows (Boldo and Melquiond, 2008).
    """
    p, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    s = p + c
    back = s - p
    error = (p - (s - back)) + (c - back)
    bits = s.view(np.int64)
    odd = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    if odd.any():
        up = np.signbit(error) == np.signbit(s)
        s = np.where(odd, bits + np.where(up, 1, -1), bits).view(np.float64)
    return s.astype(F32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits (in uint32), nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = bits + (U32(0x7FFF) + (bits >> U32(16) & U32(1)))
    return np.where(np.isnan(x), bits >> U32(16) | U32(0x40), rounded >> U32(16))


def f32_to_fp8(x: np.ndarray, saturate: bool) -> np.ndarray:
    """e4m3 bytes (in uint32), nearest even. Past 448: +-448 if ``saturate`` (MODE.FP16_OVFL), else NaN."""
    x = np.asarray(x, np.float64)
    a = np.abs(x)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(a)[1] - 1, -6)
        steps = np.rint(np.where(np.isfinite(a), np.ldexp(a, 3 - exponent), 0))  # units of 2^(exponent - 3)
    code = np.where(steps < 8, steps, (exponent + 7) * 8 + steps - 8).astype(np.int64)  # steps = 16 carries into the exponent
    over = (a > 464) | (code > 0x7E) | np.isinf(a)
    code = np.where(over, 0x7E if saturate else 0x7F, np.clip(code, 0, 0x7E))
    code = np.where(np.isnan(a), 0x7F, code)
    return (code | np.signbit(x).astype(np.int64) << 7).astype(U32)


def f32_to_u8(x: np.ndarray, rounding: str) -> np.ndarray:
    """0..255 (in uint32), saturating; NaN gives 0. rounding: nearest_even or truncate (AMD does not say which)."""
    if rounding not in ("nearest_even", "truncate"):
        raise ValueError(f"numerics.cvt_pk_u8_rounding = {rounding}; nearest_even or truncate")
    r = np.rint(x) if rounding == "nearest_even" else np.trunc(x)
    return np.where(np.isnan(x), 0, np.clip(r, 0, 255)).astype(U32)


def float_to_int(x: np.ndarray, dtype) -> np.ndarray:
    """Truncated and saturated; NaN gives 0."""
    info = np.iinfo(dtype)
    d = np.trunc(np.where(np.isnan(x), 0, x).astype(np.float64))
    return np.clip(d, float(info.min), float(info.max)).astype(np.int64).astype(dtype)


def byte_perm(s0: np.ndarray, s1: np.ndarray, select: np.ndarray) -> np.ndarray:
    """v_perm_b32: each selector byte takes byte 0-7 of {s0, s1} (s1 low), a sign (8-11), 0x00 (12) or 0xFF (13 and more)."""
    s0, s1, select = np.broadcast_arrays(s0, s1, select)
    joined = s0.astype(np.uint64) << np.uint64(32) | s1.astype(np.uint64)
    out = np.zeros(select.shape, U32)
    for i in range(4):
        sel = select >> U32(8 * i) & U32(0xFF)
        byte = (joined >> (np.minimum(sel, 7).astype(np.uint64) * np.uint64(8)) & np.uint64(0xFF)).astype(U32)
        sign_at = np.select([sel == 8, sel == 9, sel == 10, sel == 11], [15, 31, 47, 63], 0).astype(np.uint64)
        sign = (joined >> sign_at & np.uint64(1)).astype(U32) * U32(0xFF)
        out |= np.where(sel < 8, byte, np.where(sel < 12, sign, np.where(sel == 12, U32(0), U32(0xFF)))) << U32(8 * i)
    return out


def fmax(a, b) -> np.ndarray:
    """Larger of two f32; a number before a NaN, +0 before -0."""
    r = np.fmax(a, b)
    zero = (r == 0) & (a == b)
    return np.where(zero & ~(np.signbit(a) & np.signbit(b)), F32(0), r) if zero.any() else r


def fmin(a, b) -> np.ndarray:
    """Smaller of two f32; a number before a NaN, -0 before +0."""
    r = np.fmin(a, b)
    zero = (r == 0) & (a == b)
    return np.where(zero & (np.signbit(a) | np.signbit(b)), F32(-0.0), r) if zero.any() else r


def med3(a, b, c) -> np.ndarray:
    """Median of three; with a NaN among them, the least of the three (PCODE)."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    top = fmax(fmax(a, b), c)
    median = np.where(top == a, fmax(b, c), np.where(top == b, fmax(a, c), fmax(a, b)))
    return np.where(nan, fmin(fmin(a, b), c), median)


def transpose(width: int, regs: np.ndarray) -> np.ndarray:
    """ds_read_b64_tr_b8 / _b16 on the two loaded registers [2, n, 64]; the lane pattern stands in memory.isa."""
    n = regs.shape[1]
    per = 64 // width
    elements = np.ascontiguousarray(regs.transpose(1, 2, 0)).view({8: np.uint8, 16: np.uint16}[width]).reshape(n, 4, 16, per)
    lane = np.arange(16)
    k = np.arange(per)
    source = (16 // per) * k[None, :] + (lane[:, None] // per) % (16 // per)     # lane that holds element k of the result
    out = np.ascontiguousarray(elements[:, :, source, (lane % per)[:, None]])
    return np.ascontiguousarray(out.reshape(n, 64, per)).view(U32).transpose(2, 0, 1)


@functools.lru_cache(None)
def accumulator_layout(m: int, n: int, blocks: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(row[items, 64], column[64]) that each lane's registers hold of the M x N result (ISA 7.1.4, H = 4, one block)."""
    per_column = 64 // n                      # M_I for one block
    items = m * n // 64
    item, lane = np.arange(items)[:, None], np.arange(64)[None, :]
    row = item % 4 + 4 * (lane // n % per_column) + 4 * per_column * (item // 4)
    return row, np.arange(64) % n


def _small_float(code, exponent_bits: int, mantissa_bits: int, bias: int):
    """Value of an FP6 or FP4 code: no infinity, no NaN."""
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    scale = 1 << mantissa_bits
    value = np.where(exponent == 0, mantissa / scale * 2.0 ** (1 - bias), (1 + mantissa / scale) * 2.0 ** (exponent - float(bias)))
    return np.where(code >> exponent_bits + mantissa_bits & 1, -value, value)


# f8f6f4 formats by cbsz or blgp
_FORMATS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


@functools.lru_cache(None)
def _format(number: int) -> tuple[int, np.ndarray]:
    """(bits, value of each code)."""
    name = _FORMATS[number]
    if number < 2:
        return 8, fp8_table(name)
    exponent_bits, mantissa_bits, bias = {"e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}[name]
    bits = 1 + exponent_bits + mantissa_bits
    return bits, _small_float(np.arange(1 << bits), exponent_bits, mantissa_bits, bias)


def _elements(regs: np.ndarray, kind: str, fmt: int) -> np.ndarray:
    """float64 [n, 64, items] of an A or B operand's registers [r, n, 64]."""
    raw = np.ascontiguousarray(regs.transpose(1, 2, 0))
    if kind in ("fp8", "f8f6f4"):
        if fmt >= len(_FORMATS):
            raise NotImplementedError(f"there is no matrix format {fmt}; {', '.join(f'{i} {n}' for i, n in enumerate(_FORMATS))}")
        width, table = _format(fmt)
        if width == 8:
            return table[raw.view(np.uint8)]
        bits = np.unpackbits(raw[..., :width].view(np.uint8), axis=-1, bitorder="little").reshape(*raw.shape[:2], 32, width)
        return table[bits @ (1 << np.arange(width))]
    if kind == "bf16":
        return (raw.view(np.uint16).astype(U32) << U32(16)).view(F32).astype(np.float64)
    return raw.view(np.float16).astype(np.float64)


def _rows(regs: np.ndarray, size: int, k: int, kind: str, fmt: int) -> np.ndarray:
    """[waves, size, k]: A by rows (or B by columns). Lane i + size g holds k = K_L g + item; the FP8 formats of f8f6f4
    hold k = 16 g + item in their first half of registers and K / 2 + 16 g + item in the second."""
    waves, groups = regs.shape[1], 64 // size
    x = _elements(regs, kind, fmt).reshape(waves, groups, size, k // groups)
    if kind == "f8f6f4" and fmt < 2:
        return x.reshape(waves, groups, size, 2, 16).transpose(0, 2, 3, 1, 4).reshape(waves, size, k)
    return x.transpose(0, 2, 1, 3).reshape(waves, size, k)


def mfma(m: int, n: int, k: int, blocks: int, kind: str, a, b, c, a_format: int = 0, b_format: int = 0) -> np.ndarray:
    """D = A B + C as registers [items, waves, 64] (f32 as uint32). a, b: registers [r, waves, 64]; c the same, or a scalar f32.

    Model numerics.mfma_accumulate = exact: products and sums in f64, one rounding to f32.
    """
    return _accumulate(m, n, _rows(a, m, k, kind, a_format), _rows(b, n, k, kind, b_format), c)


def _accumulate(m: int, n: int, left: np.ndarray, right: np.ndarray, c) -> np.ndarray:
    """left [waves, m, k] times right [waves, n, k] transposed, plus c, in the layout of results."""
    row, column = accumulator_layout(m, n)
    with np.errstate(all="ignore"):
        d = (left @ right.transpose(0, 2, 1))[:, row, column[None, :]].transpose(1, 0, 2)
        d = d + (c.view(F32) if isinstance(c, np.ndarray) and c.ndim == 3 else c)
        return np.ascontiguousarray(d.astype(F32)).view(U32)


def _block_scales(codes: np.ndarray, byte: int, size: int) -> np.ndarray:
    """float64 [waves, size, blocks of 32 k] of E8M0 scales: lane i + size g holds row i, block g."""
    code = (codes >> U32(8 * byte) & U32(255)).astype(np.int64)
    value = np.where(code == 255, np.nan, np.ldexp(1.0, code - 127))
    return np.broadcast_to(value, (*value.shape[:-1], 64)).reshape(-1, 64 // size, size).transpose(0, 2, 1)


def mfma_scale(m: int, n: int, k: int, a, b, c, a_format: int, b_format: int, a_scale, b_scale, op_sel: int, op_sel_hi: int) -> np.ndarray:
    """``mfma`` of f8f6f4 with a scale for each row (column) and 32 values of k. Bit 0 (A) and 1 (B) of op_sel and
    op_sel_hi are the low and high bit of the number of the scale's byte."""
    scaled = []
    for i, (regs, size, fmt, codes) in enumerate(((a, m, a_format, a_scale), (b, n, b_format, b_scale))):
        byte = (op_sel >> i & 1) + 2 * (op_sel_hi >> i & 1)
        scaled.append(_rows(regs, size, k, "f8f6f4", fmt) * np.repeat(_block_scales(codes, byte, size), 32, axis=2))
    return _accumulate(m, n, *scaled, c)

"""What single operations do to arrays: conversions, fused multiply-add. No machine state; matrix.py has the matrix operations."""
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

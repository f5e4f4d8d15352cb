"""What the kernels are held to: e4m3 quantisation and float64 attention, in numpy alone."""
from __future__ import annotations

import numpy as np

E4M3_MAX = 448.0


def _decode_table() -> np.ndarray:
    """Value of each e4m3 byte (OCP: bias 7, no infinity, 0x7F and 0xFF are NaN), float64[256]."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value = np.where(code & 0x7F == 0x7F, np.nan, value)
    return np.where(code & 0x80, -value, value)


DECODE = _decode_table()


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """float64 values of e4m3 bytes (uint8, any shape)."""
    return DECODE[codes]


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """e4m3 bytes (uint8) of real numbers, rounded to nearest even, clamped to +-448; NaN gives 0x7F."""
    positive = DECODE[:127]
    a = np.minimum(np.abs(np.asarray(x, np.float64)), E4M3_MAX)
    nan = np.isnan(a)
    a = np.where(nan, 0, a)
    high = np.clip(np.searchsorted(positive, a), 1, 126)
    low = high - 1
    mid = (positive[low] + positive[high]) / 2
    up = (a > mid) | ((a == mid) & (high % 2 == 0))
    code = np.where(up, high, low).astype(np.uint8)
    return np.where(nan, 0x7F, code | (np.signbit(x).astype(np.uint8) << 7)).astype(np.uint8)


def quantize_tensor(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """(e4m3 bytes, descale): x ~ decode(bytes) * descale, with one scale for the tensor; its largest value becomes 448."""
    top = float(np.max(np.abs(x), initial=0.0))
    descale = np.float32(top / E4M3_MAX if top > 0 else 1.0)
    return encode_e4m3(np.asarray(x, np.float64) / float(descale)), descale


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, *, causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Float64 attention. q [batch, seq_q, heads, dim], k and v [batch, seq_kv, kv_heads, dim]; heads a multiple of kv_heads.

    Causal is aligned bottom-right: query i sees keys up to i + seq_kv - seq_q. Returns O like q (with v's dim) and
    LSE [batch, heads, seq_q] (natural logarithm). A row that sees no key: O 0, LSE -inf.
    """
    batch, seq_q, heads, _ = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    out = np.zeros((batch, seq_q, heads, v.shape[3]))
    lse = np.full((batch, heads, seq_q), -np.inf)
    if seq_kv == 0:
        return out, lse
    keys = np.arange(seq_kv)
    for b in range(batch):
        for h in range(heads):
            kk, vv = k[b, :, h * kv_heads // heads].astype(np.float64), v[b, :, h * kv_heads // heads].astype(np.float64)
            for i in range(0, seq_q, 1024):  # blocks of rows bound the memory
                s = q[b, i:i + 1024, h].astype(np.float64) @ kk.T * scale
                if causal:
                    last = np.arange(i, i + s.shape[0]) + seq_kv - seq_q
                    s = np.where(keys[None] <= last[:, None], s, -np.inf)
                m = s.max(axis=1, keepdims=True)
                p = np.exp(s - np.where(np.isfinite(m), m, 0))
                total = p.sum(axis=1)
                seen = total > 0
                safe = np.where(seen, total, 1)
                out[b, i:i + 1024, h] = p @ vv / safe[:, None]
                with np.errstate(divide="ignore"):
                    lse[b, h, i:i + 1024] = np.where(seen, np.log(safe) + m[:, 0], -np.inf)
    return out, lse


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Frobenius norm of the difference over that of ``want`` (0 if both are zero)."""
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / norm) if norm else float(np.linalg.norm(got))


def decode_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 bits (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)

"""Flash-attention prefill kernels for gfx950, written in cdna4dsl."""
from __future__ import annotations

from pathlib import Path

import numpy as np
from attrs import frozen

from cdna4dsl.launch import Launch
from cdna4dsl.program import Program

from . import fp8_hd128, reference

ACTIVATIONS = Path(__file__).parent / "data" / "activations.npz"


@frozen
class KernelEntry:
    """A kernel by name: how to build it, its head dim, and its causality."""
    name: str
    build: object
    head_dim: int
    queries: int
    workgroup: tuple[int, int, int]
    causal: bool

    def program(self) -> Program:
        return self.build()


KERNELS = {
    "fp8_hd128": KernelEntry("fp8_hd128", fp8_hd128.build, 128, fp8_hd128.QUERIES, (64 * fp8_hd128.WAVES, 1, 1), True),
}


class InputError(ValueError):
    """Q, K, V of a shape or type the kernel cannot take; the message says what it can."""


@frozen
class Problem:
    """Quantised inputs: e4m3 bytes [batch, seq, heads, head_dim], descales (one a tensor), the softmax scale."""
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    descale: tuple[float, float, float]
    scale: float

    @property
    def flops(self) -> float:
        """Multiply-adds counted as 2, over the visible (query, key) pairs of the causal mask, QK^T and PV."""
        n_q, n_k = self.q.shape[1], self.k.shape[1]
        seen = np.clip(np.arange(n_q) + n_k - n_q + 1, 0, n_k).sum()
        return 4.0 * self.q.shape[0] * self.q.shape[2] * self.q.shape[3] * float(seen)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """Float64 attention on the same quantised inputs: O [batch, seq, heads, dim], LSE [batch, heads, seq]."""
        q, k, v = (reference.decode_e4m3(x) * float(d) for x, d in zip((self.q, self.k, self.v), self.descale))
        return reference.attention(q, k, v, self.scale)


def problem(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float | None = None, head_dim: int = 128) -> Problem:
    """Quantise float Q, K, V [batch, seq, heads, dim] a tensor at a time; dims below the kernel's are zero-padded.

    scale: softmax scale, default 1 / sqrt(dim before padding). InputError for what the kernel cannot take.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise InputError(f"{name} has shape {x.shape}; it must be [batch, seq, heads, dim]")
        if x.dtype not in (np.float16, np.float32, np.float64):
            raise InputError(f"{name} is {x.dtype}; it must be float16 or float32")
        if not np.isfinite(x).all():
            raise InputError(f"{name} holds NaN or infinity; Lean P does not carry them to the output")
        if not 1 <= x.shape[3] <= head_dim:
            raise InputError(f"{name} has head dim {x.shape[3]}; this kernel takes 1 to {head_dim}")
        if 0 in x.shape[:3]:
            raise InputError(f"{name} has shape {x.shape}: an empty batch, sequence or head")
    if not (q.shape[0] == k.shape[0] == v.shape[0]) or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3]:
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape} do not belong together: batch must agree, k and v must have the "
                         "same sequence and heads, q and k the same head dim")
    if q.shape[2] % k.shape[2]:
        raise InputError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} key/value heads")
    scale = 1 / np.sqrt(q.shape[3]) if scale is None else scale
    quantised = []
    for x in (q, k, v):
        codes, descale = reference.quantize_tensor(x.astype(np.float64))
        quantised.append((np.pad(codes, [(0, 0)] * 3 + [(0, head_dim - x.shape[3])]), float(descale)))
    (q8, dq), (k8, dk), (v8, dv) = quantised
    return Problem(q8, k8, v8, (dq, dk, dv), float(scale))


def random_problem(seed: int, *, seq: int = 1024, heads: int = 2, kv_heads: int | None = None, batch: int = 1,
                   seq_kv: int | None = None, scale: float | None = None, head_dim: int = 128) -> Problem:
    """Gaussian Q, K, V from a seed."""
    rng = np.random.default_rng(seed)
    shape = lambda n, h: (batch, n, h, head_dim)
    kv = kv_heads or heads
    q, k, v = (rng.standard_normal(shape(n, h)).astype(np.float32) for n, h in ((seq, heads), (seq_kv or seq, kv), (seq_kv or seq, kv)))
    return problem(q, k, v, scale=scale, head_dim=head_dim)


def load_problem(path: Path, *, seq: int | None = None, scale: float | None = None, head_dim: int = 128) -> Problem:
    """q, k, v of an .npz file, optionally only the first ``seq`` tokens. InputError if it is not such a file."""
    try:
        with np.load(path, allow_pickle=False) as data:
            missing = [n for n in "qkv" if n not in data]
            if missing:
                raise InputError(f"{path} has no array {', '.join(missing)}; it holds {', '.join(data.files) or 'nothing'}")
            q, k, v = (data[n] for n in "qkv")
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as e:  # numpy and zipfile raise many kinds for a file that is no .npz
        raise InputError(f"{path} is not a readable .npz file: {e}") from None
    if seq is not None:
        if any(x.ndim == 4 and seq > x.shape[1] for x in (q, k, v)):
            raise InputError(f"--seq {seq}: {path.name} holds {q.shape[1] if q.ndim == 4 else '?'} tokens")
        q, k, v = (x[:, :seq] if x.ndim == 4 else x for x in (q, k, v))
    return problem(q, k, v, scale=scale, head_dim=head_dim)


def launch(entry: KernelEntry, program: Program, p: Problem) -> Launch:
    """Grid, buffers and kernel arguments for a problem."""
    batch, seq_q, heads, dim = p.q.shape
    seq_kv, kv_heads = p.k.shape[1:3]
    buffers = {"q": p.q, "k": p.k, "v": p.v, "o": np.zeros(p.q.shape, np.uint16), "lse": np.zeros((batch, heads, seq_q), np.float32)}
    for name, d in zip(("q_descale", "k_descale", "v_descale"), p.descale):
        buffers[name] = np.array([d], np.float32)
    values: dict[str, int | float] = {"seqlen_q": seq_q, "seqlen_kv": seq_kv, "heads_per_kv": heads // kv_heads, "softmax_scale": p.scale}
    for name, x in (("q", p.q), ("k", p.k), ("v", p.v), ("o", buffers["o"])):
        values[f"{name}_batch_stride"], values[f"{name}_row_stride"], values[f"{name}_head_stride"] = x.strides[:3]
    values["lse_batch_stride"], values["lse_head_stride"] = buffers["lse"].strides[:2]
    kernarg = [{"offset": a.offset, "buffer": a.name} if a.kind == "pointer" else {"offset": a.offset, a.kind: values.get(a.name, 0)}
               for a in program.info.args]
    grid = (-(-seq_q // entry.queries), heads, batch)
    return Launch(grid=grid, workgroup=entry.workgroup, buffers=buffers, outputs={"o", "lse"}, kernarg=kernarg)

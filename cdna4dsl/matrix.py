"""Matrix instructions: which lane and register holds which element, and what they compute.

Layouts are of one wave; ``lane = i + M (b + B g)`` holds row i of block b (column, for B), lane group g of k. Sources: CDNA4 ISA 7.1.4
(inputs and results), 7.1.5 (8 bits and less), 7.2 (scales), 7.5 (sparse).
"""
from __future__ import annotations

import functools

import numpy as np
from attrs import frozen

from .numerics import F32, U32, fp8_table

KINDS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8, "f8f6f4": 8}    # bits of an element
RESULTS = {"f64": 64, "f32": 32, "i32": 32}
FORMATS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")           # of f8f6f4, by cbsz (A) or blgp (B)
_FORMAT_BITS = (8, 8, 6, 6, 4)


@frozen
class Shape:
    """A matrix instruction: blocks of M x N x K, types of A, B and D; formats of f8f6f4; sparse: A keeps two of four values along k."""
    m: int
    n: int
    k: int
    blocks: int
    a: str
    b: str
    d: str
    a_format: int = 0
    b_format: int = 0
    sparse: bool = False


@frozen(eq=False)
class Layout:
    """Item t of lane l is element (block[t, l], row[t, l], column[t, l]), in bits base + t x bits and up of the lane's registers.

    A: row i, column k; compressed A and its indices: row i, column c, one of 4 (c // 2) .. + 3 for k. B: row k, column j. C, D: i, j.
    Scales: row i (or j), column k // 32.
    """
    bits: int
    base: int
    axes: tuple[str, str]
    block: np.ndarray
    row: np.ndarray
    column: np.ndarray

    @property
    def items(self) -> int:
        return len(self.row)

    @property
    def registers(self) -> int:
        return -(-(self.base + self.items * self.bits) // 32)

    def bit_range(self, item: int) -> tuple[int, int, int]:
        """(register, low bit, high bit) of an item; a high bit past 31 goes on in the next register."""
        register, low = divmod(self.base + item * self.bits, 32)
        return register, low, low + self.bits - 1

    def find(self, row: int, column: int, block: int = 0) -> tuple[int, int, int, int]:
        """(lane, register, low bit, high bit) of an element."""
        item, lane = np.argwhere((self.row == row) & (self.column == column) & (self.block == block))[0].tolist()
        return lane, *self.bit_range(item)

    def element(self, lane: int, register: int, bit: int = 0) -> tuple[int, int, int] | None:
        """(block, row, column) of the element that has this bit; None if the bit is unused."""
        item = (32 * register + bit - self.base) // self.bits
        if not 0 <= item < self.items:
            return None
        return int(self.block[item, lane]), int(self.row[item, lane]), int(self.column[item, lane])


def element_bits(kind: str, fmt: int = 0) -> int:
    return _FORMAT_BITS[fmt] if kind == "f8f6f4" else KINDS[kind]


def _run(per_lane: int, bits: int, compressed: bool = False) -> int:
    """How many consecutive values of k a lane's registers hold. All, but operands of eight registers (and the compressed
    A that faces such a B) come in two halves, each of half the K dimension."""
    return per_lane // 2 if per_lane * bits == (128 if compressed else 256) else per_lane


@functools.lru_cache(None)
def layout(shape: Shape, operand: str, index_set: int = 0, scale_byte: int = 0) -> Layout:
    """Layout of operand "A", "B", "C", "D", "index" (of compressed A), "scale A" or "scale B"."""
    lane = np.arange(64)[None, :]
    if operand in ("C", "D"):
        height = 1 if shape.d == "f64" else 4
        together = -(-64 // (shape.m * shape.n // height))          # blocks side by side in one item (B_I)
        rows = 64 // together // shape.n                            # row groups side by side (M_I)
        groups = shape.m // (height * rows)                         # G
        item = np.arange(shape.m * shape.n * shape.blocks // 64)[:, None]
        # The manual's lane is j + N (row group + M_I b). That is wrong for f64 4x4x4, the only shape with both: AMD's matrix
        # instruction calculator and code that runs (libParanumal) have the results in the order of B.
        at = lane // shape.n
        block = at % together + together * (item // height // groups)
        row = item % height + height * (at // together + rows * (item // height % groups))
        return _layout(RESULTS[shape.d], 0, ("i", "j"), block, row, lane % shape.n)
    left = operand in ("A", "index", "scale A")
    size = shape.m if left else shape.n
    i, block, group = lane % size, lane // size % shape.blocks, lane // (size * shape.blocks)
    if operand.startswith("scale"):
        return _layout(8, 8 * scale_byte, ("i" if left else "j", "k/32"), block, i, group)
    compressed = shape.sparse and left
    bits = element_bits(shape.a, shape.a_format) if left else element_bits(shape.b, shape.b_format)
    lanes = 64 // (size * shape.blocks)
    per_lane = shape.k // (2 if compressed else 1) // lanes
    item, run = np.arange(per_lane)[:, None], _run(per_lane, bits, compressed)
    k = item % run + run * (group + lanes * (item // run))
    if operand == "index":
        return _layout(2, index_set * 2 * per_lane, ("i", "c"), block, i, k)
    return _layout(bits, 0, ("i", "c" if compressed else "k"), block, i, k) if left else _layout(bits, 0, ("k", "j"), block, k, i)


def _layout(bits, base, axes, *index) -> Layout:
    index = np.broadcast_arrays(*index)
    for x in index:
        x.setflags(write=False)
    return Layout(bits, base, axes, *index)


def index_sets(shape: Shape) -> int:
    """How many sets of indices a register holds: 4 of 8 bits, 2 of 16 or 1 of 32."""
    return 32 // (2 * layout(shape, "index").items)


def index_set(shape: Shape, cbsz: int, abid: int) -> int:
    """ABID chooses among the sets if CBSZ[1:0] is 0, else the first is taken (ISA 7.5)."""
    return abid % index_sets(shape) if cbsz % 4 == 0 else 0


def a_lanes(blocks: int, cbsz: int, abid: int) -> np.ndarray:
    """The lane that stands in for each lane of A: in each 2^cbsz neighbouring blocks, block abid of them for all.

    So say the manual's table of VOP3P-MAI fields and AMD's matrix instruction calculator; the formula in 7.1.6.1 numbers pieces of
    64 / 2^cbsz lanes instead. They agree if 2^cbsz is the number of blocks.
    """
    lane, per_block = np.arange(64), 64 // blocks
    block = lane // per_block
    return lane % per_block + per_block * ((block >> cbsz << cbsz) + abid)


def b_lanes(blgp: int) -> np.ndarray:
    """The lane that stands in for each lane of B (ISA table 29; 7 is not printed there, but in the calculator)."""
    lane = np.arange(64)
    return (lane, lane % 32, lane % 32 + 32, (lane + 16) % 64, *(lane % 16 + 16 * i for i in range(4)))[blgp]


# ---- numbers -----------------------------------------------------------------------------------------------------
def _small_float(code, exponent_bits: int, mantissa_bits: int, bias: int):
    """Value of an FP6 or FP4 code: no infinity, no NaN."""
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    scale = 1 << mantissa_bits
    value = np.where(exponent == 0, mantissa / scale * 2.0 ** (1 - bias), (1 + mantissa / scale) * 2.0 ** (exponent - float(bias)))
    return np.where(code >> exponent_bits + mantissa_bits & 1, -value, value)


@functools.lru_cache(None)
def _format(number: int) -> np.ndarray:
    """Value of each code."""
    name = FORMATS[number]
    if number < 2:
        return fp8_table(name)
    return _small_float(np.arange(1 << _FORMAT_BITS[number]), *{"e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}[name])


def _elements(regs: np.ndarray, kind: str, fmt: int) -> np.ndarray:
    """float64 [waves, 64, items] of an A or B operand's registers [r, waves, 64]."""
    raw = np.ascontiguousarray(regs.transpose(1, 2, 0))
    if kind in ("fp8", "bf8", "f8f6f4"):
        if fmt >= len(FORMATS):
            raise NotImplementedError(f"there is no matrix format {fmt}; {', '.join(f'{i} {n}' for i, n in enumerate(FORMATS))}")
        width, table = (8, _format(kind == "bf8")) if kind != "f8f6f4" else (_FORMAT_BITS[fmt], _format(fmt))
        if width == 8:
            return table[raw.view(np.uint8)]
        bits = np.unpackbits(raw[..., :width].view(np.uint8), axis=-1, bitorder="little").reshape(*raw.shape[:2], 32, width)
        return table[bits @ (1 << np.arange(width))]
    if kind == "bf16":
        return (raw.view(np.uint16).astype(U32) << U32(16)).view(F32).astype(np.float64)
    return raw.view({"f64": np.float64, "f32": F32, "f16": np.float16, "i8": np.int8}[kind]).astype(np.float64)


def _rows(x: np.ndarray, size: int, blocks: int, bits: int, compressed: bool = False) -> np.ndarray:
    """[waves, blocks, size, k] of what the lanes hold, [waves, 64, items]: A by rows, or B by columns."""
    waves, _, per_lane = x.shape
    run, lanes = _run(per_lane, bits, compressed), 64 // (size * blocks)
    return x.reshape(waves, lanes, blocks, size, -1, run).transpose(0, 2, 3, 4, 1, 5).reshape(waves, blocks, size, per_lane * lanes)


@functools.lru_cache(None)
def _result_index(m: int, n: int, blocks: int, d_kind: str) -> np.ndarray:
    """Position in D [blocks, m, n] of each item and lane, flat."""
    at = layout(Shape(m, n, 1, blocks, "f32", "f32", d_kind), "D")
    return ((at.block * m + at.row) * n + at.column).ravel()


def _multiply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return left @ right.swapaxes(2, 3)


def _accumulate(product: np.ndarray, c, d_kind: str, negate: bool = False) -> np.ndarray:
    """product [waves, blocks, m, n] plus c (registers or a number), as registers; sums in f64 (i32: exactly), one rounding."""
    waves, blocks, m, n = product.shape
    d = product.reshape(waves, -1).take(_result_index(m, n, blocks, d_kind), 1).reshape(waves, -1, 64).transpose(1, 0, 2)
    registers = isinstance(c, np.ndarray) and c.ndim == 3
    if d_kind == "i32":
        return (d.astype(np.int64) + (c.view(np.int32) if registers else int(c))).astype(U32)
    with np.errstate(all="ignore"):
        if d_kind == "f32":
            return np.ascontiguousarray((d + (c.view(F32) if registers else c)).astype(F32)).view(U32)
        if registers:
            c = np.ascontiguousarray(c.reshape(-1, 2, *c.shape[1:]).transpose(0, 2, 3, 1)).view(np.float64)[..., 0]
        d = np.ascontiguousarray(d - c if negate else d + c)
        return np.ascontiguousarray(d.view(U32).reshape(*d.shape, 2).transpose(0, 3, 1, 2)).reshape(-1, *d.shape[1:])


def mfma(m: int, n: int, k: int, blocks: int, a_kind: str, b_kind: str, d_kind: str, a, b, c, cbsz: int = 0, abid: int = 0,
         blgp: int = 0) -> np.ndarray:
    """D = A B + C as registers [r, waves, 64] of uint32. a, b: registers; c the same, or a number.

    Model numerics.mfma_accumulate = exact: products and sums in f64, one rounding (i8: exact, wraps around at 32 bits).
    """
    a_format = b_format = 0
    if a_kind == "f8f6f4":
        a_format, b_format = cbsz, blgp
    elif a_kind != "f64":
        if cbsz:
            if 1 << cbsz > blocks or abid >= 1 << cbsz:
                raise NotImplementedError(f"cbsz:{cbsz} abid:{abid} is undefined for an instruction of {blocks} block{'s' * (blocks > 1)}")
            a = a[..., a_lanes(blocks, cbsz, abid)]
        if blgp:
            b = b[..., b_lanes(blgp)]
    left = _rows(_elements(a, a_kind, a_format), m, blocks, element_bits(a_kind, a_format))
    right = _rows(_elements(b, b_kind, b_format), n, blocks, element_bits(b_kind, b_format))
    product = _multiply(left, right)
    if a_kind != "f64":
        return _accumulate(product, c, d_kind)
    return _accumulate(-product if (blgp ^ blgp >> 1) & 1 else product, c, d_kind, negate=bool(blgp & 4))


def smfmac(m: int, n: int, k: int, a_kind: str, b_kind: str, d_kind: str, a, b, index, d, cbsz: int = 0, abid: int = 0) -> np.ndarray:
    """D + A B, A sparse: of each four values along k the two that the 2-bit indices name. index: one register [waves, 64]."""
    shape = Shape(m, n, k, 1, a_kind, b_kind, d_kind, sparse=True)
    at, bits = layout(shape, "index", index_set(shape, cbsz, abid)), element_bits(a_kind)
    shift = (at.base + 2 * np.arange(at.items)).astype(U32)
    values = _rows(_elements(a, a_kind, 0), m, 1, bits, True)
    places = _rows(index.reshape(-1, 64)[..., None] >> shift & U32(3), m, 1, bits, True)
    right = _rows(_elements(b, b_kind, 0), n, 1, element_bits(b_kind))
    if np.isfinite(right).all():
        pairs = (len(values), 1, m, k // 4, 2, 1)
        left = np.where(places.reshape(pairs) == np.arange(4, dtype=U32), values.reshape(pairs), 0.0).sum(axis=4)
        return _accumulate(_multiply(left.reshape(-1, 1, m, k), right), d, d_kind)
    # the zeros of A must not meet infinities
    at_k = (places + 4 * (np.arange(k // 2) // 2)).astype(np.int64)
    with np.errstate(all="ignore"):
        product = [np.einsum("ic,jic->ij", v[0], r[0][:, p[0]]) for v, r, p in zip(values, right, at_k)]
    return _accumulate(np.stack(product)[:, None], d, d_kind)


def _block_scales(codes: np.ndarray, byte: int, size: int) -> np.ndarray:
    """float64 [waves, 1, size, blocks of 32 k] of E8M0 scales: lane i + size g holds row i, block g."""
    code = (codes >> U32(8 * byte) & U32(255)).astype(np.int64)
    value = np.where(code == 255, np.nan, np.ldexp(1.0, code - 127))
    return np.broadcast_to(value, (*value.shape[:-1], 64)).reshape(-1, 1, 64 // size, size).swapaxes(2, 3)


def mfma_scale(m: int, n: int, k: int, a, b, c, cbsz: int, blgp: int, scale0, scale1, op_sel: int, op_sel_hi: int) -> np.ndarray:
    """``mfma`` of f8f6f4 with a scale for each row (column) and 32 values of k. Bit 0 (A) and 1 (B) of op_sel and
    op_sel_hi are the low and high bit of the number of the scale's byte."""
    scaled = []
    for i, (regs, size, fmt, codes) in enumerate(((a, m, cbsz, scale0), (b, n, blgp, scale1))):
        byte = (op_sel >> i & 1) + 2 * (op_sel_hi >> i & 1)
        rows = _rows(_elements(regs, "f8f6f4", fmt), size, 1, element_bits("f8f6f4", fmt))
        scaled.append(rows * np.repeat(_block_scales(codes, byte, size), 32, axis=3))
    return _accumulate(_multiply(*scaled), c, "f32")

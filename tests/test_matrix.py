"""Matrix instructions against the manual's formulas (CDNA4 ISA 7.1.4, 7.1.5, 7.5) in plain loops, and published table entries."""
import functools
import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from attrs import evolve
from PIL import Image

from cdna4dsl import layout_view, matrix
from cdna4dsl.isa import load
from cdna4dsl.matrix import Shape, layout

TYPES = {"f64": "f8", "f32": "f4", "f16": "f2", "bf16": ml_dtypes.bfloat16, "i8": "i1", "fp8": ml_dtypes.float8_e4m3fn,
         "bf8": ml_dtypes.float8_e5m2}
FORMATS = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn, ml_dtypes.float4_e2m1fn)
FORMAT_BITS = (8, 8, 6, 6, 4)
MIXES = list(itertools.product(("fp8", "bf8"), repeat=2))
HALF = [("f16", "f16"), ("bf16", "bf16")]


def shapes(kinds, d, *sizes, sparse=False):
    numbers = [[*map(int, f"{s}x1".split("x")[:4])] for s in sizes]
    return [Shape(*mnk, a, b, d, sparse=sparse) for mnk in numbers for a, b in kinds]


DENSE = [
    *shapes([("f32", "f32")], "f32", "32x32x1x2", "16x16x1x4", "4x4x1x16", "32x32x2", "16x16x4"),
    *shapes(HALF, "f32", "32x32x4x2", "16x16x4x4", "4x4x4x16", "32x32x8", "16x16x16", "16x16x32", "32x32x16"),
    *shapes([("i8", "i8")], "i32", "32x32x4x2", "16x16x4x4", "4x4x4x16", "32x32x16", "16x16x32", "16x16x64", "32x32x32"),
    *shapes([("f64", "f64")], "f64", "16x16x4", "4x4x4x4"),
    *shapes(MIXES, "f32", "16x16x32", "32x32x16"),
    *(Shape(*s, 1, "f8f6f4", "f8f6f4", "f32", a, b)
      for s in ((16, 16, 128), (32, 32, 64)) for a, b in ((0, 0), (1, 4), (2, 3), (3, 1), (4, 2))),
]
SPARSE = [
    *shapes(HALF, "f32", "16x16x32", "32x32x16", "16x16x64", "32x32x32", sparse=True),
    *shapes([("i8", "i8")], "i32", "16x16x64", "32x32x32", "16x16x128", "32x32x64", sparse=True),
    *shapes(MIXES, "f32", "16x16x64", "32x32x32", "16x16x128", "32x32x64", sparse=True),
]
name = lambda s: f"{s.d}_{s.m}x{s.n}x{s.k}_{s.blocks}b_{s.a}{s.a_format}_{s.b}{s.b_format}"
bits_of = lambda kind, fmt: FORMAT_BITS[fmt] if kind == "f8f6f4" else np.dtype(TYPES[kind]).itemsize * 8


# ---- the manual again, element by element ------------------------------------------------------------------------
@functools.cache
def manual_input(size, k_total, blocks, bits, halves):
    """{(block, row, k): (lane, item)}. halves: registers 0-3 hold the first half of k, 4-7 the second."""
    at = {}
    for b, i, k in itertools.product(range(blocks), range(size), range(k_total)):
        if halves:
            part, rest = divmod(k, k_total // 2)
            k_lane = k_total // 2 // (64 // (size * blocks))
            at[b, i, k] = i + size * (b + blocks * (rest // k_lane)), rest % k_lane + part * k_lane
        else:
            k_lane = k_total // (64 // (size * blocks))
            at[b, i, k] = i + size * (b + blocks * (k // k_lane)), k % k_lane
    return at


@functools.cache
def manual_output(m, n, blocks, d):
    at, h = {}, 1 if d == "f64" else 4
    b_i = -(-64 // (n * m // h))
    m_i = 64 // b_i // n
    g = m // (h * m_i)
    for b, i, j in itertools.product(range(blocks), range(m), range(n)):
        # manual: lane j + N ((i / H) % M_I + M_I (b % B_I)); the calculator's table for f64 4x4x4 (below) has block and row the other way
        at[b, i, j] = j + n * (b % b_i + b_i * (i // h % m_i)), i % h + h * (i // (h * m_i) + g * (b // b_i))
    return at


def inputs(s):
    """Layouts of A and B; 8 registers, and compressed A of 4, are in halves (tables of 7.1.5.1 and 7.5.1.3)."""
    a_bits, b_bits = bits_of(s.a, s.a_format), bits_of(s.b, s.b_format)
    stored = s.k // 2 if s.sparse else s.k
    return (manual_input(s.m, stored, s.blocks, a_bits, stored * s.m * s.blocks * a_bits // 64 == (128 if s.sparse else 256)),
            manual_input(s.n, s.k, s.blocks, b_bits, s.k * s.n * s.blocks * b_bits // 64 == 256))


def pack(values, at, bits):
    """Registers [r, 1, 64] of integer codes [blocks, row, column]."""
    lanes = [0] * 64
    for key, (lane, item) in at.items():
        lanes[lane] |= int(values[key]) << bits * item
    count = -(-bits * (1 + max(item for _, item in at.values())) // 32)
    return np.array([[[x >> 32 * r & 0xFFFFFFFF for x in lanes]] for r in range(count)], np.uint32)


def unpack(registers, at, m, n, blocks, d):
    out = np.zeros((blocks, m, n), {"f32": np.float32, "f64": np.float64, "i32": np.int32}[d])
    for key, (lane, item) in at.items():
        words = registers[2 * item:2 * item + 2, 0, lane] if d == "f64" else registers[item:item + 1, 0, lane]
        out[key] = np.ascontiguousarray(words).view(out.dtype)[0]
    return out


def draw(rng, kind, fmt, shape):
    """(codes, values) of finite numbers."""
    bits = bits_of(kind, fmt)
    if kind in ("f64", "f32", "f16", "bf16"):
        x = rng.normal(size=shape).astype(TYPES[kind])
        return x.view(f"u{bits // 8}"), x.astype(np.float64)
    dtype = np.dtype(FORMATS[fmt] if kind == "f8f6f4" else TYPES[kind])
    codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
    codes = np.where(np.isfinite(codes.view(dtype).astype(np.float64)), codes, 1).astype(np.uint8)
    return codes, codes.view(dtype).astype(np.float64)


def accumulator(rng, s):
    if s.d == "i32":
        return rng.integers(-2 ** 31, 2 ** 31, (s.blocks, s.m, s.n)).astype(np.int32)
    return rng.normal(size=(s.blocks, s.m, s.n)).astype(s.d.replace("f", "float"))


def expect(s, got, product, c):
    at = manual_output(s.m, s.n, s.blocks, s.d)
    got = unpack(got, at, s.m, s.n, s.blocks, s.d)
    if s.d == "i32":
        np.testing.assert_array_equal(got, (product.astype(np.int64) + c).astype(np.int32))
    else:
        np.testing.assert_allclose(got, product + c, rtol=0, atol=(1e-14 if s.d == "f64" else 1e-7) * max(1, np.abs(product).max()))


def case(s, rng):
    a_at, b_at = inputs(s)
    a, left = draw(rng, s.a, s.a_format, (s.blocks, s.m, s.k // 2 if s.sparse else s.k))
    b, right = draw(rng, s.b, s.b_format, (s.blocks, s.n, s.k))
    c = accumulator(rng, s)
    width = 64 if s.d == "f64" else 32
    c_regs = pack(c.view(f"u{width // 8}"), manual_output(s.m, s.n, s.blocks, s.d), width)
    return pack(a, a_at, bits_of(s.a, s.a_format)), pack(b, b_at, bits_of(s.b, s.b_format)), c_regs, left, right, c


def mfma(s, *regs, **mods):
    if s.a == "f8f6f4":
        mods = {"cbsz": s.a_format, "blgp": s.b_format}
    return matrix.mfma(s.m, s.n, s.k, s.blocks, s.a, s.b, s.d, *regs, **mods)


@pytest.mark.parametrize("s", DENSE, ids=name)
def test_mfma(s):
    a, b, c_regs, left, right, c = case(s, np.random.default_rng(1))
    product = np.einsum("bik,bjk->bij", left, right)
    expect(s, mfma(s, a, b, c_regs), product, c)
    expect(s, mfma(s, a, b, 3 if s.d == "i32" else 0.5), product, 3 if s.d == "i32" else 0.5)
    two = mfma(s, *(np.concatenate([x, x], axis=1) for x in (a, b, c_regs)))                # waves keep apart
    np.testing.assert_array_equal(two[:, :1], two[:, 1:])


@pytest.mark.parametrize("s", DENSE + SPARSE, ids=lambda s: name(s) + "_sparse" * s.sparse)
def test_layout(s):
    for operand, at in zip("AB", inputs(s)):
        lay = layout(s, operand)
        assert (lay.bits, lay.items) == (bits_of(s.a, s.a_format) if operand == "A" else bits_of(s.b, s.b_format), len(at) // 64)
        outer, inner = (lay.row, lay.column) if operand == "A" else (lay.column, lay.row)
        for (b, i, k), (lane, item) in at.items():
            assert (lay.block[item, lane], outer[item, lane], inner[item, lane]) == (b, i, k)
    lay, at = layout(s, "D"), manual_output(s.m, s.n, s.blocks, s.d)
    assert all((lay.block[t, l], lay.row[t, l], lay.column[t, l]) == key for key, (l, t) in at.items())
    assert lay.items * 64 == len(at)
    for operand in ("A", "B", "C"):                                                           # both directions agree
        lay = layout(s, operand)
        for item, lane in ((0, 0), (lay.items - 1, 63), (lay.items // 2, 21)):
            element = lay.element(lane, *lay.bit_range(item)[:2])
            assert lay.find(*element[1:], element[0]) == (lane, *lay.bit_range(item))


# ---- what is printed elsewhere -----------------------------------------------------------------------------------
def s_of(a, d, *size, sparse=False):
    return Shape(*size, a, a, d, sparse=sparse)


@pytest.mark.parametrize("shape,operand,element,place", [
    # amd_matrix_instruction_calculator, README: (row, column, block) -> (lane, register, low bit, high bit)
    (s_of("f64", "f64", 4, 4, 4, 4), "D", (0, 0, 1), (4, 0, 0, 63)),
    (s_of("f64", "f64", 4, 4, 4, 4), "D", (1, 0, 0), (16, 0, 0, 63)),
    (s_of("f64", "f64", 4, 4, 4, 4), "D", (3, 3, 2), (59, 0, 0, 63)),
    (s_of("f16", "f32", 4, 4, 4, 16), "A", (1, 2, 4), (17, 1, 0, 15)),
    (s_of("f16", "f32", 4, 4, 4, 16), "D", (2, 1, 8), (33, 2, 0, 31)),
    # CDNA4 ISA, tables of 7.1.5.1, 34, 36 and 7.5.1.3
    (s_of("bf16", "f32", 16, 16, 32, 1), "A", (5, 27, 0), (53, 1, 16, 31)),
    (s_of("i8", "i32", 16, 16, 64, 1), "B", (44, 9, 0), (41, 3, 0, 7)),
    (s_of("i8", "i32", 32, 32, 32, 1), "A", (17, 31, 0), (49, 3, 24, 31)),
    (s_of("f16", "f32", 16, 16, 32, 1, sparse=True), "B", (26, 3, 0), (51, 1, 0, 15)),
    (s_of("i8", "i32", 16, 16, 64, 1, sparse=True), "B", (25, 0, 0), (16, 2, 8, 15)),
    (s_of("bf16", "f32", 16, 16, 64, 1, sparse=True), "B", (50, 2, 0), (34, 5, 0, 15)),
    (s_of("bf16", "f32", 32, 32, 32, 1, sparse=True), "B", (29, 31, 0), (63, 6, 16, 31)),
    (s_of("fp8", "f32", 16, 16, 128, 1, sparse=True), "B", (118, 4, 0), (52, 5, 16, 23)),
    (s_of("fp8", "f32", 32, 32, 64, 1, sparse=True), "B", (47, 0, 0), (0, 7, 24, 31)),
    # table 35 and 7.5.1.3: indices of V1[15:0] in set 3, of V3[31:16] in set 1, of V3[7:0] in the only set
    (s_of("f16", "f32", 16, 16, 32, 1, sparse=True), ("index", 3), (0, 2, 0), (0, 0, 28, 29)),
    (s_of("bf16", "f32", 32, 32, 32, 1, sparse=True), ("index", 1), (0, 15, 0), None),
    (s_of("i8", "i32", 32, 32, 32, 1, sparse=True), ("index", 1), (3, 5, 0), (3, 0, 26, 27)),
])
def test_published(shape, operand, element, place):
    lay = layout(shape, *([operand] if isinstance(operand, str) else operand))
    if place is None:       # 7.5.1.3: [31:30] is set 1, V3[31:16], of its lane
        assert lay.element(5, 0, 30) == (0, 5, layout(shape, "A").element(5, 3, 16)[2])
    else:
        assert lay.find(*element) == place and lay.element(*place[:3]) == (element[2], *element[:2])


def test_index_of_the_doubled_shapes():
    # K[2][31] of v_smfmac_f32_16x16x64_f16: lane 50, bits 7:4, in the calculator's output
    assert [layout(s_of("f16", "f32", 16, 16, 64, 1, sparse=True), "index").find(2, c)[:3] for c in (14, 15)] == [(50, 0, 4), (50, 0, 6)]


def test_layout_of_scales():
    for s in (Shape(16, 16, 128, 1, "f8f6f4", "f8f6f4", "f32"), Shape(32, 32, 64, 1, "f8f6f4", "f8f6f4", "f32")):
        lay = layout(s, "scale B", scale_byte=2)
        assert all(lay.find(j, g) == (j + s.n * g, 0, 16, 23) for j in range(s.n) for g in range(s.k // 32))


# ---- modifiers ---------------------------------------------------------------------------------------------------
MULTI = [s for s in DENSE if s.blocks > 1 and s.a in ("f32", "f16", "i8")]


@pytest.mark.parametrize("s", MULTI, ids=name)
def test_broadcast_of_a(s):
    a, b, c_regs, left, right, c = case(s, np.random.default_rng(2))
    for cbsz in range(1, s.blocks.bit_length()):
        abid = (1 << cbsz) - 1
        source = [blk // (1 << cbsz) * (1 << cbsz) + abid for blk in range(s.blocks)]        # README: cbsz 1, abid 1: 1, 1, 3, 3, ...
        expect(s, mfma(s, a, b, c_regs, cbsz=cbsz, abid=abid), np.einsum("bik,bjk->bij", left[source], right), c)
    with pytest.raises(NotImplementedError):
        mfma(s, a, b, c_regs, cbsz=s.blocks.bit_length())


@pytest.mark.parametrize("s", [*MULTI[:3], DENSE[4]], ids=name)
@pytest.mark.parametrize("blgp", range(1, 8))
def test_lanes_of_b(s, blgp):
    a, b, c_regs, left, _, c = case(s, np.random.default_rng(3))
    source = lambda l: {1: l % 32, 2: l % 32 + 32, 3: (l + 16) % 64}.get(blgp, l % 16 + 16 * (blgp - 4))
    right = np.zeros((s.blocks, s.n, s.k))
    for key, (lane, item) in inputs(s)[1].items():
        right[key] = b.view(TYPES[s.b])[item, 0, source(lane)] if s.b == "f32" else b[item // 2, 0, [source(lane)]].view("f2")[item % 2]
    expect(s, mfma(s, a, b, c_regs, blgp=blgp), np.einsum("bik,bjk->bij", left, right), c)


@pytest.mark.parametrize("blgp", range(8))
def test_f64_negates(blgp):
    for s in (x for x in DENSE if x.a == "f64"):
        a, b, c_regs, left, right, c = case(s, np.random.default_rng(4))
        sign = [(-1) ** (blgp >> i & 1) for i in range(3)]
        expect(s, mfma(s, a, b, c_regs, blgp=blgp), sign[0] * sign[1] * np.einsum("bik,bjk->bij", left, right), sign[2] * c)


# ---- sparse ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("s", SPARSE, ids=name)
def test_smfmac(s):
    rng = np.random.default_rng(5)
    a, b, c_regs, left, right, c = case(s, rng)
    pairs = np.array(list(itertools.combinations(range(4), 2)))[rng.integers(0, 6, (s.m, s.k // 4))]
    dense = np.zeros((1, s.m, s.k))
    for i, group, slot in itertools.product(range(s.m), range(s.k // 4), (0, 1)):
        dense[0, i, 4 * group + pairs[i, group, slot]] = left[0, i, 2 * group + slot]
    product = np.einsum("bik,bjk->bij", dense, right)
    items = s.k // 2 * s.m // 64
    sets = 16 // items
    assert sets == (4 if s.m * s.k in (512,) else 2 if s.m * s.k == 1024 else 1) == matrix.index_sets(s)
    for cbsz, abid in ((0, 0), (0, sets - 1), (1, sets - 1)):
        used = abid if cbsz == 0 else 0
        index = rng.integers(0, 1 << 32, (1, 64), dtype=np.uint32)                           # noise in the other sets
        for (_, i, k), (lane, item) in inputs(s)[0].items():
            at = 2 * (used * items + item)
            index[0, lane] = int(index[0, lane]) & ~(3 << at) | int(pairs[i, k // 2, k % 2]) << at
        run = lambda right_regs: matrix.smfmac(s.m, s.n, s.k, s.a, s.b, s.d, a, right_regs, index, c_regs, cbsz, abid)
        expect(s, run(b), product, c)
    if s.b == "bf16":                                                                        # an infinity that no index names
        j, k = 3, next(k for k in range(s.k) if not dense[0, :, k].all() and dense[0, :, k].any())
        lane, item = inputs(s)[1][0, j, k]
        b[item // 2, 0, lane] = 0x7F807F80 & (0xFFFF << 16 * (item % 2)) | int(b[item // 2, 0, lane]) & (0xFFFF0000 >> 16 * (item % 2))
        got = unpack(run(b), manual_output(s.m, s.n, 1, s.d), s.m, s.n, 1, s.d)[0, :, j]
        np.testing.assert_array_equal(np.isfinite(got), dense[0, :, k] == 0)


# ---- edges -------------------------------------------------------------------------------------------------------
def test_i8_wraps_and_f32_overflows():
    regs = np.full((1, 1, 64), 0x7F7F7F7F, np.uint32)
    top = np.full((4, 1, 64), 0x7FFFFFFF, np.uint32)
    got = matrix.mfma(4, 4, 4, 16, "i8", "i8", "i32", regs, regs, top)
    assert (got.view(np.int32) == 0x7FFFFFFF + 4 * 127 ** 2 - 2 ** 32).all()
    big = np.full((1, 1, 64), 1e38, np.float32).view(np.uint32)
    assert np.isposinf(matrix.mfma(16, 16, 4, 1, "f32", "f32", "f32", big, big, 0.0).view(np.float32)).all()


# ---- drawings ----------------------------------------------------------------------------------------------------
def spec_of(s):
    spec = load().instructions["v_mfma_f32_16x16x32_f16"]
    call = (f"smfmac({s.m}, {s.n}, {s.k}, {s.a}, {s.b}, {s.d}, src0, src1, src2, vdst, cbsz, abid)" if s.sparse else
            f"mfma({s.m}, {s.n}, {s.k}, {s.blocks}, {s.a}, {s.b}, {s.d}, src0, src1, src2, 0, 0, 0)")
    return evolve(spec, semantics_text=f"vdst = {call}")


def ends(text):
    return [int(x) for x in text.split("-")]


@pytest.mark.parametrize("s", DENSE + SPARSE, ids=lambda s: name(s) + "_sparse" * s.sparse)
def test_text_tells_the_layout(s):
    spec = spec_of(s)
    assert layout_view.shape_of(spec) == evolve(s, a_format=0, b_format=0)
    mods = {"cbsz": s.a_format, "blgp": s.b_format}
    for operand in "ABD":
        lay = layout(s, operand)
        lines = layout_view.text(spec, operand, **mods).splitlines()
        assert max(map(len, lines)) <= 140
        start, middle = (next(i for i, x in enumerate(lines) if mark in x) for mark in ("-> register.lane", "-> element"))
        columns, covered = lines[start + 1].split()[1:], 0
        for line in lines[start + 2:middle]:
            row, *cells = line.split()
            if row == "block":
                continue
            for column, cell in zip(columns, cells, strict=True):
                registers, lanes = re.fullmatch(r"v([\d-]+)(?:\[\d+:\d+\])?\.([\d-]+)", cell).groups()
                for end in (0, -1):                                                           # first and last element of the range
                    lane, register, _, high = lay.find(ends(row)[end], ends(column)[end])
                    assert (lane, register + (high // 32 if end else 0)) == (ends(lanes)[end], ends(registers)[end])
                covered += (ends(row)[-1] - ends(row)[0] + 1) * (ends(column)[-1] - ends(column)[0] + 1)
        assert covered * s.blocks == 64 * lay.items
        heads, covered = lines[middle + 1].split()[1:], 0
        for line in lines[middle + 2:]:
            lanes, *cells = line.replace(" b", " ").split()
            cells = [c for c in cells if "," in c]
            for head, cell in zip(heads, cells, strict=True):
                row, column = map(ends, cell.split(","))
                register = int(re.match(r"v(\d+)", head)[1])
                assert lay.element(ends(lanes)[0], register)[1:] == (row[0], column[0])
                covered += (row[-1] - row[0] + 1) * (column[-1] - column[0] + 1)
        assert covered == 64 * lay.items


@pytest.mark.parametrize("s", [DENSE[0], DENSE[7], DENSE[-1], SPARSE[-1]], ids=name)
def test_picture(s, tmp_path):
    path = layout_view.png(spec_of(s), tmp_path / "layout.png", abid=1)
    with Image.open(path) as image:
        assert image.width >= 900 and len(image.convert("RGB").getcolors(1 << 20)) > 8


def test_scale_and_wrong_operands():
    scaled = load().instructions["v_mfma_scale_f32_16x16x128_f8f6f4"]
    assert layout_view.operands(scaled) == ["A", "B", "D", "scale A", "scale B"]
    assert "v0[7:0].63" in layout_view.text(scaled, "scale B")
    with pytest.raises(ValueError, match="no layout 'index'"):
        layout_view.text(scaled, "index")
    with pytest.raises(ValueError, match="no matrix instruction"):
        layout_view.text(load().instructions["v_mul_f32"])

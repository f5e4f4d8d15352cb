"""The emulator, instruction by instruction, in whole programs. Expected: Python integers, fractions, math, numpy, ml_dtypes."""
import itertools
import math
import operator
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from cdna4dsl import emulate, isa, numerics, parse
from cdna4dsl.launch import Launch
from cdna4dsl.program import KernelInfo
from test_check import CASES, waits

equal = np.testing.assert_array_equal
ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")   # numpy casts signalling NaNs
M = isa.load()
WORD = 1 << 32
# integers, and f32: denormals, the smallest and largest normals, infinities, NaNs, 1, -1.5, 2.5, 255.5, 448, 464, 2^31, 2^32
EDGES = (0, 1, 2, 4, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFE0, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x7F7FFFFF,
         0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001, 0x3F800000, 0xBFC00000, 0x40200000, 0x437F8000, 0x43E00000, 0x43E80000,
         0x4F000000, 0x4F800000)
COMPARE = {"lt": operator.lt, "eq": operator.eq, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "ne": operator.ne}


def signed(x, width=32):
    return (x & (1 << width) - 1 ^ 1 << width - 1) - (1 << width - 1)


def patterns(count, n=1024, seed=0):
    """uint32 [count, n]: edges and random bits, every pair of edges in the first two."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((count, n)) < 0.3, rng.choice(EDGES, (count, n)), rng.integers(WORD, size=(count, n))).astype(np.uint32)
    pairs = np.array(list(itertools.product(EDGES, EDGES)), np.uint32).T
    x[:2, :min(n, pairs.shape[1])] = pairs[:min(2, count), :n]
    return x


def floats(count, n=1024, seed=0):
    """f32 [count, n]: patterns, and numbers of like magnitude."""
    rng = np.random.default_rng(seed)
    near = (rng.standard_normal((count, n)) * np.exp2(rng.integers(-6, 6, (count, n)))).astype(np.float32)
    x = np.concatenate([patterns(count, n, seed).view(np.float32), near], axis=1)
    return np.ascontiguousarray(x)


def program(text, **info):
    p = parse.parse(text)[0]
    return evolve(p, info=KernelInfo("k", (64, 1, 1), **info)) if info else p


def launch(x, outputs, groups, items=64):
    """Kernel arguments: the buffers x and y."""
    return Launch((groups, 1, 1), (items, 1, 1), {"x": x, "y": np.full(outputs, 0xDEADBEEF, np.uint32)},
                  [{"offset": 0, "buffer": "x"}, {"offset": 8, "buffer": "y"}], {"y"})


def y_of(text, job, **info):
    """uint32 y of a strict run without faults."""
    result = emulate.run(program(text, **{"float_denorm_32": 3, "lds_bytes": 65536, **info}), job)
    assert result.faults == []
    return result.buffers["y"]


ARGUMENTS = "s_load_dwordx4 s[4:7], s[0:1], 0\ns_waitcnt lgkmcnt(0)\n"


def lanes(body, inputs, outputs=1, **info):
    """v10, v11, ... are a lane's inputs; returns uint32 [outputs, items] of v60, v61, ... or the registers named. Item: v0; wave: s2."""
    registers = [f"v{60 + i}" for i in range(outputs)] if isinstance(outputs, int) else outputs
    x = np.stack([np.ascontiguousarray(i).view(np.uint32) for i in inputs], axis=1)
    wide = x.shape[1]
    text = (ARGUMENTS + f"s_lshl_b32 s3, s2, 6\nv_add_u32 v0, s3, v0\nv_mul_u32_u24 v1, {4 * wide}, v0\n"
            f"v_mul_u32_u24 v2, {4 * len(registers)}, v0\n"
            + "".join(f"global_load_dword v{10 + i}, v1, s[4:5] offset:{4 * i}\n" for i in range(wide)) + "s_waitcnt vmcnt(0)\n" + body
            + "\ns_mov_b64 exec, -1\ns_nop 15\ns_nop 7\n" + "".join(f"global_store_dword v2, {r}, s[6:7] offset:{4 * i}\n" for i,
                r in enumerate(registers)) + "s_endpgm")
    assert len(x) % 64 == 0
    return y_of(text, launch(x, (len(x), len(registers)), len(x) // 64), **info).T


def waves(body, inputs, outputs=1, **info):
    """s20, s21, ... are a wave's inputs, at most 8; returns uint32 [outputs, waves] of s40, s41, ..."""
    x = np.zeros((len(inputs[0]), 8), np.uint32)
    x[:, :len(inputs)] = np.stack(inputs, axis=1)
    text = (ARGUMENTS + "s_lshl_b32 s2, s2, 5\ns_load_dwordx8 s[20:27], s[4:5], s2\ns_waitcnt lgkmcnt(0)\n" + body + "\nv_mov_b32 v1, s2\n"
            + "".join(f"v_mov_b32 v10, s{40 + i}\nglobal_store_dword v1, v10, s[6:7] offset:{4 * i}\n"
                      for i in range(outputs)) + "s_endpgm")
    return y_of(text, launch(x, x.shape, len(x)), **info).T[:outputs]


def same(got, want):
    """f32 by their bits, any NaN for a NaN."""
    got, want = np.ascontiguousarray(got).view(np.float32), np.asarray(want, np.float32)
    nan = np.isnan(want)
    equal(np.isnan(got), nan)
    equal(np.where(nan, 0, got.view(np.uint32)), np.where(nan, 0, want.view(np.uint32)))


# -- integers ---------------------------------------------------------------------------------------------------------
def perm(a, b, select):
    data, out = a << 32 | b, 0
    for i in range(4):
        s = select >> 8 * i & 255
        byte = data >> 8 * s & 255 if s < 8 else 255 * (data >> (15, 31, 47, 63)[s - 8] & 1) if s < 12 else 0 if s == 12 else 255
        out |= byte << 8 * i
    return out


U24 = 0xFFFFFF
VECTOR = {
    "v_mov_b32": lambda a: a, "v_not_b32": lambda a: ~a, "v_and_b32": lambda a, b: a & b, "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b, "v_min_i32": lambda a, b: min(signed(a), signed(b)), "v_min_u32": lambda a, b: min(a, b),
    "v_max_i32": lambda a, b: max(signed(a), signed(b)), "v_max_u32": lambda a, b: max(a, b), "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31), "v_ashrrev_i32": lambda a, b: signed(b) >> (a & 31), "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b, "v_subrev_u32": lambda a, b: b - a, "v_mul_u32_u24": lambda a, b: (a & U24) * (b & U24),
    "v_mul_lo_u32": lambda a, b: a * b, "v_mul_hi_u32": lambda a, b: a * b >> 32, "v_perm_b32": perm,
    "v_mad_u32_u24": lambda a, b, c: (a & U24) * (b & U24) + c, "v_bfe_u32": lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c, "v_add_lshl_u32": lambda a, b, c: (a + b) % WORD << (c & 31),
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c, "v_and_or_b32": lambda a, b, c: a & b | c, "v_or3_b32": lambda a, b, c: a | b | c,
    "v_add3_u32": lambda a, b, c: a + b + c, "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_cvt_pk_u8_f32": lambda a, b, c: c & ~(255 << 8 * (b & 3)) | u8(a) << 8 * (b & 3)}



def as_float(bits):
    return float(np.uint32(bits).view(np.float32))


def u8(bits):
    x = as_float(bits)
    return 0 if math.isnan(x) or x < 0 else 255 if x > 255 else round(x)


@pytest.mark.parametrize("name", VECTOR)
def test_vector_integers(name):
    count = VECTOR[name].__code__.co_argcount
    x = patterns(count)
    if name == "v_perm_b32":
        x[2, ::2] &= 0x0F0F0F0F
    got, = lanes(f"{name} v60, " + ", ".join(f"v{10 + i}" for i in range(count)), x)
    equal(got, [VECTOR[name](*map(int, a)) % WORD for a in x.T])


@pytest.mark.parametrize("source,value", [("-5", -5 % WORD), ("64", 64), ("0.5", 0x3F000000), ("-4.0", 0xC0800000), ("s2", None),
                                          ("0x12345678", 0x12345678), ("0.15915494", 0x3E22F983)])
def test_vector_constants(source, value):
    x = patterns(1, 128)
    got, = lanes(f"v_xor_b32 v60, {source}, v10", x)
    equal(got, x[0] ^ (np.arange(128, dtype=np.uint32) // 64 if value is None else np.uint32(value)))


def test_carries_and_64_bits():
    x = patterns(6)
    body = ("v_add_co_u32 v60, vcc, v10, v11\nv_addc_co_u32 v61, vcc, v12, v13, vcc\nv_cndmask_b32 v62, v10, v11, vcc\nv_mov_b32 v20, v14\n"
            "v_mov_b32 v21, v15\nv_lshl_add_u64 v[64:65], v[10:11], v12, v[20:21]\nv_add_co_u32 v63, s[30:31], v10, v11\ns_nop 1\n"
            "v_cndmask_b32 v66, -1, 3, s[30:31]\nv_lshl_add_u64 v[68:69], v[10:11], 3, -2\nv_mov_b32 v67, 0")
    got = lanes(body, x, 10).astype(object)
    a, b, c, d, e, f = x.astype(object)
    total = a + b + (c + d) * WORD
    equal(got[0] + got[1] * WORD, total % WORD ** 2)
    equal(got[2], np.where(total >= WORD ** 2, b, a))
    equal(got[4] + got[5] * WORD, ((a + b * WORD) * 2 ** (c % 8) + e + f * WORD) % WORD ** 2)
    equal(got[8] + got[9] * WORD, ((a + b * WORD) * 8 - 2) % WORD ** 2)
    equal(got[3], (a + b) % WORD)
    equal(got[6], np.where(a + b >= WORD, 3, WORD - 1))


@pytest.mark.parametrize("name", sorted(n for n in M.instructions if n.startswith("v_cmp_")))
def test_vector_compares(name):
    _, _, how, kind = name.split("_")
    x = patterns(2) if kind != "f32" else floats(2).view(np.uint32)
    x[1, -128:] = x[0, -128:]
    convert = {"f32": as_float, "i32": signed, "u32": int}[kind]
    relation = {"lg": lambda a, b: a < b or a > b, "neq": lambda a, b: a != b, **COMPARE}[how]
    want = [relation(convert(int(a)), convert(int(b))) for a, b in x.T]
    # lanes outside EXEC get 0
    got = lanes(f"v_cmp_gt_i32 exec, v10, 0\ns_nop 4\n{name} vcc, v10, v11\n{name} s[30:31], v10, v11\ns_mov_b64 exec, -1\n"
                f"v_cndmask_b32 v60, 0, 1, vcc\n"
                "v_cndmask_b32 v61, 0, 1, s[30:31]\n", x, 2)
    equal(got, [np.array(want) & (x[0].view(np.int32) > 0)] * 2)


def nonzero(f):
    return lambda a, b, c=0: (f(a, b), f(a, b) % WORD != 0)


def overflow(f):
    return lambda a, b, c: (f(signed(a), signed(b)), not -WORD // 2 <= f(signed(a), signed(b)) < WORD // 2)


SCALAR = {  # a, b, scc -> result, scc (None: unchanged)
    "s_add_u32": lambda a, b, c: (a + b, a + b >= WORD), "s_addc_u32": lambda a, b, c: (a + b + c, a + b + c >= WORD),
    "s_sub_u32": lambda a, b, c: (a - b, a < b), "s_subb_u32": lambda a, b, c: (a - b - c, a < b + c),
    "s_add_i32": overflow(operator.add), "s_sub_i32": overflow(operator.sub), "s_cselect_b32": lambda a, b, c: (a if c else b, None),
    "s_min_i32": lambda a, b, c: (min(signed(a), signed(b)), signed(a) < signed(b)), "s_min_u32": lambda a, b, c: (min(a, b), a < b),
    "s_max_i32": lambda a, b, c: (max(signed(a), signed(b)), signed(a) >= signed(b)), "s_max_u32": lambda a, b, c: (max(a, b), a >= b),
    "s_mul_i32": lambda a, b, c: (a * b, None), "s_mul_hi_u32": lambda a, b, c: (a * b >> 32, None), "s_mov_b32": lambda a, b, c: (a, None),
    "s_and_b32": nonzero(operator.and_), "s_or_b32": nonzero(operator.or_), "s_xor_b32": nonzero(operator.xor),
    "s_not_b32": nonzero(lambda a, b: ~a), "s_lshl_b32": nonzero(lambda a, b: a << (b & 31)),
    "s_lshr_b32": nonzero(lambda a, b: a >> (b & 31)), "s_ashr_i32": nonzero(lambda a, b: signed(a) >> (b & 31))}
WIDE = {
    "s_and_b64": operator.and_, "s_or_b64": operator.or_, "s_xor_b64": operator.xor, "s_lshl_b64": lambda a, b: a << (b & 63),
    "s_lshr_b64": lambda a, b: a >> (b & 63), "s_cselect_b64": None, "s_mov_b64": None}


def scalar_inputs(n=200):
    x = patterns(5, 900)[:, ::3][:, :n]
    x[4] &= 1
    x[3, ::4], x[1, ::4] = x[2, ::4], x[0, ::4]   # equal, and zero results
    return x


@pytest.mark.parametrize("name", SCALAR)
def test_scalar_integers(name):
    x = scalar_inputs()
    second = "" if name in ("s_not_b32", "s_mov_b32") else ", s21"
    got = waves(f"s_cmp_eq_u32 s24, 1\n{name} s40, s20{second}\ns_cselect_b32 s41, 1, 0", x, 2)
    want = [SCALAR[name](*map(int, a)) for a in x[[0, 1, 4]].T]
    equal(got[0], [w[0] % WORD for w in want])
    equal(got[1], [c if w[1] is None else w[1] for w, c in zip(want, x[4])])


@pytest.mark.parametrize("name", WIDE)
def test_scalar_64_bits(name):
    x = scalar_inputs()
    second = {"s_mov_b64": "", "s_lshl_b64": ", s22", "s_lshr_b64": ", s22"}.get(name, ", s[22:23]")
    got = waves(f"s_cmp_eq_u32 s24, 1\n{name} s[40:41], s[20:21]{second}\ns_cselect_b32 s42, 1, 0", x, 3).astype(object)
    a, b = x[0].astype(object) + x[1].astype(object) * WORD, x[2].astype(object) + x[3].astype(object) * WORD
    scc = x[4].astype(bool)
    if WIDE[name]:
        want = np.array([WIDE[name](int(p), int(q)) % WORD ** 2 for p, q in zip(a, b)], object)
        scc = want != 0
    else:
        want = a if name == "s_mov_b64" else np.where(scc, a, b)
    equal(got[0] + got[1] * WORD, want)
    equal(got[2], scc)


@pytest.mark.parametrize("name", sorted(n for n in M.instructions if n.startswith("s_cmp_")))
def test_scalar_compares(name):
    _, _, how, kind = name.split("_")
    x = scalar_inputs()
    operands = "s[20:21], s[22:23]" if kind == "u64" else "s20, s22"
    x[2, ::3] = x[0, ::3]
    got, = waves(f"{name} {operands}\ns_cselect_b32 s40, 1, 0", x)
    value = {"u32": lambda c: int(c[0]), "i32": lambda c: signed(int(c[0])), "u64": lambda c: int(c[0]) + WORD * int(c[1])}[kind]
    equal(got, [{**COMPARE, "lg": operator.ne}[how](value(c[:2]), value(c[2:])) for c in x.T])


def test_saveexec():
    x = scalar_inputs()
    x[:2, ::5] = 0
    got = waves("s_mov_b64 exec, s[22:23]\ns_and_saveexec_b64 s[40:41], s[20:21]\ns_cselect_b64 s[42:43], 1, 0\ns_mov_b64 s[44:45], exec\n"
                "s_mov_b64 exec, -1", x, 6)
    equal(got[[0, 1, 4, 5]], [x[2], x[3], x[0] & x[2], x[1] & x[3]])
    equal(got[2], (x[0] & x[2] | x[1] & x[3]) != 0)


def test_scalar_immediates():
    x = scalar_inputs()
    got = waves("s_nop 15\ns_sleep 1\ns_setprio 3\ns_movk_i32 s40, -7\ns_mov_b32 s41, s20\ns_addk_i32 s41, -3\ns_cselect_b32 s42, 1, 0\n"
                "s_mov_b64 s[44:45], -2\ns_add_i32 s43, s20, 0x1234\ns_mov_b64 s[46:47], 0x80000000", x, 8)
    a = x[0].astype(np.int64)
    equal(got[0], -7 % WORD)
    equal(got[1], (a - 3) % WORD)
    equal(got[2], x[0].view(np.int32) < -WORD // 2 + 3)
    equal(got[3], (a + 0x1234) % WORD)
    equal(got[4:, 0], [WORD - 2, WORD - 1, 0x80000000, 0])


# -- floats -----------------------------------------------------------------------------------------------------------
def round32(q):
    """Nearest f32 of a fraction, ties to even; not for 0."""
    exponent = max(abs(q.numerator).bit_length() - q.denominator.bit_length(), -126)
    if abs(q) < Fraction(2) ** exponent:
        exponent = max(exponent - 1, -126)
    ulp = Fraction(2) ** (exponent - 23)
    value = round(q / ulp) * ulp
    return math.copysign(math.inf, q) if abs(value) >= 2 ** 128 else math.copysign(float(value), q)


def exact_fma(a, b, c):
    a, b, c = float(a), float(b), float(c)
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return np.float64(a) * b + c
    q = Fraction(a) * Fraction(b) + Fraction(c)
    return round32(q) if q else a * b + c   # the sign of an exact zero


def flush(x):
    return np.where(np.abs(x) < np.float32(2.0 ** -126), np.copysign(np.float32(0), x), x)


def fma_inputs():
    x = floats(3)
    rng = np.random.default_rng(9)
    a, b = (1 + rng.integers(0, 1 << 23, (2, 1024)) * 2.0 ** -23).astype(np.float32)
    c = (a.astype(np.float64) * b * rng.choice([-1, 1, 2.0 ** -24, 2.0 ** 24, 2.0 ** -48, -2.0 ** -149], 1024)).astype(np.float32)
    # ties that the product alone or the sum alone would break: 1 + 2^-24 +- a little, results among the denormals
    ties = np.array([(1 + 2.0 ** -12, 1 + 2.0 ** -12, s * 2.0 ** e) for s in (1, -1) for e in range(-60, -10)]
                    + [(1 + 2.0 ** -23, 2.0 ** -140, s * 2.0 ** e) for s in (1, -1) for e in range(-149, -121)])
    return np.concatenate([x, [a, b, c], np.resize(ties, (128, 3)).T], axis=1).astype(np.float32)


@pytest.mark.parametrize("denormals", [0, 3])
def test_fused_multiply_add(denormals):
    a, b, c = x = fma_inputs()
    x = x if denormals else flush(x)
    want = np.array([exact_fma(*t) for t in x.T], np.float32)
    negative = np.array([exact_fma(-p, abs(q), r) for p, q, r in x.T], np.float32)
    if not denormals:
        want, negative = flush(want), flush(negative)
    got = lanes("v_fma_f32 v60, v10, v11, v12\nv_mov_b32 v61, v12\nv_fmac_f32 v61, v10, v11\nv_fma_f32 v62, -v10, |v11|, v12", (a, b, c),
                3, float_denorm_32=denormals)
    same(got[0], want)
    same(got[1], want)
    same(got[2], negative)


def test_packed_floats():
    x = floats(6)
    a, b, c = ([x[i].astype(np.float64), x[i + 1].astype(np.float64)] for i in (0, 2, 4))
    body = ("v_pk_mul_f32 v[60:61], v[10:11], v[12:13]\n"
            "v_pk_add_f32 v[62:63], v[10:11], v[12:13] op_sel:[0,1] op_sel_hi:[1,0] neg_lo:[1,0] neg_hi:[0,1]\n"
            "v_pk_fma_f32 v[64:65], v[10:11], v[12:13], v[14:15]\n"
            "v_pk_fma_f32 v[66:67], v[10:11], v[12:13], v[14:15] op_sel_hi:[0,1,1] neg_hi:[0,0,1]")
    got = lanes(body, x, 8)
    with np.errstate(all="ignore"):
        want = [a[0] * b[0], a[1] * b[1], b[1] - a[0], a[1] - b[0]]
        for g, w in zip(got, want):
            same(g, w.astype(np.float32))
        for g, w in zip(got[4:], ((0, 0, 0, 1), (1, 1, 1, 1), (0, 0, 0, 1), (0, 1, 1, -1))):
            i, j, k, sign = w
            same(g, np.array([exact_fma(p, q, sign * r) for p, q, r in zip(a[i], b[j], c[k])], np.float32))


def largest(*values):
    return max((v for v in values if not math.isnan(v)), key=lambda v: (v, math.copysign(1, v)), default=math.nan)


def smallest(*values):
    return -largest(*(-v for v in values))


def median(*values):
    return smallest(*values) if any(map(math.isnan, values)) else sorted(values)[1]


FLOAT = {
    "v_add_f32": lambda a, b: a + b, "v_sub_f32": lambda a, b: a - b, "v_subrev_f32": lambda a, b: b - a, "v_mul_f32": lambda a, b: a * b,
    "v_min_f32": smallest, "v_max_f32": largest, "v_max3_f32": largest, "v_min3_f32": smallest, "v_med3_f32": median,
    "v_rndne_f32": lambda a: math.copysign(round(a), a) if math.isfinite(a) else a,
    "v_floor_f32": lambda a: math.copysign(math.floor(a), a) if math.isfinite(a) else a}


@pytest.mark.parametrize("denormals", [0, 3])
@pytest.mark.parametrize("name", FLOAT)
def test_floats(name, denormals):
    count = len([o for o in M.instructions[name].operands if o.inp])
    x = floats(count)
    got, = lanes(f"{name} v60, " + ", ".join(f"v{10 + i}" for i in range(count)), x, float_denorm_32=denormals)
    x = x if denormals else flush(x)
    with np.errstate(all="ignore"):
        # f64 holds more than twice the bits: no double rounding
        want = np.array([FLOAT[name](*map(np.float64, t)) for t in x.T]).astype(np.float32)
    want = want if denormals else flush(want)
    if name == "v_med3_f32":   # which zero is the median is a matter of order
        got, want = got.view(np.float32) + np.float32(0), want + np.float32(0)
    same(got, want)


def test_float_modifiers():
    x = floats(2)
    a, b = (np.abs(x) < 1e30) * (np.abs(x) > 1e-30) * np.nan_to_num(x, posinf=0, neginf=0)
    body = ("v_add_f32 v60, -v10, |v11|\nv_mul_f32 v61, -|v10|, v11 clamp\nv_add_f32 v62, v10, v11 mul:4\nv_add_f32 v63, v10, v11 div:2\n"
            "v_max_f32 v64, v12, v12 clamp\nv_sub_f32 v65, 1.0, v10")
    got = lanes(body, (a, b, x[0]), 6, float_denorm_32=0)
    p, q = a.astype(np.float64), b.astype(np.float64)
    total = (p + q).astype(np.float32)
    with np.errstate(all="ignore"):
        want = [np.abs(q) - p, np.clip(-np.abs(p) * q, 0, 1), total * np.float32(4), total / np.float32(2),
                np.clip(np.where(np.isnan(x[0]), 0, x[0]), 0, 1), 1 - p]
    for g, w in zip(got, want):
        equal(g.view(np.float32), flush(w.astype(np.float32)))   # takes -0 for 0


TRANS = {"v_exp_f32": lambda a: 2.0 ** a if a < 1000 else math.inf,
         "v_log_f32": lambda a: math.log2(a) if a > 0 else math.nan if a else -math.inf,
         "v_rcp_f32": lambda a: 1 / a if a else math.copysign(math.inf, a), "v_sqrt_f32": lambda a: math.sqrt(a) if a >= 0 else math.nan,
         "v_rsq_f32": lambda a: 1 / math.sqrt(a) if a > 0 else math.nan if a else math.copysign(math.inf, a)}


@pytest.mark.parametrize("name", TRANS)
def test_transcendentals(name):
    x, = np.concatenate([floats(1), np.random.default_rng(1).uniform(-150, 130, (1, 1024)).astype(np.float32)], axis=1)
    got = lanes(f"{name} v60, v10", (x,), float_denorm_32=0)[0].view(np.float32)
    with np.errstate(all="ignore"):
        want = np.array([math.nan if math.isnan(a) else TRANS[name](float(a)) for a in flush(x)]).astype(np.float32)
    want = flush(want)
    with np.errstate(all="ignore"):
        close = (got == want) | np.isnan(got) & np.isnan(want) | (np.abs(got - want) <= np.spacing(np.abs(want)))
    assert close.all(), (x[~close], got[~close], want[~close])
    equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


# -- conversions ------------------------------------------------------------------------------------------------------
def to_integer(low):
    return lambda a: 0 if math.isnan(a) else low + WORD - 1 if a > low + WORD - 1 else low if a < low else int(a)


@pytest.mark.parametrize("name,convert", [("v_cvt_u32_f32", to_integer(0)), ("v_cvt_i32_f32", to_integer(-WORD // 2)),
                                          ("v_cvt_f32_u32", int), ("v_cvt_f32_i32", signed)])
def test_integers_and_floats(name, convert):
    x, = floats(1)
    x.view(np.uint32)[-256:] = (1 << 24 | np.arange(256)) << np.arange(256) % 8     # ties
    got, = lanes(f"{name} v60, v10", (x,))
    if name.endswith("_f32"):
        equal(got, [convert(float(a)) % WORD for a in x])
    else:
        same(got, [round32(Fraction(convert(int(a)))) if a else 0 for a in x.view(np.uint32)])


def test_to_bf16():
    x = floats(2)
    x.view(np.uint32)[0, -512:] = x.view(np.uint32)[0, -512:] & 0xFFFF0000 | np.random.default_rng(2).choice([0x7FFF, 0x8000, 0x8001], 512)
    for denormals in (0, 3):
        got, = lanes("v_cvt_pk_bf16_f32 v60, v10, v11", x, float_denorm_32=denormals)
        for half, source in zip((got << 16, got & 0xFFFF0000), x if denormals else flush(x)):
            same(half, source.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("saturate", [False, True])
def test_to_fp8(saturate):
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (codes[:-1] + codes[1:]) / 2                                  # ties, and just beside them
    beside = [np.nextafter(middle, np.float32(to)) for to in (0, 1e9)]
    hard = np.concatenate([codes, middle, *beside, [464, 464.1, 479, 480, 1e9, 0, 2.0 ** -10]])
    random = np.random.default_rng(3).uniform(-500, 500, 1024)
    x = np.concatenate([floats(1)[0], random, np.resize(np.concatenate([hard, -hard]), 1024)]).astype(np.float32)
    got, kept = lanes("v_mov_b32 v60, v10\nv_mov_b32 v61, v10\nv_cvt_pk_fp8_f32 v60, v10, -v10\n"
                      "v_cvt_pk_fp8_f32 v61, -v10, v10 op_sel:[0,0,1]", (x,), 2, fp16_ovfl=saturate)
    with np.errstate(all="ignore"):
        want, minus = ((np.clip(v, -448, 448) if saturate else v).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint32)
                       for v in (x, -x))
    want, minus = (np.where(w & 127 == 127, 127, w) for w in (want, minus))   # any NaN for a NaN
    one = lambda v: np.where(v & 127 == 127, 127, v)
    bits = x.view(np.uint32)
    equal([one(got & 255), one(got >> 8 & 255), got >> 16], [want, minus, bits >> 16])
    equal([one(kept >> 16 & 255), one(kept >> 24), kept & 0xFFFF], [minus, want, bits & 0xFFFF])


def test_to_u8_rounding_is_a_parameter():
    x = np.resize(np.float32([0.5, 1.5, 1.999, 254.5, 255.5, -3, np.nan, np.inf]), 64)
    job = launch(x, 64, 1)
    text = (ARGUMENTS + "v_lshlrev_b32 v1, 2, v0\nglobal_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\nv_cvt_pk_u8_f32 v3, v2, 0, 0\n"
            "global_store_dword v1, v3, s[6:7]\ns_endpgm")
    for how, want in (("nearest_even", [0, 2, 2, 254, 255, 0, 0, 255]), ("truncate", [0, 1, 1, 254, 255, 0, 0, 255])):
        got = emulate.run(program(text), job, params={"numerics.cvt_pk_u8_rounding": how}).buffers["y"]
        equal(got, np.resize(want, 64))
    with pytest.raises(KeyError):
        emulate.run(program(text), job, params={"numerics.nosuch": 1})


@pytest.mark.parametrize("name,kind,cbsz", [("e4m3", ml_dtypes.float8_e4m3fn, 0), ("e5m2", ml_dtypes.float8_e5m2, 1)])
def test_every_fp8_byte(name, kind, cbsz):
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(kind).astype(np.float64)
    equal(numerics.fp8_table(name), want)
    equal(np.signbit(numerics.fp8_table(name))[::128], [False, True])
    # through an MFMA: element k = 0 of row i of wave w is byte 16 w + i, times 1
    a = np.zeros((16, 64), np.uint32)
    a[:, :16] = codes.reshape(16, 16)
    body = (f"v_mov_b32 v20, 0x38\n{''.join(f'v_mov_b32 v{i}, 0{chr(10)}' for i in (*range(21, 28), *range(31, 38)))}v_mov_b32 v30, v10\n"
            f"s_nop 1\nv_mfma_f32_16x16x128_f8f6f4 v[60:63], v[30:37], v[20:27], 0 cbsz:{cbsz}")
    got = lanes(body, (a.ravel(),), 4).view(np.float32).reshape(4, 16, 4, 16)   # item, wave, row // 4, column
    same(np.ascontiguousarray(got[..., 0].transpose(1, 2, 0)).reshape(256), want + 0.0)   # the sum makes +0 of -0


# -- matrix instructions ----------------------------------------------------------------------------------------------
F8F6F4 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn, ml_dtypes.float4_e2m1fn)
BITS = {ml_dtypes.bfloat16: 16, np.float16: 16, **dict(zip(F8F6F4, (8, 8, 6, 6, 4)))}


def matrix(rng, kind, rows, k, halves):
    """(integers of at most 8 that the type holds [rows, k], registers [r, 64]). Lane i + rows g holds row i and
    k = K/groups g + item; halves: FP8 of f8f6f4, 16 g + item in the lower half of the registers, K/2 + 16 g + item in the upper."""
    bits, groups = BITS[kind], 64 // rows
    every = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
    value = every.view(kind).astype(np.float64)
    codes = rng.choice(every[np.isin(value, np.arange(-8, 9))], (rows, k))
    per = k // groups
    stream = np.zeros((64, per, bits), np.uint8)
    for lane in range(64):
        g, row = divmod(lane, rows)
        for item in range(per):
            at = item // 16 * (k // 2) + 16 * g + item % 16 if halves else per * g + item
            stream[lane, item] = int(codes[row, at]) >> np.arange(bits) & 1
    return value[codes], np.packbits(stream.reshape(64, -1), axis=1, bitorder="little").view(np.uint32).T


def result_place(m):
    """(row, column) of each register and lane."""
    item, lane = np.arange(m * m // 64)[:, None], np.arange(64)
    return (4 * (lane // 16) + item if m == 16 else 8 * (item // 4) + 4 * (lane // 32) + item % 4), lane % m + 0 * item


PAIRS = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (0, 1), (0, 4), (3, 1)]
SAME = {"_bf16": ml_dtypes.bfloat16, "_f16": np.float16, "_fp8": F8F6F4[0]}
MFMA = [(n, t, t) for n in M.instructions if n.startswith("v_mfma_") for end, t in SAME.items() if n.endswith(end)]
MFMA += [(n, F8F6F4[a], F8F6F4[b]) for n in M.instructions if n.endswith("_f8f6f4") for a, b in PAIRS]


@pytest.mark.parametrize("name,a,b", MFMA, ids=lambda x: getattr(x, "__name__", x))
def test_mfma(name, a, b):
    m, _, k = map(int, re.search(r"_(\d+)x(\d+)x(\d+)_", name).groups())
    rng = np.random.default_rng(k)
    mixed = name.endswith("f8f6f4")
    (left, ra), (right, rb) = (matrix(rng, t, m, k, mixed and BITS[t] == 8) for t in (a, b))
    row, column = result_place(m)
    c = rng.integers(-100, 100, (m, m)).astype(np.float32)
    mods = f" cbsz:{F8F6F4.index(a)} blgp:{F8F6F4.index(b)}" if mixed else ""
    scale = ""
    inputs = [*ra, *rb, *c[row, column]]
    if "_scale_" in name:
        codes = rng.integers(120, 135, (2, 4, m, k // 32))                        # operand, byte, row, block; byte 1 for A, 2 for B
        registers = (codes.transpose(0, 3, 2, 1).reshape(2, -1, 4) << np.arange(0, 32, 8)).sum(-1).astype(np.uint32)
        inputs += list(registers)
        left, right = (v * 2.0 ** (np.repeat(codes[i, i + 1], 32, axis=1) - 127) for i, v in enumerate((left, right)))
        at = 10 + len(inputs)
        scale, mods = f", v{at - 2}, v{at - 1}", mods + " op_sel:[1,0,0] op_sel_hi:[0,1,0]"
    span = lambda bank, at, n: f"{bank}[{at}:{at + n - 1}]"
    at_b, at_c, items = 10 + len(ra), 10 + len(ra) + len(rb), len(row)
    body = ("s_mov_b64 exec, 1\ns_nop 4\n"                                         # MFMA does not look at EXEC
            f"{name} {span('v', 60, items)}, {span('v', 10, len(ra))}, {span('v', at_b, len(rb))}, {span('v', at_c, items)}{scale}{mods}\n"
            f"{name} {span('a', 0, items)}, {span('v', 10, len(ra))}, {span('v', at_b, len(rb))}, 1.0{scale}{mods}")
    got = lanes(body, [np.ascontiguousarray(i) for i in inputs], [f"{bank}{at + i}" for bank, at in (("v", 60), ("a", 0))
        for i in range(items)]).view(np.float32)
    product = left @ right.T                                                       # exact: at most 24 bits, or 53 with scales
    equal(got, np.concatenate([(product + c)[row, column], (product + 1)[row, column]]).astype(np.float32))


def test_mfma_rounds_once():
    x = np.zeros((9, 64), np.uint32)
    x[:4] = 0x3F803F80                                                              # A: all ones
    x[4, :16] = 0x33004B80                                                          # B: 2^24 and 2^-25 for k = 0, 1; C = -2^24
    x[8] = np.float32(-2.0 ** 24).view(np.uint32)
    body = ("v_mov_b32 v20, v18\nv_mov_b32 v21, v18\nv_mov_b32 v22, v18\nv_mov_b32 v23, v18\ns_nop 1\n"
            "v_mfma_f32_16x16x32_bf16 v[60:63], v[10:13], v[14:17], v[20:23]")
    equal(lanes(body, x, 4).view(np.float32), 2.0 ** -25)


# -- lanes and data movement ------------------------------------------------------------------------------------------
def test_first_lane_swap_and_permute():
    x = patterns(2, 128)
    body = ("v_readfirstlane_b32 s20, v11\nv_mov_b32 v60, v10\nv_mov_b32 v61, v11\nv_mov_b32 v62, v10\nv_mov_b32 v63, v11\n"
            "v_mov_b32 v64, v10\nv_mov_b32 v65, v11\n"
            "s_mov_b32 exec_lo, 0x0f0f0f00\ns_mov_b32 exec_hi, 0x0f0f0f0f\nv_swap_b32 v60, v61\ns_nop 1\nv_permlane32_swap_b32 v62, v63\n"
            "v_permlane16_swap_b32 v64, v65\n"
            "v_readfirstlane_b32 s21, v10\ns_mov_b64 exec, 0\nv_readfirstlane_b32 s22, v10\ns_mov_b64 exec, -1\ns_nop 1\n"
            "v_mov_b32 v66, s20\nv_mov_b32 v67, s21\nv_mov_b32 v68, s22")
    got = lanes(body, x, 9).reshape(9, 2, 64)
    a, b = x.reshape(2, 2, 64)
    on = 0x0F0F0F0F0F0F0F00 >> np.arange(64, dtype=object) & 1 == 1
    equal(got[:2], np.where(on, [b, a], [a, b]))
    for width, (p, q) in ((32, got[2:4]), (16, got[4:6])):
        want_p, want_q = a.copy(), b.copy()
        for lane in range(64):
            if lane // width % 2:                                                   # odd rows of p and even rows of q change places
                want_p[:, lane], want_q[:, lane - width] = b[:, lane - width], a[:, lane]
        equal([p, q], np.where(on, [want_p, want_q], [a, b]))
    equal(got[6:], np.broadcast_to([b[:, :1], a[:, 8:9], a[:, :1]], (3, 2, 64)))


@pytest.mark.parametrize("write", [1, 2, 4])
@pytest.mark.parametrize("read", [1, 2, 4])
def test_lds(write, read):
    rng = np.random.default_rng(write)
    x = np.concatenate([patterns(4, 64), [rng.permutation(64) * 16, rng.permutation(64) * 4 * read]]).astype(np.uint32)
    span = lambda at, n: f"v[{at}:{at + n - 1}]" if n > 1 else f"v{at}"
    body = "v_mov_b32 v20, 7\n" + "".join(f"ds_write_b32 v14, v20 offset:{8192 + 4 * i}\n" for i in range(4)) + (
        f"ds_write_b{32 * write} v14, {span(10, write)} offset:8192\nds_read_b{32 * read} {span(60, read)}, v15 offset:8192\n"
        f"s_waitcnt lgkmcnt(0)")
    got = lanes(body, x, read, lds_bytes=8192 + 1024)
    memory = np.full(256, 7, np.uint32)
    for lane in range(64):
        memory[x[4, lane] // 4:][:write] = x[:write, lane]
    equal(got, [memory[x[5] // 4 + i] for i in range(read)])


@pytest.mark.parametrize("bits", [8, 16])
def test_transposing_read(bits):
    """16 lanes hold the rows of a matrix of 16 columns; each gets a column."""
    x = np.concatenate([patterns(2, 64), [np.random.default_rng(bits).permutation(64) * 8]]).astype(np.uint32)
    got = lanes(f"ds_write_b64 v12, v[10:11]\nds_read_b64_tr_b{bits} v[60:61], v12\ns_waitcnt lgkmcnt(0)", x, 2)
    groups = np.ascontiguousarray(x[:2].T).view({8: np.uint8, 16: np.uint16}[bits]).reshape(4, -1, 16)
    equal(got.T, np.ascontiguousarray(groups.transpose(0, 2, 1)).view(np.uint32).reshape(64, 2))


@pytest.mark.parametrize("dwords", [1, 2, 4])
def test_global_memory(dwords):
    n = 256
    x = patterns(1, 1024)[0]
    order = np.random.default_rng(dwords).permutation(n)
    data = np.concatenate([x, order.astype(np.uint32)])
    size, suffix = 4 * dwords, {1: "", 2: "x2", 4: "x4"}[dwords]
    span = f"v[20:{19 + dwords}]" if dwords > 1 else "v20"
    text = (ARGUMENTS + "v_lshlrev_b32 v1, 2, v0\ns_add_u32 s8, s4, 4096\ns_addc_u32 s9, s5, 0\nglobal_load_dword v2, v1, s[8:9]\n"
            "s_waitcnt vmcnt(0)\n"
            f"v_mul_u32_u24 v3, {size}, v2\nglobal_load_dword{suffix} {span}, v3, s[8:9] offset:-4096\n"    # SGPR base, negative offset
            f"v_mul_u32_u24 v4, {size}, v0\nv_mov_b32 v5, s7\nv_add_co_u32 v4, vcc, s6, v4\nv_addc_co_u32 v5, vcc, 0, v5, vcc\n"
                        # 64-bit address
            f"s_mov_b32 exec_lo, 0x7fffffff\ns_waitcnt vmcnt(0)\nglobal_store_dword{suffix} v[4:5], {span}, off offset:4\ns_endpgm")
    job = launch(data, n * dwords + 1, 1, n)
    result = emulate.run(program(text, float_denorm_32=3), job)
    assert result.faults == []
    want = np.full(n * dwords + 1, 0xDEADBEEF, np.uint32)
    for lane in range(n):
        if lane % 64 != 31:
            want[1 + lane * dwords:][:dwords] = x[order[lane] * dwords:][:dwords]
    equal(result.buffers["y"], want)
    stored = np.concatenate([[False], np.repeat(np.arange(n) % 64 != 31, dwords)])
    equal(result.written["y"].reshape(-1, 4), stored[:, None].repeat(4, 1))
    assert "x" not in result.written and (result.buffers["x"] == data).all() and (job.buffers["y"] == 0xDEADBEEF).all()


def test_unaligned_global_load():
    x = patterns(1, 64)[0]
    text = (ARGUMENTS + "v_lshlrev_b32 v1, 2, v0\nglobal_load_dword v2, v0, s[4:5] offset:1\ns_waitcnt vmcnt(0)\n"
            "global_store_dword v1, v2, s[6:7]\ns_endpgm")
    raw = x.tobytes()
    equal(y_of(text, launch(x, 64, 1)), [int.from_bytes(raw[i + 1:i + 5], "little") for i in range(64)])


@pytest.mark.parametrize("dwords", [1, 2, 4, 8, 16])
def test_scalar_loads(dwords):
    x, suffix = patterns(1, 64)[0], f"x{dwords}" if dwords > 1 else ""
    at = f"s[64:{63 + dwords}]" if dwords > 1 else "s64"
    text = ARGUMENTS + "s_mov_b32 s10, 20\n" + "".join(f"s_load_dword{suffix} {at}, {base}, {where}\ns_waitcnt lgkmcnt(0)\n" + "".join(
        f"v_mov_b32 v1, {4 * i + 256 * n}\nv_mov_b32 v2, s{64 + i}\nglobal_store_dword v1, v2, s[6:7]\n" for i in range(dwords))
        for n, (base, where) in enumerate((("s[4:5]", "0x4"), ("s[4:5]", "s10")))) + "s_endpgm"
    got = y_of(text, launch(x, 128, 1)).reshape(2, 64)
    equal(got[:, :dwords], [x[1:1 + dwords], x[5:5 + dwords]])


BUFFER = "s_mov_b32 s8, s{}\ns_mov_b32 s9, s{}\ns_mov_b32 s10, {}\ns_mov_b32 s11, 0x20000\n"


@pytest.mark.parametrize("dwords", [1, 2, 4])
def test_buffers_and_their_bounds(dwords):
    """Each dword past num_records loads 0, its store is dropped."""
    n, size, suffix = 64, 4 * dwords, {1: "", 2: "x2", 4: "x4"}[dwords]
    span = f"v[20:{19 + dwords}]" if dwords > 1 else "v20"
    x = np.random.default_rng(0).integers(1, WORD, 512, dtype=np.uint32)
    limit = 16 + 8 + size * 40 + 7                                             # with soffset; 7: part of a dword does not count
    text = (ARGUMENTS + BUFFER.format(4, 5, limit) + f"s_mov_b32 s12, 16\nv_mul_u32_u24 v1, {size}, v0\n"
            f"buffer_load_dword{suffix} {span}, v1, s[8:11], s12 offen offset:8\n"
            f"s_waitcnt vmcnt(0)\n{BUFFER.format(6, 7, limit)}buffer_store_dword{suffix} {span}, v1, s[8:11], 0 offen offset:12\n"
            "v_mov_b32 v2, 99\nbuffer_store_dword v2, off, s[8:11], 0 offset:4\nv_mov_b32 v1, -4\n"
            "buffer_store_dword v2, v1, s[8:11], 0 offen\ns_endpgm")
    got = y_of(text, launch(x, n * dwords + 3, 1))
    want = np.full(n * dwords + 3, 0xDEADBEEF, np.uint32)
    want[1] = 99
    for i in range(n * dwords):
        if 12 + 4 * i + 4 <= limit:
            want[3 + i] = x[6 + i] if 16 + 8 + 4 * i + 4 <= limit else 0
    equal(got, want)


@pytest.mark.parametrize("dwords", [1, 4])
def test_lds_dma(dwords):
    """LDS gets lane x size at M0 + offset, wherever the lane's address points; lanes outside EXEC write nothing; 0 past the end."""
    size, suffix, m0 = 4 * dwords, {1: "", 4: "x4"}[dwords], 512
    x, order = patterns(1, 1024)[0], np.random.default_rng(0).permutation(64)
    zero = "".join(f"ds_write_b32 v1, v9 offset:{256 * i}\n" for i in range(16))
    text = (ARGUMENTS + BUFFER.format(4, 5, 64 * size + 4096 - size) + f"v_lshlrev_b32 v1, 2, v0\nv_mov_b32 v9, 5\n"
            f"{zero}global_load_dword v2, v1, s[4:5]\n"
            f"s_waitcnt vmcnt(0) lgkmcnt(0)\nv_mul_u32_u24 v2, {size}, v2\ns_mov_b32 m0, {m0}\ns_mov_b32 s12, 4080\n"
            f"s_mov_b32 exec_lo, 0x7fffffff\n"
            f"buffer_load_dword{suffix} v2, s[8:11], s12 offen offset:16 lds\ns_mov_b64 exec, -1\ns_waitcnt vmcnt(0)\n"
            + "".join(f"ds_read_b32 v3, v1 offset:{256 * i}\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v3, s[6:7] offset:{256 * i}\n"
                      for i in range(15)) + "s_endpgm")
    data = np.concatenate([order.astype(np.uint32), patterns(1, 960)[0], x[:64 * dwords]])
    got = y_of(text, launch(data, 1024, 1))[:960]
    want = np.full(960, 5, np.uint32)
    for lane in range(64):
        if lane != 31:
            want[(m0 + 16) // 4 + lane * dwords:][:dwords] = x[order[lane] * dwords:][:dwords] if order[lane] < 63 else 0
    equal(got, want)


# -- strict mode ------------------------------------------------------------------------------------------------------
X = "s_load_dwordx2 s[4:5], s[0:1], 0\ns_waitcnt lgkmcnt(0)\n"
OWN = "v_lshlrev_b32 v1, 2, v0\nv_xor_b32 v2, 0x100, v1\n"                          # v1: the lane's dword, v2: another wave's
WAVE = "v_readfirstlane_b32 s10, v0\ns_cmp_lt_u32 s10, 64\n"                        # SCC: wave 0
DMA = (X + BUFFER.format(4, 5, 4096) + "v_readfirstlane_b32 s12, v0\ns_lshl_b32 m0, s12, 2\nv_lshlrev_b32 v1, 2, v0\n"
       "buffer_load_dword v1, s[8:11], 0 offen lds ; cause\n")
ZEROS = "".join(f"v_mov_b32 v{i}, 0\n" for i in range(8, 24))
MATRIX = ZEROS + "s_nop 1\nv_mfma_f32_16x16x32_bf16 v[24:27], v[8:11], v[12:15], 0 ; cause\n"
SYNC, NO_WAIT, NO_BARRIER = "s_waitcnt lgkmcnt(0)\ns_barrier\n", "s_barrier\n", "s_waitcnt lgkmcnt(0)\n"
# kind, waves, text, what to put for {} to provoke it and to avoid it. "; here" is the place, "; cause" the instruction to blame
FAULTS = [
    ("pending-load", 1, X + OWN + "global_load_dword v3, v1, s[4:5] ; cause\n{}v_mov_b32 v4, v3 ; here\n", "s_waitcnt lgkmcnt(0)\n",
     "s_waitcnt vmcnt(0)\n"),
    ("pending-load", 1, X + OWN + "global_load_dword v3, v1, s[4:5] ; cause\n{}v_mov_b32 v3, 0 ; here\n", "s_nop 15\n",
     "s_waitcnt vmcnt(0)\n"),
    ("pending-load", 1, X + OWN + "global_load_dwordx4 v[4:7], v1, s[4:5]\nglobal_load_dwordx2 v[8:9], v1, s[4:5] ; cause\n"
     "global_store_dword v1, v1, s[4:5]\n{}v_mov_b32 v3, v7\nv_mov_b32 v10, v9 ; here\n", "s_waitcnt vmcnt(2)\n", "s_waitcnt vmcnt(1)\n"),
    ("pending-load", 1, X + BUFFER.format(4, 5, 4096) + "buffer_load_dword v3, off, s[8:11], 0 ; cause\n"
     "{}global_store_dword v0, v3, s[4:5] ; here\n", "", "s_waitcnt vmcnt(0)\n"),
    ("pending-load", 1, OWN + "ds_write_b32 v1, v0\nds_read_b32 v3, v1 ; cause\nds_write_b32 v1, v0\n{}ds_write_b32 v1, v3 ; here\n",
     "s_waitcnt lgkmcnt(2)\n", "s_waitcnt lgkmcnt(1)\n"),
    ("pending-load", 1, "s_load_dword s4, s[0:1], 0 ; cause\n{}s_add_u32 s6, s4, 1 ; here\n", "s_waitcnt vmcnt(0)\n",
     "s_waitcnt lgkmcnt(0)\n"),
    # scalar loads return in any order
    ("pending-load", 1, "s_load_dword s4, s[0:1], 0 ; cause\ns_load_dword s5, s[0:1], 4\n{}s_mov_b32 s6, s4 ; here\n",
     "s_waitcnt lgkmcnt(1)\n", "s_waitcnt lgkmcnt(0)\n"),
    # ... and so does LDS data among them
    ("pending-load", 1, OWN + "ds_write_b32 v1, v0\nds_read_b32 v3, v1 ; cause\n{}s_waitcnt lgkmcnt(1)\nv_mov_b32 v4, v3 ; here\n",
     "s_load_dword s4, s[0:1], 0\n", "ds_write_b32 v1, v0\n"),
    ("pending-load", 1, OWN + "ds_write_b32 v1, v0\nds_read_b32 v3, v1 ; cause\nds_read_b32 v4, v1\n{}s_waitcnt lgkmcnt(1)\n"
     "v_mov_b32 v5, v3 ; here\n", "s_load_dword s4, s[0:1], 0\n", ""),
    ("unwritten", 1, "{}v_mov_b32 v4, v3 ; here\n", "", "v_mov_b32 v3, 0\n"),
    ("unwritten", 1, "{}s_mov_b32 s6, s5 ; here\n", "", "s_mov_b32 s5, 0\n"),
    ("unwritten", 1, "{}v_cndmask_b32 v4, v0, v0, vcc ; here\n", "s_mov_b32 vcc_lo, 0\n", "s_mov_b64 vcc, 0\n"),
    ("unwritten", 1, ZEROS + "s_nop 1\n{}v_mfma_f32_16x16x32_bf16 a[0:3], v[8:11], v[12:15], a[0:3] ; here\n", "",
     "v_mfma_f32_16x16x32_bf16 a[0:3], v[8:11], v[12:15], 0\n"),
    ("unwritten", 1, X + BUFFER.format(4, 5, 4096) + "{}s_nop 0\nbuffer_load_dword v0, s[8:11], 0 offen lds ; here\ns_waitcnt vmcnt(0)\n",
     "", "s_mov_b32 m0, 0\n"),
    ("unwritten", 2, WAVE + "{}s_cbranch_scc1 L\nv_mov_b32 v3, 0\nL:\nv_mov_b32 v4, v3 ; here\n", "", "v_mov_b32 v3, 1\n"),
    ("lds-unwritten", 1, OWN + "ds_write_b32 v1, v0\n{}ds_read_b64 v[4:5], v1 ; here\n", "ds_write_b32 v1, v0\n",
     "ds_write_b32 v1, v0 offset:4\n"),
    ("lds-dma-pending", 1, DMA + "{}ds_read_b32 v3, v1 ; here\n", "s_waitcnt lgkmcnt(0)\n", "s_waitcnt vmcnt(0)\n"),
    ("lds-dma-pending", 1, DMA + "{}ds_write_b32 v1, v0 ; here\n", "", "s_waitcnt vmcnt(0)\n"),
    ("lds-dma-pending", 2, DMA + "{}s_barrier\nds_read_b32 v3, v1 ; here\ns_waitcnt vmcnt(0)\n", "s_waitcnt vmcnt(1)\n",
     "s_waitcnt vmcnt(0)\n"),
    ("lds-race", 2, DMA + "s_waitcnt vmcnt(0)\n{}v_xor_b32 v2, 0x100, v1\nds_read_b32 v3, v2 ; here\n", "", "s_barrier\n"),
    *(("lds-race", 2, OWN + "ds_write_b32 v1, v0\n{}ds_read_b32 v3, v2 ; here\n", bad, SYNC)
      for bad in ("", NO_WAIT, NO_BARRIER, "s_waitcnt vmcnt(0)\ns_barrier\n")),
    *(("lds-race", 2, OWN + f"ds_write_b32 v1, v0\n{SYNC}ds_read_b32 v3, v2\n{own}{{}}ds_write_b32 v1, v0 ; here\n", bad, SYNC)
      for bad in ("", NO_WAIT, NO_BARRIER) for own in ("", "ds_read_b32 v4, v1\n")),
    *(("lds-race", 2, OWN + f"ds_write_b32 v1, v0\n{SYNC}v_mov_b32 v5, 0\nds_read_b32 v3, v5\n{{}}{WAVE}s_cbranch_scc{one} E\n"
       "ds_write_b32 v5, v0 ; here\nE:\n", "", SYNC) for one in (0, 1)),
    ("lds-race", 2, "{}ds_write_b32 v1, v0 ; here\n", "v_mov_b32 v1, 0\n", OWN),
    # one wave writes what the other reads or writes, whichever comes first in the text
    *(("lds-race", 2, f"{OWN}ds_write_b32 v1, v0\n{SYNC}v_mov_b32 v1, 0\n{WAVE}s_cbranch_scc{one} W\n{first}\ns_endpgm\nW:\n"
       f"{{}}{second} ; here\n", "", "v_mov_b32 v1, 4\n")
      for one in (0, 1) for first, second in itertools.product(("ds_write_b32 v1, v0", "ds_read_b32 v3, v1"), repeat=2)
      if "write" in first + second),
    ("mfma-wait", 1, MATRIX + "{}v_mov_b32 v30, v27 ; here\n", "s_nop 6\n", "s_nop 7\n"),
    ("mfma-wait", 1, MATRIX + "{}v_mfma_f32_16x16x32_bf16 v[28:31], v[8:11], v[24:27], 0 ; here\n", "s_nop 6\n", "s_nop 7\n"),
    ("wait-states", 2, WAVE + "s_cbranch_scc1 L\nv_mov_b32 v1, v0\ns_branch E\nL:\nv_mov_b32 v1, v0 ; cause\n{}E:\n"
     "v_readfirstlane_b32 s6, v1 ; here\n", "", "s_nop 0\n"),
    ("transpose-exec", 1, OWN + "v_lshlrev_b32 v1, 3, v0\nds_write_b64 v1, v[0:1]\n{}ds_read_b64_tr_b8 v[4:5], v1 ; here\n",
     "s_mov_b32 exec_lo, -2\n", "s_mov_b64 exec, -1\n"),
    ("transpose-alignment", 1, OWN + "v_lshlrev_b32 v1, 3, v0\nds_write_b64 v1, v[0:1]\nds_write_b32 v1, v0 offset:8\n"
     "{}ds_read_b64_tr_b16 v[4:5], v1 ; here\n", "v_add_u32 v1, 4, v1\n", "")]


def faults_of(text, count=1, **options):
    p = program(text + "s_waitcnt vmcnt(0) lgkmcnt(0)\ns_endpgm\n", lds_bytes=1024, float_denorm_32=3)
    job = Launch((1, 1, 1), (64 * count, 1, 1), {"x": np.zeros(2048, np.uint32)}, [{"offset": 0, "buffer": "x"}])
    return emulate.run(p, job, **options).faults, p


def marked(text, mark):
    return next((n for n, line in enumerate(text.split("\n"), 1) if line.endswith(mark)), None)


@pytest.mark.parametrize("kind,count,text,bad,good", FAULTS, ids=[f"{n}-{f[0]}" for n, f in enumerate(FAULTS)])
def test_faults(kind, count, text, bad, good):
    wrong = text.format(bad)
    found, p = faults_of(wrong, count)
    assert [(f.kind, p.instructions[f.index].line) for f in found] == [(kind, marked(wrong, "; here"))]
    f, = found
    assert (f.where, f.mnemonic) == (p.instructions[f.index].where, str(p.instructions[f.index])) and f.wave[0] == 0 <= f.wave[1] < count
    if f.cause is not None:
        assert p.instructions[f.cause].line == marked(wrong, "; cause") and p.instructions[f.cause].where in f.message
    assert faults_of(wrong, count, strict=False)[0] == []
    assert faults_of(text.format(good), count)[0] == []


@pytest.mark.parametrize("rule,producer,consumer,need", CASES, ids=lambda x: str(x).split(" ")[0])
def test_wait_states(rule, producer, consumer, need):
    """The checker's cases, whose wait states are the manual's. EXEC is 0: no address counts."""
    spec = next(h for h in M.hazards if h.name == rule)
    kind = "mfma-wait" if producer.startswith("v_mfma") else "wait-states"
    for have in {0, (need or 1) - 1, need or 0}:
        text = f"s_mov_b64 exec, 0\n{producer}\n{waits(have)}{consumer}\ns_waitcnt vmcnt(0)\ns_endpgm"
        found = emulate.run(program(text), launch(np.zeros(4, np.uint32), 4, 1)).faults
        bad = need is not None and have < need and spec.severity == "error"
        assert [(f.kind, f.index, f.cause) for f in found] == [(kind, 2 + (have > 0) + (have > 16), 1)] * bad
        assert all(f"{rule} needs {need}" in f.message and f" {have} wait states" in f.message for f in found)


@pytest.mark.parametrize("text,want", [
    pytest.param(OWN + "ds_write_b32 v1, v0\nds_read_b32 v3, v1\nds_read_b32 v3, v1\n", [], id="LDS returns in order"),
    pytest.param(X + OWN + "global_load_dword v3, v1, s[4:5]\nglobal_load_dword v3, v1, s[4:5]\n", [], id="VMEM returns in order"),
    pytest.param("v_cvt_pk_fp8_f32 v1, v0, v0\nv_cvt_pk_fp8_f32 v1, v0, v0 op_sel:[0,0,1]\n", [], id="the first half of a register"),
    pytest.param("v_mov_b32 v1, src_vccz\n", ["unwritten"], id="src_vccz reads vcc"),
    pytest.param("s_cbranch_vccz L\nL:\n", ["unwritten"], id="s_cbranch_vccz reads vcc"),
    pytest.param(X + OWN + "ds_write_b32 v1, v0\nglobal_load_dword v3, v1, s[4:5]\nds_read_b32 v3, v1\n", ["pending-load"],
                 id="LDS and VMEM in any order"),
    pytest.param(X + "s_load_dword s6, s[4:5], 0\ns_load_dword s6, s[4:5], 4\n", ["pending-load"], id="SMEM in any order"),
    pytest.param(OWN + "ds_write_b32 v1, v0\nds_read_b32 v3, v1\nv_mov_b32 v1, 0\n", [], id="the address was read at issue"), ])
def test_loads_in_order_and_parts_of_registers(text, want):
    assert [f.kind for f in faults_of(text)[0]] == want


def test_fault_details():
    found, _ = faults_of("v_mov_b32 v1, 0\n" + WAVE + "s_cbranch_scc1 E\ns_mov_b64 exec, 6\nds_read_b32 v2, v1 offset:8\nv_mov_b32 v3, v2\n"
                         "v_mov_b32 v4, v2\nE:\n", 2)
    assert [(f.kind, f.wave, f.lanes) for f in found] == [
        ("lds-unwritten", (0, 1), (1, 2)), ("pending-load", (0, 1), ()), ("pending-load", (0, 1), ())]
    assert "lgkmcnt" in found[1].message and "v2" in found[1].message
    many = "".join(f"v_mov_b32 v{i}, v{i}\n" for i in range(1, 150))
    found, _ = faults_of(many)
    assert len(found) == 100                                                        # no more; each instruction once
    found, _ = faults_of("s_mov_b32 s4, 3\nL:\nv_mov_b32 v1, v2\ns_sub_u32 s4, s4, 1\ns_cmp_lg_u32 s4, 0\ns_cbranch_scc1 L\n", 4)
    assert len(found) == 1


# kind, text, line, words of the message, a text that runs
ERRORS = [
    ("wild-address", X + "v_mov_b32 v1, {}\nglobal_load_dword v2, v1, s[4:5]\n", "0x2000", 4, "x is 0x", "0x1ffc"),
    ("wild-address", X + "v_mov_b32 v1, 0\nglobal_store_dwordx2 v1, v[2:3], s[4:5] offset:{}\n", "-4", 4, "lies in no buffer", "4"),
    ("wild-address", X + "{}v_lshlrev_b32 v1, 8, v0\nglobal_load_dword v2, v1, s[4:5]\n", "", 4, "lane 32", "s_mov_b64 exec, 0xffff\n"),
    ("wild-address", X + "s_load_dword s6, s[4:5], {}\n", "0x2000", 3, "kernarg", "0x1ffc"),
    ("lds-range", "v_lshlrev_b32 v1, 4, v0\nds_write_b32 v1, v0 offset:{}\n", "16", 2, "past the 1024 bytes", "12"),
    ("lds-range", "v_lshlrev_b32 v1, 4, v0\nds_read_b128 v[4:7], v1 offset:{}\n", "4", 2, "lane 63", "0"),
    ("lds-range", DMA.replace("; cause", "").replace("s_lshl_b32 m0, s12, 2", "s_mov_b32 m0, {}"), "772", 10, "past", "768"),
    ("lds-alignment", "v_mov_b32 v1, {}\nds_read_b64 v[4:5], v1\n", "2", 2, "not aligned", "4"),
    ("endless", "s_mov_b32 s4, {}\nTOP:\ns_sub_u32 s4, s4, 1\ns_cmp_lg_u32 s4, 0\ns_cbranch_scc1 TOP\n", "2000", 5, "loop at 'TOP'",
     "1600"),
    ("semantics", BUFFER.format(0, 1, 64).replace("s_mov_b32 s9, s1", "s_or_b32 s9, s1, {}") + "buffer_load_dword v1, off, s[8:11], 0\n",
     "0x40000", 5, "stride", "0")]


@pytest.mark.parametrize("kind,text,bad,line,words,good", ERRORS, ids=[f"{n}-{e[0]}" for n, e in enumerate(ERRORS)])
def test_errors(kind, text, bad, line, words, good):
    run = lambda t: faults_of(t, strict=False, max_instructions=5000)
    with pytest.raises(emulate.EmulationError, match=re.escape(words)) as e:
        run(text.format(bad))
    assert e.value.fault.kind == kind and f"line {line}" == e.value.fault.where and "workgroup 0, wave 0" in str(e.value)
    run(text.format(good))


def test_no_end():
    job = launch(np.zeros(4, np.uint32), 4, 1)
    for text in ("v_mov_b32 v1, 0\n", "s_branch E\ns_endpgm\nE:\n", "s_cbranch_execnz E\ns_endpgm\nE:\n"):
        with pytest.raises(emulate.EmulationError, match="s_endpgm is missing") as e:
            emulate.run(program(text), job)
        assert e.value.fault.kind == "no-end"


# -- control flow -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("branch,setup,taken", [
    ("s_branch", "", lambda w: True), ("s_cbranch_scc1", "s_cmp_gt_u32 s20, 5", lambda w: w > 5),
    ("s_cbranch_scc0", "s_cmp_gt_u32 s20, 5", lambda w: w <= 5), ("s_cbranch_vccz", "s_and_b64 vcc, s[20:21], 1", lambda w: w % 2 == 0),
    ("s_cbranch_vccnz", "s_and_b64 vcc, s[20:21], 3", lambda w: w % 4), ("s_cbranch_vccnz", "v_cmp_gt_u32 vcc, s20, v0", lambda w: w > 0),
    ("s_cbranch_execz", "s_and_b64 exec, s[20:21], 2", lambda w: not w & 2),
    ("s_cbranch_execnz", "v_cmp_eq_u32 exec, s20, v0", lambda w: w < 64)])
def test_branches(branch, setup, taken):
    x = np.array([np.arange(96), np.zeros(96)], np.uint32)
    for body in (f"{setup}\ns_mov_b32 s40, 1\n{branch} L\ns_mov_b32 s40, 0\nL:\ns_mov_b64 exec, -1",
                 # forwards and backwards
                 f"{setup}\ns_branch C\nB:\ns_mov_b32 s40, 1\ns_branch L\nC:\n{branch} B\ns_mov_b32 s40, 0\nL:\ns_mov_b64 exec, -1"):
        equal(waves(body, x)[0], [bool(taken(w)) for w in range(96)])


def collatz(n):
    steps = 0
    while n != 1:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps


COLLATZ = ("v_mov_b32 v60, 0\nv_mov_b32 v11, v10\ns_mov_b64 s[20:21], exec\nv_cmp_ne_u32 vcc, 1, v11\ns_and_saveexec_b64 s[22:23], vcc\n"
           "s_cbranch_execz DONE\nLOOP:\nv_and_b32 v12, 1, v11\ns_mov_b64 s[24:25], exec\nv_cmp_eq_u32 vcc, 1, v12\n"
           "s_and_saveexec_b64 s[26:27], vcc\ns_cbranch_execz EVEN\nv_mul_u32_u24 v11, 3, v11\nv_add_u32 v11, 1, v11\nEVEN:\n"
           "s_xor_b64 exec, exec, s[24:25]\nv_lshrrev_b32 v11, 1, v11\ns_mov_b64 exec, s[24:25]\nv_add_u32 v60, 1, v60\n"
           "v_cmp_ne_u32 vcc, 1, v11\ns_and_b64 exec, exec, vcc\ns_cbranch_execnz LOOP\nDONE:\ns_mov_b64 exec, s[20:21]")


def test_divergent_loops():
    """Lanes, waves and workgroups go round a different number of times; the loop has an if and else."""
    x = np.random.default_rng(0).integers(1, 3000, 640, dtype=np.uint32)
    x[:64] = 1                                                                      # a wave that skips the loop
    equal(lanes(COLLATZ, (x,))[0], [collatz(int(n)) for n in x])


LOOP = (ARGUMENTS + "s_lshl_b32 s8, s2, 2\ns_load_dword s9, s[4:5], s8\nv_lshlrev_b32 v1, 2, v0\nv_mov_b32 v2, 0\nv_mov_b32 v3, v0\n"
        "v_xor_b32 v4, 0x100, v1\n"
        "s_waitcnt lgkmcnt(0)\ns_cmp_eq_u32 s9, 0\ns_cbranch_scc1 END\nTOP:\nds_write_b32 v1, v3\ns_waitcnt lgkmcnt(0)\ns_barrier\n"
        "ds_read_b32 v3, v4\n"
        "s_waitcnt lgkmcnt(0)\ns_barrier\nv_add_u32 v2, v2, v3\ns_sub_u32 s9, s9, 1\ns_cmp_lg_u32 s9, 0\ns_cbranch_scc1 TOP\nEND:\n"
        "s_lshl_b32 s8, s2, 9\nv_add_u32 v1, s8, v1\nglobal_store_dword v1, v2, s[6:7]\ns_endpgm")


def test_batches_give_the_same():
    """Two waves exchange values through LDS, as often as the workgroup's number in x says."""
    trips = np.array([3, 0, 7, 1, 1, 12, 2, 30, 5], np.uint32)
    job = launch(trips, (9, 128), 9, 128)
    seen = []
    runs = [emulate.run(program(LOOP, lds_bytes=512), job, memory_bytes=size, record={2, 7}) for size in (1 << 29, 1 << 20)]
    runs.append(emulate.run(program(LOOP, lds_bytes=512), job, memory_bytes=1, record={2, 7}, progress=seen.append))
    item = np.arange(128)
    want = [n // 2 * (item + (item ^ 64)) + n % 2 * (item ^ 64) for n in trips]
    for r in runs:
        assert r.faults == [] and r.executed == runs[0].executed
        equal(r.buffers["y"], want)
        for group in (2, 7):
            for wave, first in zip(r.trace[group], runs[0].trace[group]):
                equal(wave.index, first.index)
                assert wave.lds_address.keys() == first.lds_address.keys() and len(wave.lds_address) == 2 * trips[group]
                assert all((wave.lds_address[k] == first.lds_address[k]).all() for k in first.lds_address)
    assert seen == sorted(seen) and seen[-1] == 1
    before, loop, after = 11, 10, 4   # instructions
    assert runs[0].executed == 2 * (9 * (before + after) + loop * int(trips.sum()))
    assert len(runs[0].trace[7]) == 2 and len(runs[0].trace[7][0].index) == before + after + loop * 30


@pytest.mark.parametrize("grid,workgroup", [((1, 1, 1), (1, 1, 1)), ((3, 2, 4), (8, 4, 4)), ((5, 1, 3), (100, 1, 1)),
                                            ((2, 3, 1), (7, 5, 3)), ((1, 300, 1), (64, 2, 1))])
def test_grids_in_three_dimensions(grid, workgroup):
    gx, gy, gz = grid
    x, y, z = workgroup
    items = x * y * z
    text = ("s_load_dwordx4 s[8:11], s[0:1], 0\nv_bfe_u32 v1, v0, 0, 10\nv_bfe_u32 v2, v0, 10, 10\nv_bfe_u32 v3, v0, 20, 10\n"
            f"v_mul_u32_u24 v3, {y}, v3\nv_add_u32 v2, v2, v3\nv_mul_u32_u24 v2, {x}, v2\nv_add_u32 v1, v1, v2\n"
            f"s_mul_i32 s5, s4, {gy}\ns_add_u32 s5, s5, s3\ns_mul_i32 s5, s5, {gx}\ns_add_u32 s5, s5, s2\ns_mul_i32 s5, s5, {items}\n"
            f"v_add_u32 v1, s5, v1\n"
            "v_lshlrev_b32 v1, 4, v1\nv_mov_b32 v4, v0\nv_mov_b32 v5, s2\nv_mov_b32 v6, s3\nv_mov_b32 v7, s4\ns_waitcnt lgkmcnt(0)\n"
            "global_store_dwordx4 v1, v[4:7], s[10:11]\ns_endpgm")
    job = evolve(launch(np.zeros(1, np.uint32), (gz, gy, gx, z, y, x, 4), 1), grid=grid, workgroup=workgroup)
    got = y_of(text, job)
    place = np.indices((gz, gy, gx, z, y, x))
    equal(np.moveaxis(got, -1, 0), [place[5] | place[4] << 10 | place[3] << 20, place[2], place[1], place[0]])


@pytest.mark.parametrize("enabled", list(itertools.product([False, True], repeat=3)))
def test_workgroup_ids_that_are_enabled(enabled):
    job = evolve(launch(np.zeros(1, np.uint32), (24, 4), 1), grid=(2, 3, 4))
    text = ("v_mov_b32 v2, 0\nv_mov_b32 v3, 0\nv_mov_b32 v4, 0\n" + "".join(f"v_mov_b32 v{2 + i}, s{2 + i}\n" for i in range(sum(enabled)))
            + "s_load_dwordx4 s[8:11], s[0:1], 0\nv_lshlrev_b32 v1, 0, v2\nv_mov_b32 v6, 0\ns_waitcnt lgkmcnt(0)\ns_mov_b64 exec, 1\n"
            "global_store_dword v6, v2, s[10:11]\nglobal_store_dword v6, v3, s[10:11] offset:4\n"
            "global_store_dword v6, v4, s[10:11] offset:8\ns_endpgm")
    last = [n - 1 for n, on in zip((2, 3, 4), enabled) if on]                       # the last workgroup stores last
    equal(y_of(text, job, workgroup_id=enabled)[0, :3], (last + [0, 0, 0])[:3])


def test_barriers_in_different_places():
    """A wave that ended is not waited for, and waves may meet at different s_barriers."""
    text = (ARGUMENTS + OWN + WAVE + "s_cbranch_scc1 A\ns_cmp_lt_u32 s10, 128\ns_cbranch_scc1 B\ns_endpgm\nA:\nds_write_b32 v1, v0\n"
            "s_waitcnt lgkmcnt(0)\ns_barrier\ns_endpgm\n"
            "B:\ns_barrier\nds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v3, s[6:7]\ns_endpgm")
    got = y_of(text, launch(np.zeros(1, np.uint32), 128, 1, 192))
    equal(got, np.concatenate([np.full(64, 0xDEADBEEF), np.arange(64)]))


def test_every_instruction_is_tested():
    """Here or in a test_semantics_*.py. What has no semantics is listed by `cdna4 isa --missing`."""
    here = Path(__file__)
    text = "".join(p.read_text() for p in (here, *sorted(here.parent.glob("test_semantics_*.py")))).replace("\\n", " ")
    words = set(re.findall(r"\w+", text))
    generated = ("v_cmp_", "s_cmp_", "v_mfma_", *(a + b for a in ("buffer_", "global_") for b in ("load_dword", "store_dword")),
                 "s_load_dword", "ds_read_b", "ds_write_b")
    assert [n for n, i in M.instructions.items() if i.semantics_text and n not in words and not n.startswith(generated)] == []

"""OpenCL C on the CPU device: every function of its library against numpy, and Intel's runtime where it is there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from helpers.launches import run_call, run_text
from tunewright.devices.c_device import CDevice
from tunewright.devices.native import opencl_c
from tunewright.devices.native.processor import processor
from tunewright.errors import ExecutionError, SettingsError
from tunewright.ir.types import DType
from tunewright.plugins.single import available, open_device
from tunewright.settings import Settings
from tunewright.solvers.c.source.emit import In, Out, Source

Array = npt.NDArray[Any]

NATIVE = "CPU.NATIVE"
DEVICES = [
    pytest.param(name, marks=pytest.mark.skipif(name not in available()[0], reason=f"there is no {name}"))
    for name in (NATIVE, "CPU.INTEL")
]
native = pytest.mark.skipif(NATIVE not in available()[0], reason="there is no CPU.NATIVE")
WIDTHS = (1, 2, 3, 4, 8, 16)
#: where macros make all widths alike
FEW = (1, 3, 16)
KINDS = {"float": np.float32, "double": np.float64, "char": np.int8, "uchar": np.uint8, "short": np.int16,
         "ushort": np.uint16, "int": np.int32, "uint": np.uint32, "long": np.int64, "ulong": np.uint64}  # fmt: skip
#: in numbers, so that no width divides it
COUNT = 37


def run(
    device: str, text: str, arrays: Sequence[Array], grid: Sequence[int], local: Sequence[int] = (), entry: str = "f"
) -> None:
    """Launch a kernel whose arguments are these arrays."""
    opened = open_device(device)
    assert isinstance(opened, CDevice)
    whole = opencl_c.complete(text, entry, len(arrays), grid, local) if opened.dialect == "c" else text
    name = opencl_c.ENTRY if opened.dialect == "c" else entry
    run_text(opened, whole, name, grid, arrays, local)


def evaluate(
    device: str, cases: Sequence[str], given: Sequence[tuple[str, Array]], made: str, width: int, extra: str = ""
) -> list[Array]:
    """Each expression of vectors a, b, c, ... of the given kinds, whose result is of kind ``made``."""
    items = len(given[0][1]) // width
    kind = made if width == 1 else f"{made}{width}"
    loads, params = [], []
    for name, (of, _) in zip("abcde", given, strict=False):
        params.append(f"__global const {of}* p{name}")
        typed = of if width == 1 else f"{of}{width}"
        loads.append(f"{typed} {name} = " + (f"p{name}[i];" if width == 1 else f"vload{width}(i, p{name});"))
    stores = []
    for k, case in enumerate(cases):
        to = f"out + {k * items * width}"
        store = f"({to})[i] = v;" if width == 1 else f"vstore{width}(v, i, {to});"
        stores.append(f"{{ {kind} v = {case}; {store} }}")
    body = "\n".join([*loads, *stores])
    head = f"__kernel void f({', '.join(params)}, __global {made}* out)"
    text = f"{extra}\n{head} {{ size_t i = get_global_id(0);\n{body}\n}}"
    out = np.zeros(len(cases) * items * width, KINDS[made])
    run(device, text, [*(np.ascontiguousarray(a[: items * width]) for _, a in given), out], (items,))
    return list(out.reshape(len(cases), -1))


def each(function: Callable[..., float]) -> Callable[..., Array]:
    return lambda *arrays: np.array([function(*map(float, row)) for row in zip(*arrays, strict=True)])


def _step(edge: Array, x: Array) -> Array:
    return np.where(x < edge, 0.0, 1.0)


def _smoothstep(a: Array, b: Array, x: Array) -> Array:
    t = np.clip((x - a) / (b - a), 0, 1)
    return t * t * (3 - 2 * t)


#: expression of a (from -3 to 3), b (the same, others), p (from 0.1 to 5), u (from -1 to 1) -> what numpy says
FLOATS: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "exp(a)": lambda a, b, p, u: np.exp(a),
    "exp2(a)": lambda a, b, p, u: np.exp2(a),
    "exp10(a)": lambda a, b, p, u: 10.0**a,
    "expm1(a)": lambda a, b, p, u: np.expm1(a),
    "log(p)": lambda a, b, p, u: np.log(p),
    "log2(p)": lambda a, b, p, u: np.log2(p),
    "log10(p)": lambda a, b, p, u: np.log10(p),
    "log1p(p)": lambda a, b, p, u: np.log1p(p),
    "logb(p)": lambda a, b, p, u: np.floor(np.log2(p)),
    "sqrt(p)": lambda a, b, p, u: np.sqrt(p),
    "rsqrt(p)": lambda a, b, p, u: 1 / np.sqrt(p),
    "cbrt(a)": lambda a, b, p, u: np.cbrt(a),
    "pow(p, b)": lambda a, b, p, u: p**b,
    "powr(p, b)": lambda a, b, p, u: p**b,
    "hypot(a, b)": lambda a, b, p, u: np.hypot(a, b),
    "fabs(a)": lambda a, b, p, u: np.abs(a),
    "fmin(a, b)": lambda a, b, p, u: np.fmin(a, b),
    "fmax(a, b)": lambda a, b, p, u: np.fmax(a, b),
    "min(a, b)": lambda a, b, p, u: np.minimum(a, b),
    "max(a, b)": lambda a, b, p, u: np.maximum(a, b),
    "maxmag(a, b)": lambda a, b, p, u: np.where(np.abs(a) > np.abs(b), a, b),
    "minmag(a, b)": lambda a, b, p, u: np.where(np.abs(a) < np.abs(b), a, b),
    "fma(a, b, p)": lambda a, b, p, u: a * b + p,
    "mad(a, b, p)": lambda a, b, p, u: a * b + p,
    "fdim(a, b)": lambda a, b, p, u: np.maximum(a - b, 0),
    "fmod(a, p)": lambda a, b, p, u: np.fmod(a, p),
    "remainder(a, p)": lambda a, b, p, u: each(math.remainder)(a, p),
    "copysign(a, b)": lambda a, b, p, u: np.copysign(a, b),
    "floor(a)": lambda a, b, p, u: np.floor(a),
    "ceil(a)": lambda a, b, p, u: np.ceil(a),
    "round(a)": lambda a, b, p, u: np.copysign(np.floor(np.abs(a) + 0.5), a),
    "rint(a)": lambda a, b, p, u: np.rint(a),
    "trunc(a)": lambda a, b, p, u: np.trunc(a),
    "sin(a)": lambda a, b, p, u: np.sin(a),
    "cos(a)": lambda a, b, p, u: np.cos(a),
    "tan(a)": lambda a, b, p, u: np.tan(a),
    "sinpi(a)": lambda a, b, p, u: np.sin(np.pi * a),
    "cospi(a)": lambda a, b, p, u: np.cos(np.pi * a),
    "tanpi(u / 4)": lambda a, b, p, u: np.tan(np.pi * u / 4),
    "asin(u)": lambda a, b, p, u: np.arcsin(u),
    "acos(u)": lambda a, b, p, u: np.arccos(u),
    "atan(a)": lambda a, b, p, u: np.arctan(a),
    "asinpi(u)": lambda a, b, p, u: np.arcsin(u) / np.pi,
    "acospi(u)": lambda a, b, p, u: np.arccos(u) / np.pi,
    "atanpi(a)": lambda a, b, p, u: np.arctan(a) / np.pi,
    "atan2(a, b)": lambda a, b, p, u: np.arctan2(a, b),
    "atan2pi(a, b)": lambda a, b, p, u: np.arctan2(a, b) / np.pi,
    "sinh(a)": lambda a, b, p, u: np.sinh(a),
    "cosh(a)": lambda a, b, p, u: np.cosh(a),
    "tanh(a)": lambda a, b, p, u: np.tanh(a),
    "asinh(a)": lambda a, b, p, u: np.arcsinh(a),
    "acosh(1 + p)": lambda a, b, p, u: np.arccosh(1 + p),
    "atanh(u)": lambda a, b, p, u: np.arctanh(u),
    "erf(a)": lambda a, b, p, u: each(math.erf)(a),
    "erfc(a)": lambda a, b, p, u: each(math.erfc)(a),
    "tgamma(p)": lambda a, b, p, u: each(math.gamma)(p),
    "lgamma(p + 3)": lambda a, b, p, u: each(math.lgamma)(p + 3),
    "degrees(a)": lambda a, b, p, u: np.degrees(a),
    "radians(a)": lambda a, b, p, u: np.radians(a),
    "sign(a)": lambda a, b, p, u: np.sign(a),
    "step(a, b)": lambda a, b, p, u: _step(a, b),
    "smoothstep(a, a + p, b)": lambda a, b, p, u: _smoothstep(a, a + p, b),
    "clamp(b, a, a + p)": lambda a, b, p, u: np.clip(b, a, a + p),
    "mix(a, b, u)": lambda a, b, p, u: a + (b - a) * u,
    "pown(a, 3)": lambda a, b, p, u: a**3,
    "rootn(p, 3)": lambda a, b, p, u: np.cbrt(p),
    "ldexp(a, 5)": lambda a, b, p, u: a * 32,
    "normalize(a) * length(a)": lambda a, b, p, u: a,
}
#: with numbers beside vectors
MIXED: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "fmin(a, 0.5f)": lambda a, b, p, u: np.fmin(a, 0.5),
    "fmax(a, 0.5f)": lambda a, b, p, u: np.fmax(a, 0.5),
    "min(a, 0.5f)": lambda a, b, p, u: np.minimum(a, 0.5),
    "max(a, 0.5f)": lambda a, b, p, u: np.maximum(a, 0.5),
    "clamp(a, -1.0f, 0.5f)": lambda a, b, p, u: np.clip(a, -1, 0.5),
    "mix(a, b, 0.25f)": lambda a, b, p, u: a + (b - a) * 0.25,
    "step(0.5f, a)": lambda a, b, p, u: _step(np.full_like(a, 0.5), a),
    "smoothstep(-0.5f, 2.0f, a)": lambda a, b, p, u: _smoothstep(np.full_like(a, -0.5), np.full_like(a, 2), a),
}
#: fewer promises are made for these
FAST: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    **{f"{kind}_{name}(p)": getattr(np, name) for kind in ("native", "half")
       for name in ("exp", "exp2", "log", "log2", "log10", "sqrt", "sin", "cos", "tan")},
    **{f"{kind}_rsqrt(p)": lambda p: 1 / np.sqrt(p) for kind in ("native", "half")},
    **{f"{kind}_recip(p)": lambda p: 1 / p for kind in ("native", "half")},
    **{f"{kind}_exp10(p)": lambda p: 10.0**p for kind in ("native", "half")},
}  # fmt: skip


def numbers(kind: str, seed: int = 0) -> list[tuple[str, Array]]:
    """a, b, c = p, d = u of `FLOATS`, in whose expressions the last two are called so."""
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(-3, 3, (2, COUNT * 16))
    a[:6] = 0.0, 0.5, -0.5, 1.5, -2.5, 2.0
    p, u = rng.uniform(0.1, 5, COUNT * 16), rng.uniform(-0.98, 0.98, COUNT * 16)
    return [(kind, each.astype(KINDS[kind])) for each in (a, b, p, u)]


NAMED = "#define p c\n#define u d\n"
TOLERANCE = {"float": 2e-6, "double": 1e-14}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("device", DEVICES)
def test_functions_of_numbers_and_of_vectors(device: str, kind: str, width: int) -> None:
    given = numbers(kind)
    cases = dict(FLOATS)
    if width > 1:
        suffix = "f" if kind == "float" else ""
        cases |= {case.replace("f)", suffix + ")").replace("f,", suffix + ","): said for case, said in MIXED.items()}
    if width > 4:  # geometry is of up to four
        del cases["normalize(a) * length(a)"]
    found = evaluate(device, list(cases), given, kind, width, NAMED)
    size = found[0].size
    wide = [a[:size].astype(np.float64) for _, a in given]
    for (case, said), got in zip(cases.items(), found, strict=True):
        most = TOLERANCE[kind]
        np.testing.assert_allclose(got, said(*wide), most, most, err_msg=f"{case} of {kind}{width}")


@pytest.mark.parametrize("width", FEW)
@pytest.mark.parametrize("device", DEVICES)
def test_fast_functions(device: str, width: int) -> None:
    cases = {case: said for case, said in FAST.items() if width > 0}
    given = numbers("float", 1)
    found = evaluate(device, list(cases), given, "float", width, NAMED)
    wide = given[2][1][: found[0].size].astype(np.float64)
    for (case, said), got in zip(cases.items(), found, strict=True):
        most = 1e-6 if device == NATIVE else 2e-3
        np.testing.assert_allclose(got, said(wide), most, most, err_msg=case)


SPECIAL = np.array([
    0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3e38, -3e38, 0.5, 2.5, 1e-3, 80.0, -80.0, 200.0, -200.0,
])  # fmt: skip


@native
@pytest.mark.parametrize("kind", ["float", "double"])
def test_special_numbers(kind: str) -> None:
    x = SPECIAL.astype(KINDS[kind])
    a, b = (m.ravel() for m in np.meshgrid(x, x))
    with np.errstate(all="ignore"):
        wanted = {
            "exp(a)": np.exp(a), "log(a)": np.log(a), "sqrt(a)": np.sqrt(a), "tanh(a)": np.tanh(a), "pow(a, b)": a**b,
            "fmax(a, b)": np.fmax(a, b), "fmin(a, b)": np.fmin(a, b), "rint(a)": np.rint(a), "floor(a)": np.floor(a),
            "atan2(a, b)": np.arctan2(a, b), "sign(a)": np.where(a != a, 0, np.sign(a)), "rsqrt(a)": 1 / np.sqrt(a),
            "copysign(a, b)": np.copysign(a, b), "trunc(a)": np.trunc(a), "erf(a)": each(math.erf)(a),
            f"clamp(a, ({kind})-1, ({kind})1)": np.where(a != a, -1, np.clip(a, -1, 1)), "hypot(a, b)": np.hypot(a, b),
        }  # fmt: skip
    for width in (1, 4):
        found = evaluate(NATIVE, list(wanted), [(kind, a), (kind, b)], kind, width)
        for (case, said), got in zip(wanted.items(), found, strict=True):
            np.testing.assert_allclose(got, said, 1e-6, 1e-37, err_msg=f"{case} of {kind}{width}")


def whole(kind: str) -> list[Array]:
    rng, about = np.random.default_rng(2), np.iinfo(KINDS[kind])
    made = [rng.integers(about.min, about.max, COUNT * 16, KINDS[kind], endpoint=True) for _ in range(3)]
    made[0][:4], made[1][:4] = (about.min, about.max, 0, 1), (about.max, about.max, about.min, 1)
    return made


def _exact(kind: str) -> dict[str, Callable[[int, int, int], int]]:
    """What functions of whole numbers are, by Python's own numbers."""
    about = np.iinfo(KINDS[kind])
    bits, least, most = about.bits, int(about.min), int(about.max)
    mask = (1 << bits) - 1

    def bound(x: int) -> int:
        return max(least, min(most, x))

    def wrap(x: int) -> int:
        x &= mask
        return x - (1 << bits) if x > most else x

    return {
        "max(a, b)": lambda a, b, c: max(a, b), "min(a, b)": lambda a, b, c: min(a, b),
        "clamp(a, min(b, c), max(b, c))": lambda a, b, c: max(min(b, c), min(a, max(b, c))),
        "add_sat(a, b)": lambda a, b, c: bound(a + b), "sub_sat(a, b)": lambda a, b, c: bound(a - b),
        "hadd(a, b)": lambda a, b, c: a + b >> 1, "rhadd(a, b)": lambda a, b, c: a + b + 1 >> 1,
        "mul_hi(a, b)": lambda a, b, c: a * b >> bits, "mad_hi(a, b, c)": lambda a, b, c: wrap((a * b >> bits) + c),
        "mad_sat(a, b, c)": lambda a, b, c: bound(a * b + c),
        "rotate(a, b)": lambda a, b, c: wrap((a & mask) << (b % bits) | (a & mask) >> (bits - b % bits)),
        "popcount(a)": lambda a, b, c: (a & mask).bit_count(), "clz(a)": lambda a, b, c: bits - (a & mask).bit_length(),
        "bitselect(a, b, c)": lambda a, b, c: wrap(a & ~c | b & c),
        "a + b": lambda a, b, c: wrap(a + b), "a * b": lambda a, b, c: wrap(a * b),
        "a ^ ~b": lambda a, b, c: wrap(a ^ ~b),
    }  # fmt: skip


@pytest.mark.parametrize("width", FEW)
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("float", "double")])
@pytest.mark.parametrize("device", DEVICES)
def test_functions_of_whole_numbers(device: str, kind: str, width: int) -> None:
    a, b, c = whole(kind)
    cases = _exact(kind)
    if device != NATIVE:
        del cases["mad_sat(a, b, c)"]  # Intel's says that 0 x -2147483648 - 1 is 2147483647
    found = evaluate(device, list(cases), [(kind, a), (kind, b), (kind, c)], kind, width)
    size = found[0].size
    rows = list(zip(*(x[:size].tolist() for x in (a, b, c)), strict=True))
    for (case, said), got in zip(cases.items(), found, strict=True):
        assert got.tolist() == [said(*row) for row in rows], f"{case} of {kind}{width}"
    unsigned = kind if kind.startswith("u") else f"u{kind}"
    for case, said in {"abs_diff(a, b)": lambda a, b: abs(a - b), "abs(a)": lambda a, b: abs(a)}.items():
        (got,) = evaluate(device, [case], [(kind, a), (kind, b)], unsigned, width)
        assert got.tolist() == [said(*row[:2]) for row in rows], f"{case} of {kind}{width}"


@pytest.mark.parametrize("width", FEW)
@pytest.mark.parametrize("device", DEVICES)
def test_conversions(device: str, width: int) -> None:
    rng = np.random.default_rng(3)
    halves = [0.5, 1.5, -0.5, 2.5, 126.5, 127.5, 255.5, -128.5]
    x = np.concatenate([halves, rng.uniform(-300, 300, COUNT * 16)]).astype(np.float32)
    n = "" if width == 1 else str(width)
    roundings = {"": np.trunc, "_rte": np.rint, "_rtz": np.trunc, "_rtp": np.ceil, "_rtn": np.floor}
    for kind in ("char", "uchar", "short", "int", "ulong"):
        about = np.iinfo(KINDS[kind])
        cases = [f"convert_{kind}{n}_sat{mode}(a)" for mode in roundings]
        found = evaluate(device, cases, [("float", x)], kind, width)
        for (mode, rounded), got in zip(roundings.items(), found, strict=True):
            wanted = [max(about.min, min(about.max, int(v))) for v in rounded(x[: got.size]).tolist()]
            assert got.tolist() == wanted, f"convert_{kind}{n}_sat{mode}"
    small = np.clip(x, -127, 127)
    for mode, rounded in roundings.items():
        (got,) = evaluate(device, [f"convert_int{n}{mode}(a)"], [("float", small)], "int", width)
        assert got.tolist() == rounded(small[: got.size]).tolist(), f"convert_int{n}{mode}"
    a = whole("int")[0]
    (got,) = evaluate(device, [f"convert_short{n}_sat(a)"], [("int", a)], "short", width)
    assert got.tolist() == np.clip(a[: got.size], -32768, 32767).tolist()
    (got,) = evaluate(device, [f"convert_uchar{n}(a)"], [("int", a)], "uchar", width)
    assert got.tolist() == a[: got.size].astype(np.uint8).tolist()
    (got,) = evaluate(device, [f"convert_double{n}(a)"], [("int", a)], "double", width)
    assert got.tolist() == a[: got.size].tolist()
    (got,) = evaluate(device, [f"convert_float{n}_rte(a)"], [("int", a)], "float", width)
    assert got.tolist() == a[: got.size].astype(np.float32).tolist()
    (got,) = evaluate(device, [f"as_int{n}(a)"], [("float", x)], "int", width)
    assert got.tolist() == x[: got.size].view(np.int32).tolist()
    if device == NATIVE:  # Intel's makes the largest number of it
        nothing = np.full(64, np.nan, np.float32)
        assert not evaluate(device, [f"convert_uint{n}_sat(a)"], [("float", nothing)], "uint", width)[0].any()


@pytest.mark.parametrize("width", FEW)
@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("device", DEVICES)
def test_comparisons_and_choices(device: str, kind: str, width: int) -> None:
    a, b = (m.ravel().astype(KINDS[kind]) for m in np.meshgrid(SPECIAL, SPECIAL))
    result = "int" if kind == "float" or width == 1 else "long"
    tiny = np.finfo(KINDS[kind]).tiny
    wanted = {
        "isequal(a, b)": a == b, "isnotequal(a, b)": a != b, "isgreater(a, b)": a > b, "isgreaterequal(a, b)": a >= b,
        "isless(a, b)": a < b, "islessequal(a, b)": a <= b, "islessgreater(a, b)": (a < b) | (a > b),
        "isordered(a, b)": (a == a) & (b == b), "isunordered(a, b)": (a != a) | (b != b), "isnan(a)": np.isnan(a),
        "isinf(a)": np.isinf(a), "isfinite(a)": np.isfinite(a), "isnormal(a)": np.isfinite(a) & (np.abs(a) >= tiny),
        "a < b": a < b, "a == b": a == b,
    }  # fmt: skip
    found = evaluate(device, list(wanted), [(kind, a), (kind, b)], result, width)
    true = 1 if width == 1 else -1
    for (case, said), got in zip(wanted.items(), found, strict=True):
        np.testing.assert_array_equal(got, said[: got.size] * true, err_msg=f"{case} of {kind}{width}")
    pick = "uint" if kind == "float" else "ulong"
    mask = np.random.default_rng(4).integers(0, 2, a.size).astype(KINDS[pick]) * np.iinfo(KINDS[pick]).max
    (got,) = evaluate(device, ["select(a, b, c)"], [(kind, a), (kind, b), (pick, mask)], kind, width)
    np.testing.assert_array_equal(got, np.where(mask, b, a)[: got.size])
    if width > 1:
        case = f"(any(isless(a, b)) && !all(isless(a, b))) ? a : ({kind}{width})(7)"
        (got,) = evaluate(device, [case], [(kind, a), (kind, b)], kind, width)
        less = (a < b)[: got.size].reshape(-1, width)
        some = (less.any(1) & ~less.all(1))[:, None]
        np.testing.assert_array_equal(got, np.where(some, a[: got.size].reshape(-1, width), 7).ravel())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("device", DEVICES)
def test_geometry(device: str, kind: str, width: int) -> None:
    given = numbers(kind, 5)[:2]
    cases = ["dot(a, b)", "length(a)", "distance(a, b)", *(["fast_length(a)"] if kind == "float" else [])]
    splat = [f"({kind}{width})({case})" if width > 1 else case for case in cases]
    found = [got.reshape(-1, width)[:, 0] for got in evaluate(device, splat, given, kind, width)]
    a, b = (x[: len(found[0]) * width].reshape(-1, width).astype(np.float64) for _, x in given)
    wanted = [(a * b).sum(1), np.linalg.norm(a, axis=1), np.linalg.norm(a - b, axis=1), np.linalg.norm(a, axis=1)]
    for case, got, said in zip(cases, found, wanted, strict=False):
        np.testing.assert_allclose(got, said, 1e-3 if "fast" in case else 1e-5, 1e-5, err_msg=case)
    if width == 3:
        (got,) = evaluate(device, ["cross(a, b)"], given, kind, 3)
        np.testing.assert_allclose(got.reshape(-1, 3), np.cross(a, b), 1e-5, 1e-5)


LITERALS = """
typedef struct { float3 at; int n; } Point;
__constant float weights[4] = {0.5f, 0.25f, -1.0f, 3.0f};
float4 turned(float4 v) { return v.wzyx; }
__kernel void f(__global const float* x, __global float* y, __constant float* z) {
  const size_t i = get_global_id(0);
  float4 v = (float4)(x[i], 1, (float2)(2.0f, z[i]));
  float4 w = (float4)(x[i]), t = turned(v);
  v.xw = (float2)(7.0f, 8.0f);
  v.lo += v.hi;
  Point p = {(float3)(1, 2, 3), (int)sizeof(float3)};
  float8 e = (float8)(v, w);
  float16 s = (float16)(e, e.odd, e.even);
  int4 m = v > w;
  __global float* o = y + 16 * i;
  vstore4(v, 0, o);
  vstore4(t, 1, o);
  o[8] = p.at.z + p.n; o[9] = s.sF; o[10] = e.s3; o[11] = weights[i & 3];
  o[12] = m.x ? 1 : 2; o[13] = dot(v, w); o[14] = sizeof(float3) == 16 ? sizeof(p) : 0; o[15] = (int4)(1, 2, 3, 4).hi.y;
}
"""


@pytest.mark.parametrize("device", DEVICES)
def test_literals_swizzles_vectors_of_three_and_address_spaces(device: str) -> None:
    x, z = (np.random.default_rng(s).uniform(-9, 9, 13).astype(np.float32) for s in (6, 7))
    y = np.zeros((13, 16), np.float32)
    run(device, LITERALS, [x, y, z], (13,))
    wanted = np.empty_like(y)
    for i in range(13):
        v = [x[i], 1, 2, z[i]]
        t = v[::-1]
        v[0], v[3] = np.float32(7), np.float32(8)
        v[0], v[1] = v[0] + v[2], v[1] + v[3]
        e = [*v, *[x[i]] * 4]
        s = [*e, *e[1::2], *e[::2]]
        wanted[i] = [*v, *t, 3 + 16, s[15], e[3], (0.5, 0.25, -1, 3)[i & 3], 1 if v[0] > x[i] else 2,
                     sum(np.float32(a) * x[i] for a in v), 32, 4]  # fmt: skip
    np.testing.assert_allclose(y, wanted, 1e-6)


IDS = """
int place(uint n) { return (int)get_global_id(n); }
__kernel void f(__global int* y) {
  const int i = place(0) + (int)get_global_size(0) * (place(1) + (int)get_global_size(1) * place(2));
  __global int* o = y + 16 * i;
  for (uint n = 0; n < 3; n++) {
    o[n] = get_global_id(n); o[3 + n] = get_local_id(n); o[6 + n] = get_group_id(n); o[9 + n] = get_num_groups(n);
    o[12 + n] = get_local_size(n);
  }
  o[15] = get_work_dim() + 10 * (int)(get_global_offset(0) + get_global_id(3)) + 1000 * (int)get_global_size(5);
}
"""


@pytest.mark.parametrize(
    ("grid", "local"),
    [
        ((7,), ()),
        ((12,), (4,)),
        ((5, 3), ()),
        ((6, 4), (3, 2)),
        ((5, 3, 7), (5, 1, 7)),
        ((1, 9, 2), ()),
        ((129, 3, 2), ()),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_work_items_know_who_they_are(device: str, grid: tuple[int, ...], local: tuple[int, ...]) -> None:
    size, group = ((*n, 1, 1)[:3] for n in (grid, local or (1,) * len(grid)))
    y = np.full((math.prod(grid), 16), -1, np.int32)
    run(device, IDS, [y], grid, local)
    wanted = []
    for z in range(size[2]):
        for r in range(size[1]):
            for x in range(size[0]):
                at = (x, r, z)
                wanted.append([
                    *at, *(i % g for i, g in zip(at, group, strict=True)),
                    *(i // g for i, g in zip(at, group, strict=True)),
                    *(s // g for s, g in zip(size, group, strict=True)), *group, len(grid) + 1000,
                ])  # fmt: skip
    np.testing.assert_array_equal(y, wanted)


POINTERS = """
__kernel void f(__global const float* x, __global float* y, __global int* n) {
  const size_t i = get_global_id(0);
  float whole, cosine; int power;
  y[6 * i] = fract(x[i], &whole); y[6 * i + 1] = whole;
  y[6 * i + 2] = sincos(x[i], &cosine); y[6 * i + 3] = cosine;
  y[6 * i + 4] = frexp(x[i], &power) ; y[6 * i + 5] = ldexp(y[6 * i + 4], power) + modf(x[i], &whole);
  atomic_add(n, 3); atomic_inc(n + 1); atomic_max(n + 2, (int)i); atomic_min(n + 3, -(int)i); atomic_xchg(n + 4, 9);
  atomic_cmpxchg(n + 5, 0, 5); atomic_or(n + 6, 1 << (i & 7)); atomic_sub(n + 7, 1);
  volatile __local int mine[4];
  mine[i & 3] = i; barrier(CLK_LOCAL_MEM_FENCE); mem_fence(CLK_GLOBAL_MEM_FENCE);
  if (mine[i & 3] != i) atomic_dec(n + 8);
}
"""


@pytest.mark.parametrize("device", DEVICES)
def test_results_behind_pointers_atomics_and_groups_of_one(device: str) -> None:
    x = np.random.default_rng(8).uniform(-9, 9, 501).astype(np.float32)
    y, n = np.zeros((501, 6), np.float32), np.zeros(9, np.int32)
    run(device, POINTERS, [x, y, n], (501,))
    wide = x.astype(np.float64)
    mantissa, _ = np.frexp(wide)
    wanted = [wide - np.floor(wide), np.floor(wide), np.sin(wide), np.cos(wide), mantissa, wide + np.modf(wide)[0]]
    np.testing.assert_allclose(y, np.stack(wanted, 1), 1e-5, 2e-6)
    assert n.tolist() == [1503, 501, 500, -500, 9, 5, 255, -501, 0]


OWN = """
float expf(float x) { return exp(x) + 1.0f; }
void memcpy(__global float* to, float x) { *to = x; }
__kernel void f(__global const float* x, __global float* y) { memcpy(y + get_global_id(0), expf(x[get_global_id(0)])); }
"""


@native
def test_a_text_may_define_what_the_c_library_has() -> None:
    x, y = np.linspace(-2, 2, 9, dtype=np.float32), np.zeros(9, np.float32)
    run(NATIVE, OWN, [x, y], (9,))
    np.testing.assert_allclose(y, np.exp(x) + 1, 1e-6)


@native
@pytest.mark.parametrize(("of", "width"), [("float", 2), ("float", 4), ("float", 8), ("float", 16), ("double", 16)])
def test_vectors_of_tensors_begin_anywhere(of: str, width: int) -> None:
    """Numpy's arrays begin at multiples of 16 bytes, or of an element."""
    text = "__kernel void f(__global const V* x, __global V* y) { y[get_global_id(0)] = x[get_global_id(0)] * 2; }"
    text, scalar = f"#define V {of}{width}\n{text}", KINDS[of]
    for skip in range(4):
        x = np.arange(3 * width + skip, dtype=scalar)[skip:]
        y = np.zeros(3 * width + skip, scalar)[skip:]
        run(NATIVE, text, [x, y], (3,))
        np.testing.assert_array_equal(y, 2 * x)


@native
@pytest.mark.parametrize("level", ["X86-64-V2", "X86-64-V3", "X86-64-V4"])
def test_rounding_reads_numbers_that_begin_anywhere(level: str) -> None:
    """LLVM 22 reads them as if they began at a multiple of 16 bytes, where there is SSE alone."""
    levels = [found.name.upper() for found in processor().levels]
    if level not in levels:
        pytest.skip(f"this processor executes {', '.join(levels)}")
    device = open_device(NATIVE, Settings.make({"CPU_ISA": level}))
    assert isinstance(device, CDevice)
    given = Source("rounded")
    given.buffer("x", DType.FLOAT32, In(0))
    given.buffer("y", DType.INT32, Out(0))
    given.add("for (int i = 0; i < 64; i++) y[i] = (i32)f32_round(x[i]);")
    call = given.call((1,))
    for skip in range(4):
        x, y = np.linspace(-9, 9, 64 + skip, dtype=np.float32)[skip:], np.zeros(64, np.int32)
        run_call(device, call, [x], [y])
        assert y.tolist() == np.rint(x).tolist()


SIMPLE = "__kernel void f(__global float* y) {{ {} }}"
REFUSED = [
    (SIMPLE.format("y[0] = frobnicate(y[1]);"), (), "frobnicate"),
    (SIMPLE.format("async_work_group_copy(y, y, 1, 0);"), (), "async_work_group_copy"),
    (SIMPLE.format('printf("%f", y[0]);'), (), "printf"),
    (SIMPLE.format("y[0] = expf(y[1]);"), (), "'expf'"),
    ("float helper(float x);\n" + SIMPLE.format("y[0] = helper(y[1]);"), (), "uses helper, which is not defined"),
    ("float __attribute__((overloadable)) helper(float);\n" + SIMPLE.format("y[0] = helper(y[1]);"), (), "uses helper"),
    ("int PyErr_Occurred(void);\n" + SIMPLE.format("y[0] = PyErr_Occurred();"), (), "uses PyErr_Occurred"),
    (SIMPLE.format("barrier(CLK_LOCAL_MEM_FENCE);"), (2,), r"barrier\(\) needs groups of one"),
    (SIMPLE.format("__local float t[2]; y[0] = t[1];"), (2,), "__local memory needs groups of one"),
    (SIMPLE.format("local float t[2]; y[0] = t[1];"), (2,), "__local memory needs groups of one"),
    ("__kernel void f(__global float* y, int n) { y[0] = n; }", (), "too few arguments"),
    ("__kernel void g(__global float* y) { y[0] = 1; }", (), "'f'"),
    ("__kernel void f(float y) { }", (), "incompatible type"),
]


@native
@pytest.mark.parametrize(("text", "local", "why"), REFUSED)
def test_what_is_not_there_is_named(text: str, local: tuple[int, ...], why: str) -> None:
    with pytest.raises(ExecutionError) as caught:
        run(NATIVE, text, [np.zeros(4, np.float32)], (4,), local)
    assert re.search(why, opencl_c.readable(caught.value.what)), caught.value.what


@native
def test_groups_that_do_not_divide_the_work_items_are_told() -> None:
    with pytest.raises(SettingsError, match=r"groups of \[3\] do not divide"):
        run(NATIVE, SIMPLE.format("y[0] = 1;"), [np.zeros(4, np.float32)], (4,), (3,))

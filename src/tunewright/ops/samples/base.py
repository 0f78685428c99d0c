"""Samples of ONNX's own operators: small, odd-sized inputs on which every implementation is checked.

`with_samples` gives each spec of a family the samples listed here under its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from ..base import Array, OpSpec, Sample

Rng: TypeAlias = "np.random.Generator"  # a string, because numpy imports `random` at its first use
Samples: TypeAlias = Callable[[Rng], Iterable[Sample]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def with_samples(specs: Iterable[OpSpec], samples: dict[str, Samples]) -> tuple[OpSpec, ...]:
    """The specs, each with its samples."""
    return tuple(dataclasses.replace(s, samples=samples[s.name]) if s.name in samples else s for s in specs)


def normal(rng: Rng, *shape: int, dtype: Any = np.float32) -> Array:
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def uniform(rng: Rng, low: float, high: float, *shape: int, dtype: Any = np.float32) -> Array:
    return np.asarray(rng.uniform(low, high, shape)).astype(dtype)


def integers(rng: Rng, low: int, high: int, *shape: int, dtype: Any = np.int64) -> Array:
    return np.asarray(rng.integers(low, high, shape)).astype(dtype)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def scalar(value: Any, dtype: Any = np.int64) -> Array:
    return np.array(value, dtype)


# -- element-wise -----------------------------------------------------------------------------------------------------
def unary(low: float = -3, high: float = 3, **attrs: Any) -> Samples:
    def make(rng: Rng) -> Iterable[Sample]:
        for dtype in (np.float32, np.float64, np.float16, BFLOAT16):
            yield Sample([uniform(rng, low, high, 3, 17, dtype=dtype)], attrs)
        yield Sample([uniform(rng, low, high)], attrs)

    return make


def signed(rng: Rng) -> Iterable[Sample]:
    """Samples of floats and integers."""
    yield from unary()(rng)
    for dtype in (np.int8, np.int32, np.int64):
        yield Sample([integers(rng, -100, 100, 5, 3, dtype=dtype)], {})


def logical(count: int) -> Samples:
    def make(rng: Rng) -> Iterable[Sample]:
        yield Sample([integers(rng, 0, 2, *((3, 1, 5) if i else (4, 1)), dtype=np.bool_) for i in range(count)], {})

    return make


def bits(count: int) -> Samples:
    def make(rng: Rng) -> Iterable[Sample]:
        for dtype in (np.uint8, np.int16, np.int32, np.uint64):
            yield Sample([integers(rng, 0, 120, *((3, 1, 5) if i else (4, 1)), dtype=dtype) for i in range(count)], {})

    return make


_PAIRS = (((2, 3, 5), (2, 3, 5)), ((2, 3, 5), (5,)), ((4, 1, 3), (2, 1)), ((), (3, 2)), ((1, 7), ()))


def arithmetic(low: float = -3, high: float = 3, whole: bool = True) -> Samples:
    def make(rng: Rng) -> Iterable[Sample]:
        for a, b in _PAIRS:
            yield Sample([uniform(rng, low, high, *a), uniform(rng, low, high, *b)], {})
        for dtype in (np.float64, np.float16, BFLOAT16):
            yield Sample([uniform(rng, low, high, 3, 4, dtype=dtype), uniform(rng, low, high, 4, dtype=dtype)], {})
        for kind in (np.int32, np.int64, np.uint8) if whole else ():
            yield Sample([integers(rng, 1, 60, 4, 3, dtype=kind), integers(rng, 1, 9, 3, dtype=kind)], {})

    return make


def division(rng: Rng) -> Iterable[Sample]:
    yield from arithmetic(0.5, 3)(rng)
    signs = np.array([[-7, 7], [-8, 8]], np.int32)
    yield Sample([signs, np.array([2, -3], np.int32)], {})


def modulo(rng: Rng) -> Iterable[Sample]:
    for dtype in (np.int32, np.int64, np.int8):
        a, b = integers(rng, -50, 50, 5, 7, dtype=dtype), integers(rng, 1, 9, 7, dtype=dtype)
        yield Sample([a, b], {})
        yield Sample([a, (-b).astype(dtype)], {"fmod": 1})
    yield Sample([normal(rng, 4, 5) * 9, uniform(rng, 0.5, 3, 5)], {"fmod": 1})


def power(rng: Rng) -> Iterable[Sample]:
    yield Sample([uniform(rng, 0.2, 3, 3, 4), uniform(rng, -2, 2, 4)], {})
    for exponent in (2.0, 0.5, 3.0, -1.0):
        yield Sample([uniform(rng, 0.2, 3, 3, 4), scalar(exponent, np.float32)], {})
    yield Sample([uniform(rng, 0.2, 3, 3, 4), scalar(2)], {})
    yield Sample([integers(rng, -5, 6, 3, 4, dtype=np.int32), integers(rng, 0, 4, 4, dtype=np.int32)], {})
    yield Sample([integers(rng, 1, 6, 3, 4), uniform(rng, 0, 2, 4)], {})


def variadic(rng: Rng) -> Iterable[Sample]:
    for count in (1, 2, 3):
        yield Sample([normal(rng, *((3, 1) if i else (4, 1, 5))) for i in range(count)], {})


def extreme(rng: Rng) -> Iterable[Sample]:
    yield from variadic(rng)
    yield Sample([integers(rng, -9, 9, 3, 4, dtype=np.int8), integers(rng, -9, 9, 4, dtype=np.int8)], {})


def clip(rng: Rng) -> Iterable[Sample]:
    x = normal(rng, 3, 7)
    low, high = scalar(-0.5, np.float32), scalar(0.75, np.float32)
    for bounds in ([low, high], [low], [None, high], [], [high, low]):
        yield Sample([x, *bounds], {})
    yield Sample([integers(rng, -9, 9, 5, dtype=np.int32), scalar(-3, np.int32), scalar(4, np.int32)], {})


def where(rng: Rng) -> Iterable[Sample]:
    yield Sample([integers(rng, 0, 2, 3, 1, dtype=np.bool_), normal(rng, 3, 5), normal(rng, 5)], {})
    yield Sample([integers(rng, 0, 2, 2, 1, 4, dtype=np.bool_), integers(rng, 0, 9, 3, 1), scalar(7)], {})


def comparison(rng: Rng) -> Iterable[Sample]:
    for a, b in _PAIRS:
        yield Sample([integers(rng, 0, 3, *a, dtype=np.float32), integers(rng, 0, 3, *b, dtype=np.float32)], {})
    yield Sample([integers(rng, 0, 3, 4, 5), integers(rng, 0, 3, 5)], {})


def special(**attrs: Any) -> Samples:
    values = np.array([0.0, -1.5, np.inf, -np.inf, np.nan, 3e4], np.float32)

    def make(rng: Rng) -> Iterable[Sample]:
        yield Sample([values], {})
        yield Sample([values.reshape(2, 3).astype(np.float16)], {})
        if attrs:
            yield Sample([values], attrs)

    return make


def shift(rng: Rng) -> Iterable[Sample]:
    for direction in ("LEFT", "RIGHT"):
        x, y = integers(rng, 0, 200, 4, 3, dtype=np.uint8), integers(rng, 0, 7, 3, dtype=np.uint8)
        yield Sample([x, y], {"direction": direction})


def slope(rng: Rng) -> Iterable[Sample]:
    yield Sample([normal(rng, 2, 3, 5, 4), uniform(rng, 0, 1, 3, 1, 1)], {})
    yield Sample([normal(rng, 2, 3), uniform(rng, 0, 1, 1)], {})


def cast(rng: Rng) -> Iterable[Sample]:
    for code in (1, 2, 3, 6, 7, 9, 10, 11):
        yield Sample([uniform(rng, 0, 100, 3, 5)], {"to": code})
        yield Sample([integers(rng, 0, 100, 4, dtype=np.int32)], {"to": code})
    for code in (16, 17, 18, 19, 20):
        yield Sample([normal(rng, 3, 5) * 100], {"to": code})
        yield Sample([normal(rng, 3, 5) * 100], {"to": code, "saturate": 0})


def cast_like(rng: Rng) -> Iterable[Sample]:
    yield Sample([uniform(rng, 0, 100, 3, 5), scalar(0, np.int16)], {})
    yield Sample([integers(rng, 0, 100, 3, 5), normal(rng, 2, dtype=np.float16)], {})


def bit_cast(rng: Rng) -> Iterable[Sample]:
    yield Sample([normal(rng, 3, 5)], {"to": 6})


def swiglu(rng: Rng) -> Iterable[Sample]:
    yield Sample([normal(rng, 3, 5), normal(rng, 3, 5)], {"alpha": 1.5})


ELEMENTWISE: dict[str, Samples] = {
    **dict.fromkeys(("Abs", "Neg", "Sign"), signed),
    **{name: unary(-0.95, 0.95) for name in ("Acos", "Asin", "Atanh")},
    **{name: unary(0.1, 9) for name in ("Log", "Sqrt", "Reciprocal")},
    **{
        name: unary()
        for name in (
            "Asinh",
            "Atan",
            "Ceil",
            "Cos",
            "Cosh",
            "Erf",
            "Exp",
            "Floor",
            "Round",
            "Sin",
            "Sinh",
            "Tan",
            "Tanh",
        )
    },
    "Acosh": unary(1.1, 5),
    "BitwiseNot": bits(1),
    "Not": logical(1),
    **{name: arithmetic() for name in ("Add", "Sub", "Mul")},
    "Div": division,
    "Mod": modulo,
    "Pow": power,
    **{name: logical(2) for name in ("And", "Or", "Xor")},
    **{name: bits(2) for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")},
    "BitShift": shift,
    "Max": extreme,
    "Min": extreme,
    "Sum": variadic,
    "Mean": variadic,
    "Where": where,
    "Clip": clip,
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), comparison),
    "IsInf": special(detect_negative=0),
    "IsNaN": special(),
    "Cast": cast,
    "CastLike": cast_like,
    "BitCast": bit_cast,
}

ACTIVATIONS: dict[str, Samples] = {
    **{name: unary() for name in ("HardSwish", "Mish", "Relu", "Sigmoid", "Softplus", "Softsign")},
    "Celu": unary(alpha=1.5),
    "Elu": unary(alpha=0.75),
    "Gelu": unary(approximate="tanh"),
    "HardSigmoid": unary(alpha=0.3125, beta=0.375),
    "LeakyRelu": unary(alpha=0.1875),
    "Selu": unary(),
    "Shrink": unary(bias=0.5, lambd=1.25),
    "Swish": unary(alpha=1.25),
    "ThresholdedRelu": unary(alpha=0.875),
    "PRelu": slope,
    "SwiGLU": swiglu,
}


def over(
    values: Iterable[Any], inputs: Callable[[Rng, Any], Sequence[Any]], *attrs: dict[str, Any], outputs: int = 1
) -> Samples:
    """Apply `each` to several values that the inputs depend on."""
    return join(*(each(partial(_swapped, inputs, v), *attrs, outputs=outputs) for v in values))


def _swapped(inputs: Callable[[Rng, Any], Sequence[Any]], value: Any, rng: Rng) -> Sequence[Any]:
    return inputs(rng, value)


def each(inputs: Callable[[Rng], Sequence[Any]], *attrs: dict[str, Any], outputs: int = 1) -> Samples:
    """One sample per set of attributes, over fresh inputs."""

    def make(rng: Rng) -> Iterable[Sample]:
        for one in attrs or ({},):
            yield Sample(inputs(rng), one, outputs)

    return make


def join(*parts: Samples) -> Samples:
    """Concatenate several sets of samples."""

    def make(rng: Rng) -> Iterable[Sample]:
        for part in parts:
            yield from part(rng)

    return make

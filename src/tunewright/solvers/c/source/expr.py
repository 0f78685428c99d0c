"""Element-wise operations as C expressions, for chains of them and for epilogues.

Narrow floats are computed in f32 (see `emit.COMPUTE`). An expression does not round its result to the stored type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tunewright.ir.types import DType

from .emit import COMPUTE, REPORT, STORAGE

A = TypeVar("A")
Attrs: TypeAlias = Mapping[str, Any]
#: element types of arguments; None where an optional one is absent
Types: TypeAlias = Sequence[DType | None]
#: (C expressions of the arguments, in the type they are computed in; their types; the result's type; attributes) -> the
#: C expression of the result. An argument may be used more than once: it is always a plain name.
Emit: TypeAlias = Callable[[Sequence[str | None], Types, DType, Attrs], str]

BOOL = frozenset({DType.BOOL})
FLOAT = frozenset(d for d in STORAGE if d.is_float)
INTEGER = frozenset(d for d in STORAGE if d.is_integer)
NUMBER = FLOAT | INTEGER
ANY = NUMBER | BOOL
#: types whose elements are computed in the type in which they are stored
WORDS = INTEGER | {DType.FLOAT32, DType.FLOAT64}
_UNSIGNED = {
    DType.UINT32: ("2147483648.0f", "i32", "0x80000000u"),
    DType.UINT64: ("9223372036854775808.0f", "i64", "0x8000000000000000ul"),
}


@dataclass(frozen=True)
class ExpressionForm:
    """How an operation is written in C, and for which types of its first argument (of all, if they must be equal)."""

    emit: Emit
    takes: frozenset[DType]
    #: element types of the result
    makes: frozenset[DType] = ANY


# -- literals and conversions -----------------------------------------------------------------------------------------
def number(value: float, dtype: DType) -> str:
    """A float literal of the type that ``dtype`` is computed in."""
    value = float(value) if dtype is DType.FLOAT64 else float(np.float32(value))
    if math.isnan(value):
        return "F32_NAN"
    if math.isinf(value):
        return "F32_INFINITY" if value > 0 else "(-F32_INFINITY)"
    text = repr(value) if dtype is DType.FLOAT64 else f"{value!r}f"
    return text if value >= 0 else f"({text})"


def convert(x: str, source: DType, to: DType) -> str:
    """A cast with numpy's semantics: integers wrap around, floats are cut towards zero as the processor does it."""
    if source is to:
        return x
    if to is DType.BOOL:
        return f"(as_u32({x}) << 1) != 0" if COMPUTE[source] == "f32" else f"{x} != 0"
    if to.is_float or not source.is_float:
        return f"({COMPUTE[to]}){x}"
    # Processors convert to signed types. Therefore the upper half is moved down before and up after the conversion.
    if to in _UNSIGNED:
        half, signed, bit = _UNSIGNED[to]
        lower, upper = (f"({COMPUTE[to]}){_cut(part, source, signed)}" for part in (x, f"({x} - {half})"))
        return f"({x} >= {half} ? {upper} ^ {bit} : {lower})"
    return f"({COMPUTE[to]}){_cut(x, source, 'i64' if to is DType.INT64 else 'i32')}"


def _cut(x: str, source: DType, to: str) -> str:
    """A float as an i32 or i64. A value out of range becomes the smallest integer, as on processors.

    C leaves such a conversion undefined, and compilers use that to drop the conversion.
    """
    bits, suffix = (63, "L") if to == "i64" else (31, "")
    least = "> -2147483649.0" if (bits, COMPUTE[source]) == (31, "f64") else f">= -0x1p{bits}f"
    return f"({x} {least} && {x} < 0x1p{bits}f ? ({to}){x} : -{2**bits - 1}{suffix} - 1)"


def rounded(x: str, dtype: DType) -> str:
    """A value that was computed in f32, rounded to its element type."""
    name = {DType.FLOAT16: "f16", DType.BFLOAT16: "bf16"}.get(dtype)
    return x if name is None else f"{name}_load({name}_store({x}))"


def _cast(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    return convert(str(a[0]), _dtype(types), out)


def _dtype(types: Types) -> DType:
    assert types[0] is not None
    return types[0]


def _bit_cast(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    bits = {"f32": f"as_u32({a[0]})", "f64": f"as_u64({a[0]})"}.get(COMPUTE[_dtype(types)], str(a[0]))
    return {"f32": f"as_f32((u32){bits})", "f64": f"as_f64((u64){bits})"}.get(COMPUTE[out], f"({COMPUTE[out]}){bits}")


# -- building blocks --------------------------------------------------------------------------------------------------
_CONSTANTS = {"SQRT_HALF": math.sqrt(0.5), "SQRT_2_PI": math.sqrt(2 / math.pi)}


def _float(template: str, **defaults: float) -> ExpressionForm:
    """A formula in floats. {x}, {y}, ...: arguments; {T}: f32 or f64; attributes, with their defaults, by name."""

    def emit(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
        values = _CONSTANTS | {k: attrs.get(k, v) for k, v in defaults.items()}
        names = dict(zip("xyzuvw", a, strict=False))
        return template.format(T=COMPUTE[out], **names, **{k: number(v, out) for k, v in values.items()})

    return ExpressionForm(emit, FLOAT)


def _function(name: str) -> ExpressionForm:
    return _float(f"{{T}}_{name}({{x}})")


def _builtin(name: str) -> ExpressionForm:
    """An operation that is one instruction of the processor. It takes only floats: integers have nothing to round."""

    def emit(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
        return f"__builtin_{name}{'' if out is DType.FLOAT64 else 'f'}({a[0]})"

    return ExpressionForm(emit, FLOAT)


def _plain(template: str, takes: frozenset[DType]) -> ExpressionForm:
    """An operation with the same text for every type."""
    return ExpressionForm(lambda a, types, out, attrs: template.format(**dict(zip("xyz", a, strict=False))), takes)


def _wrapped(text: str, dtype: DType) -> str:
    return f"({COMPUTE[dtype]})({text})"


def _unsigned(x: str, dtype: DType) -> str:
    """Casts an integer to the unsigned type, in which arithmetic wraps around (signed overflow is undefined in C)."""
    return f"({'u64' if dtype.itemsize == 8 else 'u32'}){x}"


def _arithmetic(op: str) -> ExpressionForm:
    def emit(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
        given = [str(x) for x in a if x is not None]
        if out.is_float:
            return f" {op} ".join(given)
        return _wrapped(f" {op} ".join(_unsigned(x, out) for x in given), out)

    return ExpressionForm(emit, NUMBER)


def _variadic(name: str) -> ExpressionForm:
    def emit(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
        given = [str(x) for x in a]
        return reduce(lambda x, y: f"{COMPUTE[out]}_{name}({x}, {y})", given)

    return ExpressionForm(emit, NUMBER)


def _signed(dtype: DType) -> bool:
    return not dtype.value.startswith("uint")


# -- arithmetic -------------------------------------------------------------------------------------------------------
def _negative(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    return f"-{a[0]}" if out.is_float else _wrapped(f"0 - {_unsigned(str(a[0]), out)}", out)


def _absolute(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    if out.is_float:
        return f"{COMPUTE[out]}_fabs({a[0]})"
    return f"{a[0]} < 0 ? {_negative(a, types, out, attrs)} : {a[0]}" if _signed(out) else str(a[0])


def _divide(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    """The quotient. Integers are divided towards zero, and a division by 0 is reported. The smallest one divided by -1
    is itself."""
    x, y = a
    if out.is_float:
        return f"{x} / {y}"
    if not _signed(out):
        return f"{y} == 0 ? BY_ZERO({REPORT}) : {x} / {y}"
    return f"{y} == 0 ? BY_ZERO({REPORT}) : {y} == -1 ? {_negative(a, types, out, attrs)} : {x} / {y}"


def _modulo(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    """The remainder, with the sign of the dividend (fmod) or of the divisor."""
    x, y = a
    if out.is_float:
        rest = f"{COMPUTE[out]}_fmod({x}, {y})"
    else:
        minus = f"{y} == -1 ? 0 : " if _signed(out) else ""
        rest = f"({y} == 0 ? BY_ZERO({REPORT}) : {minus}{x} % {y})"
    if attrs.get("fmod", 0) or not (out.is_float or _signed(out)):
        return rest
    return f"{rest} + ({rest} != 0 && ({rest} < 0) != ({y} < 0) ? {y} : 0)"


def _power(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    x, y, exponent = str(a[0]), str(a[1]), types[1]
    assert exponent is not None
    if out.is_float:
        return f"{COMPUTE[out]}_pow({x}, ({COMPUTE[out]}){y})"
    real = convert(f"f64_of(pow)((f64){x}, (f64){y})", DType.FLOAT64, out)
    if exponent.is_float:
        return real
    whole = _wrapped(f"i64_pow({x}, (i64)({COMPUTE[out]}){y})", out)
    return f"{y} < 0 ? {real} : {whole}" if _signed(exponent) else whole


def _mean(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    return f"({' + '.join(str(x) for x in a)}) / {number(len(a), out)}"


def _sign(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    below = "-1" if _signed(out) else "0"
    return f"{a[0]} > 0 ? 1 : {a[0]} < 0 ? {below} : {a[0]}"


def _erf(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    return f"{COMPUTE[out]}_erf({a[0]})" if out.is_float else convert(f"f64_erf((f64){a[0]})", DType.FLOAT64, out)


# -- bits -------------------------------------------------------------------------------------------------------------
def _shift(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    """A shift. A negative count, or one of at least the type's width, gives 0, or -1 for a right shift of a negative
    number."""
    x, y = a
    outside = f"{y} < 0 || {y} >= {out.itemsize * 8}" if _signed(out) else f"{y} >= {out.itemsize * 8}"
    if attrs.get("direction") == "LEFT":
        return f"{outside} ? 0 : {_wrapped(f'{_unsigned(str(x), out)} << {y}', out)}"
    return f"{outside} ? ({x} < 0 ? -1 : 0) : {x} >> {y}" if _signed(out) else f"{outside} ? 0 : {x} >> {y}"


# -- bounds and conditions --------------------------------------------------------------------------------------------
def _clip(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    low, high = (a[i] if len(a) > i else None for i in (1, 2))
    text, kind = str(a[0]), COMPUTE[out]
    text = text if low is None else f"{kind}_maximum({text}, {low})"
    return text if high is None else f"{kind}_minimum({text}, {high})"


def _is_inf(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    tests = [f"{a[0]} == F32_INFINITY"] if attrs.get("detect_positive", 1) else []
    tests += [f"{a[0]} == -F32_INFINITY"] if attrs.get("detect_negative", 1) else []
    return " || ".join(tests) or "0"


# -- activations ------------------------------------------------------------------------------------------------------
def _shrink(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    """The Shrink operation; integers are computed in f64."""
    kind = out if out.is_float else DType.FLOAT64
    x = str(a[0]) if out.is_float else f"(f64){a[0]}"
    bias, limit = number(attrs.get("bias", 0.0), kind), number(attrs.get("lambd", 0.5), kind)
    text = f"({x} < -{limit} ? {x} + {bias} : {x} > {limit} ? {x} - {bias} : 0)"
    return text if out.is_float else convert(text, DType.FLOAT64, out)


def _gelu(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    exact = attrs.get("approximate", "none") != "tanh"
    return (_GELU_ERF if exact else _GELU_TANH).emit(a, types, out, attrs)


def _with_bias(form: ExpressionForm) -> ExpressionForm:
    """A form that adds its second argument, where present, to the first one."""

    def emit(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
        x = a[0] if len(a) < 2 or a[1] is None else f"({a[0]} + {a[1]})"
        return form.emit([x], types, out, attrs)

    return ExpressionForm(emit, FLOAT)


def _gated_add(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    return f"{a[0]} + {rounded(f'{a[1]} * {a[2]}', out)}"


def _slope(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    if out.is_float:
        return f"{a[0]} < 0 ? {a[0]} * {a[1]} : {a[0]}"
    return f"{a[0]} < 0 ? {_wrapped(f'{_unsigned(str(a[0]), out)} * {_unsigned(str(a[1]), out)}', out)} : {a[0]}"


_GELU_ERF = _float("0.5f * {x} * (1 + {T}_erf({x} * {SQRT_HALF}))")
_GELU_TANH = _float("0.5f * {x} * (1 + {T}_tanh({SQRT_2_PI} * ({x} + {cubic} * {x} * {x} * {x})))", cubic=0.044715)
_LEAKY, _HARD, _SIXTH = (float(np.float32(v)) for v in (0.01, 0.2, 1 / 6))
_CLAMPED = "{T}_minimum({T}_maximum(%s, 0), 1)"
#: Every step rounds separately, as in the definition. Otherwise a value half-way between two levels would get the other
#: level.
_QUANTIZE = (
    "{x} <= {T}_minimum({y}, {z}) ? {u} : {x} > {T}_maximum({y}, {z}) ? {v} : "
    "{T}_round(({x} - {y}) / ({z} - {y}) * {steps}) / {steps} * ({v} - {u}) + {u}"
)


def _fake_quantize(a: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    return _float(_QUANTIZE, steps=int(attrs["levels"]) - 1).emit(a, types, out, {})


EXPRESSIONS: dict[str, ExpressionForm] = {
    # arithmetic
    "Abs": ExpressionForm(_absolute, NUMBER),
    "Add": _arithmetic("+"),
    "Sub": _arithmetic("-"),
    "Mul": _arithmetic("*"),
    "Div": ExpressionForm(_divide, NUMBER),
    "Max": _variadic("maximum"),
    "Mean": ExpressionForm(_mean, FLOAT),
    "Min": _variadic("minimum"),
    "Mod": ExpressionForm(_modulo, NUMBER),
    "Neg": ExpressionForm(_negative, NUMBER),
    "Pow": ExpressionForm(_power, NUMBER),
    "Reciprocal": _float("1 / {x}"),
    "Sign": ExpressionForm(_sign, NUMBER),
    "Sqrt": _function("sqrt"),
    "Sum": _arithmetic("+"),
    # rounding
    "Ceil": _builtin("ceil"),
    "Floor": _builtin("floor"),
    "Round": _builtin("rint"),
    # transcendental
    "Acos": _function("acos"),
    "Acosh": _function("acosh"),
    "Asin": _function("asin"),
    "Asinh": _function("asinh"),
    "Atan": _function("atan"),
    "Atanh": _function("atanh"),
    "Cos": _function("cos"),
    "Cosh": _function("cosh"),
    "Erf": ExpressionForm(_erf, NUMBER),
    "Exp": _function("exp"),
    "Log": _function("log"),
    "Sin": _function("sin"),
    "Sinh": _function("sinh"),
    "Tan": _function("tan"),
    "Tanh": _function("tanh"),
    # logic and bits
    "And": _plain("{x} & {y}", BOOL),
    "Or": _plain("{x} | {y}", BOOL),
    "Xor": _plain("{x} ^ {y}", BOOL),
    "Not": _plain("!{x}", BOOL),
    "BitwiseAnd": _plain("{x} & {y}", INTEGER),
    "BitwiseOr": _plain("{x} | {y}", INTEGER),
    "BitwiseXor": _plain("{x} ^ {y}", INTEGER),
    "BitwiseNot": _plain("~{x}", INTEGER),
    "BitShift": ExpressionForm(_shift, INTEGER),
    # comparison and choice
    "Equal": _plain("{x} == {y}", ANY),
    "Greater": _plain("{x} > {y}", ANY),
    "GreaterOrEqual": _plain("{x} >= {y}", ANY),
    "Less": _plain("{x} < {y}", ANY),
    "LessOrEqual": _plain("{x} <= {y}", ANY),
    "IsInf": ExpressionForm(_is_inf, FLOAT),
    "IsNaN": _plain("{x} != {x}", FLOAT),
    "Where": _plain("{x} ? {y} : {z}", BOOL),
    "Clip": ExpressionForm(_clip, NUMBER),
    # conversion
    "Cast": ExpressionForm(_cast, ANY),
    "CastLike": ExpressionForm(_cast, ANY),
    "BitCast": ExpressionForm(_bit_cast, WORDS | BOOL, WORDS),
    # activations
    "Celu": _float("({x} < 0 ? 0 : {x}) + {alpha} * {T}_expm1(({x} > 0 ? 0 : {x}) / {alpha})", alpha=1.0),
    "Elu": _float("{x} > 0 ? {x} : {alpha} * {T}_expm1({x} > 0 ? 0 : {x})", alpha=1.0),
    "Gelu": ExpressionForm(_gelu, FLOAT),
    "HardSigmoid": _float(_CLAMPED % "{alpha} * {x} + {beta}", alpha=_HARD, beta=0.5),
    "HardSwish": _float("{x} * " + _CLAMPED % "{x} * {sixth} + 0.5f", sixth=_SIXTH),
    "LeakyRelu": _float("{x} < 0 ? {x} * {alpha} : {x}", alpha=_LEAKY),
    "Mish": _function("mish"),
    "PRelu": ExpressionForm(_slope, NUMBER),
    "Relu": _plain("{x} < 0 ? 0 : {x}", NUMBER),
    "Selu": _float(
        "{gamma} * ({x} > 0 ? {x} : {alpha} * {T}_expm1({x} > 0 ? 0 : {x}))",
        alpha=1.67326319217681884765625, gamma=1.05070102214813232421875,
    ),
    "Shrink": ExpressionForm(_shrink, NUMBER),
    "Sigmoid": _function("sigmoid"),
    "Softplus": _function("softplus"),
    "Softsign": _float("{x} / (1 + {T}_fabs({x}))"),
    "SwiGLU": _float("{x} * {T}_sigmoid({x} * {alpha}) * {y}", alpha=1.0),
    "Swish": _float("{x} * {T}_sigmoid({x} * {alpha})", alpha=1.0),
    "ThresholdedRelu": _float("{x} > {alpha} ? {x} : 0", alpha=1.0),
    # of other domains
    "com.microsoft::BiasAdd": _arithmetic("+"),
    "com.microsoft::BiasGelu": _with_bias(_GELU_ERF),
    "com.microsoft::FastGelu": _with_bias(_GELU_TANH),
    "com.microsoft::GatedAdd": ExpressionForm(_gated_add, FLOAT),
    "com.microsoft::Gelu": _GELU_ERF,
    "com.microsoft::QuickGelu": _float("{x} * {T}_sigmoid({x} * {alpha})", alpha=1.702),
    "org.openvinotoolkit::FakeQuantize": ExpressionForm(_fake_quantize, FLOAT),
}  # fmt: skip


def why_not(op: str, types: Types, out: DType, attrs: Attrs) -> str | None:
    """None when `expression` can write the operation for these element types, else the reason."""
    form = EXPRESSIONS.get(op)
    if form is None:
        return f"{op} has no expression in C"
    odd = next((t for t in [*types, out] if t is not None and t not in STORAGE), None)
    if odd is not None:
        return f"{op} is not computed in {odd}"
    if types[0] not in form.takes or out not in form.makes:
        return f"{op} of {types[0]} to {out} has no expression in C"
    return None


#: operations that report a division of integers by zero
DIVISIONS = frozenset({"Div", "Mod"})
#: operations whose result a narrow float holds exactly where it holds the arguments
EXACT = frozenset({"Abs", "Ceil", "Clip", "Floor", "Max", "Min", "Neg", "Relu", "Round", "Sign", "Where"})


def used(op: str, args: Sequence[A]) -> Sequence[A]:
    """The arguments whose values an operation reads: CastLike reads only the type of its second one."""
    return args[:1] if op == "CastLike" else args


def expression(op: str, args: Sequence[str | None], types: Types, out: DType, attrs: Attrs) -> str:
    """The expression of one element of the result from one element of each argument; None stands for an absent
    argument."""
    return EXPRESSIONS[op].emit(args, types, out, attrs)

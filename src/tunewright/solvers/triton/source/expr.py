"""Element-wise operations as Triton expressions. Narrow floats are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tunewright.ir.types import DType

Attrs: TypeAlias = Mapping[str, Any]
Emit: TypeAlias = Callable[[Sequence[str | None], DType, Attrs], str]

FLOAT = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64})
INTEGER = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64, DType.UINT8, DType.UINT16, DType.UINT32,
                     DType.UINT64})  # fmt: skip
NUMBER = FLOAT | INTEGER
BOOL = frozenset({DType.BOOL})
ANY = NUMBER | BOOL


#: Gelu of half floats: x above zero and 0 below, minus |x| times a polynomial in |x|. Its error is at most 1e-5, below
#: the precision of half floats. The error function takes three times the instructions, which is a third of the product
#: in front of it.
_FAR, _BUMP = 4.75, (
    0.0087726468, -0.056416287, 0.15932664, -0.24744073, 0.19715285, -0.0062945189, -0.13675284, 0.094579262,
    0.012072188, -0.034613221, 0.0096131659,
)  # fmt: skip
GELU = "\n    ".join([
    "@triton.jit\ndef gelu(x):", f"t = tl.minimum(tl.abs(x), {_FAR})", f"s = t * {2 / _FAR!r} - 1.0",
    f"p = {_BUMP[-1]!r} * s + ({_BUMP[-2]!r})", *(f"p = p * s + ({c!r})" for c in reversed(_BUMP[:-2])),
    "return tl.where(x < 0, 0.0, x) - t * p\n",
])  # fmt: skip


@dataclass(frozen=True)
class TritonExpressionForm:
    """The expression of an operation, and the supported types of its first argument."""

    emit: Emit
    takes: frozenset[DType]


def number(value: float) -> str:
    """The value as a Triton literal."""
    value = float(value)
    if math.isfinite(value):
        return repr(value) if value >= 0 else f"({value!r})"
    return 'float("nan")' if math.isnan(value) else 'float("inf")' if value > 0 else '(-float("inf"))'


def _text(template: str, takes: frozenset[DType] = FLOAT, **defaults: float) -> TritonExpressionForm:
    """A form from a template. {x}, {y} and {z} are the arguments. Attributes, with their defaults, appear by name."""

    def emit(a: Sequence[str | None], out: DType, attrs: Attrs) -> str:
        values = {k: number(attrs.get(k, v)) for k, v in defaults.items()}
        return template.format(**dict(zip("xyz", a, strict=False)), **values)

    return TritonExpressionForm(emit, takes)


def _joined(op: str) -> TritonExpressionForm:
    return TritonExpressionForm(lambda a, out, attrs: f" {op} ".join(str(x) for x in a), NUMBER)


def _extreme(name: str) -> TritonExpressionForm:
    """Maximum or minimum. NaN wins, as in numpy's maximum."""

    def emit(a: Sequence[str | None], out: DType, attrs: Attrs) -> str:
        text = str(a[0])
        for other in a[1:]:
            text = f"tl.{name}({text}, {other}{_NAN if out.is_float else ''})"
        return text

    return TritonExpressionForm(emit, NUMBER)


_NAN = ", propagate_nan=tl.PropagateNan.ALL"


def _clip(a: Sequence[str | None], out: DType, attrs: Attrs) -> str:
    low, high = (a[i] if len(a) > i else None for i in (1, 2))
    nan, text = _NAN if out.is_float else "", str(a[0])
    text = text if low is None else f"tl.maximum({text}, {low}{nan})"
    return text if high is None else f"tl.minimum({text}, {high}{nan})"


def _cast(a: Sequence[str | None], out: DType, attrs: Attrs) -> str:
    from .text import computed

    return f"({a[0]} != 0)" if out is DType.BOOL else f"{a[0]}.to({computed(out)})"


def _gelu(a: Sequence[str | None], out: DType, attrs: Attrs) -> str:
    x = a[0]
    if attrs.get("approximate", "none") == "tanh":
        inner = f"0.7978845608028654 * ({x} + 0.044715 * {x} * {x} * {x})"
        return f"{x} * tl.sigmoid(2.0 * {inner})"  # (1 + tanh u) / 2
    if out in (DType.FLOAT16, DType.BFLOAT16):
        return f"gelu({x})"
    return f"0.5 * {x} * (1.0 + tl.erf({x} * 0.7071067811865476))"


def _power(a: Sequence[str | None], out: DType, attrs: Attrs) -> str:
    """Power as in C: squares are exact, a negative base needs an integer exponent, and exponent 0 gives 1."""
    from .text import computed

    x, y = a[0], f"({a[1]}).to({computed(out)})"
    size = f"tl.where(tl.abs({x}) == 1.0, 1.0, tl.exp2({y} * tl.log2(tl.abs({x}))))"
    whole, odd = f"(tl.floor({y}) == {y})", f"(tl.floor({y} * 0.5) * 2.0 != {y})"
    below = f'tl.where({whole}, tl.where({odd}, -{size}, {size}), tl.where({x} == -float("inf"), {size}, float("nan")))'
    general = f"tl.where({x} < 0, {below}, {size})"
    return f"tl.where({y} == 2.0, {x} * {x}, tl.where(({y} == 0.0) | ({x} == 1.0), 1.0, {general}))"


def _is_infinite(a: Sequence[str | None], out: DType, attrs: Attrs) -> str:
    signs = [f'({a[0]} == {sign}float("inf"))' for sign, name in (("", "positive"), ("-", "negative"))
             if attrs.get(f"detect_{name}", 1)]  # fmt: skip
    return " | ".join(signs) or f"({a[0]} != {a[0]}) & ({a[0]} == {a[0]})"


def _mean(a: Sequence[str | None], out: DType, attrs: Attrs) -> str:
    return f"({' + '.join(str(x) for x in a)}) / {float(len(a))}"


_CLAMPED = "tl.minimum(tl.maximum(%s, 0.0), 1.0)"

EXPRESSIONS: dict[str, TritonExpressionForm] = {
    "Abs": _text("tl.abs({x})", NUMBER),
    "Add": _joined("+"),
    "Sub": _joined("-"),
    "Mul": _joined("*"),
    "Sum": _joined("+"),
    "Div": _text("{x} / {y}"),
    "Max": _extreme("maximum"),
    "Min": _extreme("minimum"),
    "Neg": _text("-{x}", NUMBER),
    "Reciprocal": _text("1.0 / {x}"),
    "Sqrt": _text("tl.sqrt({x})"),
    "Exp": _text("tl.exp({x})"),
    "Log": _text("tl.log({x})"),
    "Sin": _text("tl.sin({x})"),
    "Cos": _text("tl.cos({x})"),
    "Floor": _text("tl.floor({x})"),
    "Ceil": _text("tl.ceil({x})"),
    # Halves round to even. Larger numbers have no fraction.
    "Round": _text(
        "tl.where(tl.abs({x}) < 4194304.0, tl.floor({x} + 0.5) - tl.where((tl.floor({x} + 0.5) == {x} + 0.5) & "
        "(tl.floor(tl.floor({x} + 0.5) * 0.5) * 2.0 != tl.floor({x} + 0.5)), 1.0, 0.0), {x})"
    ),
    "Sign": _text("tl.where({x} > 0, 1.0, tl.where({x} < 0, -1.0, {x}))"),
    "Pow": TritonExpressionForm(_power, FLOAT),
    "Mean": TritonExpressionForm(_mean, FLOAT),
    "Tan": _text("tl.sin({x}) / tl.cos({x})"),
    "Erf": _text("tl.erf({x})"),
    # near zero the difference would lose its digits
    "Tanh": _text(
        "tl.where(tl.abs({x}) < 0.1, {x} * (1.0 - {x} * {x} * (0.3333333333 - {x} * {x} * (0.1333333333 - "
        "0.053968254 * {x} * {x}))), 2.0 * tl.sigmoid(2.0 * {x}) - 1.0)"
    ),
    "Sigmoid": _text("tl.sigmoid({x})"),
    "And": _text("{x} & {y}", BOOL),
    "Or": _text("{x} | {y}", BOOL),
    "Xor": _text("{x} ^ {y}", BOOL),
    "Not": _text("{x} == 0", BOOL),
    "Equal": _text("{x} == {y}", ANY),
    "Greater": _text("{x} > {y}", NUMBER),
    "GreaterOrEqual": _text("{x} >= {y}", NUMBER),
    "Less": _text("{x} < {y}", NUMBER),
    "LessOrEqual": _text("{x} <= {y}", NUMBER),
    "IsNaN": _text("{x} != {x}"),
    "IsInf": TritonExpressionForm(_is_infinite, FLOAT),
    "Where": _text("tl.where({x}, {y}, {z})", BOOL),
    "Clip": TritonExpressionForm(_clip, NUMBER),
    "Cast": TritonExpressionForm(_cast, ANY),
    "CastLike": TritonExpressionForm(_cast, ANY),
    "Relu": _text("tl.where({x} < 0, 0.0, {x})"),
    "LeakyRelu": _text("tl.where({x} < 0, {x} * {alpha}, {x})", alpha=0.01),
    "PRelu": _text("tl.where({x} < 0, {x} * {y}, {x})"),
    "Elu": _text("tl.where({x} > 0, {x}, {alpha} * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))", alpha=1.0),
    "HardSigmoid": _text(_CLAMPED % "{alpha} * {x} + {beta}", alpha=0.2, beta=0.5),
    "HardSwish": _text("{x} * " + _CLAMPED % "{x} * 0.16666666666666666 + 0.5"),
    "Celu": _text("tl.maximum({x}, 0.0) + {alpha} * (tl.exp(tl.minimum({x}, 0.0) / {alpha}) - 1.0)", alpha=1.0),
    "Selu": _text(
        "{gamma} * tl.where({x} > 0, {x}, {alpha} * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))",
        alpha=1.67326319217681884765625,
        gamma=1.05070102214813232421875,
    ),
    # tanh of softplus is e (e + 2) / (e (e + 2) + 2) for e = exp(x)
    "Mish": _text(
        "tl.where({x} > 20.0, {x}, {x} * (tl.exp(tl.minimum({x}, 20.0)) * (tl.exp(tl.minimum({x}, 20.0)) + 2.0)) / "
        "(tl.exp(tl.minimum({x}, 20.0)) * (tl.exp(tl.minimum({x}, 20.0)) + 2.0) + 2.0))"
    ),
    "Shrink": _text(
        "tl.where({x} < -{lambd}, {x} + {bias}, tl.where({x} > {lambd}, {x} - {bias}, 0.0))", lambd=0.5, bias=0.0
    ),
    "ThresholdedRelu": _text("tl.where({x} > {alpha}, {x}, 0.0)", alpha=1.0),
    "com.microsoft::QuickGelu": _text("{x} * tl.sigmoid({x} * {alpha})", alpha=1.702),
    "Softplus": _text("tl.maximum({x}, 0.0) + tl.log(1.0 + tl.exp(-tl.abs({x})))"),
    "Softsign": _text("{x} / (1.0 + tl.abs({x}))"),
    "Swish": _text("{x} * tl.sigmoid({x} * {alpha})", alpha=1.0),
    "Gelu": TritonExpressionForm(_gelu, FLOAT),
    "com.microsoft::Gelu": TritonExpressionForm(_gelu, FLOAT),
}


def why_not(op: str, types: Sequence[DType | None], out: DType) -> str | None:
    """None when `expression` supports the operation for these element types, else the reason."""
    form = EXPRESSIONS.get(op)
    if form is None:
        return f"{op} has no expression in Triton"
    odd = next((t for t in [*types, out] if t is not None and t not in ANY), None)
    if odd is not None:
        return f"{op} is not computed in {odd}"
    if types[0] not in form.takes:
        return f"{op} of {types[0]} has no expression in Triton"
    return None


def expression(op: str, args: Sequence[str | None], out: DType, attrs: Attrs) -> str:
    """The expression for one result element from one element of each argument. None stands for an absent optional
    argument."""
    used = args[:1] if op == "CastLike" else args
    return EXPRESSIONS[op].emit(used, out, attrs)

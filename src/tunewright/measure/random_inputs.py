"""Make inputs for checking and timing kernels of a static problem: logical (plain) arrays with suitable values.

Valid values depend on the operation: indices in range, positive variances, scales of quantisation. The table `ROLES`
defines them for operations that need it; all other inputs get ordinary data. There are three kinds:

- random: like real data, with weights scaled so that sums stay in range; kernels are timed on it;
- edge: zeros of either sign, large and small numbers together, ties, the limits of integer types;
- tame: numbers near one, for epilogues that do not accept the others (such as a logarithm after a sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ..errors import UnsupportedError
from ..ir.types import DType, TensorType
from ..ops import lookup
from ..ops.internal.append import APPEND
from ..ops.internal.row_counts import PLAIN_OP
from ..ops.internal.strided_attention import STRIDED
from ..solvers.base import Array, Problem

MS = "com.microsoft::"
OV = "org.openvinotoolkit::"
#: Results with fewer elements than this get sums without cancellation; otherwise one could consist of rounding errors.
FEW = 64


@dataclass
class Draw:
    """One input to be made. ``made``: the inputs before it."""

    problem: Problem
    rng: np.random.Generator
    kind: str
    at: int
    type: TensorType
    made: list[Array | None] = field(default_factory=list)

    @property
    def dims(self) -> tuple[int, ...]:
        return self.type.dims

    def attr(self, name: str, default: int) -> int:
        return int(self.problem.attrs.get(name, default))

    def input_dims(self, i: int) -> tuple[int, ...]:
        """Return the dimensions of another input; empty if it is absent."""
        type = self.problem.inputs[i] if i < len(self.problem.inputs) else None
        return type.dims if isinstance(type, TensorType) else ()

    def output_dims(self, i: int = 0) -> tuple[int, ...]:
        type = self.problem.outputs[i]
        assert isinstance(type, TensorType)
        return type.dims

    def cast(self, values: Array | float) -> Array:
        return np.asarray(values).astype(self.type.dtype.numpy)

    def whole(self, low: int, high: int) -> Array:
        """Draw integers from low to high, both included."""
        return self.cast(self.rng.integers(low, high, self.dims, endpoint=True))

    def uniform(self, low: float, high: float) -> Array:
        if self.type.dtype.numpy == np.float32:
            values = self.rng.random(self.dims, np.float32)
            values *= np.float32(high - low)
            values += np.float32(low)
            return np.asarray(values)
        return self.cast(self.rng.uniform(low, high, self.dims))


Role: TypeAlias = Callable[[Draw], Array]


def make(problem: Problem, rng: np.random.Generator, kind: str = "random") -> list[Array | None]:
    """Make an array for every input of a static problem. Constants that are part of the problem keep their values."""
    if problem.op in PLAIN_OP:  # the inputs would determine the size of the results, which is not known in advance
        raise UnsupportedError(f"the result size of {problem.op} depends on input values: not measured alone")
    roles = _roles(problem)
    values = dict(problem.values)
    made: list[Array | None] = []
    for i, type in enumerate(problem.inputs):
        if type is None or i in values:
            made.append(values.get(i))
            continue
        assert isinstance(type, TensorType) and type.is_static, type
        draw = Draw(problem, rng, kind, i, type, made)
        made.append(np.ascontiguousarray(roles.get(i, data)(draw)).reshape(type.dims))
    return made


def _roles(problem: Problem) -> dict[int, Role]:
    """Return the roles of inputs in the main operation, or in the step of the epilogue that reads the input."""
    found: dict[int, Role] = {}
    for step in problem.epilogue:
        table = _table(step.op, len(step.args))
        found |= {arg: table[n] for n, arg in enumerate(step.args) if arg >= 0 and n in table}
    main = len(problem.main_inputs)
    return found | {i: role for i, role in _table(problem.op, main).items() if i < main}


def _table(op: str, count: int) -> Mapping[int, Role]:
    found = ROLES.get(op, {})
    return found(count) if callable(found) else found


# ---- roles -----------------------------------------------------------------------------------------------------------


def data(draw: Draw) -> Array:
    """Draw ordinary data, as in a network."""
    dtype = draw.type.dtype
    if dtype is DType.BOOL:
        return draw.rng.integers(0, 2, draw.dims, np.uint8).astype(np.bool_)
    if dtype.is_integer:
        return _integers(draw)
    if dtype in (DType.COMPLEX64, DType.COMPLEX128):
        return draw.cast(draw.rng.standard_normal(draw.dims) + 1j * draw.rng.standard_normal(draw.dims))
    if draw.kind == "tame":
        return draw.uniform(0.25, 1)
    if draw.kind == "edge":
        return _edges(draw)
    few = sum(t.size for t in draw.problem.outputs if isinstance(t, TensorType)) < FEW
    if dtype is DType.FLOAT32:
        values = draw.rng.standard_normal(draw.dims, np.float32)
        return values + np.float32(1) if few else values
    return draw.cast(draw.rng.standard_normal(draw.dims) + few)


def _integers(draw: Draw) -> Array:
    dtype = draw.type.dtype
    low, high = _ends(dtype)
    if draw.kind == "tame":
        return draw.whole(1, min(3, high))
    if draw.kind == "edge" and draw.dims:
        values = draw.whole(max(low, -3), min(high, 3))
        pick = draw.rng.random(draw.dims)
        return np.where(pick < 0.1, draw.cast(low), np.where(pick < 0.2, draw.cast(high), values))
    return draw.whole(max(low, -128), min(high, 255 if low == 0 else 127))


def _ends(dtype: DType) -> tuple[int, int]:
    bits = int("".join(c for c in dtype.value if c.isdigit()))
    return (0, 2**bits - 1) if dtype.value.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _edges(draw: Draw) -> Array:
    """Draw from few distinct numbers, so that many are equal: zeros, ones, large and small ones."""
    spec = lookup(draw.problem.op)
    wide = draw.type.dtype in (DType.FLOAT32, DType.FLOAT64) and not (spec is not None and spec.steep)
    large = 2.0 if draw.problem.epilogue else 1e3 if wide else 8.0  # a fused step may amplify rounding, too
    palette = np.array([0.0, -0.0, 1.0, -1.0, 1.0, 0.5, -0.5, 2.0, -3.0, large, -large, 1 / large, -1 / large, 1e-6])
    picked = draw.rng.integers(0, len(palette), draw.dims, np.uint8)
    return np.asarray(palette.astype(draw.type.dtype.numpy)[picked])


def between(low: float, high: float) -> Role:
    """Role: numbers from low to high."""

    def role(draw: Draw) -> Array:
        if draw.type.dtype.is_integer:
            return draw.whole(max(math.ceil(low), _ends(draw.type.dtype)[0]), max(math.floor(high), 1))
        return draw.uniform(low, high)

    return role


def nonzero(draw: Draw) -> Array:
    """Role: divisors of either sign, away from zero."""
    if draw.type.dtype.is_integer:
        low, _ = _ends(draw.type.dtype)
        values = draw.whole(1, 9)
        return values if low == 0 else np.where(draw.rng.random(draw.dims) < 0.5, -values, values)
    return np.where(draw.rng.random(draw.dims) < 0.5, -1, 1).astype(draw.type.dtype.numpy) * draw.uniform(0.5, 2)


def weight(inner: Callable[[Draw], int]) -> Role:
    """Role: factors of sums over ``inner`` terms, scaled so that results stay as large as the data."""

    def role(draw: Draw) -> Array:
        values = data(draw)
        if draw.type.dtype not in _FLOATS:
            return values
        return np.asarray(values * draw.type.dtype.numpy.type(1 / math.sqrt(max(inner(draw), 1))))

    return role


_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})


def window(draw: Draw) -> int:
    """Return the number of terms of a convolution."""
    return math.prod(draw.dims[1:])


def rows(draw: Draw) -> int:
    """Return the number of terms of a product: the row length of the first matrix."""
    dims = draw.input_dims(0)
    return dims[-2 if draw.attr("transA", 0) else -1] if len(dims) > 1 else (dims or (1,))[0]


def last(draw: Draw) -> int:
    return (draw.dims or (1,))[-1]


def index(size: Callable[[Draw], int], negative: bool = True) -> Role:
    """Role: indices into ``size`` places; negative ones count from the end."""

    def role(draw: Draw) -> Array:
        n = max(size(draw), 1)
        low = -n if negative and not draw.type.dtype.value.startswith("u") else 0
        if draw.kind == "edge":
            ends = draw.cast(np.array([low, n - 1, 0, n // 2]))
            return np.asarray(ends[draw.rng.integers(0, len(ends), draw.dims)])
        return draw.whole(low, n - 1)

    return role


def along(i: int = 0, default: int = 0) -> Callable[[Draw], int]:
    """Return a function for the size of input i along the attribute axis."""

    def size(draw: Draw) -> int:
        dims = draw.input_dims(i)
        return dims[draw.attr("axis", default)] if dims else 1

    return size


def tuples(draw: Draw) -> Array:
    """Role: indices of GatherND and ScatterND; the last dimension is an index into the first ones of the data."""
    batch, dims = draw.attr("batch_dims", 0), draw.input_dims(0)
    width = draw.dims[-1]
    sizes = np.array(dims[batch : batch + width], np.int64)
    if "Scatter" in draw.problem.op and draw.problem.attrs.get("reduction", "none") in ("none", b"none"):
        count, total = math.prod(draw.dims[:-1]), math.prod(sizes.tolist())
        flat = draw.rng.permutation(total)[:count] if count <= total else draw.rng.integers(0, total, count)
        return draw.cast(np.stack(np.unravel_index(flat, sizes), -1).reshape(draw.dims))
    low = 0 if draw.type.dtype.value.startswith("u") else -sizes
    return draw.cast(draw.rng.integers(low, sizes, draw.dims))


def scattered(draw: Draw) -> Array:
    """Role: indices of ScatterElements, without duplicates along the axis unless a reduction combines them."""
    axis = draw.attr("axis", 0)
    if draw.problem.attrs.get("reduction", "none") not in ("none", b"none"):
        return index(along())(draw)
    size, count = draw.input_dims(0)[axis], draw.dims[axis]
    if count > size:
        return index(along())(draw)
    keys = draw.rng.random([size if a == axis % len(draw.dims) else d for a, d in enumerate(draw.dims)])
    return draw.cast(np.take(np.argsort(keys, axis), np.arange(count), axis))


def lengths(size: Callable[[Draw], int]) -> Role:
    """Role: lengths of sequences in the upper half, because kernels are timed on them; the first one is full."""

    def role(draw: Draw) -> Array:
        n = max(size(draw), 1)
        values = draw.whole(1 if draw.kind == "edge" else max((n + 1) // 2, 1), n)
        if values.size:
            values.reshape(-1)[0] = n
        return values

    return role


def steps(draw: Draw) -> int:
    """Return the number of steps of a recurrent layer."""
    return draw.input_dims(0)[1 if draw.attr("layout", 0) else 0]


def zero_point(draw: Draw) -> Array:
    """Role: a zero point. Mid-range in an unsigned type, near zero in a signed one, zero in wide types."""
    low, high = _ends(draw.type.dtype) if draw.type.dtype.is_integer else (0, 0)
    if high > 1 << 16 or not draw.type.dtype.is_integer:
        return draw.cast(np.zeros(draw.dims))
    return draw.whole(high // 4, high - high // 4) if low == 0 else draw.whole(low // 8, high // 8)


def fine(i: int) -> Role:
    """Role: the scale of quantised weights (input i), so small that sums over their rows do not saturate a gate."""

    def role(draw: Draw) -> Array:
        depth = max((*draw.input_dims(i)[1:2], 1))
        return draw.cast((0.5 + draw.rng.random(draw.dims)) / (150 * math.sqrt(depth)))

    return role


def of_output(value: Callable[[Draw], object]) -> Role:
    """Role: a value that follows from the shape of the result."""
    return lambda draw: draw.cast(np.asarray(value(draw))).reshape(draw.dims)


def above(i: int) -> Role:
    """Role: numbers not below input i."""

    def role(draw: Draw) -> Array:
        other = draw.made[i]
        if draw.type.dtype.is_integer:
            return draw.cast(draw.whole(0, 20) + (0 if other is None else other.astype(np.int64).max()))
        least = -1.0 if other is None or not other.size else float(other.astype(np.float64).max())
        return draw.cast(least + 0.5 + draw.rng.random(draw.dims))

    return role


def below(draw: Draw) -> Array:
    if draw.type.dtype.is_integer:
        return draw.whole(max(_ends(draw.type.dtype)[0], -40), 10 if draw.type.dtype.value.startswith("u") else -20)
    return draw.uniform(-1.5, -0.5)


def castable(draw: Draw) -> Array:
    """Role: numbers that fit the result's type; in C other conversions are undefined."""
    target = draw.problem.outputs[0]
    assert isinstance(target, TensorType)
    if not target.dtype.is_integer or draw.type.dtype.is_integer or draw.type.dtype is DType.BOOL:
        return data(draw)
    low, high = _ends(target.dtype)
    return draw.uniform(max(low, -100), min(high, 100))


def shift(draw: Draw) -> Array:
    return draw.whole(0, draw.type.dtype.itemsize * 8 - 1)


def exponent(draw: Draw) -> Array:
    return draw.whole(0, 3) if draw.type.dtype.is_integer else draw.uniform(-2, 2)


def near_one(draw: Draw) -> Array:
    """Role: factors of long products."""
    if draw.type.dtype.is_integer:
        return draw.whole(1, 2) if draw.kind == "tame" else draw.whole(max(_ends(draw.type.dtype)[0], -2), 2)
    return draw.uniform(0.9, 1.1)


def corners(draw: Draw) -> Array:
    """Role: regions of interest in an image: x1, y1, x2, y2."""
    height, width = draw.input_dims(0)[2:4]
    scale = float(draw.problem.attrs.get("spatial_scale", 1.0)) or 1.0
    low = draw.rng.random((draw.dims[0], 2)) * 0.5
    size = 0.1 + draw.rng.random((draw.dims[0], 2)) * 0.4
    return draw.cast(np.concatenate([low, low + size], 1) * np.array([width, height, width, height]) / scale)


def written(draw: Draw) -> Array:
    """Role: the position where TensorScatter begins to write; the update must fit."""
    axis = draw.attr("axis", -2)
    room = draw.input_dims(0)[axis] - draw.input_dims(1)[axis]
    return draw.whole(0, max(room, 0))


def ends(draw: Draw) -> Array:
    """Role: the number of rows of each sequence in an Append, with the new ones."""
    count = draw.input_dims(1)[draw.attr("axis", 0)]
    return draw.whole(count, max(draw.attr("rows", count), count))


def unpooled(draw: Draw) -> Array:
    """Role: indices of MaxUnpool. Each window's maximum has its own place in its own plane."""
    batch, channels = draw.dims[:2]
    count, plane = math.prod(draw.dims[2:]), math.prod(draw.output_dims()[2:])
    places = np.linspace(0, plane - 1, count).astype(np.int64)
    planes = np.arange(channels)[None, :, None] * plane
    return draw.cast(np.broadcast_to(places + planes, (batch, channels, count)).reshape(draw.dims))


def mask(draw: Draw) -> Array:
    """Role: an attention mask.

    Three of four keys are visible, the first always; other types hold addends of the scores.
    """
    if draw.type.dtype is not DType.BOOL:
        return data(draw)
    seen = draw.rng.random(draw.dims) < 0.75
    seen[..., 0] = True
    return np.asarray(seen)


def beside_strided(draw: Draw) -> Array:
    """Role: inputs of a strided attention after its sources, whose number varies: masks, or lengths of keys."""
    if draw.type.dtype is DType.INT64:
        return lengths(lambda draw: int(draw.problem.attrs["sizes"][4]))(draw)
    return mask(draw)


# ---- roles by operation ----------------------------------------------------------------------------------------------

POSITIVE, UNIT, SMALL = between(0.5, 1.5), between(-1, 1), between(-3, 3)
SCALE = between(0.01, 0.1)
#: Scales of sums.
COARSE = between(1, 2)
#: Addends of sums of byte products, which must not overflow.
ADDEND = between(-999, 999)


def _quantised_parts(count: int) -> Mapping[int, Role]:
    """Return the roles of QLinearConcat.

    Inputs are scale and zero point of the result, then data, scale and zero point of each part.
    """
    return {i: SCALE if i == 0 or (i > 1 and i % 3 == 0) else zero_point for i in range(count) if i < 2 or i % 3 != 2}


_QUANTISED: Mapping[int, Role] = {1: SCALE, 2: zero_point, 3: SCALE, 4: zero_point}
_BINARY: Mapping[int, Role] = {1: SCALE, 2: zero_point, 4: SCALE, 5: zero_point, 6: SCALE, 7: zero_point}
_PRODUCT: Mapping[int, Role] = {**_BINARY, 6: COARSE, 8: ADDEND}
_RECURRENT: Mapping[int, Role] = {1: weight(last), 2: weight(last), 4: lengths(steps), 5: UNIT, 6: UNIT}
_SIZES: Role = of_output(lambda draw: draw.output_dims())

ROLES: Mapping[str, Mapping[int, Role] | Callable[[int], Mapping[int, Role]]] = {
    # element-wise: values in the domain of the function, with results of moderate size
    "Acos": {0: between(-0.99, 0.99)}, "Asin": {0: between(-0.99, 0.99)}, "Atanh": {0: between(-0.9, 0.9)},
    "Acosh": {0: between(1.01, 4)}, "Log": {0: between(0.05, 4)}, "Sqrt": {0: between(0, 4)},
    "Tan": {0: UNIT}, "Exp": {0: SMALL}, "Sinh": {0: SMALL}, "Cosh": {0: SMALL},
    "Reciprocal": {0: nonzero}, "Div": {1: nonzero}, "Mod": {1: nonzero},
    "Pow": {0: between(0.25, 2), 1: exponent}, "BitShift": {1: shift}, "Cast": {0: castable}, "CastLike": {0: castable},
    "Clip": {1: below, 2: above(1)},
    OV + "FakeQuantize": {1: below, 2: above(1), 3: below, 4: above(3)},
    # products
    "Conv": {1: weight(window)}, MS + "FusedConv": {1: weight(window)},
    "ConvTranspose": {1: weight(lambda draw: draw.dims[0] // draw.attr("group", 1))},
    **{op: {1: weight(rows)} for op in ("MatMul", "Gemm", MS + "FusedMatMul", MS + "TransposeMatMul")},
    "Attention": {3: mask, 6: lengths(lambda draw: draw.input_dims(1)[-2])},
    STRIDED: dict.fromkeys(range(1, 7), beside_strided),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _RECURRENT),
    # quantisation
    **{prefix + op: {1: SCALE, 2: zero_point} for op in ("QuantizeLinear", "DequantizeLinear") for prefix in ("", MS)},
    **{op: {2: zero_point, 3: zero_point} for op in ("MatMulInteger", "ConvInteger")},
    **dict.fromkeys(("QLinearConv", MS + "QLinearConv", "QLinearMatMul"), _PRODUCT),
    MS + "QGemm": {1: SCALE, 2: zero_point, 4: SCALE, 5: zero_point, 6: ADDEND, 7: COARSE, 8: zero_point},
    MS + "MatMulIntegerToFloat": {2: SCALE, 3: SCALE, 4: zero_point, 5: zero_point},
    MS + "DynamicQuantizeMatMul": {2: SCALE, 3: zero_point}, MS + "MatMulNBits": {2: SCALE},
    MS + "DynamicQuantizeLSTM": {
        4: lengths(steps), 5: UNIT, 6: UNIT, 8: fine(1), 9: zero_point, 10: fine(2), 11: zero_point,
    },
    MS + "QLinearAdd": _BINARY, MS + "QLinearMul": _BINARY,
    MS + "QLinearWhere": {2: SCALE, 3: zero_point, 5: SCALE, 6: zero_point, 7: SCALE, 8: zero_point},
    **{MS + op: _QUANTISED for op in ("QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax", "QLinearAveragePool",
                                      "QLinearGlobalAveragePool")},
    MS + "QLinearConcat": _quantised_parts,
    # normalisation and reduction
    "BatchNormalization": {1: POSITIVE, 4: POSITIVE},
    MS + "EmbedLayerNormalization": {
        0: index(lambda draw: draw.input_dims(2)[0], False), 1: index(lambda draw: draw.input_dims(4)[0], False),
        7: between(0, 1), 8: index(lambda draw: draw.input_dims(3)[0], False),
    },
    "ReduceProd": {0: near_one}, "CumProd": {0: near_one}, "ReduceLogSum": {0: between(0.25, 2)},
    "ReduceLogSumExp": {0: SMALL},
    # indices and shapes
    "Gather": {1: index(along())}, "GatherElements": {1: index(along())},
    "GatherND": {1: tuples}, MS + "GatherND": {1: tuples}, "ScatterND": {1: tuples},
    "Scatter": {1: scattered}, "ScatterElements": {1: scattered}, "TensorScatter": {2: written}, APPEND: {2: ends},
    "MaxUnpool": {1: unpooled, 2: _SIZES},
    "OneHot": {
        0: index(lambda draw: draw.output_dims()[draw.attr("axis", -1)]),
        1: of_output(lambda draw: draw.output_dims()[draw.attr("axis", -1)]),
    },
    "TopK": {1: of_output(lambda draw: draw.output_dims()[draw.attr("axis", -1)])},
    "Split": {1: of_output(lambda draw: [draw.output_dims(n)[draw.attr("axis", 0)] for n in range(draw.type.size)])},
    "Reshape": {1: _SIZES}, "Expand": {1: _SIZES}, "ConstantOfShape": {0: _SIZES}, "AffineGrid": {0: UNIT},
    "Trilu": {1: between(-1, 1)}, MS + "Trilu": {1: between(-1, 1)},
    "ReverseSequence": {1: lengths(lambda draw: draw.input_dims(0)[draw.attr("time_axis", 0)])},
    "RotaryEmbedding": {1: UNIT, 2: UNIT, 3: index(lambda draw: draw.input_dims(1)[0], False)},
    MS + "RotaryEmbedding": {
        1: index(lambda draw: max(draw.input_dims(2)[0] - (draw.input_dims(0)[-2] if draw.type.size == 1 else 0), 1),
                 False),
        2: UNIT, 3: UNIT,
    },
    # images
    "GridSample": {1: between(-1.2, 1.2)}, MS + "GridSample": {1: between(-1.2, 1.2)},
    "RoiAlign": {1: corners, 2: index(lambda draw: draw.input_dims(0)[0], False)},
}  # fmt: skip

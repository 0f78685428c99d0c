"""Shape operators: views that only rename dimensions, queries of shapes, and permutations of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE, sym_array
from tunewright.ir.types import Dim, DType, Shape, TensorType, Type
from tunewright.ops import batch_rules, shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.samples import shape as samples_shape
from tunewright.ops.samples.base import with_samples


# -- Shape, Size ------------------------------------------------------------------------------------------------------
def _selected(rank: int, attrs: Attrs) -> slice:
    begin, end, _ = slice(attrs.get("start", 0), attrs.get("end")).indices(rank)
    return slice(begin, max(begin, end))


def _shape(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    dims = inputs[0].shape
    return [np.array(dims[_selected(len(dims), attrs)], np.int64)]


def _infer_shape(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    shape = shapes.tensor(operands, 0).shape
    if shape is None:
        return [TensorType(DType.INT64, (None,))]
    return [TensorType(DType.INT64, (len(shape[_selected(len(shape), attrs)]),))]


def _shape_value(operands: Operands, attrs: Attrs) -> Array | None:
    shape = shapes.tensor(operands, 0).shape
    if shape is None:
        return None
    dims = shape[_selected(len(shape), attrs)]
    return sym_array(dims) if all(isinstance(d, WHOLE) for d in dims) else None


def _size(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    return [np.array(inputs[0].size, np.int64)]


def _infer_size(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    shapes.tensor(operands, 0)
    return [TensorType(DType.INT64, ())]


def _size_value(operands: Operands, attrs: Attrs) -> Array | None:
    count = shapes.count(shapes.tensor(operands, 0).shape)
    return None if count is None else sym_array(count)


# -- Identity, Reshape, Flatten, Squeeze, Unsqueeze -------------------------------------------------------------------
def _identity(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [inputs[0]]


def _infer_identity(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    operand = operands[0] if operands else None
    if operand is None:
        raise ValueError("input 0 is missing")
    return [operand.type]


def _reshape(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, wanted = inputs[0], inputs[1].reshape(-1).tolist()
    return [x.reshape(reshaped(x.shape, wanted, bool(attrs.get("allowzero", 0))))]


def _infer_reshape(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    wanted = shapes.ints(operands, 1)
    if wanted is None:
        return [TensorType(x.dtype, shapes.unknown(shapes.length(shapes.tensor(operands, 1))))]
    return [TensorType(x.dtype, reshaped(x.shape, wanted, bool(attrs.get("allowzero", 0))))]


def reshaped(shape: Shape | None, wanted: Sequence[int], allow_zero: bool = False) -> Shape:
    """The result shape of Reshape. The dimension for -1 is what remains after all others cancel.

    A copied dimension cancels too, so that -1 is also defined for an empty batch.
    """
    result: list[Dim] = []
    left: list[Dim] = list(shape or ())  # dimensions of the input that no result dimension has used yet
    copied: list[int] = []
    for i, d in enumerate(wanted):
        if d < -1:
            raise ValueError(f"shape {list(wanted)} has a dimension below -1")
        if d == 0 and not allow_zero:
            if shape is None:
                result.append(None)
                continue
            if i >= len(shape):
                raise ValueError(f"shape {list(wanted)} copies dimension {i} of an input of rank {len(shape)}")
            result.append(shape[i])
            copied.append(i)
        else:
            result.append(None if d == -1 else d)
    if list(wanted).count(-1) > 1:
        raise ValueError(f"shape {list(wanted)} has more than one -1")
    if shape is None:
        return tuple(result)
    left = [d for i, d in enumerate(shape) if i not in copied]
    fixed = math.prod(d for d in wanted if d > 0) * (0 if allow_zero and 0 in wanted else 1)
    number = math.prod(d for d in left if isinstance(d, WHOLE))
    names = [d for d in left if not isinstance(d, WHOLE)]
    if -1 not in wanted:
        if not names and number != fixed and 0 not in [shape[i] for i in copied]:
            raise ValueError(f"shape {list(shape)} cannot become {list(wanted)}")
        return tuple(result)
    at = list(wanted).index(-1)
    if allow_zero and 0 in wanted:  # exporters write both: the empty dimensions cancel
        if names:
            return tuple(result)
        number, fixed = math.prod(d for d in left if isinstance(d, WHOLE) and d), math.prod(d for d in wanted if d > 0)
        if 0 not in shape:
            raise ValueError(f"shape {list(shape)} cannot become {list(wanted)}")
    if not names:
        if fixed == 0 or number % fixed:
            raise ValueError(f"shape {list(shape)} cannot become {list(wanted)}")
        result[at] = number // fixed
    elif len(names) == 1 and number == fixed and number:
        result[at] = names[0]
    return tuple(result)


def _flatten(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = inputs[0]
    axis = _flatten_axis(attrs, x.ndim)
    return [x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))]


def _flatten_axis(attrs: Attrs, rank: int) -> int:
    axis = int(attrs.get("axis", 1))
    if not -rank <= axis <= rank:
        raise ValueError(f"axis {axis} does not fit rank {rank}")
    return axis + rank if axis < 0 else axis


def merged(dims: Sequence[Dim]) -> Dim:
    """The product of dimensions. A single open dimension among ones stays open."""
    count = shapes.count(dims)
    if count is not None:
        return count
    others = [d for d in dims if d != 1]
    return others[0] if len(others) == 1 else None


def _infer_flatten(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is None:
        return [TensorType(x.dtype, (None, None))]
    axis = _flatten_axis(attrs, len(x.shape))
    return [TensorType(x.dtype, (merged(x.shape[:axis]), merged(x.shape[axis:])))]


def _squeeze(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, axes = inputs[0], shapes.optional(inputs, 1)
    return [np.squeeze(x) if axes is None else np.squeeze(x, tuple(shapes.axes_of(axes.reshape(-1).tolist(), x.ndim)))]


def _infer_squeeze(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is None:
        return [TensorType(x.dtype)]
    if not shapes.given(operands, 1):
        known = all(isinstance(d, WHOLE) for d in x.shape)
        return [TensorType(x.dtype, tuple(d for d in x.shape if d != 1) if known else None)]
    axes = shapes.ints(operands, 1)
    if axes is None:
        removed = shapes.length(shapes.tensor(operands, 1))
        return [TensorType(x.dtype, shapes.unknown(None if removed is None else max(0, len(x.shape) - removed)))]
    gone = shapes.axes_of(axes, len(x.shape))
    for a in gone:
        if isinstance(x.shape[a], WHOLE) and x.shape[a] != 1:
            raise ValueError(f"axis {a} has {x.shape[a]} elements and cannot be removed")
    return [TensorType(x.dtype, tuple(d for i, d in enumerate(x.shape) if i not in gone))]


def _unsqueeze(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, axes = inputs[0], inputs[1].reshape(-1).tolist()
    return [np.expand_dims(x, tuple(shapes.axes_of(axes, x.ndim + len(axes))))]


def _infer_unsqueeze(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, axes = shapes.tensor(operands, 0), shapes.ints(operands, 1)
    if x.shape is None:
        return [TensorType(x.dtype)]
    if axes is None:
        added = shapes.length(shapes.tensor(operands, 1))
        return [TensorType(x.dtype, shapes.unknown(None if added is None else len(x.shape) + added))]
    rank = len(x.shape) + len(axes)
    new = set(shapes.axes_of(axes, rank))
    old = iter(x.shape)
    return [TensorType(x.dtype, tuple(1 if i in new else next(old) for i in range(rank)))]


# -- Transpose, DepthToSpace, SpaceToDepth ----------------------------------------------------------------------------
def _permutation(attrs: Attrs, rank: int) -> list[int]:
    perm = attrs.get("perm")
    if perm is None:
        return list(range(rank))[::-1]
    if sorted(perm) != list(range(rank)):
        raise ValueError(f"perm {list(perm)} is no permutation of {rank} axes")
    return list(perm)


def _transpose(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    return [np.transpose(inputs[0], _permutation(attrs, inputs[0].ndim))]


def _infer_transpose(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is None:
        return [TensorType(x.dtype, shapes.unknown(len(attrs["perm"]) if attrs.get("perm") is not None else None))]
    return [TensorType(x.dtype, tuple(x.shape[i] for i in _permutation(attrs, len(x.shape))))]


def _block(attrs: Attrs) -> int:
    block = int(attrs.get("blocksize", 0))
    if block < 1:
        raise ValueError(f"blocksize {block} is not positive")
    return block


def _column_first(attrs: Attrs) -> bool:
    mode = attrs.get("mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise ValueError(f"mode {mode!r} is not DCR or CRD")
    return bool(mode == "CRD")


def _depth_to_space(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, b = inputs[0], _block(attrs)
    batch, c, h, w = x.shape
    if _column_first(attrs):
        y = x.reshape(batch, c // (b * b), b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    else:
        y = x.reshape(batch, b, b, c // (b * b), h, w).transpose(0, 3, 4, 1, 5, 2)
    return [y.reshape(batch, c // (b * b), h * b, w * b)]


def _infer_depth_to_space(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, b = shapes.tensor(operands, 0), _block(attrs)
    batch, c, h, w = shapes.need_rank(x, 4, "the input")
    if isinstance(c, WHOLE) and c % (b * b):
        raise ValueError(f"{c} channels are not divisible by {b} x {b}")
    return [
        TensorType(
            x.dtype,
            (
                batch,
                c // (b * b) if isinstance(c, WHOLE) else None,
                h * b if isinstance(h, WHOLE) else None,
                w * b if isinstance(w, WHOLE) else None,
            ),
        )
    ]


def _space_to_depth(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, b = inputs[0], _block(attrs)
    batch, c, h, w = x.shape
    y = x.reshape(batch, c, h // b, b, w // b, b)
    y = y.transpose(0, 1, 3, 5, 2, 4) if _column_first(attrs) else y.transpose(0, 3, 5, 1, 2, 4)
    return [y.reshape(batch, c * b * b, h // b, w // b)]


def _infer_space_to_depth(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, b = shapes.tensor(operands, 0), _block(attrs)
    batch, c, h, w = shapes.need_rank(x, 4, "the input")
    for d in (h, w):
        if isinstance(d, WHOLE) and d % b:
            raise ValueError(f"{d} pixels are not divisible by {b}")
    return [
        TensorType(
            x.dtype,
            (
                batch,
                c * b * b if isinstance(c, WHOLE) else None,
                h // b if isinstance(h, WHOLE) else None,
                w // b if isinstance(w, WHOLE) else None,
            ),
        )
    ]


OPS = with_samples(
    (
        OpSpec("Shape", _shape, _infer_shape, value_from_types=_shape_value),
        OpSpec("Size", _size, _infer_size, value_from_types=_size_value),
        OpSpec("Identity", _identity, _infer_identity, view=True),
        OpSpec("Reshape", _reshape, _infer_reshape, view=True),
        OpSpec("Flatten", _flatten, _infer_flatten, view=True),
        OpSpec("Squeeze", _squeeze, _infer_squeeze, view=True),
        OpSpec("Unsqueeze", _unsqueeze, _infer_unsqueeze, view=True),
        OpSpec("Transpose", _transpose, _infer_transpose, batch=batch_rules.transposed),
        OpSpec("DepthToSpace", _depth_to_space, _infer_depth_to_space, batch=batch_rules.first(0)),
        OpSpec("SpaceToDepth", _space_to_depth, _infer_space_to_depth, batch=batch_rules.first(0)),
    ),
    samples_shape.SHAPING,
)

"""Operations by index: Gather and Scatter variants, TopK, OneHot, NonZero, Compress, Unique, ReverseSequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, DType, TensorType, Type
from tunewright.ops import batch_rules, shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.input_errors import check_indices, check_lengths, check_natural, check_rows
from tunewright.ops.numeric import narrow, wide
from tunewright.ops.samples import shape as samples_shape
from tunewright.ops.samples.base import with_samples


# -- Gather -----------------------------------------------------------------------------------------------------------
def _gather(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, indices = inputs
    axis = shapes.axis_of(int(attrs.get("axis", 0)), x.ndim)
    try:
        return [np.asarray(np.take(x, indices, axis=axis))]
    except IndexError:
        check_indices(indices, x.shape[axis])
        raise


def _infer_gather(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, indices = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if x.shape is None or indices.shape is None:
        return [TensorType(x.dtype)]
    axis = shapes.axis_of(int(attrs.get("axis", 0)), len(x.shape))
    return [TensorType(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))]


def _wrapped(indices: Array, size: int) -> Array:
    """Return non-negative indices; raises for an index out of range."""
    check_indices(indices, size)
    return np.where(indices < 0, indices + size, indices)


def _gather_elements(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, indices = inputs
    axis = shapes.axis_of(int(attrs.get("axis", 0)), x.ndim)
    if indices.ndim != x.ndim:
        raise ValueError(f"data of rank {x.ndim} and indices of rank {indices.ndim}")
    near = tuple(slice(None) if i == axis else slice(0, d) for i, d in enumerate(indices.shape))
    return [np.take_along_axis(x[near], _wrapped(indices, x.shape[axis]), axis)]


def _infer_gather_elements(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, indices = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if x.shape is not None:
        shapes.axis_of(int(attrs.get("axis", 0)), len(x.shape))
        if indices.shape is not None and len(indices.shape) != len(x.shape):
            raise ValueError(f"data of rank {len(x.shape)} and indices of rank {len(indices.shape)}")
    return [TensorType(x.dtype, indices.shape)]


def _gather_nd(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, indices = inputs
    batch = int(attrs.get("batch_dims", 0))
    depth = indices.shape[-1]
    picked = tuple(_wrapped(indices[..., k], x.shape[batch + k]) for k in range(depth))
    lead = tuple(
        np.arange(x.shape[i]).reshape(*(-1 if j == i else 1 for j in range(indices.ndim - 1))) for i in range(batch)
    )
    return [np.asarray(x[(*lead, *picked)])]


def _infer_gather_nd(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, indices = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if x.shape is None or indices.shape is None or not indices.shape or not isinstance(indices.shape[-1], int):
        return [TensorType(x.dtype)]
    batch, depth = int(attrs.get("batch_dims", 0)), indices.shape[-1]
    if batch + depth > len(x.shape) or not 0 <= batch < len(indices.shape):
        raise ValueError(f"indices of depth {depth} after {batch} batch dimensions do not fit rank {len(x.shape)}")
    lead = [
        shapes.same_dim(a, b, "batch dimensions differ") for a, b in zip(x.shape[:batch], indices.shape, strict=False)
    ]
    return [TensorType(x.dtype, (*lead, *indices.shape[batch:-1], *x.shape[batch + depth :]))]


# -- Scatter ----------------------------------------------------------------------------------------------------------
_REDUCTIONS: dict[str, np.ufunc | None] = {
    "none": None, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


def _scatter(x: Array, where: tuple[Any, ...], updates: Array, attrs: Attrs) -> Array:
    reduction = attrs.get("reduction", "none")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is not one of {', '.join(_REDUCTIONS)}")
    function = _REDUCTIONS[reduction]
    if function is None:
        y = x.copy()
        y[where] = updates
        return y
    y = wide(x).copy() if wide(x) is x else wide(x)
    function.at(y, where, wide(updates))
    return narrow(y, x.dtype)


def _scatter_elements(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, indices, updates = inputs
    axis = shapes.axis_of(int(attrs.get("axis", 0)), x.ndim)
    if indices.shape != updates.shape or indices.ndim != x.ndim:
        raise ValueError(f"indices of shape {list(indices.shape)} and updates of shape {list(updates.shape)}")
    where = list(np.ogrid[tuple(slice(0, d) for d in indices.shape)])
    where[axis] = _wrapped(indices, x.shape[axis])
    return [_scatter(x, tuple(where), updates, attrs)]


def _scatter_nd(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, indices, updates = inputs
    where = tuple(_wrapped(indices[..., k], x.shape[k]) for k in range(indices.shape[-1]))
    return [_scatter(x, where, updates, attrs)]


def _tensor_scatter(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, updates, starts = inputs[0], inputs[1], shapes.optional(inputs, 2)
    axis, mode = shapes.axis_of(int(attrs.get("axis", -2)), x.ndim), attrs.get("mode", "linear")
    if mode not in ("linear", "circular"):
        raise ValueError(f"mode {mode!r} is not linear or circular")
    if axis == 0:
        raise ValueError("axis 0 is that of the batch")
    size, count = x.shape[axis], updates.shape[axis]
    if count > size or updates.shape != (*x.shape[:axis], count, *x.shape[axis + 1 :]):
        raise ValueError(f"updates of shape {list(updates.shape)} do not fit a cache of {list(x.shape)}")
    starts = np.zeros(len(x), np.int64) if starts is None else starts
    if mode == "linear":
        check_rows(starts, size - count + 1)
    else:
        check_natural(starts)
    y = np.moveaxis(x.copy(), axis, 1)
    for cache, new, start in zip(y, np.moveaxis(updates, axis, 1), starts.tolist(), strict=True):
        if count:
            cache[(start % size + np.arange(count)) % size] = new
    return [np.ascontiguousarray(np.moveaxis(y, 1, axis))]


def _infer_scatter(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, updates = shapes.tensor(operands, 0), shapes.tensor(operands, 2)
    if x.dtype is not updates.dtype:
        raise ValueError(f"data is {x.dtype}, the updates are {updates.dtype}")
    if attrs.get("reduction", "none") not in _REDUCTIONS:
        raise ValueError(f"reduction {attrs['reduction']!r} is not one of {', '.join(_REDUCTIONS)}")
    return [TensorType(x.dtype, x.shape)]


# -- TopK -------------------------------------------------------------------------------------------------------------
def _top_k(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, k = inputs[0], int(inputs[1].reshape(-1)[0])
    axis = shapes.axis_of(int(attrs.get("axis", -1)), x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"K = {k} of {x.shape[axis]} elements")
    order = top_k(np.moveaxis(wide(x), axis, -1), k, bool(attrs.get("largest", 1)))
    order = np.moveaxis(order, -1, axis)
    return [np.take_along_axis(x, order, axis), order.astype(np.int64, copy=False)]


def top_k(x: Array, k: int, largest: bool = True) -> Array:
    """Return indices of the first k along the last axis in sorted order; of equal values the lower index is first."""
    # Sorting is ascending: the complement (integers) or the negative (floats) reverses the order.
    key = x if not largest else np.invert(x) if x.dtype.kind in "iub" else np.negative(x)
    size = key.shape[-1]
    if k == 0 or size < 1024 or 4 * k > size or key.size // size > 1024:
        return np.argsort(key, axis=-1, kind="stable")[..., :k]
    rows = key.reshape(-1, size)
    result = np.empty((len(rows), k), np.int64)
    for r, row in enumerate(rows):
        # Only candidates for the first k are sorted; NaN (which sorts last) never compares as equal or less.
        bound = np.partition(row, k - 1)[k - 1]
        candidates = np.flatnonzero(row <= bound) if bound == bound else np.arange(size)
        result[r] = candidates[np.argsort(row[candidates], kind="stable")[:k]]
    return result.reshape(*key.shape[:-1], k)


def _infer_top_k(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, k = shapes.tensor(operands, 0), shapes.ints(operands, 1)
    if x.shape is None:
        return [TensorType(x.dtype), TensorType(DType.INT64)][:n]
    axis = shapes.axis_of(int(attrs.get("axis", -1)), len(x.shape))
    dim = x.shape[axis]
    if k and isinstance(dim, WHOLE) and not 0 <= k[0] <= dim:
        raise ValueError(f"K = {k[0]} of {dim} elements")
    shape = (*x.shape[:axis], k[0] if k else None, *x.shape[axis + 1 :])
    return [TensorType(x.dtype, shape), TensorType(DType.INT64, shape)][:n]


# -- OneHot, NonZero, Compress, Unique, ReverseSequence ---------------------------------------------------------------
def _one_hot(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    indices, depth, values = inputs[0], int(inputs[1].reshape(-1)[0]), inputs[2]
    axis = shapes.axis_of(int(attrs.get("axis", -1)), indices.ndim + 1)
    wanted = np.where(indices < 0, indices + depth, indices)
    hot = np.expand_dims(wanted, axis) == np.arange(depth).reshape(
        *(-1 if i == axis else 1 for i in range(indices.ndim + 1))
    )
    return [np.where(hot, values[1], values[0]).astype(values.dtype, copy=False)]


def _infer_one_hot(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    indices, depth, values = shapes.tensor(operands, 0), shapes.value(operands, 1), shapes.tensor(operands, 2)
    if indices.shape is None:
        return [TensorType(values.dtype)]
    axis = shapes.axis_of(int(attrs.get("axis", -1)), len(indices.shape) + 1)
    size = None if depth is None else int(depth.reshape(-1)[0])
    return [TensorType(values.dtype, (*indices.shape[:axis], size, *indices.shape[axis:]))]


def _non_zero(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    found = np.nonzero(np.atleast_1d(inputs[0]))
    return [np.stack(found).astype(np.int64, copy=False)]


def _infer_non_zero(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    shape = shapes.tensor(operands, 0).shape
    return [TensorType(DType.INT64, (None if shape is None else max(1, len(shape)), None))]


def _compress(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    axis = attrs.get("axis")
    return [np.compress(inputs[1], inputs[0], None if axis is None else shapes.axis_of(int(axis), inputs[0].ndim))]


def _infer_compress(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, axis = shapes.tensor(operands, 0), attrs.get("axis")
    if axis is None:
        return [TensorType(x.dtype, (None,))]
    if x.shape is None:
        return [TensorType(x.dtype)]
    at = shapes.axis_of(int(axis), len(x.shape))
    return [TensorType(x.dtype, tuple(None if i == at else d for i, d in enumerate(x.shape)))]


def _unique(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, axis = inputs[0], attrs.get("axis")
    values, first, inverse, counts = np.unique(
        wide(x), return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not attrs.get("sorted", 1):
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        values = np.take(values, order, axis=0 if axis is None else axis)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    return [narrow(values, x.dtype), *(a.astype(np.int64, copy=False) for a in (first, inverse, counts))]


def _infer_unique(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, axis = shapes.tensor(operands, 0), attrs.get("axis")
    shape: tuple[Dim, ...] | None = (None,)
    inverse: Dim = shapes.count(x.shape)
    if axis is not None:
        shape = None
        inverse = None
        if x.shape is not None:
            at = shapes.axis_of(int(axis), len(x.shape))
            shape = tuple(None if i == at else d for i, d in enumerate(x.shape))
            inverse = x.shape[at]
    counted = TensorType(DType.INT64, (None,))
    return [TensorType(x.dtype, shape), counted, TensorType(DType.INT64, (inverse,)), counted][:n]


def _reverse_sequence(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, lengths = inputs
    time, batch = int(attrs.get("time_axis", 0)), int(attrs.get("batch_axis", 1))
    if {time, batch} != {0, 1}:
        raise ValueError(f"time_axis {time} and batch_axis {batch} are not 0 and 1")
    check_lengths(lengths, x.shape[time])
    steps, ends = np.ogrid[0 : x.shape[time], 0:1]
    ends = lengths.reshape(1, -1)
    source = np.where(steps < ends, ends - 1 - steps, steps)
    index = (source, np.arange(x.shape[batch])[None]) if time == 0 else (np.arange(x.shape[batch])[:, None], source.T)
    return [x[index]]


OPS = with_samples(
    (
        OpSpec("Gather", _gather, _infer_gather, batch=batch_rules.gathered, picks=True),
        OpSpec("GatherElements", _gather_elements, _infer_gather_elements, picks=True),
        OpSpec("GatherND", _gather_nd, _infer_gather_nd, picks=True),
        OpSpec("Scatter", _scatter_elements, _infer_scatter),
        OpSpec("ScatterElements", _scatter_elements, _infer_scatter),
        OpSpec("ScatterND", _scatter_nd, _infer_scatter),
        OpSpec("TensorScatter", _tensor_scatter, shapes.same_as()),
        OpSpec("TopK", _top_k, _infer_top_k, batch=batch_rules.along(-1)),
        OpSpec("OneHot", _one_hot, _infer_one_hot),
        OpSpec("NonZero", _non_zero, _infer_non_zero),
        OpSpec("Compress", _compress, _infer_compress, picks=True),
        OpSpec("Unique", _unique, _infer_unique),
        OpSpec("ReverseSequence", _reverse_sequence, shapes.same_as()),
    ),
    samples_shape.INDEXING,
)

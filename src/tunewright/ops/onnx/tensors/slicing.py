"""Parts and copies along axes: Slice, Split, Concat, Pad, Tile, Expand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE, greater, lesser
from tunewright.ir.types import Dim, Shape, TensorType, Type
from tunewright.ops import batch_rules, shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.samples import shape as samples_shape
from tunewright.ops.samples.base import with_samples

_FAR = (1 << 31) - 1  # exporters write the end of an unbounded slice as INT32_MAX or INT64_MAX


# -- Slice ------------------------------------------------------------------------------------------------------------
def slice_range(start: int, end: int, step: int, dim: int) -> range:
    """The indices that a slice takes of an axis. When stepping backwards, ONNX moves a start before the first element
    to the first element; numpy does not."""
    return range(*limits(start, end, step, dim), step)


def slice_length(start: int, end: int, step: int, dim: int) -> int:
    """The number of indices of a slice. Dimensions may be symbolic."""
    first, last = limits(start, end, step, dim)
    steps = -((first - last) // step)
    return greater(0, steps)


def limits(start: int, end: int, step: int, dim: int) -> tuple[int, int]:
    """The start and the stop of the indices, as of a `range`."""
    if step == 0:
        raise ValueError("a step is 0")
    start, end = (v + dim if v < 0 else v for v in (start, end))
    if step > 0:
        return lesser(greater(start, 0), dim), lesser(greater(end, 0), dim)
    return lesser(greater(start, 0), dim - 1), lesser(greater(end, -1), dim - 1)


def _slice(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, starts, ends = inputs[0], inputs[1].reshape(-1).tolist(), inputs[2].reshape(-1).tolist()
    axes, steps = _slice_axes(shapes.optional(inputs, 3), starts), _slice_steps(shapes.optional(inputs, 4), starts)
    index: list[slice] = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, shapes.axes_of(axes, x.ndim), steps, strict=True):
        taken = slice_range(start, end, step, x.shape[axis])
        index[axis] = slice(taken.start, taken.stop if taken.stop >= 0 else None, step) if taken else slice(0, 0)
    return [x[tuple(index)]]


def _slice_axes(axes: Array | None, starts: Sequence[int]) -> list[int]:
    return list(range(len(starts))) if axes is None else axes.reshape(-1).tolist()


def _slice_steps(steps: Array | None, starts: Sequence[int]) -> list[int]:
    return [1] * len(starts) if steps is None else steps.reshape(-1).tolist()


def _infer_slice(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is None:
        return [TensorType(x.dtype)]
    starts, ends = shapes.ints(operands, 1), shapes.ints(operands, 2)
    axes, steps = shapes.ints(operands, 3), shapes.ints(operands, 4)
    if not shapes.given(operands, 3):
        given = shapes.length(shapes.tensor(operands, 1))
        axes = None if given is None else list(range(given))
    if axes is None:
        return [TensorType(x.dtype, shapes.unknown(len(x.shape)))]
    axes = shapes.axes_of(axes, len(x.shape))
    if not shapes.given(operands, 4):
        steps = [1] * len(axes)
    if any(given is not None and len(given) != len(axes) for given in (starts, ends, steps)):
        raise ValueError("starts, ends, axes and steps differ in length")
    result = list(x.shape)
    for k, axis in enumerate(axes):
        start = None if starts is None else starts[k]
        end = None if ends is None else ends[k]
        step = None if steps is None else steps[k]
        result[axis] = _slice_dim(x.shape[axis], start, end, step)
    return [TensorType(x.dtype, tuple(result))]


def _slice_dim(dim: Dim, start: int | None, end: int | None, step: int | None) -> Dim:
    if step == 0:
        raise ValueError("a step is 0")
    if start is None or end is None or step is None:
        return None
    if isinstance(dim, WHOLE):
        return slice_length(start, end, step, dim)
    if start == 0 and step == 1 and end >= _FAR:
        return dim
    if start == -1 and step == -1 and end <= -_FAR:
        return dim
    return None


# -- Split, Concat ----------------------------------------------------------------------------------------------------
def split_sizes(dim: int, split: Sequence[int] | None, attrs: Attrs, n: int) -> list[int]:
    """The size of each part: as given, or equal sizes with a smaller last part."""
    if split is not None:
        sizes = [shapes.whole(s) for s in split]
        if len(sizes) != n:
            raise ValueError(f"split {sizes} has {len(sizes)} parts for {n} outputs")
        if sum(sizes) != dim or min(sizes, default=0) < 0:
            raise ValueError(f"split {sizes} does not add up to {dim}")
        return sizes
    parts = int(attrs.get("num_outputs", n))
    if parts < 1 or parts != n:
        raise ValueError(f"num_outputs {parts} for {n} outputs")
    size = -(-dim // parts)
    return [max(0, min(size, dim - k * size)) for k in range(parts)]


def _split(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, split = inputs[0], shapes.optional(inputs, 1)
    axis = shapes.axis_of(int(attrs.get("axis", 0)), x.ndim)
    sizes = split_sizes(x.shape[axis], None if split is None else split.reshape(-1).tolist(), attrs, n)
    lead = (slice(None),) * axis
    parts, at = [], 0
    for size in sizes:
        parts.append(x[(*lead, slice(at, at + size))])
        at += size
    return parts


def _infer_split(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is None:
        return [TensorType(x.dtype)] * n
    axis = shapes.axis_of(int(attrs.get("axis", 0)), len(x.shape))
    dim, split = x.shape[axis], shapes.ints(operands, 1)
    sizes: Sequence[Dim]
    if shapes.given(operands, 1) and split is None:
        sizes = [dim] if n == 1 else [None] * n
    elif isinstance(dim, WHOLE):
        sizes = split_sizes(dim, split, attrs, n)
    elif split is not None:
        sizes = split if len(split) == n else split_sizes(sum(split), split, attrs, n)
    else:
        sizes = [dim] if n == 1 else [None] * n
    return [TensorType(x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :])) for size in sizes]


def _concat(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    return [np.concatenate(inputs, int(attrs["axis"]))]


def _infer_concat(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    types = [o.tensor for o in operands if o is not None]
    if not types:
        raise ValueError("has no input")
    dtype = types[0].dtype
    known = [t.shape for t in types if t.shape is not None]
    for t in types:
        if t.dtype is not dtype:
            raise ValueError(f"inputs differ in type: {dtype} and {t.dtype}")
    if not known:
        return [TensorType(dtype)]
    rank = len(known[0])
    axis = shapes.axis_of(int(attrs["axis"]), rank)
    result: list[Dim] = list(known[0])
    total: Dim = known[0][axis]
    for shape in known[1:]:
        if len(shape) != rank:
            raise ValueError(f"inputs differ in rank: {rank} and {len(shape)}")
        for i, d in enumerate(shape):
            if i == axis:
                total = total + d if isinstance(total, WHOLE) and isinstance(d, WHOLE) else None
            elif d != result[i]:
                result[i] = shapes.same_dim(result[i], d, f"inputs differ in dimension {i}")
    result[axis] = total if len(known) == len(types) else None
    return [TensorType(dtype, tuple(result))]


# -- Pad --------------------------------------------------------------------------------------------------------------
def pad_pairs(pads: Sequence[int], axes: Sequence[int] | None, rank: int) -> list[tuple[int, int]]:
    """(before, after) for every axis."""
    chosen = list(range(rank)) if axes is None else shapes.axes_of(axes, rank)
    if len(pads) != 2 * len(chosen):
        raise ValueError(f"{len(pads)} pads for {len(chosen)} axes")
    pairs = [(0, 0)] * rank
    for k, axis in enumerate(chosen):
        pairs[axis] = (shapes.whole(pads[k]), shapes.whole(pads[k + len(chosen)]))
    return pairs


def pad(x: Array, pairs: Sequence[tuple[int, int]], mode: str = "constant", fill: Any = 0) -> Array:
    """Pad an array. Negative pads are cut first, the others are then added."""
    if any(p < 0 for pair in pairs for p in pair):
        cut = tuple(slice(max(0, -a), d - max(0, -b)) for (a, b), d in zip(pairs, x.shape, strict=True))
        x, pairs = x[cut], [(max(0, a), max(0, b)) for a, b in pairs]
    if mode != "constant":
        return np.pad(x, pairs, mode=mode)  # type: ignore[call-overload,no-any-return]
    y = np.empty([d + a + b for (a, b), d in zip(pairs, x.shape, strict=True)], x.dtype)
    # Only the borders are filled, so that the inside is written once.
    for axis, (a, b) in enumerate(pairs):
        inner = tuple(slice(p, p + d) for (p, _), d in zip(pairs[:axis], x.shape, strict=False))
        if a:
            y[(*inner, slice(0, a))] = fill
        if b:
            y[(*inner, slice(a + x.shape[axis], None))] = fill
    y[tuple(slice(a, a + d) for (a, _), d in zip(pairs, x.shape, strict=True))] = x
    return y


_MODES = ("constant", "reflect", "edge", "wrap")


def _pad(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, fill, axes = inputs[0], shapes.optional(inputs, 2), shapes.optional(inputs, 3)
    pairs = pad_pairs(inputs[1].reshape(-1).tolist(), None if axes is None else axes.reshape(-1).tolist(), x.ndim)
    default: Any = "" if x.dtype == object else 0
    mode = attrs.get("mode", "constant")
    if mode not in _MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(_MODES)}")
    return [pad(x, pairs, mode, default if fill is None or not fill.size else fill.reshape(-1)[0])]


def _infer_pad(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, pads, axes = shapes.tensor(operands, 0), shapes.ints(operands, 1), shapes.ints(operands, 3)
    if x.shape is None:
        return [TensorType(x.dtype)]
    if shapes.given(operands, 3) and axes is None:
        return [TensorType(x.dtype, shapes.unknown(len(x.shape)))]
    if pads is None:
        moved = range(len(x.shape)) if axes is None else shapes.axes_of(axes, len(x.shape))
        return [TensorType(x.dtype, tuple(None if i in moved else d for i, d in enumerate(x.shape)))]
    pairs = pad_pairs(pads, axes, len(x.shape))
    return [TensorType(x.dtype, tuple(_padded(d, a + b) for d, (a, b) in zip(x.shape, pairs, strict=True)))]


def _padded(dim: Dim, by: int) -> Dim:
    if isinstance(dim, WHOLE):
        if dim + by < 0:
            raise ValueError(f"pads take {-by} of {dim} elements")
        return dim + by
    return None if by else dim


# -- Tile, Expand -----------------------------------------------------------------------------------------------------
def _tile(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    return [np.tile(inputs[0], inputs[1].reshape(-1).tolist())]


def _infer_tile(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, repeats = shapes.tensor(operands, 0), shapes.ints(operands, 1)
    if x.shape is None:
        return [TensorType(x.dtype)]
    if repeats is None:
        return [TensorType(x.dtype, tuple(0 if d == 0 else None for d in x.shape))]
    if len(repeats) != len(x.shape):
        raise ValueError(f"{len(repeats)} repeats for rank {len(x.shape)}")
    if min(repeats, default=0) < 0:
        raise ValueError(f"repeats {repeats} are negative")
    return [
        TensorType(
            x.dtype,
            tuple(
                d if r == 1 else d * r if isinstance(d, WHOLE) else None for d, r in zip(x.shape, repeats, strict=True)
            ),
        )
    ]


def _expand(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, wanted = inputs[0], inputs[1].reshape(-1).tolist()
    # -1 keeps a dimension. The standard does not say so, but exporters and other engines agree on it.
    lead = len(wanted) - x.ndim
    wanted = [x.shape[i - lead] if d == -1 and i >= lead else d for i, d in enumerate(wanted)]
    return [np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(wanted)))]


def _infer_expand(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, wanted = shapes.tensor(operands, 0), shapes.ints(operands, 1)
    target: Shape | None
    if wanted is None:
        target = shapes.unknown(shapes.length(shapes.tensor(operands, 1)))
    else:
        if any(d < -1 for d in wanted):  # checks each dimension, since `min` of symbolic sizes would be a guard
            raise ValueError(f"shape {wanted} is negative")
        lead = len(wanted) - len(x.shape or ())
        target = tuple(
            (1 if x.shape is not None and i >= lead else None) if d == -1 else d for i, d in enumerate(wanted)
        )
    return [TensorType(x.dtype, shapes.broadcast(x.shape, target))]


OPS = with_samples(
    (
        OpSpec("Slice", _slice, _infer_slice, batch=batch_rules.sliced, size_inputs=(2,), picks=True),
        OpSpec("Split", _split, _infer_split, batch=batch_rules.kept(1)),
        OpSpec("Concat", _concat, _infer_concat, batch=batch_rules.joined),
        OpSpec("Pad", _pad, _infer_pad, batch=batch_rules.padded),
        OpSpec("Tile", _tile, _infer_tile, batch=batch_rules.kept(1)),
        OpSpec("Expand", _expand, _infer_expand, batch=batch_rules.expanded, size_inputs=(1,)),
    ),
    samples_shape.SLICING,
)

"""Poolings. Maxima and sums over windows are taken axis by axis: k + k taps instead of k x k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, Shape, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec, Reference
from ..numeric import limits, narrow, wide
from ..samples import dense
from ..samples.base import with_samples
from ..windows import Windows, output_dims, padded, taps, windows


def _kernel(attrs: Attrs) -> tuple[int, ...]:
    kernel = attrs.get("kernel_shape")
    if not kernel:
        raise ValueError("attribute kernel_shape is missing")
    return tuple(kernel)


def _along_axes(x: Array, win: Windows, combine: np.ufunc) -> Array:
    """Reduce a padded input over its windows by an associative function."""
    rank = len(win.kernel)
    for k in reversed(range(rank)):
        axis = k + 2
        lead, step, dilation = (slice(None),) * axis, win.strides[k], win.dilations[k]
        reach = (win.output[k] - 1) * step + 1
        if win.output[k] == 1:
            taps_ = x[(*lead, slice(0, (win.kernel[k] - 1) * dilation + 1, dilation))]
            x = combine.reduce(taps_, axis=axis, keepdims=True)
            continue
        parts = [x[(*lead, slice(t * dilation, t * dilation + reach, step))] for t in range(win.kernel[k])]
        if len(parts) == 1:
            x = parts[0]
            continue
        y = combine(parts[0], parts[1])
        for part in parts[2:]:
            combine(y, part, out=y)
        x = y
    return x


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -math.inf if dtype.kind == "f" else limits(dtype)[0]


def _max_pool(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    win = windows(x.shape[2:], _kernel(attrs), attrs)
    full = padded(x, win, _lowest(x.dtype))
    if n < 2:
        y = _along_axes(full, win, np.maximum)
        return [narrow(y.copy() if y.base is not None else y, inputs[0].dtype)]
    return _max_with_indices(full, win, x.shape, inputs[0].dtype, int(attrs.get("storage_order", 0)))


def _max_with_indices(x: Array, win: Windows, shape: Sequence[int], dtype: np.dtype[Any], order: int) -> list[Array]:
    """Maxima and their indices: the first of equal maxima in the window's row-major order, counted over the whole
    input."""
    best: Array | None = None
    chosen = np.zeros((*x.shape[:2], *win.output), np.int64)
    for k, (_, region) in enumerate(taps(win)):
        part = x[(slice(None), slice(None), *region)]
        if best is None:
            best = part.copy()
            continue
        better = part > best
        np.copyto(best, part, where=better)
        np.copyto(chosen, k, where=better)
    assert best is not None
    spatial = shape[2:]
    strides = [math.prod(spatial[i + 1 :]) if order == 0 else math.prod(spatial[:i]) for i in range(len(spatial))]
    indices = np.arange(math.prod(shape[:2]), dtype=np.int64).reshape(*shape[:2], *(1 for _ in spatial)) * math.prod(
        spatial
    )
    places = np.unravel_index(chosen, win.kernel)
    for i, stride in enumerate(strides):
        origin = np.arange(win.output[i]) * win.strides[i] - win.head[i]
        origin = origin.reshape(*(-1 if j == i else 1 for j in range(len(spatial))))
        indices = indices + (places[i] * win.dilations[i] + origin) * stride
    return [narrow(best, dtype), indices]


def _average_pool(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    win = windows(x.shape[2:], _kernel(attrs), attrs)
    total = _along_axes(padded(x, win), win, np.add)
    include = bool(attrs.get("count_include_pad", 0))
    divisor: Array = np.ones((), x.dtype)
    for k, size in enumerate(x.shape[2:]):
        # Ceiling may extend the last window beyond the padding. That part never counts.
        low, high = (-win.head[k], size + win.tail[k]) if include else (0, size)
        at = (
            np.arange(win.output[k])[:, None] * win.strides[k]
            - win.head[k]
            + np.arange(win.kernel[k]) * win.dilations[k]
        )
        counted = ((at >= low) & (at < high)).sum(1).astype(x.dtype)
        divisor = divisor * counted.reshape(-1, *(1 for _ in range(len(win.kernel) - k - 1)))
    return [narrow(total / divisor, inputs[0].dtype)]


def _lp_pool(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, p = wide(inputs[0]), int(attrs.get("p", 2))
    win = windows(x.shape[2:], _kernel(attrs), attrs)
    powers = np.square(x) if p == 2 else np.abs(x) ** x.dtype.type(p)
    total = _along_axes(padded(powers, win), win, np.add)
    return [narrow(_root(total, p), inputs[0].dtype)]


def _root(total: Array, p: int) -> Array:
    return np.asarray(np.sqrt(total) if p == 2 else total ** total.dtype.type(1 / p))


def _infer_pool(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, kernel = shapes.tensor(operands, 0), _kernel(attrs)
    shape = shapes.need_rank(x, len(kernel) + 2, "the input")
    result = (*shape[:2], *output_dims(shape[2:], kernel, attrs))
    return [TensorType(x.dtype, result), TensorType(DType.INT64, result)][:n]


def _pool_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    return float(outputs[0].size * math.prod(_kernel(attrs)))


# -- over everything --------------------------------------------------------------------------------------------------
def _global(function: Callable[[Array, tuple[int, ...], Attrs], Any]) -> Reference:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        x = wide(inputs[0])
        return [narrow(function(x, tuple(range(2, x.ndim)), attrs), inputs[0].dtype)]

    return reference


def _lp(x: Array, axes: tuple[int, ...], attrs: Attrs) -> Array:
    p = int(attrs.get("p", 2))
    return _root((np.abs(x) ** x.dtype.type(p)).sum(axis=axes, keepdims=True), p)


def global_shape(shape: Shape | None) -> Shape | None:
    """[N, C, 1, ...]."""
    if shape is None:
        return None
    if len(shape) < 2:
        raise ValueError(f"the input has rank {len(shape)}; a batch and channels are needed")
    return (*shape[:2], *(1 for _ in shape[2:]))


def _infer_global(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    return [TensorType(x.dtype, global_shape(x.shape))]


def _global_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    return float(inputs[0].size) if inputs[0] is not None else 0.0


OPS = with_samples(
    (
        OpSpec("MaxPool", _max_pool, _infer_pool, flops=_pool_flops, batch=batch_rules.pooled),
        OpSpec("AveragePool", _average_pool, _infer_pool, flops=_pool_flops, batch=batch_rules.first(0)),
        OpSpec("LpPool", _lp_pool, _infer_pool, flops=_pool_flops, batch=batch_rules.first(0)),
        OpSpec(
            "GlobalMaxPool",
            _global(lambda x, axes, attrs: x.max(axes, keepdims=True)),
            _infer_global,
            flops=_global_flops,
            batch=batch_rules.first(0),
        ),
        OpSpec(
            "GlobalAveragePool",
            _global(lambda x, axes, attrs: x.mean(axes, keepdims=True)),
            _infer_global,
            flops=_global_flops,
            batch=batch_rules.first(0),
        ),
        OpSpec("GlobalLpPool", _global(_lp), _infer_global, flops=_global_flops, batch=batch_rules.first(0)),
    ),
    dense.POOL,
)

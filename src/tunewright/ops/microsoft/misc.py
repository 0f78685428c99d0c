"""Other operators of com.microsoft that occur in models: linear algebra, indexing, image and text helpers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, DType, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec, Reference
from ..numeric import wide
from ..shapes import axis_of, broadcast, given, optional, same_as, tensor, value
from .common import MS, dims, infer, plus, run


def _inverse(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = inputs[0]
    return [np.linalg.inv(wide(x)).astype(x.dtype, copy=False)]


def _infer_inverse(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t = tensor(operands, 0)
    if t.shape is not None and (len(t.shape) < 2 or (t.is_static and t.shape[-1] != t.shape[-2])):
        raise ValueError(f"a square matrix is needed, not {t}")
    return [t]


def _like(name: str, standard: str, picks: bool = False) -> OpSpec:
    """The spec of an operator with the inputs and attributes of a standard one."""

    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        return [run(standard, inputs, attrs)]

    def infer_types(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        return [infer(standard, operands, attrs)]

    return OpSpec(name, reference, infer_types, picks=picks)


def _pad(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    data, pads, fill = inputs[0], inputs[1], optional(inputs, 2)
    return [run("Pad", [data, pads.reshape(-1), None if fill is None else fill.reshape(())], attrs)]


def _infer_pad(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t, pads = tensor(operands, 0), value(operands, 1)
    if t.shape is None:
        return [t]
    rank = len(t.shape)
    if pads is None:
        return [t.with_shape((None,) * rank)]
    if pads.size != 2 * rank:
        raise ValueError(f"{pads.size} pads for {rank} dimensions")
    both = pads.reshape(2, rank).sum(0)
    return [t.with_shape(tuple(plus(d, int(p)) for d, p in zip(t.shape, both, strict=True)))]


GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def _grid_attrs(attrs: Attrs) -> dict[str, Any]:
    mode = attrs.get("mode", "bilinear")
    return {**attrs, "mode": GRID_MODES.get(mode, mode)}


def _grid_sample(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [run("GridSample", inputs, _grid_attrs(attrs)).astype(inputs[0].dtype, copy=False)]


def _infer_grid_sample(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [infer("GridSample", operands, _grid_attrs(attrs))]


def _expand_dims(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [np.expand_dims(inputs[0], int(inputs[1].reshape(-1)[0]))]


def _infer_expand_dims(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t, axis = tensor(operands, 0), value(operands, 1)
    if t.shape is None:
        return [t]
    if axis is None:
        return [t.with_shape((None,) * (len(t.shape) + 1))]
    place = axis_of(int(axis.reshape(-1)[0]), len(t.shape) + 1)
    return [t.with_shape((*t.shape[:place], 1, *t.shape[place:]))]


def _unique(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """The unique values in the order of their first appearance."""
    values, first, inverse, counts = np.unique(inputs[0], return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return [values[order], place[inverse.reshape(-1)].astype(np.int64), counts[order].astype(np.int64)]


def _infer_unique(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t, (length,) = tensor(operands, 0), dims(operands, 0, 1)
    return [t.with_shape((None,)), TensorType(DType.INT64, (length,)), TensorType(DType.INT64, (None,))]


def _range(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    start, limit = (x.reshape(-1)[0] for x in inputs[:2])
    step = start.dtype.type(1) if optional(inputs, 2) is None else inputs[2].reshape(-1)[0]
    if step == 0:
        raise ValueError("the step is zero")
    count = max(int(np.ceil((float(limit) - float(start)) / float(step))), 0)
    return [np.asarray(start + np.arange(count).astype(start.dtype) * step, start.dtype)]


def _infer_range(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(tensor(operands, 0).dtype, (None,))]


def _cdist(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a, b = inputs
    squares = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * (a @ b.T)
    squares = np.maximum(squares, 0)
    return [np.asarray(np.sqrt(squares) if attrs.get("metric", "sqeuclidean") == "euclidean" else squares)]


def _infer_cdist(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    metric = attrs.get("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        raise NotImplementedError(f"metric {metric!r} is not supported: only euclidean and sqeuclidean are")
    return [TensorType(tensor(operands, 0).dtype, (dims(operands, 0, 2)[0], dims(operands, 1, 2)[0]))]


def _is_all_finite(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    if attrs.get("isnan_only", 0):
        bad = any(np.isnan(wide(x)).any() for x in inputs)
    elif attrs.get("isinf_only", 0):
        bad = any(np.isinf(wide(x)).any() for x in inputs)
    else:
        bad = any(not np.isfinite(wide(x)).all() for x in inputs)
    return [np.asarray(not bad)]


def _crop_lines(low: Array, high: Array, count: int, size: int) -> Array:
    """The image coordinates of each crop's lines, (boxes, count)."""
    last = np.float32(size - 1)
    if count == 1:
        return np.asarray((0.5 * (low.astype(np.float64) + high) * (size - 1)).astype(np.float32))[:, None]
    step = (high - low) * last / np.float32(count - 1)
    lines = low[:, None] * last + np.arange(count, dtype=np.float32) * step[:, None]
    lines[:, -1] = high * last
    return np.asarray(lines)


def _crop_and_resize(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, boxes, batch, size = inputs
    height, width = (int(s) for s in size)
    if batch.size and not 0 <= batch.min() <= batch.max() < len(x):
        raise ValueError(f"batch_indices go from {batch.min()} to {batch.max()} for {len(x)} images")
    rows = _crop_lines(boxes[:, 0], boxes[:, 2], height, x.shape[2])
    columns = _crop_lines(boxes[:, 1], boxes[:, 3], width, x.shape[3])
    lines = ((rows, x.shape[2] - 1), (columns, x.shape[3] - 1))
    rows_in, columns_in = ((v >= 0) & (v <= last) for v, last in lines)
    inside = rows_in[:, :, None] & columns_in[:, None]
    rows, columns = (np.where(np.isfinite(v), v, 0).clip(0, last) for v, last in lines)

    def pick(r: Array, c: Array) -> Array:
        return np.asarray(x[batch[:, None, None], :, r.astype(np.int64)[:, :, None], c.astype(np.int64)[:, None]])

    if attrs.get("mode", "bilinear") == "nearest":
        y = pick(np.floor(rows + np.float32(0.5)), np.floor(columns + np.float32(0.5)))
    else:
        top, left = np.floor(rows), np.floor(columns)
        dy, dx = (rows - top)[:, :, None, None], (columns - left)[:, None, :, None]
        upper = pick(top, left) * (1 - dx) + pick(top, np.ceil(columns)) * dx
        lower = pick(np.ceil(rows), left) * (1 - dx) + pick(np.ceil(rows), np.ceil(columns)) * dx
        y = upper * (1 - dy) + lower * dy
    y = np.where(inside[..., None], y, np.float32(attrs.get("extrapolation_value", 0.0)))
    return [np.ascontiguousarray(y.transpose(0, 3, 1, 2)).astype(x.dtype, copy=False)]


def _infer_crop_and_resize(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    size = value(operands, 3)
    spatial: tuple[Dim, Dim] = (None, None) if size is None else (int(size[0]), int(size[1]))
    return [TensorType(tensor(operands, 0).dtype, (dims(operands, 1, 2)[0], dims(operands, 0, 4)[1], *spatial))]


def _ngram_repeat_block(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    ids, scores, size = inputs[0], inputs[1].copy(), attrs["ngram_size"]
    for row, target in zip(ids, scores, strict=True):
        if len(row) + 1 < size:
            continue
        tail = row[len(row) + 1 - size :]
        for i in range(len(row) - size + 1):
            if np.array_equal(row[i : i + size - 1], tail):
                target[row[i + size - 1]] = -np.inf
    return [scores]


def _unfold(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = inputs[0]
    axis = axis_of(attrs.get("dim", -1), x.ndim, "dim")
    windows = np.lib.stride_tricks.sliding_window_view(x, attrs["size"], axis)
    return [np.ascontiguousarray(windows[(slice(None),) * axis + (slice(None, None, attrs.get("step", 1)),)])]


def _infer_unfold(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t, size, step = tensor(operands, 0), attrs["size"], attrs.get("step", 1)
    if t.shape is None:
        return [t]
    axis = axis_of(attrs.get("dim", -1), len(t.shape), "dim")
    length = t.shape[axis]
    if size < 1 or step < 1 or (isinstance(length, WHOLE) and length < size):
        raise ValueError(f"slices of {size} every {step} do not fit a dimension of {length}")
    count: Dim = (length - size) // step + 1 if isinstance(length, WHOLE) else None
    return [t.with_shape((*t.shape[:axis], count, *t.shape[axis + 1 :], size))]


def _fft_axes(attrs: Attrs, rank: int) -> tuple[int, ...]:
    return tuple(range(rank - attrs.get("signal_ndim", 1), rank))


def _rfft(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = wide(inputs[0])
    y = np.fft.rfftn(x, axes=_fft_axes(attrs, x.ndim))
    return [np.stack([y.real, y.imag], -1).astype(inputs[0].dtype)]


def _irfft(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = wide(inputs[0])
    y = np.fft.irfftn(x[..., 0] + 1j * x[..., 1], axes=_fft_axes(attrs, x.ndim - 1))
    return [y.astype(inputs[0].dtype)]


def _infer_rfft(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t = tensor(operands, 0)
    if t.shape is None:
        return [t]
    last = t.shape[-1]
    return [t.with_shape((*t.shape[:-1], last // 2 + 1 if isinstance(last, WHOLE) else None, 2))]


def _infer_irfft(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t = tensor(operands, 0)
    if t.shape is None:
        return [t]
    last = t.shape[-2]
    return [t.with_shape((*t.shape[:-2], 2 * (last - 1) if isinstance(last, WHOLE) else None))]


def _complex_mul(conjugate: bool) -> Reference:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        a, b = (wide(x)[..., 0] + 1j * wide(x)[..., 1] for x in inputs)
        y = a * (np.conj(b) if conjugate else b)
        return [np.stack([y.real, y.imag], -1).astype(inputs[0].dtype)]

    return reference


def _infer_complex_mul(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b = tensor(operands, 0), tensor(operands, 1)
    return [a.with_shape(broadcast(a.shape, b.shape))]


def _infer_finite(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    if not given(operands, 0):
        raise ValueError("has no input")
    return [TensorType(DType.BOOL, ())]


OPS = (
    OpSpec(MS + "Inverse", _inverse, _infer_inverse),
    _like(MS + "Trilu", "Trilu"),
    _like(MS + "GatherND", "GatherND", picks=True),
    _like(MS + "SampleOp", "Identity"),
    OpSpec(MS + "Pad", _pad, _infer_pad),
    OpSpec(MS + "GridSample", _grid_sample, _infer_grid_sample),
    OpSpec(MS + "ExpandDims", _expand_dims, _infer_expand_dims, view=True),
    OpSpec(MS + "Unique", _unique, _infer_unique),
    OpSpec(MS + "Range", _range, _infer_range),
    OpSpec(MS + "CDist", _cdist, _infer_cdist),
    OpSpec(MS + "IsAllFinite", _is_all_finite, _infer_finite),
    OpSpec(MS + "CropAndResize", _crop_and_resize, _infer_crop_and_resize),
    OpSpec(MS + "NGramRepeatBlock", _ngram_repeat_block, same_as(1)),
    OpSpec(MS + "UnfoldTensor", _unfold, _infer_unfold),
    OpSpec(MS + "Rfft", _rfft, _infer_rfft),
    OpSpec(MS + "Irfft", _irfft, _infer_irfft),
    OpSpec(MS + "ComplexMul", _complex_mul(conjugate=False), _infer_complex_mul),
    OpSpec(MS + "ComplexMulConj", _complex_mul(conjugate=True), _infer_complex_mul),
)

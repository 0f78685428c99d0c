"""Boxes that depend on shapes only: PriorBox, PriorBoxClustered, ExperimentalDetectronPriorGridGenerator.

PriorBox and PriorBoxClustered have two forms. In OpenVINO's ONNX front end the inputs are a feature map and an image of
rank 4. Only their shapes matter and the result is [1, 2, n]. In the operation set the inputs are two vectors (height,
width) and the result is [2, n]. Row 0 holds the boxes, row 1 their variances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, DType, TensorType, Type

from ..base import Array, Attrs, Infer, Operands, OpSpec, Reference
from ..shapes import tensor, times, value
from .common import flag, floats, name, ranked, required, single

#: (shift x, shift y, half width, half height, whether it is clipped to the image)
_Box: TypeAlias = tuple[Any, Any, Any, Any, bool]

_EPS = 1e-6
#: most elements of a result computed at load time
_FOLDABLE = 1 << 24
#: most boxes of one cell
_MOST = 1 << 16


def _ratios(attrs: Attrs) -> list[np.float32]:
    """The aspect ratios without repetition, 1 first, each with its flipped ratio where requested."""
    ratios = [np.float32(1)]
    for ratio in floats(attrs, "aspect_ratio"):
        if all(abs(ratio - known) >= _EPS for known in ratios):
            ratios.append(ratio)
            if flag(attrs, "flip"):
                ratios.append(np.float32(1) / ratio)
    return ratios


def _count(attrs: Attrs) -> int:
    """The number of boxes per cell, as OpenVINO's shape inference counts them."""
    ratios = len(_ratios(attrs))
    minimal, maximal, fixed = (len(floats(attrs, key)) for key in ("min_size", "max_size", "fixed_size"))
    count = ratios * minimal + maximal if flag(attrs, "scale_all_sizes", True) else ratios + minimal - 1
    if fixed:
        count = ratios * fixed
    around = len(floats(attrs, "fixed_ratio")) or ratios
    return count + sum(around * (int(d) ** 2 - 1) for d in floats(attrs, "density"))


def _cell(attrs: Attrs, image_height: int) -> list[_Box]:
    """The boxes of one cell."""
    ratios = [r for r in _ratios(attrs) if abs(r - 1) >= _EPS]
    half = np.float32(0.5)
    boxes: list[_Box] = []
    fixed, density = floats(attrs, "fixed_size"), floats(attrs, "density")
    if len(fixed) and len(density) < len(fixed):
        raise ValueError(f"{len(fixed)} values in 'fixed_size', but {len(density)} in 'density'")
    for size, dense in zip(fixed, density, strict=False):
        n = int(dense)
        shift = int(size / n)
        places = [np.float32(shift / 2.0 + k * shift - int(size) // 2) for k in range(n)]
        own = floats(attrs, "fixed_ratio")
        shapes = [(size * half * np.sqrt(r), size * half / np.sqrt(r)) for r in (own if len(own) else ratios)]
        if not len(own):
            shapes.insert(0, (int(size) * half, int(size) * half))
        boxes += [(x, y, w, h, True) for w, h in shapes for y in places for x in places]
    scaled = flag(attrs, "scale_all_sizes", True)
    minimal, maximal = floats(attrs, "min_size"), floats(attrs, "max_size")
    if not scaled:
        minimal = minimal * np.float32(image_height)
    for k, size in enumerate(minimal):
        boxes.append((0, 0, size * half, size * half, False))
        between: list[_Box] = []
        if k < len(maximal):
            root = np.sqrt(size * maximal[k]) * half
            between = [(0, 0, root, root, False)]
        shaped: list[_Box] = []
        if scaled or k == len(minimal) - 1:
            base = minimal[k if scaled else 0] * half
            shaped = [(0, 0, base * np.sqrt(r), base / np.sqrt(r), False) for r in ratios]
        boxes += between + shaped if flag(attrs, "min_max_aspect_ratios_order", True) else shaped + between
    return boxes


def _prior_box(attrs: Attrs, height: int, width: int, image_height: int, image_width: int) -> Array:
    cell = np.asarray(_cell(attrs, image_height), np.float32).reshape(-1, 5)
    step = single(attrs, "step")
    if not flag(attrs, "scale_all_sizes", True):
        step = np.float32(image_height / height) if step == -1 else step * np.float32(image_height)
    if step == 0:
        x = (np.arange(width, dtype=np.float32) + np.float32(0.5)) * (np.float32(image_width) / np.float32(width))
        y = (np.arange(height, dtype=np.float32) + np.float32(0.5)) * (np.float32(image_height) / np.float32(height))
    else:
        offset = single(attrs, "offset")
        x = (offset + np.arange(width, dtype=np.float32)) * step
        y = (offset + np.arange(height, dtype=np.float32)) * step
    center = np.empty((height, width, len(cell), 2), np.float32)
    center[..., 0] = x[None, :, None] + cell[:, 0]
    center[..., 1] = y[:, None, None] + cell[:, 1]
    scale = np.float32(1) / np.asarray([image_width, image_height], np.float32)
    boxes = np.concatenate([(center - cell[:, 2:4]) * scale, (center + cell[:, 2:4]) * scale], axis=-1)
    bounded = cell[:, 4:] > 0
    boxes[..., :2] = np.where(bounded, np.maximum(boxes[..., :2], np.float32(0)), boxes[..., :2])
    boxes[..., 2:] = np.where(bounded, np.minimum(boxes[..., 2:], np.float32(1)), boxes[..., 2:])
    return boxes


def _clustered(attrs: Attrs, height: int, width: int, image_height: int, image_width: int) -> Array:
    step = single(attrs, "step")
    step_w, step_h = single(attrs, "step_w") or step, single(attrs, "step_h") or step
    if step_w == 0 and step_h == 0:
        step_w, step_h = np.float32(image_width / width), np.float32(image_height / height)
    offset = single(attrs, "offset")
    size = np.stack([floats(attrs, "width"), floats(attrs, "height")], axis=1)
    center = np.empty((height, width, 1, 2), np.float32)
    center[..., 0] = ((np.arange(width, dtype=np.float32) + offset) * step_w)[None, :, None]
    center[..., 1] = ((np.arange(height, dtype=np.float32) + offset) * step_h)[:, None, None]
    image = np.asarray([image_width, image_height], np.float32)
    reach = size / np.float32(2)
    return np.concatenate([(center - reach) / image, (center + reach) / image], axis=-1)


def _check_prior_box(attrs: Attrs) -> int:
    """The number of boxes per cell. Raises where OpenVINO's count and its boxes differ, since the result is undefined
    there."""
    _variance(attrs)
    count = _count(attrs)
    if not 0 < count <= _MOST:
        raise ValueError(f"the sizes, ratios and densities make {count} boxes per cell")
    boxes = len(_cell(attrs, 1))
    if count != boxes:
        raise ValueError(f"the sizes, ratios and densities make {boxes} boxes per cell, but leave room for {count}")
    return count


def _check_clustered(attrs: Attrs) -> int:
    _variance(attrs)
    required(attrs, "width"), required(attrs, "height")
    width, height = len(floats(attrs, "width")), len(floats(attrs, "height"))
    if width != height:
        raise ValueError(f"{width} values in 'width', but {height} in 'height'")
    return width


def _variance(attrs: Attrs) -> Array:
    variance = floats(attrs, "variance")
    if len(variance) not in (0, 1, 4):
        raise ValueError(f"attribute 'variance' has {len(variance)} values instead of 1 or 4")
    return variance if len(variance) else np.asarray([0.1], np.float32)


def _stand_in(operands: Operands, i: int) -> Array | None:
    """The value of an operand, or an array of its shape that takes no memory. None where the shape is open."""
    t = tensor(operands, i)
    known = value(operands, i)
    if known is not None or t.shape is None:
        return np.asarray(known) if known is not None else None
    dims = [d for d in t.shape[-2:] if isinstance(d, WHOLE)]
    return np.broadcast_to(np.float32(0), (1, 1, *dims)) if len(t.shape) == 4 and len(dims) == 2 else None


def _folded(reference: Reference, infer: Infer) -> Callable[[Operands, Attrs], Array | None]:
    """Make a function that computes the boxes at load time where shapes determine them. Huge results wait until run
    time."""

    def fold(operands: Operands, attrs: Attrs) -> Array | None:
        arrays = [_stand_in(operands, i) for i in range(len(operands))]
        [made] = infer(operands, attrs, 1)
        static = isinstance(made, TensorType) and made.is_static
        if any(a is None for a in arrays) or not static or made.size > _FOLDABLE:  # type: ignore[union-attr]
            return None
        result: Array = reference(arrays, attrs, 1)[0]
        return result

    return fold


def _forms(op: str, boxes: Callable[[Attrs, int, int, int, int], Array], check: Callable[[Attrs], int]) -> OpSpec:
    """The spec of an operator for both forms of the inputs."""

    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
        over_maps = inputs[0].ndim == 4
        size, image = ([int(d) for d in (a.shape[2:] if over_maps else a)] for a in inputs[:2])
        made = boxes(attrs, size[0], size[1], image[0], image[1]).reshape(-1, 4)
        if flag(attrs, "clip"):
            made = np.minimum(np.maximum(made, np.float32(0)), np.float32(1))
        result = np.stack([made.reshape(-1), np.broadcast_to(_variance(attrs), made.shape).reshape(-1)])
        return [result[None] if over_maps else result]

    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        per_cell = check(attrs)
        ranks = {tensor(operands, 0).rank, tensor(operands, 1).rank}
        if None in ranks:
            return [TensorType(DType.FLOAT32)]
        if ranks == {4}:
            shape = tensor(operands, 0).shape
            assert shape is not None
            return [TensorType(DType.FLOAT32, (1, 2, times(shape[2], shape[3], per_cell, 4)))]
        if ranks != {1}:
            raise ValueError("a feature map and an image of rank 4, or two vectors (height, width), are needed")
        known = value(operands, 0)
        if known is not None and known.shape != (2,):
            raise ValueError(f"input 0 has {known.size} values instead of height and width")
        n_boxes: Dim = None if known is None else int(known[0]) * int(known[1]) * per_cell * 4
        return [TensorType(DType.FLOAT32, (2, n_boxes))]

    return OpSpec(name(op), reference, infer, value_from_types=_folded(reference, infer))


def prior_grid(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    priors, feature, image = inputs[:3]
    height, width = int(attrs.get("h", 0)) or feature.shape[2], int(attrs.get("w", 0)) or feature.shape[3]
    step_x = single(attrs, "stride_x") or np.float32(image.shape[3] / width)
    step_y = single(attrs, "stride_y") or np.float32(image.shape[2] / height)
    x = step_x * (np.arange(width, dtype=np.float32) + np.float32(0.5))
    y = step_y * (np.arange(height, dtype=np.float32) + np.float32(0.5))
    shift = np.empty((height, width, 1, 4), np.float32)
    shift[..., 0::2] = x[None, :, None, None]
    shift[..., 1::2] = y[:, None, None, None]
    grid = (priors.astype(np.float32) + shift).astype(priors.dtype)
    return [grid.reshape(-1, 4) if flag(attrs, "flatten", True) else grid]


def _infer_grid(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    priors, (count, four) = ranked(operands, 0, 2, "the priors")
    if four not in (4, None) and isinstance(four, WHOLE):
        raise ValueError(f"the priors (input 0) have {four} values each instead of 4")
    _, feature = ranked(operands, 1, 4, "the feature map")
    ranked(operands, 2, 4, "the image")
    height: Dim = int(attrs.get("h", 0)) or feature[2]
    width: Dim = int(attrs.get("w", 0)) or feature[3]
    if flag(attrs, "flatten", True):
        return [TensorType(priors.dtype, (times(height, width, count), 4))]
    return [TensorType(priors.dtype, (height, width, count, 4))]


OPS = (
    _forms("PriorBox", _prior_box, _check_prior_box),
    _forms("PriorBoxClustered", _clustered, _check_clustered),
    OpSpec(
        name("ExperimentalDetectronPriorGridGenerator"),
        prior_grid,
        _infer_grid,
        value_from_types=_folded(prior_grid, _infer_grid),
    ),
)

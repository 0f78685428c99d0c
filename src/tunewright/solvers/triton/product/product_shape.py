"""The shape of a product or convolution, and the division of its sum into steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType
from tunewright.ops.windows import windows
from tunewright.solvers.base import Array, Packing, Problem

#: positions are 32-bit numbers
MOST_ELEMENTS = 1 << 31
#: With fewer channels, the sum joins the taps along a row of the window, because tensor cores need at least 16 terms.
FEW_CHANNELS = 16
#: most bytes that a thread loads at once; fewest bytes of a copy that bypasses its registers
VECTOR, WORD = 16, 4


@dataclass(frozen=True)
class ProductShape:
    """All that the kernel needs to know of sizes. A product is a convolution with one tap over one row of pixels."""

    images: int
    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    filters: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    head: tuple[int, int] = (0, 0)
    padded: bool = False
    groups: int = 1
    #: Independent products: (number, elements between left matrices, elements between right matrices) per batch axis.
    batch: tuple[tuple[int, int, int], ...] = ()

    @property
    def depth(self) -> int:
        """Number of channels of a group, over which the sum runs."""
        return self.channels // self.groups

    @property
    def columns(self) -> int:
        """Number of filters of a group."""
        return self.filters // self.groups

    @property
    def products(self) -> int:
        """Number of independent products: groups of a convolution, or matrices."""
        return self.groups * math.prod(number for number, _, _ in self.batch)

    def tiles(self, bm: int, bn: int) -> int:
        """Number of tiles of all products."""
        return -(-self.rows // bm) * -(-self.columns // bn) * self.products

    @property
    def rows(self) -> int:
        return self.images * self.out_height * self.out_width

    @property
    def dense(self) -> bool:
        """Whether row m of the result needs only row m of the input."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and not self.padded

    @property
    def folds(self) -> bool:
        """Whether the taps of a row are contiguous in memory and have too few channels for a sum of their own."""
        few = self.depth < FEW_CHANNELS and self.kernel[1] > 1
        return few and self.groups == 1 and self.dilation[1] == 1

    def alignments(self, dtype: DType) -> list[int]:
        """Numbers of elements that may be loaded at once, best first. Windows start at a multiple of them after a small
        shift.

        Without a shift, the loads can go directly to shared memory.
        """
        most = math.gcd(self.stride[1] * self.channels, self.width * self.channels, VECTOR // dtype.itemsize)
        found = [align for align in (8, 4, 2, 1) if most % align == 0]
        whole = math.gcd(self.head[1] * self.channels, self.kernel[1] * self.channels)
        straight = next((align for align in found if whole % align == 0), 1)
        return sorted(found, key=lambda align: (align != straight or align * dtype.itemsize < WORD, -align))


@dataclass(frozen=True)
class FoldedWindow:
    """A row of a window as it lies in memory: its taps and their channels form one sum.

    Elements ``shift`` to ``shift + width`` of ``pitch`` belong to the window; the others have zero weights. With
    ``flat`` the rows follow each other within the steps. Otherwise each row starts a new step.
    """

    width: int
    shift: int
    pitch: int
    align: int
    flat: bool

    @property
    def end(self) -> int:
        """Number of elements to load. No element behind it is loaded."""
        return -(-(self.shift + self.width) // self.align) * self.align

    @property
    def exact(self) -> bool:
        """Whether all loaded elements belong to the window."""
        return self.shift == 0 and self.end == self.width


def fold(shape: ProductShape, config: Mapping[str, Any]) -> FoldedWindow | None:
    """How a config folds the taps of a shape; None where it does not."""
    if "fold" not in config:
        return None
    align, flat = int(config["align"]), config["fold"] == "flat"
    width = shape.kernel[1] * shape.channels
    shift = -shape.head[1] * shape.channels % align
    unit = align if flat else int(config["bk"])
    return FoldedWindow(width, shift, -(-(shift + width) // unit) * unit, align, flat)


def steps(shape: ProductShape, config: Mapping[str, Any]) -> int:
    """Number of steps of the sum."""
    bk, folded = int(config["bk"]), fold(shape, config)
    if folded is not None:
        return -(-shape.kernel[0] * folded.pitch // bk)
    return shape.kernel[0] * shape.kernel[1] * -(-shape.depth // bk)


def steps_each(shape: ProductShape, config: Mapping[str, Any]) -> int:
    """Number of steps of each program that shares a sum. The last programs may have fewer steps, or none."""
    return -(-steps(shape, config) // int(config["split"]))


def conv_shape(problem: Problem) -> ProductShape:
    """The shape of a static convolution over two spatial axes."""
    x, w, out = problem.input(0), problem.input(1), problem.outputs[0]
    assert isinstance(x, TensorType) and isinstance(w, TensorType) and isinstance(out, TensorType)
    win = windows(x.dims[2:], w.dims[2:], problem.attrs)
    pads = win.pads(x.dims[2:])
    return ProductShape(
        x.dims[0], x.dims[2], x.dims[3], x.dims[1], out.dims[2], out.dims[3], w.dims[0], _two(win.kernel),
        _two(win.strides), _two(win.dilations), _two(win.head), any(p > 0 for pair in pads for p in pair),
        int(problem.attrs.get("group", 1)),
    )  # fmt: skip


def _two(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[1]


def product_shape(problem: Problem) -> ProductShape:
    """The shape of a static MatMul of matrices: one product where all rows share a matrix, else one per matrix."""
    x, w, out = problem.input(0), problem.input(1), problem.outputs[0]
    assert isinstance(x, TensorType) and isinstance(w, TensorType) and isinstance(out, TensorType)
    (rows, depth), columns = x.dims[-2:], w.dims[-1]
    if all(size == 1 for size in w.dims[:-2]):
        rows = x.size // max(1, depth)
        return ProductShape(1, 1, rows, depth, 1, rows, columns)
    axes = len(w.dims) - 2, len(x.dims) - 2
    number = max(axes)
    left = _between((1,) * (number - axes[1]) + x.dims[:-2], rows * depth)
    right = _between((1,) * (number - axes[0]) + w.dims[:-2], depth * columns)
    batch = tuple((n, a, b) for n, a, b in zip(_wide(x, w, number), left, right, strict=True) if n != 1)
    return ProductShape(1, 1, rows, depth, 1, rows, columns, batch=batch)


def _wide(x: TensorType, w: TensorType, number: int) -> list[int]:
    """Sizes of the batch axes after broadcasting."""
    each = [(1,) * (number + 2 - len(t.dims)) + t.dims[:-2] for t in (x, w)]
    return [a if b == 1 else b for a, b in zip(*each, strict=True)]


def _between(sizes: tuple[int, ...], matrix: int) -> list[int]:
    """Elements between neighbours along each axis; 0 along axes that are broadcast."""
    found = [0] * len(sizes)
    for axis in reversed(range(len(sizes))):
        found[axis] = 0 if sizes[axis] == 1 else matrix
        matrix *= sizes[axis]
    return found


def why_not_size(problem: Problem) -> str | None:
    """The reason why a static problem's sizes are unsupported, else None."""
    sizes = [t.size for t in (*problem.inputs, *problem.outputs) if isinstance(t, TensorType)]
    if any(size < 1 for size in sizes):
        return "is empty"
    return "is too large" if any(size >= MOST_ELEMENTS for size in sizes) else None


def _by_tap(weights: Array) -> Array:
    return np.ascontiguousarray(weights.transpose(2, 3, 1, 0))


BY_TAP = Packing("taps, channels, filters", _by_tap)


def folded_weights(shape: ProductShape, config: Mapping[str, Any]) -> Packing:
    """The packing of weights as rows of the window. Zeros surround each row, and fill up the last step."""
    folded = fold(shape, config)
    assert folded is not None
    total = steps_each(shape, config) * int(config["split"]) * int(config["bk"])
    key = f"rows of taps and channels, {folded.shift} in front, {folded.pitch} each, {total} in all, filters"
    return Packing(key, partial(_fold, folded.shift, folded.pitch, total))


def _fold(shift: int, pitch: int, total: int, weights: Array) -> Array:
    filters, channels, high, wide = weights.shape
    packed = np.zeros((total, filters), weights.dtype)
    rows = packed[: high * pitch].reshape(high, pitch, filters)
    rows[:, shift : shift + wide * channels] = weights.transpose(2, 3, 1, 0).reshape(high, -1, filters)
    return packed

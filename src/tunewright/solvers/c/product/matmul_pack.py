"""Packs operands of a matrix product for its kernel: panels of columns, in the type in which products are summed.

A panel is [K][width], its columns side by side, so that one step of the sum reads a contiguous row of it. The last one
is padded with zeros. A constant is packed once (`packing`), any other operand by a launch in front of the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.devices.base import empty_on_lines
from tunewright.ir.symbolic import greater, hint, lesser
from tunewright.ir.types import DType
from tunewright.solvers.base import Array, Packing

from ..source.emit import EmittedLaunch, In, Out, Scratch, Source
from .matmul_product import Matrix

#: the least number of elements that one work-item of a packing launch moves
SLICE = 8192
#: the most work-items in one dimension of a grid
MOST_ITEMS = 60000


@dataclass(frozen=True)
class PackedOperand:
    """The matrices [K][N] of one input: a size and a stride for each dimension of the batch that it has."""

    matrix: Matrix
    k: int
    n: int
    batch: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return math.prod(size for size, _ in self.batch)

    def packed_size(self, width: int) -> int:
        """The number of elements of one packed matrix."""
        return -(-self.n // width) * width * self.k

    def strides(self, batch: Sequence[int], width: int) -> list[int]:
        """Strides of the packed matrices along a whole batch, from those of the operand (0: broadcast)."""
        found, step = [], self.packed_size(width)
        sizes = [size for size, _ in self.batch]
        for stride in reversed(batch):
            found.append(step if stride else 0)
            step *= sizes.pop() if stride else 1
        return found[::-1]

    def scratch(self, width: int, dtype: DType, name: str) -> Scratch:
        """Memory for the packed matrices."""
        return Scratch(name, greater(self.count * self.packed_size(width) * dtype.itemsize, 1))


def packing(operand: PackedOperand, width: int, dtype: DType) -> Packing:
    """The packing of a constant operand."""
    shape = (*(size for size, _ in operand.batch), operand.k, operand.n)
    strides = (*(stride for _, stride in operand.batch), operand.matrix.row, operand.matrix.column)

    def pack(array: Array) -> Array:
        flat = np.ascontiguousarray(array, dtype.numpy).reshape(-1)
        view: Any = np.lib.stride_tricks.as_strided(flat, shape, [s * flat.itemsize for s in strides])
        panels = -(-operand.n // width)
        out = empty_on_lines((operand.count, panels, operand.k, width), dtype.numpy)
        for source, target in zip(view.reshape(operand.count, operand.k, operand.n), out, strict=True):
            for p in range(panels):
                columns = source[:, p * width : (p + 1) * width]
                target[p, :, : columns.shape[1]] = columns
                target[p, :, columns.shape[1] :] = 0
        return out

    return Packing(f"panels {width} {dtype} {shape} {strides}", pack)


def launch(
    operand: PackedOperand, width: int, given: DType, dtype: DType, name: str, specialise: bool,
    where: Out | Scratch | None = None,
) -> EmittedLaunch:  # fmt: skip
    """The launch that packs an operand, of element type ``given``, into the scratch memory ``name``.

    The operand is an input, unless ``where`` names other memory.
    """
    panels = -(-operand.n // width)
    units = panels * operand.count
    share = greater(1, lesser(hint(units), SLICE // greater(hint(operand.k) * width, 1)), -(-hint(units) // MOST_ITEMS))
    source = Source("pack", specialise)
    source.buffer("x", given, where or In(operand.matrix.index))
    source.buffer("y", dtype, operand.scratch(width, dtype, name))
    source.fixed(WIDTH=width)
    source.dims(K=operand.k, N=operand.n, PANELS=panels, UNITS=units, SHARE=share)
    row, column = _stride(source, "ROW", operand.matrix.row), _stride(source, "COLUMN", operand.matrix.column)
    element = source.load("x", f"from + k{row} + j{column}")
    source.add(f"""
for (int unit = GID(0) * SHARE; unit < (GID(0) + 1) * SHARE && unit < UNITS; unit++) {{
  int matrix UNUSED = unit / PANELS, n = unit % PANELS * WIDTH;
  int from = {batch_offset(source, "matrix", operand.batch, "D")} + n{column};
  int columns = N - n < WIDTH ? N - n : WIDTH;
  GLOBAL {source.compute("y")}* panel = y + unit * K * WIDTH;
  if (columns == WIDTH)
    for (int k = 0; k < K; k++)
      for (int j = 0; j < WIDTH; j++) panel[k * WIDTH + j] = {element};
  else
    for (int k = 0; k < K; k++)
      for (int j = 0; j < WIDTH; j++) panel[k * WIDTH + j] = j < columns ? {element} : 0;
}}""")
    return source.call([-(-units // share)])


def _stride(source: Source, name: str, stride: int) -> str:
    """The factor of a stride, or nothing for a stride of one: contiguous elements are worth a separate text."""
    if stride == 1:
        return ""
    source.dims(**{name: stride})
    return f" * {name}"


def batch_offset(source: Source, index: str, dims: Sequence[tuple[int, int]], name: str) -> str:
    """The expression of where a matrix of a batch begins, from its number ``index``.

    ``dims`` are (size, stride) of the batch's dimensions, which are declared in the source.
    """
    terms, outer = [], index
    for axis in range(len(dims) - 1, -1, -1):
        size, stride = dims[axis]
        source.dims(**{f"{name}{axis}_STEP": stride})
        if axis:
            source.dims(**{f"{name}{axis}": size})
        terms.append(f"{outer}{f' % {name}{axis}' if axis else ''} * {name}{axis}_STEP")
        outer += f" / {name}{axis}"
    return " + ".join(reversed(terms)) or "0"

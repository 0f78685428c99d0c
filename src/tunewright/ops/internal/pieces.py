"""An operator of the IR that composes a tensor of boxes. Each box is computed element by element from strided reads.

It replaces nodes that move elements or join tensors, and the element-wise nodes between them. Its attributes are
``dims`` and ``dtype`` (ONNX's number) of the result, and ``parts``, the boxes that cover it, encoded by `text`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tunewright.ir.types import DType, TensorType, Type

from .. import lookup
from ..base import Array, Attrs, Operands, OpSpec, Sample
from ..samples.base import Rng, normal
from ..shapes import tensor

PIECES = "tunewright::Pieces"
#: an axis as factors of (size, stride), the fastest one last; no factor stands for a single element
Axis: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Read:
    """Elements of one input, one per element of a box: the first element in plain order, and strides along axes."""

    source: int
    start: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class PieceStep:
    """An element-wise operation. Argument i is read number i, argument ~i the result of step i."""

    op: str
    args: tuple[int, ...]
    dtype: DType
    attrs: Attrs


@dataclass(frozen=True)
class Piece:
    """A box of the result: its position, its size and its program. A program without steps is read 0."""

    at: tuple[int, ...]
    dims: tuple[int, ...]
    reads: tuple[Read, ...]
    steps: tuple[PieceStep, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.dims)


def text(parts: Sequence[Piece]) -> str:
    """Encode parts for the attribute."""
    data = [
        [p.at, p.dims, [[r.source, r.start, r.axes] for r in p.reads],
         [[s.op, s.args, s.dtype.onnx_code, dict(s.attrs)] for s in p.steps]]
        for p in parts
    ]  # fmt: skip
    return json.dumps(data, separators=(",", ":"), sort_keys=True)


def _axes(data: Any) -> tuple[Axis, ...]:
    return tuple(tuple((int(n), int(stride)) for n, stride in axis) for axis in data)


def parts(attrs: Attrs) -> list[Piece]:
    """Decode the parts from the attribute. ValueError when the attribute is malformed."""
    try:
        return [
            Piece(
                tuple(at), tuple(dims), tuple(Read(i, start, _axes(axes)) for i, start, axes in reads),
                tuple(PieceStep(op, tuple(args), DType.of_onnx(code), more) for op, args, code, more in steps),
            )
            for at, dims, reads, steps in json.loads(attrs["parts"])
        ]  # fmt: skip
    except (TypeError, KeyError) as error:
        raise ValueError(f"parts are no boxes: {error!r}") from None


def _read(x: Array, read: Read, dims: Sequence[int]) -> Array:
    factors = [factor for axis in read.axes for factor in axis]
    last = read.start + sum((n - 1) * stride for n, stride in factors)
    if min([read.start, last, *(stride for _, stride in factors)]) < 0 or last >= x.size:
        raise ValueError(f"elements {read.start} to {last} are read of {x.size}")
    flat = np.ascontiguousarray(x).reshape(-1)[read.start :]
    strides = [stride * x.itemsize for _, stride in factors]
    return np.lib.stride_tricks.as_strided(flat, [n for n, _ in factors], strides).reshape(dims)


def _reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    made = np.empty(tuple(attrs["dims"]), DType.of_onnx(attrs["dtype"]).numpy)
    for part in parts(attrs):
        given = [_read(inputs[read.source], read, part.dims) for read in part.reads]
        results: list[Array] = []
        for step in part.steps:
            spec = lookup(step.op)
            if spec is None:
                raise ValueError(f"there is no operation {step.op}")
            args = [given[i] if i >= 0 else results[~i] for i in step.args]
            results.append(np.asarray(spec.reference(args, step.attrs, 1)[0]))
        box = tuple(slice(a, a + d) for a, d in zip(part.at, part.dims, strict=True))
        made[box] = results[-1] if results else given[0]
    return [made]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    for i in range(len(operands)):
        tensor(operands, i)
    return [TensorType(DType.of_onnx(attrs["dtype"]), tuple(int(d) for d in attrs["dims"]))]


def _samples(rng: Rng) -> list[Sample]:
    x, y = normal(rng, 2, 3, 4), normal(rng, 3)
    turned = Read(0, 0, (((2, 12),), ((4, 1),), ((3, 4),)))
    spread = Read(1, 0, (((2, 0),), ((4, 0),), ((3, 1),)))
    steps = (PieceStep("Sigmoid", (0,), DType.FLOAT32, {}), PieceStep("Mul", (~0, 1), DType.FLOAT32, {}))
    row = Read(1, 0, (((2, 0),), (), ((3, 1),)))
    boxes = [Piece((0, 0, 0), (2, 4, 3), (turned, spread), steps), Piece((0, 4, 0), (2, 1, 3), (row,))]
    return [Sample([x, y], {"dims": (2, 5, 3), "dtype": DType.FLOAT32.onnx_code, "parts": text(boxes)})]


OPS = (OpSpec(PIECES, _reference, _infer, samples=_samples),)

"""Judge large problems on a few different images, or rows, which are repeated.

The reference runs on the host. For 64 images it would take longer than all candidates together, although images are
independent and the work is the same for each. The reference therefore computes a few images. Their number is one that
no tile size and no split divides. A kernel gets them repeatedly and must give the same result for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..ir.types import PLAIN, TensorType
from ..ops import lookup
from ..ops.internal.pixels import PIXELS
from ..ops.internal.reorder import REORDER
from ..solvers.base import Array, Problem

#: Elements of inputs and results from which a problem counts as large.
LARGE = 1 << 22
#: Numbers of different images and rows. They are primes, so that no tile size divides them.
PICTURES, ROWS = 5, 331
#: The same along the longest of several row axes; all axes together have at least ROWS rows.
ALONG = (13, 29, 53, 101, ROWS)
#: Operations whose first axis counts images.
_PICTURES = frozenset({
    "Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool",
    REORDER, PIXELS,
})  # fmt: skip
#: Operations whose rows along an axis are independent, with the default axis.
_ALONG = {
    "LayerNormalization": -1, "RMSNormalization": -1, "Softmax": -1, "LogSoftmax": -1,
    "com.microsoft::SkipLayerNormalization": -1, "com.microsoft::SkipSimplifiedLayerNormalization": -1,
}  # fmt: skip


@dataclass(frozen=True)
class RepeatedProblem:
    """A problem with fewer images or rows, and the axis that counts them in each tensor (None: it has no such axis).

    The axis is the same in the tensor's layout.
    """

    problem: Problem
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    number: int

    def wide(self, array: Array, axis: int | None) -> Array:
        """Repeat a tensor to the size of the large problem."""
        return array if axis is None else np.asarray(np.take(array, np.arange(self.number) % array.shape[axis], axis))


def repeat(problem: Problem) -> RepeatedProblem | None:
    """Reduce a large static problem to few images or rows. None if it is small or its rows may depend on each other."""
    types = [t for t in (*problem.inputs, *problem.outputs) if isinstance(t, TensorType)]
    first = problem.inputs[0] if problem.inputs else None
    if sum(t.size for t in types) < LARGE or not isinstance(first, TensorType) or None in problem.outputs:
        return None
    axis = _axis(problem, first)
    if axis is None or (axis > 0 and any(t.layout != PLAIN for t in types)):
        return None
    number = first.dims[axis]
    others = math.prod(first.dims[:-1]) // max(number, 1)
    few = PICTURES if problem.op in _PICTURES else next(n for n in ALONG if n * others >= ROWS or n == ROWS)
    if number < 2 * few:
        return None
    places: list[int | None] = []
    main = len(problem.main_inputs)
    for i, type in enumerate(problem.inputs):
        if not isinstance(type, TensorType) or (i < main and i > 0 and problem.constant[i]):
            places.append(None)  # weights are the same for all images
            continue
        place = axis - (len(first.dims) - len(type.dims))
        if i < main and len(type.dims) != len(first.dims) and type.size > 1:
            return None
        places.append(place if place >= 0 and type.dims[place] == number else None)
    outs = [t for t in problem.outputs if isinstance(t, TensorType)]
    if any(len(t.dims) != len(first.dims) or t.dims[axis] != number for t in outs):
        return None
    small = replace(
        problem, inputs=tuple(_fewer(t, place, few) for t, place in zip(problem.inputs, places, strict=True)),
        outputs=tuple(_fewer(t, axis, few) for t in outs),
    )  # fmt: skip
    return RepeatedProblem(small, tuple(places), (axis,) * len(outs), number)


def _axis(problem: Problem, first: TensorType) -> int | None:
    """Return the axis of images, or the longest axis of rows."""
    rank, spec = len(first.dims), lookup(problem.op)
    if rank < 2 or spec is None:
        return None
    if problem.op in _PICTURES:
        return 0
    rows = None
    if problem.op in ("MatMul", "Gemm"):
        weights = problem.inputs[1]
        known = isinstance(weights, TensorType) and len(weights.dims) == 2 and problem.constant[1]
        rows = range(rank - 1) if known and not problem.attrs.get("transA", 0) else None
    elif problem.op in _ALONG:
        along = int(problem.attrs.get("axis", _ALONG[problem.op])) % rank
        rows = range(along) if along == rank - 1 else None
    elif spec.elementwise:
        rows = range(rank - 1)
    return max(rows, key=lambda a: first.dims[a]) if rows else None


def _fewer(type: object, axis: int | None, few: int) -> TensorType | None:
    if not isinstance(type, TensorType) or axis is None:
        return type if isinstance(type, TensorType) else None
    return type.with_shape((*type.dims[:axis], few, *type.dims[axis + 1 :]))

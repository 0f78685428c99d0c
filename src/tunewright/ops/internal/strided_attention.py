"""An attention of the IR that reads queries, keys and values with strides from larger tensors.

One product with joined weights leaves queries, keys and values side by side, and exporters add transposes and splits.
Kernels that take strides need none of these. ``main`` names the main operation. The other attributes, beside those of
the main operation, are:

- ``sizes``: batch, heads, heads of keys and values, queries, keys, elements of a query, elements of a value;
- ``sources``: the inputs that hold queries, keys and values. Inputs of the main operation after its third follow them;
- ``q``, ``k``, ``v``: the first element in the source, then the strides of batch, head and row; the last stride is 1;
- ``order``: how batch (0), heads (1), queries (2) and the elements of a value (3) lie in the result, of rank 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tunewright.ir.types import TensorType, Type

from .. import lookup
from ..base import Array, Attrs, Operand, Operands, OpSpec, Sample
from ..samples.base import Rng, normal
from ..shapes import whole

STRIDED = "tunewright::StridedAttention"
MULTI_HEAD = "com.microsoft::MultiHeadAttention"
#: attributes that the main operation does not have
OWN = ("main", "sizes", "sources", "q", "k", "v", "order")
#: queries, keys or values: [batch, heads, rows, elements], the first element, the strides
Place: TypeAlias = tuple[tuple[int, int, int, int], int, tuple[int, int, int, int]]
T = TypeVar("T")


def count(attrs: Attrs) -> int:
    """The number of inputs that hold queries, keys and values."""
    return max(int(i) for i in attrs["sources"]) + 1


def main_attrs(attrs: Attrs) -> Mapping[str, Any]:
    """The attributes of the main operation."""
    return {k: v for k, v in attrs.items() if k not in OWN}


def places(attrs: Attrs) -> tuple[Place, Place, Place]:
    """Positions of queries, keys and values in their sources."""
    batch, heads, groups, queries, keys, size, width = (whole(n) for n in attrs["sizes"])
    shapes = ((batch, heads, queries, size), (batch, groups, keys, size), (batch, groups, keys, width))
    found = []
    for shape, name in zip(shapes, "qkv", strict=True):
        start, *steps = (whole(n) for n in attrs[name])
        if min(start, *steps, *shape) < 0:
            raise ValueError(f"{name} has negative strides or sizes")
        found.append((shape, start, (steps[0], steps[1], steps[2], 1)))
    q, k, v = found
    return q, k, v


def end(place: Place) -> int:
    """The position behind the last element that is read."""
    shape, start, strides = place
    return start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else 0


def separate(given: Sequence[T | None], attrs: Attrs, part: Callable[[T, Place], T]) -> list[T | None]:
    """The inputs of the main operation. ``part`` extracts queries, keys or values from their source."""
    found: list[T | None] = []
    for source, place in zip(attrs["sources"], places(attrs), strict=True):
        whole = given[int(source)]
        if whole is None:
            raise ValueError("queries, keys and values must all be given")
        found.append(part(whole, place))
    return [*found, *given[count(attrs) :]]


def part_type(main: str) -> Callable[[TensorType, Place], TensorType]:
    """Make a function that gives the type of a part, as the main operation takes it, from the type of its source."""

    def part(type: TensorType, place: Place) -> TensorType:
        shape = place[0]
        if type.shape is not None and type.is_static and type.size < end(place):
            raise ValueError(f"{type} ends before element {end(place)}")
        flat = (shape[0], shape[2], shape[1] * shape[3])
        return type.with_shape(flat if main == MULTI_HEAD else shape)

    return part


def result_shape(attrs: Attrs) -> tuple[int, ...]:
    """The shape of the result: rank 4, its axes as in ``order``."""
    batch, heads, _, queries, _, _, width = (whole(n) for n in attrs["sizes"])
    return tuple((batch, heads, queries, width)[int(axis)] for axis in attrs["order"])


def _main(attrs: Attrs) -> OpSpec:
    main = str(attrs["main"])
    spec = lookup(main) if main in ("Attention", MULTI_HEAD) else None
    if spec is None:
        raise ValueError(f"{main} is no attention")
    return spec


def _read(main: str) -> Callable[[Array, Place], Array]:
    def part(x: Array, place: Place) -> Array:
        at: Any = place[1]
        for axis, (n, stride) in enumerate(zip(place[0], place[2], strict=True)):
            at = at + (np.arange(n) * stride).reshape([-1 if k == axis else 1 for k in range(4)])
        made: Array = x.reshape(-1)[at]
        batch, heads, rows, size = made.shape
        return made.transpose(0, 2, 1, 3).reshape(batch, rows, heads * size) if main == MULTI_HEAD else made

    return part


def _reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    main = str(attrs["main"])
    y = _main(attrs).reference(separate(inputs, attrs, _read(main)), main_attrs(attrs), 1)[0]
    if main == MULTI_HEAD:
        batch, heads, _, queries, _, _, width = (int(k) for k in attrs["sizes"])
        y = y.reshape(batch, queries, heads, width).transpose(0, 2, 1, 3)
    return [np.ascontiguousarray(y.transpose([int(axis) for axis in attrs["order"]]))]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    part = part_type(str(attrs["main"]))
    given = separate(operands, attrs, lambda x, place: Operand(part(x.tensor, place)))
    made = _main(attrs).infer(given, main_attrs(attrs), 1)[0]
    if not isinstance(made, TensorType):
        return [None]
    return [TensorType(made.dtype, result_shape(attrs))]


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    batch, heads, _, queries, keys, size, width = (int(k) for k in attrs["sizes"])
    return 2.0 * batch * heads * queries * keys * (size + width)


def _samples(rng: Rng) -> Sequence[Sample]:
    mask = np.where(rng.random((5, 5)) < 0.3, -10.0, 0.0).astype(np.float32)
    one: dict[str, Any] = {"main": "Attention", "sources": (0, 0, 0), "order": (0, 2, 1, 3)}
    shared = {"sizes": (2, 4, 2, 5, 5, 3, 2), "q": (0, 110, 3, 22), "k": (12, 110, 3, 22), "v": (18, 110, 2, 22)}
    cross = {"sizes": (2, 4, 2, 3, 7, 3, 3), "sources": (0, 1, 1)}
    apart = {"q": (0, 36, 3, 12), "k": (6, 84, 3, 12), "v": (0, 84, 3, 12)}
    # rows outside of the batch; heads that all read the same keys
    turned = {"sizes": (2, 2, 2, 5, 5, 4, 4), "q": (1, 24, 4, 48), "k": (8, 24, 4, 48), "v": (16, 24, 0, 48)}
    # caches with room for nine rows, six of them filled
    grown = {"sizes": (2, 4, 2, 1, 6, 4, 4), "sources": (0, 1, 2)}
    rooms = {"q": (0, 16, 4, 16), "k": (0, 72, 36, 4), "v": (0, 72, 36, 4)}
    return (
        Sample([normal(rng, 2, 1, 16), normal(rng, 2, 2, 9, 4), normal(rng, 2, 2, 9, 4)], one | grown | rooms),
        Sample([normal(rng, 2, 5, 22)], one | shared),
        Sample([normal(rng, 2, 5, 22), mask], one | shared | {"order": (0, 1, 2, 3), "is_causal": 1}),
        Sample([normal(rng, 2, 3, 12), normal(rng, 2, 7, 12)], one | cross | apart),
        Sample([normal(rng, 5, 2, 24)], one | turned | {"order": (2, 0, 1, 3)}),
        Sample([normal(rng, 5, 2, 24)], one | turned | {"main": MULTI_HEAD, "num_heads": 2}),
    )


OPS = (OpSpec(STRIDED, _reference, _infer, flops=_flops, samples=_samples, heavy=True, steep=True),)

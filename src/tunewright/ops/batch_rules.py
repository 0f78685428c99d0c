"""Rules for operations that keep the examples of a batch apart: where the examples are in the results.

An `OpSpec` names the rule of its operation as ``batch``. Operations without a rule cannot be in a batched model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..ir.graph import Graph, Node, Value


class Unproven(Exception):
    """Raised if an operation may mix examples, with the reason."""


class Examples:
    """Positions of the examples in the values of a graph, as far as it was followed."""

    def __init__(self, graph: Graph, count: int) -> None:
        self.graph, self.count = graph, count
        #: for values that depend on the inputs: the product of the sizes before the examples
        self.before: dict[Value, int] = dict.fromkeys(graph.inputs, 1)

    def has(self, value: Value | None) -> bool:
        """Whether the value depends on the inputs."""
        return value in self.before

    def dims(self, value: Value) -> tuple[int, ...]:
        type = value.tensor
        if type is None or not type.is_static:
            raise Unproven(f"has {value.name!r}, whose shape depends on what is in it")
        return type.dims

    def input(self, node: Node, i: int) -> Value:
        value = node.input(i)
        if value is None:
            raise Unproven(f"lacks input {i}")
        return value

    def axis(self, value: Value) -> int:
        """Return the axis of the examples, which may be only its outer part."""
        dims, before = self.dims(value), self.before[value]
        for axis, size in enumerate(dims):
            if math.prod(dims[:axis]) == before and size > 1:
                if size % self.count == 0:
                    return axis
                break
        raise Unproven(f"has {value.name!r}, whose examples are not along an axis")

    def one_example(self, value: Value) -> tuple[int, ...]:
        """Return the sizes of a value with one example."""
        dims, axis = self.dims(value), self.axis(value)
        return (*dims[:axis], dims[axis] // self.count, *dims[axis + 1 :])

    def only(self, node: Node, *those: int) -> None:
        """Raise unless only these inputs depend on the examples."""
        for i, value in enumerate(node.inputs):
            if i not in those and self.has(value):
                raise Unproven(f"takes input {i} from the examples")

    def alike(self, value: Value, axis: int) -> None:
        """Raise if a value that is independent of the examples differs between them along an axis (below 0: none)."""
        size = self.dims(value)[axis] if axis >= 0 else 1
        if size == 1:
            return
        if value.const is None or size % self.count:
            raise Unproven(f"takes {value.name!r}, which has a part for each example")
        parts = np.stack(np.split(value.const, self.count, axis))
        if not (parts == parts[:1]).all():
            raise Unproven(f"takes {value.name!r}, which differs from example to example")

    def constant(self, node: Node, i: int) -> list[int]:
        """Return the numbers of an input that controls the operation."""
        value = self.input(node, i)
        if value.const is None:
            raise Unproven(f"is controlled by {value.name!r}, which is not constant")
        return [int(n) for n in value.const.reshape(-1)]


#: Returns the axis of the examples in each result.
BatchRule = Callable[[Examples, Node], Sequence[int]]


def _aligned(proof: Examples, values: Sequence[Value | None], rank: int) -> int:
    """Return the common axis of the examples when values are broadcast to ``rank`` axes as in numpy."""
    given = [v for v in values if v is not None]
    places = {proof.axis(v) + rank - len(proof.dims(v)) for v in given if proof.has(v)}
    sizes = {proof.dims(v)[proof.axis(v)] for v in given if proof.has(v)}
    if len(places) != 1 or len(sizes) != 1:
        raise Unproven("has examples along different axes")
    (place,) = places
    for value in given:
        if not proof.has(value):
            proof.alike(value, place - rank + len(proof.dims(value)))
    return place


def elementwise(proof: Examples, node: Node) -> list[int]:
    return [_aligned(proof, node.inputs, len(proof.dims(node.output)))] * len(node.outputs)


def first(*data: int) -> BatchRule:
    """Rule: examples come first in these inputs and in the results; the other inputs are weights."""

    def rule(proof: Examples, node: Node) -> Sequence[int]:
        proof.only(node, *data)
        for i in data:
            value = node.input(i)
            if proof.has(value) and value is not None and proof.axis(value) != 0:
                raise Unproven("has examples along another axis than the first")
        if proof.dims(node.output)[0] != proof.dims(proof.input(node, data[0]))[0]:
            raise Unproven("cuts or repeats examples")
        return [0] * len(node.outputs)

    return rule


def normalised(proof: Examples, node: Node) -> Sequence[int]:
    if node.attrs.get("training_mode", 0):
        raise Unproven("takes its statistics from the examples")
    return first(0)(proof, node)


def pooled(proof: Examples, node: Node) -> Sequence[int]:
    if len(node.outputs) > 1:
        raise Unproven("returns positions in the whole batch")
    return first(0)(proof, node)


def attention(proof: Examples, node: Node) -> Sequence[int]:
    """Rule: queries, keys and values belong to examples; a mask may apply to all of them."""
    for i in range(3):
        if not proof.has(node.input(i)):
            raise Unproven(f"takes input {i} from elsewhere")
    for i, value in enumerate(node.inputs[3:], 3):
        if value is None:
            continue
        rank = len(proof.dims(value))
        if not proof.has(value):
            proof.alike(value, 0 if i > 3 else rank - 4)
        elif i == 3 and rank != 4:
            raise Unproven("has a mask of the examples that is not one for each")
    return first(*range(len(node.inputs)))(proof, node)


def rotary(proof: Examples, node: Node) -> Sequence[int]:
    """Rule of rotary embeddings: angles for each example or for all; or a table, and positions of each example."""
    table = node.input(3) is not None
    for i, value in enumerate(node.inputs[1:], 1):
        if value is not None and not proof.has(value) and not (table and i < 3):
            proof.alike(value, 0)
    return first(0, 3)(proof, node) if table else first(0, 1, 2)(proof, node)


def fused_product(proof: Examples, node: Node) -> Sequence[int]:
    """Rule of a product that may transpose its second operand."""
    if any(node.attrs.get(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        raise Unproven("transposes its first operand, or the batch axes")
    proof.only(node, 0)
    if proof.axis(proof.input(node, 0)) == len(proof.dims(proof.input(node, 0))) - 1:
        raise Unproven("adds up over examples")
    if len(proof.dims(proof.input(node, 1))) != 2:
        raise Unproven("has weights that are no matrix")
    return [proof.axis(proof.input(node, 0))]


def along(default: int | None, *, behind: bool = False) -> BatchRule:
    """Rule: works along the attribute's axis; with ``behind``, also along all later axes."""

    def rule(proof: Examples, node: Node) -> list[int]:
        proof.only(node, 0)
        axis, rank = proof.axis(proof.input(node, 0)), len(proof.dims(proof.input(node, 0)))
        given = node.attrs.get("axis", default)
        if given is None:
            raise Unproven("does not say along which axis it works")
        place = int(given) % rank
        if axis == place or (behind and axis > place):
            raise Unproven("works along the axis of the examples")
        return [axis] * len(node.outputs)

    return rule


def argument(proof: Examples, node: Node) -> list[int]:
    [axis] = along(0)(proof, node)
    below = int(node.attrs.get("axis", 0)) % len(proof.dims(proof.input(node, 0))) < axis
    return [axis - (below and not node.attrs.get("keepdims", 1))]


def cumulative(proof: Examples, node: Node) -> list[int]:
    proof.only(node, 0)
    [place] = proof.constant(node, 1)
    value = proof.input(node, 0)
    if place % len(proof.dims(value)) == proof.axis(value):
        raise Unproven("works along the axis of the examples")
    return [proof.axis(value)]


def reduced(proof: Examples, node: Node) -> list[int]:
    proof.only(node, 0)
    value = proof.input(node, 0)
    axis, rank = proof.axis(value), len(proof.dims(value))
    if node.input(1) is not None:
        axes = {a % rank for a in proof.constant(node, 1)}
    elif "axes" in node.attrs:
        axes = {int(a) % rank for a in node.attrs["axes"]}
    else:
        axes = set()
    if not axes and not node.attrs.get("noop_with_empty_axes", 0):
        axes = set(range(rank))
    if axis in axes:
        raise Unproven("works along the axis of the examples")
    return [axis if node.attrs.get("keepdims", 1) else axis - sum(a < axis for a in axes)]


def transposed(proof: Examples, node: Node) -> list[int]:
    value = proof.input(node, 0)
    order = node.attrs.get("perm") or range(len(proof.dims(value)))[::-1]
    return [[int(a) for a in order].index(proof.axis(value))]


def joined(proof: Examples, node: Node) -> list[int]:
    rank = len(proof.dims(node.output))
    axis = _aligned(proof, node.inputs, rank)
    size = proof.dims(node.output)[axis]
    if int(node.attrs["axis"]) % rank == axis or any(v is None or proof.dims(v)[axis] != size for v in node.inputs):
        raise Unproven("works along the axis of the examples")
    return [axis]


def kept(*others: int) -> BatchRule:
    """Rule: sizes along other axes may change; along that of the examples the size stays, so nothing happens there."""

    def rule(proof: Examples, node: Node) -> list[int]:
        proof.only(node, 0)
        value = proof.input(node, 0)
        axis = proof.axis(value)
        if any(proof.dims(out)[axis] != proof.dims(value)[axis] for out in node.outputs):
            raise Unproven("cuts or repeats examples")
        for i in others:
            if node.input(i) is not None:
                proof.constant(node, i)
        return [axis] * len(node.outputs)

    return rule


def sliced(proof: Examples, node: Node) -> list[int]:
    [axis] = kept(1, 2, 3, 4)(proof, node)
    rank = len(proof.dims(proof.input(node, 0)))
    axes = proof.constant(node, 3) if node.input(3) is not None else list(range(len(proof.constant(node, 1))))
    steps = proof.constant(node, 4) if node.input(4) is not None else [1] * len(axes)
    if any(a % rank == axis and step != 1 for a, step in zip(axes, steps, strict=True)):
        raise Unproven("turns examples round")
    return [axis]


def padded(proof: Examples, node: Node) -> list[int]:
    [axis] = kept(1, 3)(proof, node)
    rank = len(proof.dims(proof.input(node, 0)))
    pads = proof.constant(node, 1)
    axes = [a % rank for a in proof.constant(node, 3)] if node.input(3) is not None else list(range(rank))
    if any(a == axis and (pads[i] or pads[i + len(axes)]) for i, a in enumerate(axes)):
        raise Unproven("moves examples")
    return [axis]


def resized(proof: Examples, node: Node) -> list[int]:
    [axis] = kept(3)(proof, node)
    scales, axes = node.input(2), node.attrs.get("axes")
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise Unproven("crops")
    given = scales is not None and proof.dims(scales) != (0,)
    if scales is not None and given and (scales.const is None or axes is not None or scales.const[axis] != 1):
        raise Unproven("may scale along the axis of the examples")
    return [axis]


def expanded(proof: Examples, node: Node) -> list[int]:
    proof.only(node, 0)
    value = proof.input(node, 0)
    axis = proof.axis(value)
    place = axis + len(proof.dims(node.output)) - len(proof.dims(value))
    if proof.dims(node.output)[place] != proof.dims(value)[axis]:
        raise Unproven("cuts or repeats examples")
    return [place]


def gathered(proof: Examples, node: Node) -> list[int]:
    data, indices = proof.input(node, 0), proof.input(node, 1)
    place = int(node.attrs.get("axis", 0)) % len(proof.dims(data))
    if proof.has(data) and proof.has(indices):
        raise Unproven("gathers from each example by indices of that example")
    if proof.has(indices):  # rows of a table
        return [place + proof.axis(indices)]
    axis = proof.axis(data)
    if axis == place:
        raise Unproven("picks examples")
    return [axis if axis < place else axis - 1 + len(proof.dims(indices))]


def product(first: int, second: int) -> BatchRule:
    """Rule of products of two inputs. Scales and zero points are single numbers, or belong to the second's columns."""

    def rule(proof: Examples, node: Node) -> list[int]:
        proof.only(node, first, second)
        columns = (first, second, second + 1, second + 2) if second > first + 1 else (first, second, 3)
        for i, value in enumerate(node.inputs):
            if value is not None and i not in columns and math.prod(proof.dims(value)) > 1:
                raise Unproven("has a scale or zero point for each row")
        a, b = proof.input(node, first), proof.input(node, second)
        ranks, rank = (len(proof.dims(a)), len(proof.dims(b))), len(proof.dims(node.output))
        if min(ranks) < 2:
            raise Unproven("multiplies vectors")
        if proof.has(a) and not proof.has(b) and proof.axis(a) == ranks[0] - 2:
            return [rank - 2]
        if proof.has(b) and not proof.has(a) and proof.axis(b) == ranks[1] - 1:
            return [rank - 1]
        axis = _aligned(proof, [a, b], rank)
        if axis >= rank - 2:
            raise Unproven("adds up over examples")
        return [axis]

    return rule


def gemm(proof: Examples, node: Node) -> list[int]:
    proof.only(node, 0)
    if proof.axis(proof.input(node, 0)) != (1 if node.attrs.get("transA", 0) else 0):
        raise Unproven("adds up over examples")
    added = node.input(2)
    if added is not None:
        proof.alike(added, len(proof.dims(added)) - 2)
    return [0]


def recurrent(proof: Examples, node: Node) -> list[int]:
    """Rule: examples are in X and the initial states, in Y and the last states."""
    proof.only(node, 0, 4, 5, 6)
    if node.attrs.get("layout", 0):
        raise Unproven("has its examples along the first axis, which no rule covers")
    for i, wanted in ((0, 1), (4, 0), (5, 1), (6, 1)):
        value = node.input(i)
        if value is None:
            continue
        if not proof.has(value):
            proof.alike(value, wanted)
        elif proof.axis(value) != wanted:
            raise Unproven(f"has examples along another axis of input {i}")
    return [2, 1, 1][: len(node.outputs)]


def scaled(proof: Examples, node: Node) -> list[int]:
    """Rule of quantisation: one scale, or one for each position along an axis."""
    proof.only(node, 0)
    value, scale = proof.input(node, 0), proof.input(node, 1)
    axis, rank = proof.axis(value), len(proof.dims(value))
    if math.prod(proof.dims(scale)) > 1 and (
        len(proof.dims(scale)) > 1 or int(node.attrs.get("axis", 1)) % rank == axis
    ):
        raise Unproven("has a scale for each example")
    return [axis]

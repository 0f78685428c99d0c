"""Values that are parts of other values, as a source, a start and strides.

A reader with strides needs none of the nodes in between: Reshape, Transpose, Split, Slice, Gather of one index, Expand,
Tile of single elements. All types must be static and plain. A Gather of one index whose result is contiguous becomes a
Slice, which takes no time (`runtime.plans.alias`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import common_divisor, sym_array
from tunewright.ir.types import PLAIN

from .. import value_facts
from ..pattern import Const, Match, Op, Rule

#: the most nodes between a value and its source
DEEPEST = 12
_RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})


#: an axis: factors of (size, stride), the last one runs fastest; none: a single element
Axis: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PartialView:
    """A tensor of these axes in ``value``, from element ``start`` on; ``through`` are the nodes between."""

    value: Value
    start: int
    axes: tuple[Axis, ...]
    through: tuple[Node, ...] = ()

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(math.prod(size for size, _ in axis) for axis in self.axes)

    @property
    def moves(self) -> bool:
        """Whether some node between does more than give the same bytes another shape."""
        return any(node.op not in _RESHAPES for node in self.through)

    def permuted(self, perm: Sequence[int]) -> PartialView:
        return replace(self, axes=tuple(self.axes[p] for p in perm))

    def cut(self, at: int, start: int, size: int) -> PartialView | None:
        """A part along an axis; None if the axis has several strides."""
        if (start, size) == (0, self.dims[at]):
            return self
        if len(self.axes[at]) != 1:
            return None
        ((_, stride),) = self.axes[at]
        axes = (*self.axes[:at], _axis((size, stride)), *self.axes[at + 1 :])
        return replace(self, start=self.start + start * stride, axes=axes)

    def reshaped(self, dims: Sequence[int]) -> PartialView | None:
        """The view in another shape with the same number of elements; None if that shape cuts through axes."""
        left = list(_axis(*(factor for axis in self.axes for factor in axis)))
        axes: list[Axis] = []
        for size in reversed(dims):
            factors: list[tuple[int, int]] = []
            while size > 1:
                if not left:
                    return None
                whole, stride = left.pop()
                taken = common_divisor(whole, size)
                if taken == 1 or (taken < whole and taken < size):
                    return None
                factors.insert(0, (taken, stride))
                size //= taken
                if taken < whole:
                    left.append((whole // taken, stride * taken))
            axes.append(_axis(*factors))
        return None if left else replace(self, axes=tuple(reversed(axes)))


def _axis(*factors: tuple[int, int]) -> Axis:
    """An axis of these factors: contiguous factors are merged, and factors of one element dropped."""
    merged: list[tuple[int, int]] = []
    for size, stride in factors:
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    return tuple(merged)


def view(value: Value) -> PartialView | None:
    """The value as a view of its furthest source; None if it is not static and plain."""
    path: list[tuple[Node, Value]] = []
    source = value
    while len(path) < DEEPEST and (before := _before(source)) is not None:
        assert source.producer is not None
        path.append((source.producer, source))
        source = before
    found = _whole(source)
    for node, result in reversed(path):
        if found is None:
            return None
        step = _through(found, node, result)
        # A result that strides cannot express becomes a new source.
        found = _whole(result) if step is None else replace(step, through=(*found.through, node))
    return found


def _whole(value: Value) -> PartialView | None:
    type = value_facts.static(value)
    if type is None or type.layout != PLAIN or 0 in type.dims:
        return None
    axes, step = [], 1
    for size in reversed(type.dims):
        axes.append(_axis((size, step)))
        step *= size
    return PartialView(value, 0, tuple(reversed(axes)))


def _before(value: Value) -> Value | None:
    """The input of the node that makes a value, if that node only selects or reorders elements; else None."""
    node = value.producer
    if node is None or node.epilogue or node.bodies or not node.inputs:
        return None
    if node.op not in _RESHAPES | {"Transpose", "Split", "Slice", "Gather", "Expand", "Tile"}:
        return None
    source = node.inputs[0]
    type = value_facts.static(source)
    return source if type is not None and type.layout == PLAIN and 0 not in type.dims else None


def _through(of: PartialView, node: Node, result: Value) -> PartialView | None:
    """The view that a node makes of a view; None if strides cannot express it."""
    type, rank = value_facts.static(result), len(of.axes)
    if type is None or type.layout != PLAIN or 0 in type.dims:
        return None
    if node.op in _RESHAPES:
        return of.reshaped(type.dims)
    if node.op == "Transpose":
        return of.permuted([int(p) for p in node.attrs.get("perm") or reversed(range(rank))])
    if node.op == "Expand":
        axes = ((),) * (len(type.dims) - rank) + of.axes
        return replace(of, axes=tuple(axis or _axis((n, 0)) for axis, n in zip(axes, type.dims, strict=True)))
    if node.op == "Tile":
        pairs = list(zip(of.axes, of.dims, type.dims, strict=True))
        if any(axis and size is not n and size != n for axis, size, n in pairs):
            return None
        return replace(of, axes=tuple(axis or _axis((n, 0)) for axis, _, n in pairs))
    if node.op == "Split":
        axis = int(node.attrs.get("axis", 0)) % rank
        before = [value_facts.static(v) for v in node.outputs[: result.index]]
        return None if None in before else of.cut(axis, sum(t.dims[axis] for t in before if t), type.dims[axis])
    if node.op == "Gather":
        index = node.inputs[1]
        if index is None or index.const is None or index.const.ndim:
            return None
        axis, at = int(node.attrs.get("axis", 0)) % rank, int(index.const)
        at += of.dims[axis] if at < 0 else 0
        one = of.cut(axis, at, 1) if 0 <= at < of.dims[axis] else None
        return None if one is None else one.reshaped(type.dims)
    return _sliced(of, node, type.dims)


def _sliced(of: PartialView, node: Node, dims: tuple[int, ...]) -> PartialView | None:
    starts, ends, axes, steps = (value_facts.int_list(node.input(i)) for i in (1, 2, 3, 4))
    if starts is None or ends is None or any(v is not None and v.const is None for v in node.inputs[3:]):
        return None
    if any(step != 1 for step in steps or ()):
        return None
    found: PartialView | None = of
    for start, axis in zip(starts, axes if axes is not None else range(len(starts)), strict=True):
        axis %= len(of.dims)
        begin = min(max(start + (of.dims[axis] if start < 0 else 0), 0), of.dims[axis])
        found = None if found is None else found.cut(axis, begin, dims[axis])
    return found


# -- one index ---------------------------------------------------------------------------------------------------------


def _check_index(match: Match) -> str | None:
    """Refuses parts that are not contiguous: devices have kernels for those. Contiguous parts need no kernel."""
    x, index = value_facts.static(match["x"]), match.const("i")
    if x is None or x.layout != PLAIN or index.ndim or value_facts.static(match.root.output) is None:
        return f"the part of {match['x']!r} is not known"
    axis = value_facts.axis(match.root, 0, match["x"])
    if axis is None or math.prod(x.dims[:axis]) != 1 or not -x.dims[axis] <= int(index) < x.dims[axis]:
        return f"the part of {match['x']!r} does not lie in one piece"
    return None


def _cut_out(graph: Graph, match: Match) -> Value:
    x, out = value_facts.static(match["x"]), value_facts.static(match.root.output)
    axis = value_facts.axis(match.root, 0, match["x"])
    assert x is not None and out is not None and axis is not None
    at = int(match.const("i"))
    at += x.dims[axis] if at < 0 else 0
    ends = [graph.constant(sym_array([n]), "end") for n in (at, at + 1, axis)]
    part = graph.add("Slice", [match["x"], *ends]).output
    return graph.add("Reshape", [part, graph.constant(sym_array(out.dims), "shape")]).output


#: used once shapes are known
RULES = (Rule("gather-one", Op("Gather", "x", Const("i")), _cut_out, _check_index),)

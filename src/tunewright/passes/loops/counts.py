"""How often a loop runs and what it counts, as sums of lengths, the number of the iteration and constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tunewright.ir.graph import Node, Value
from tunewright.ir.types import DType
from tunewright.ops import lookup

from .. import value_facts

#: the number of the iteration, a named dimension, or an axis of a value
Symbol: TypeAlias = "str | tuple[Value, int]"
#: no name of a dimension
ITERATION = "\0iteration"
#: a bound that no axis reaches
ENDLESS = (1 << 31) - 1
#: longer vectors and deeper expressions are no arithmetic on shapes
LONGEST, DEEPEST = 16, 24

_SAME = frozenset({"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"})


@dataclass(frozen=True)
class Count:
    """``number``, and each symbol with its factor."""

    number: int = 0
    terms: frozenset[tuple[Symbol, int]] = frozenset()

    @staticmethod
    def symbol(symbol: Symbol) -> Count:
        return Count(0, frozenset({(symbol, 1)}))

    def plus(self, other: Count, times: int = 1) -> Count:
        sums = dict(self.terms)
        for symbol, k in other.terms:
            sums[symbol] = sums.get(symbol, 0) + times * k
        kept = frozenset((symbol, k) for symbol, k in sums.items() if k)
        return Count(self.number + times * other.number, kept)

    def of(self, symbol: Symbol) -> int:
        return dict(self.terms).get(symbol, 0)

    @property
    def constant(self) -> int | None:
        return None if self.terms else self.number

    def surely_reaches(self, other: Count) -> bool:
        """Whether it is not less than ``other``, whatever the symbols are."""
        more = self.plus(other, -1).constant
        return more >= 0 if more is not None else (self.constant or 0) >= ENDLESS


class CountSizes:
    """Lengths and whole numbers, in words of `Count`.

    ``known``: values whose count is given; ``outer``: what stands for a value inside a body. ``names``: equal names of
    dimensions are equal sizes here, which holds for the model but not inside a loop.
    """

    def __init__(self, known: Mapping[Value, Count], outer: Mapping[Value, Value], names: bool) -> None:
        self.known, self.outer, self.names = known, outer, names

    def dim(self, value: Value, axis: int, depth: int = 0) -> Count:
        """The length of an axis of a value whose rank is known."""
        value = self.outer.get(value, value)
        dims = value_facts.shape(value) or ()
        size = dims[axis] if axis < len(dims) else None
        if isinstance(size, int):
            return Count(size)
        if isinstance(size, str) and self.names:
            return Count.symbol(size)
        node = value.producer
        if node is not None and depth <= DEEPEST and not node.epilogue and node.inputs and node.inputs[0] is not None:
            if node.op == "Transpose" and "perm" in node.attrs:
                return self.dim(node.inputs[0], int(node.attrs["perm"][axis]), depth + 1)
            spec = lookup(node.op)
            if len(node.inputs) == 1 and spec is not None and spec.elementwise:
                return self.dim(node.inputs[0], axis, depth + 1)
            if node.op == "Slice" and _keeps_axis(node, axis, len(dims)):
                return self.dim(node.inputs[0], axis, depth + 1)
            made = self._shape(node, depth)
            if made is not None and len(made) == len(dims):
                return made[axis]
        return Count.symbol((value, axis))

    def _shape(self, node: Node, depth: int) -> list[Count] | None:
        """The shape that a node is told to make."""
        if node.op == "ConstantOfShape":
            return self.vector(node.inputs[0], depth + 1)
        given = value_facts.shape(node.inputs[0])
        if node.op == "Expand" and given is not None and all(d == 1 for d in given):
            return self.vector(node.inputs[1], depth + 1)
        return None

    def scalar(self, value: Value | None) -> Count | None:
        """The only element of a whole number; None where it is more, or not known."""
        found = self.vector(value)
        return found[0] if found is not None and len(found) == 1 else None

    def vector(self, value: Value | None, depth: int = 0) -> list[Count] | None:
        """The elements of a vector or scalar of whole numbers."""
        if value is None or depth > DEEPEST:
            return None
        value = self.outer.get(value, value)
        if value in self.known:
            return [self.known[value]]
        if value.const is not None:
            whole = value.const.dtype.kind in "iu" and value.const.size <= LONGEST
            return [Count(int(i)) for i in value.const.reshape(-1)] if whole else None
        node = value.producer
        if node is None or node.epilogue or node.bodies or node.op not in _VECTORS:
            return None
        return _VECTORS[node.op](self, node, depth + 1)

    # -- one operation ------------------------------------------------------------------------------------------------
    def same(self, node: Node, depth: int) -> list[Count] | None:
        to = DType.of_onnx(int(node.attrs["to"])) if node.op == "Cast" else DType.INT64
        found = self.vector(node.inputs[0], depth)
        wraps = to is DType.INT32 and any(abs(c.number) > ENDLESS for c in found or ())
        return found if to in (DType.INT32, DType.INT64) and not wraps else None

    def shape(self, node: Node, depth: int) -> list[Count] | None:
        value = node.inputs[0]
        value = None if value is None else self.outer.get(value, value)
        n, end = value_facts.rank(value), node.attrs.get("end")
        if value is None or n is None:
            return None
        axes = range(n)[slice(int(node.attrs.get("start", 0)), None if end is None else int(end))]
        return [self.dim(value, axis, depth) for axis in axes]

    def gather(self, node: Node, depth: int) -> list[Count] | None:
        vector, index = self.vector(node.inputs[0], depth), value_facts.int_list(node.inputs[1])
        if vector is None or index is None or any(not -len(vector) <= i < len(vector) for i in index):
            return None
        return [vector[i] for i in index]

    def slice(self, node: Node, depth: int) -> list[Count] | None:
        vector = self.vector(node.inputs[0], depth)
        starts, ends, axes, steps = (value_facts.int_list(node.input(i)) for i in (1, 2, 3, 4))
        given = (axes or [0], steps or [1]) == ([0], [1]) and not any(
            node.input(i) is not None and value_facts.int_list(node.input(i)) is None for i in (3, 4)
        )
        if vector is None or not given or starts is None or ends is None or len(starts) != 1 or len(ends) != 1:
            return None
        return vector[starts[0] : ends[0]]

    def extreme(self, node: Node, depth: int) -> list[Count] | None:
        """The largest or smallest of single numbers, where it is certain which that is."""
        rows = [self.vector(v, depth) for v in (node.inputs if node.op in ("Max", "Min") else node.inputs[:1])]
        found = [row[0] for row in rows if row is not None and len(row) == 1]
        if len(found) != len(rows):
            return None
        for c in found:
            if all(c.surely_reaches(o) if node.op.endswith("Max") else o.surely_reaches(c) for o in found):
                return [c]
        return None

    def concat(self, node: Node, depth: int) -> list[Count] | None:
        parts = [self.vector(v, depth) for v in node.inputs]
        return None if any(p is None for p in parts) else [c for p in parts for c in p or ()]

    def sum(self, node: Node, depth: int) -> list[Count] | None:
        a, b = (self.vector(v, depth) for v in node.inputs)
        if a is None or b is None or len(a) != 1 or len(b) != 1:
            return None
        return [a[0].plus(b[0], 1 if node.op == "Add" else -1)]

    def product(self, node: Node, depth: int) -> list[Count] | None:
        a, b = (self.vector(v, depth) for v in (*node.inputs, None)[:2])
        if node.op == "Neg":
            b = [Count(-1)]
        if a is None or b is None or len(a) != 1 or len(b) != 1:
            return None
        if a[0].constant is not None:
            a, b = b, a
        return None if b[0].constant is None else [Count().plus(a[0], b[0].constant)]

    def length(self, node: Node, depth: int) -> list[Count] | None:
        """How many parts a sequence has that a tensor was taken apart into."""
        split = split_sequence(self.outer.get(node.inputs[0], node.inputs[0]))  # type: ignore[arg-type]
        return None if split is None else [self.dim(*split, depth)]


_VECTORS: Mapping[str, Callable[[CountSizes, Node, int], list[Count] | None]] = {
    **dict.fromkeys(_SAME, CountSizes.same),
    "Shape": CountSizes.shape,
    "Gather": CountSizes.gather,
    "Slice": CountSizes.slice,
    "Concat": CountSizes.concat,
    "Add": CountSizes.sum,
    "Sub": CountSizes.sum,
    "Mul": CountSizes.product,
    "Neg": CountSizes.product,
    **dict.fromkeys(("Max", "Min", "ReduceMax", "ReduceMin"), CountSizes.extreme),
    "SequenceLength": CountSizes.length,
}


def _keeps_axis(node: Node, axis: int, rank: int) -> bool:
    """Whether it is a Slice that leaves an axis alone, or turns it round."""
    starts, ends, axes, steps = (value_facts.int_list(node.input(i)) for i in (1, 2, 3, 4))
    if starts is None or ends is None or axes is None or steps is None or not len(starts) == len(axes) == len(steps):
        return False
    for start, end, at, step in zip(starts, ends, axes, steps, strict=True):
        if at % rank == axis and not (start == -1 and step == -1 and end <= -ENDLESS):
            return False
    return True


def split_sequence(value: Value | None) -> tuple[Value, int] | None:
    """The tensor and the axis along which it was taken apart into slices without that axis."""
    node = value.producer if value is not None else None
    if node is None or node.op != "SplitToSequence" or node.attrs.get("keepdims", 1):
        return None
    split = node.input(1)
    if split is not None and (split.const is None or split.const.shape != () or int(split.const) != 1):
        return None
    n, tensor = value_facts.rank(node.inputs[0]), node.inputs[0]
    return None if n is None or tensor is None else (tensor, int(node.attrs.get("axis", 0)) % n)


# -- conditions --------------------------------------------------------------------------------------------------------
#: operation -> its operands in the order of "less", and what equality adds
_COMPARISONS = {"Less": (0, 1, 0), "LessOrEqual": (0, 1, 1), "Greater": (1, 0, 0), "GreaterOrEqual": (1, 0, 1)}
_OPPOSITE = {"Less": "GreaterOrEqual", "LessOrEqual": "Greater", "Greater": "LessOrEqual", "GreaterOrEqual": "Less"}


def limits(value: Value | None, sizes: CountSizes, always: Value | None = None, depth: int = 0) -> list[Count] | None:
    """The limits that a condition sets; None: it says something else as well.

    In a body it says that the number of the iteration is less than each of them, and ``always`` is known to be true; in
    front of the loop (``always`` None) it says that 0 is less.
    """
    if value is None or depth > DEEPEST:
        return None
    value = sizes.outer.get(value, value)
    if value is always:
        return []
    if value.const is not None:
        return [] if value.const.size == 1 and bool(value.const.reshape(())) else None
    node = value.producer
    if node is None or node.epilogue or node.bodies:
        return None
    if node.op in ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"):
        whole = value_facts.dtype(node.inputs[0])
        return limits(node.inputs[0], sizes, always, depth + 1) if whole in (DType.BOOL, None) else None
    if node.op == "And":
        a, b = (limits(v, sizes, always, depth + 1) for v in node.inputs)
        return None if a is None or b is None else [*a, *b]
    op = node.op
    if op == "Not" and node.inputs[0] is not None and node.inputs[0].producer is not None:
        node = node.inputs[0].producer
        op = _OPPOSITE.get(node.op, "")
    if op not in _COMPARISONS:
        return None
    low, high, equal = _COMPARISONS[op]
    less, more = sizes.scalar(node.inputs[low]), sizes.scalar(node.inputs[high])
    if less is None or more is None:
        return None
    bound = more.plus(less, -1).plus(Count(equal))  # a < b says iteration < bound
    if bound.of(ITERATION) != (0 if always is None else -1):
        return None
    return [bound if always is None else bound.plus(Count.symbol(ITERATION))]


def runs_as_often_as(length: Count, most: Count | None, first: Sequence[Count], then: Sequence[Count]) -> str | None:
    """None when a loop runs once for each element of an axis of that length, else why it may not.

    ``most``: its trip count; ``first``: limits that hold for the first iteration; ``then``: those that hold for the
    others. All say that the number of an iteration is less.
    """
    every = [*([most] if most is not None else []), *first, *then]
    if not all(limit.surely_reaches(length) for limit in every):
        return "it may stop before the end of the scanned axis"
    if length not in ([most] if most is not None else []) and length not in then:
        return "it may not stop at the end of the scanned axis"
    runs = length.constant is not None and length.constant >= 1
    if not runs and length not in ([most] if most is not None else []) and length not in first:
        return "it may run once over nothing"
    return None

"""Sizes that a tensor gives: a TopK by a computed K, a Slice to a computed end.

The launch reads such integers once they are computed. It reads them where they come from data, so that what is computed
from them (at most 100 of them) bounds what follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import hint
from tunewright.ir.types import DType
from tunewright.ops.control_types import static

#: an operation of the IR alone: the integers of a tensor, as the launch reads them
NUMBERS = "tunewright::Numbers"
#: inputs that determine the size of a result
SIZES: Mapping[str, tuple[int, ...]] = {
    "Slice": (1, 2), "TopK": (1,), "Range": (0, 1, 2), "Reshape": (1,), "Expand": (1,), "Tile": (1,),
    "ConstantOfShape": (0,), "Pad": (1,),
}  # fmt: skip
#: operations of these whose inputs bound their results, whatever the numbers are
BOUNDED = frozenset({"Slice", "TopK"})
#: operations that make integers out of integers
ARITHMETIC = frozenset({
    "Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze",
    "Concat", "Gather", "Slice",
})  # fmt: skip
#: those that only move integers
MOVES = frozenset({"Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
#: most numbers of a tensor that a launch reads, and most operations that compute a size from them
MOST_NUMBERS, MOST_NODES = 8, 64


@dataclass
class Given:
    """Nodes whose sizes come from tensors."""

    #: these nodes, and the arithmetic that leads to them
    nodes: dict[Node, None] = field(default_factory=dict)
    #: inputs of nodes that are numbers from data: the name of the node's first output, and the input's index
    readers: set[tuple[str, int]] = field(default_factory=set)


def given_sizes(graph: Graph, follows_rows: set[Value]) -> Given:
    """Find nodes whose sizes come from tensors. ``follows_rows``: values whose sizes depend on a number of rows."""
    found = Given()
    for node in graph.nodes:
        operands = [(node, i) for i in SIZES.get(node.op, ()) if _is_data(node.input(i))]
        x = node.inputs[0] if node.inputs else None
        if not operands or node.epilogue or (x not in follows_rows and (x is None or static(x) is None)):
            continue
        if node.op == "Slice" and any(node.input(i) is not None and _is_data(node.input(i)) for i in (3, 4)):
            continue
        one = Given({node: None})
        traced = [_trace(node.inputs[i], (node, i), one) for _, i in operands]
        is_bounded = any(step.op == "Min" for step in one.nodes)
        if node.op == "TopK" and not is_bounded:  # K itself is bounded: it may not exceed the size of the axis
            one = Given({node: None})
            traced = [_read_here(node.inputs[1], node, 1, one)]
        if all(traced) and one.readers and (is_bounded or node.op in BOUNDED):
            found.nodes |= one.nodes
            found.readers |= one.readers
    return found


def _is_data(value: Value | None) -> bool:
    return value is not None and value.const is None


def _trace(value: Value | None, reader: tuple[Node, int], found: Given) -> bool:
    """Follow a number back to where it comes from data. False: a launch cannot read it."""
    waiting = [(value, *reader)]
    while waiting:
        one, node, i = waiting.pop()
        made_by = None if one is None else one.producer
        if one is None or one.const is not None or (made_by is not None and made_by.op in ("Shape", "Size")):
            continue  # absent, or known before the launch, or the size of something
        if made_by is not None and _computes(made_by):
            if made_by not in found.nodes:
                found.nodes[made_by] = None
                waiting += [(given, made_by, k) for k, given in enumerate(made_by.inputs)]
        elif not _read_here(one, node, i, found):
            return False
        if len(found.nodes) > MOST_NODES:
            return False
    return True


def _computes(node: Node) -> bool:
    """Whether a node makes integers out of integers."""
    return node.op in ARITHMETIC and not node.epilogue and all(map(_is_whole, node.inputs))


def _read_here(value: Value | None, node: Node, i: int, found: Given) -> bool:
    """Let the launch read an input of a node as numbers. False: it cannot."""
    type = static(value)
    if type is None or type.dtype not in (DType.INT64, DType.INT32) or not 0 < type.size <= MOST_NUMBERS:
        return False
    found.readers.add((node.output.name, i))
    return True


def _is_whole(value: Value | None) -> bool:
    """Whether a value is absent or a tensor of integers."""
    type = None if value is None else value.tensor
    return value is None or (type is not None and type.dtype in (DType.INT64, DType.INT32))


def most_of(graph: Graph, numbers: Node) -> int | None:
    """The largest valid value of a single number: TopK may take no more than there are."""
    found: list[int] = []
    for node, i in _read(numbers.output):
        type = static(node.inputs[0]) if node.op == "TopK" and i == 1 else None
        if type is not None:
            size = type.dims[int(node.attrs.get("axis", -1))]
            if isinstance(size, int):
                found.append(size)
    return min(found, default=None)


def foreseen_of(graph: Graph, numbers: Node) -> int | None:
    """The assumed value of a single number: a start or an end inside what is cut."""
    for node, i in _read(numbers.output):
        type, axes = static(node.inputs[0]), node.input(3)
        if node.op == "Slice" and i in (1, 2) and type is not None and (axes is None or axes.const is not None):
            axis = 0 if axes is None or axes.const is None else int(axes.const.reshape(-1)[0])
            return int(hint(type.dims[axis])) * (2 * i - 1) // 4
    return None


def _read(value: Value) -> Iterator[tuple[Node, int]]:
    """Yield the readers of a value, and the readers of the same number moved elsewhere."""
    for node, i in value.uses:
        yield node, i
        if node.op in MOVES and i == 0:
            yield from _read(node.output)

"""Joins successive movements, concatenations and element-wise nodes to one operation, where the device has a kernel for
it.

Graphs contain many nodes that mainly move elements. Heads of detectors transpose, cut, scale and join the results of
convolutions; a Cast precedes a change of layout. On a GPU each of them is a launch. This pass follows a result upwards
to existing tensors, through element-wise nodes and movements that strides can express (`views.PartialView`). It
replaces the nodes with one node (`ops.internal.pieces`). It runs last, when shapes and layouts are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import SymInt
from tunewright.ir.types import NHWC, PLAIN, DType, TensorType
from tunewright.ops import lookup
from tunewright.ops.base import Operand
from tunewright.ops.infer import infer_node
from tunewright.ops.internal.pieces import PIECES, Piece, PieceStep, Read, text
from tunewright.ops.internal.reorder import REORDER
from tunewright.ops.onnx.tensors.resize import steps as resized
from tunewright.ops.onnx.tensors.resize import taps

from .. import value_facts
from ..base import Context
from ..pattern import remove_dead
from ..placement.views import PartialView
from .fuse import ELEMENTWISE

_RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", REORDER})
_MOVES = frozenset({REORDER, "Transpose", "Split", "Slice", "Expand", "Concat", "Resize"})
#: Limits of one operation. A kernel has separate text for each part, so that more parts compile slowly.
MOST_PARTS, MOST_STEPS, MOST_READS, DEEPEST = 16, 16, 8, 24
#: A tensor of so few integers may be a shape, which the host reads.
SHAPES = 64
#: The least elements along two axes for which tiles pay; only the kernel of a single movement has tiles.
WORTH_TILES = 16


@dataclass(frozen=True)
class _Part:
    """A box of a value: its position ``at``, views of its shape, and the steps that compute it from the views."""

    at: tuple[int, ...]
    views: tuple[PartialView, ...]
    steps: tuple[PieceStep, ...] = ()

    @property
    def dims(self) -> tuple[int, ...]:
        return self.views[0].dims


class PiecesPass:
    """Works from the last node to the first, so that each operation is as long as possible."""

    name = "pieces"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None or not context.knows(PIECES):  # the host runs the model's operations
            return False
        changed = False
        order = {node: at for at, node in enumerate(graph.nodes)}
        for node in reversed(graph.nodes):
            if node in graph and (node.op in _MOVES or _computes(node)) and len(node.outputs) == 1:
                changed |= _rewrite(graph, node, order, context)
        if changed:
            graph.sort()
        return changed


def _rewrite(graph: Graph, node: Node, order: Mapping[Node, int], context: Context) -> bool:
    type = value_facts.static(node.output)
    search = _Search(graph)
    found = search.above(node)
    if found is None or type is None or (type.dtype.is_integer and type.size <= SHAPES):
        return False
    gone = [n for n in search.taken if n is not node and _dies(graph, n, search.taken)]
    launched = [n for n in (node, *gone) if n.op not in _RESHAPES or n.op == REORDER]
    if len(launched) < 2 or not any(n.op in _MOVES for n in launched) or _turns(found, type):
        return False
    sources = list(dict.fromkeys(view.value for part in found for view in part.views))
    if any(t is not None and t.is_symbolic for t in (type, *(v.tensor for v in sources))):
        return False  # the text of boxes has numbers alone
    attrs = {"dims": type.dims, "dtype": type.dtype.onnx_code, "parts": text([_final(p, sources) for p in found])}
    origin = dict.fromkeys(name for n in (*reversed(gone), node) for name in n.origin)
    new = graph.add(PIECES, sources, attrs, types=[type], name=node.name, origin=origin)
    spec = lookup(PIECES)
    assert spec is not None
    infer_node(new, spec)
    new.output.type = type
    reason = context.works_in(new, type.layout, [])
    if reason is not None:
        context.log.refused(PiecesPass.name, node, reason)
        graph.remove(new)
        return False
    new.output.name, node.output.name = node.output.name, new.output.name
    graph.replace(node.output, new.output)
    remove_dead(graph, sorted(search.taken, key=lambda n: -order[n]))
    context.log.applied(PiecesPass.name, new)
    return True


def _dies(graph: Graph, node: Node, taken: Sequence[Node]) -> bool:
    """Whether only the taken nodes read it."""
    return all(user in taken for v in node.outputs for user in v.users) and not any(map(graph.is_output, node.outputs))


def _computes(node: Node) -> bool:
    """Whether a node and its epilogue are element-wise."""
    spec = lookup(node.op)
    ops = [node.op, *(step.op for step in node.epilogue)]
    return spec is not None and all(op in ELEMENTWISE for op in ops) and not node.bodies


def _plain_attrs(attrs: Mapping[str, Any]) -> bool:
    return all(isinstance(v, int | float | str) for v in attrs.values())


def _final(part: _Part, sources: Sequence[Value]) -> Piece:
    reads = tuple(Read(sources.index(v.value), v.start, v.axes) for v in part.views)
    return Piece(part.at, part.dims, reads, part.steps)


def _turns(found: Sequence[_Part], out: TensorType) -> bool:
    """Whether a large part is written along another axis than it is read along; tiles serve that better."""
    last = 1 if out.layout == NHWC else len(out.dims) - 1
    for view in (view for part in found for view in part.views if view.axes and view.axes[last]):
        type = view.value.tensor
        assert type is not None
        # the plain stride of elements that are adjacent in memory
        near = math.prod(type.dims[2:]) if type.layout == NHWC else 1
        size, stride = view.axes[last][-1]
        lines = any(s == near and n >= WORTH_TILES for axis in view.axes for n, s in axis)
        if size >= WORTH_TILES and stride not in (0, near) and lines:
            return True
    return False


class _Search:
    """Follows one result upwards."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        #: nodes that become part of the operation, users before their operands
        self.taken: list[Node] = []

    def above(self, node: Node) -> list[_Part] | None:
        """The parts of a node's result; None if the node cannot become part of an operation."""
        found = self._through(node, node.output, 0)
        return found if found is not None and len(found) <= MOST_PARTS and all(map(_fits, found)) else None

    def _parts(self, value: Value, depth: int) -> list[_Part] | None:
        """The parts of an operand; None if it cannot be read with strides."""
        node = value.producer
        if node is not None and depth < DEEPEST and value.const is None and self._may_take(node, value):
            size = len(self.taken)
            found = self._through(node, value, depth + 1)
            if found is not None and len(found) <= MOST_PARTS and all(map(_fits, found)):
                return found
            del self.taken[size:]
        whole = _whole(value)
        return None if whole is None else [_Part((0,) * len(whole.dims), (whole,))]

    def _may_take(self, node: Node, value: Value) -> bool:
        if node.bodies or (node.epilogue and not _computes(node)):
            return False
        if node.op in _RESHAPES | _MOVES:
            return True
        # A value with several users would be computed twice.
        return _computes(node) and len(value.users) == 1 and not self.graph.is_output(value)

    def _through(self, node: Node, result: Value, depth: int) -> list[_Part] | None:
        type = value_facts.static(result)
        if type is None or 0 in type.dims or len(self.taken) > 4 * DEEPEST:
            return None
        if node not in self.taken:
            self.taken.append(node)
        if _computes(node):
            return self._computed(node, type, depth)
        if node.op == "Concat":
            return self._joined(node, type, depth)
        source = node.inputs[0]
        assert source is not None
        if value_facts.static(source) is None or 0 in source.type.dims:  # type: ignore[union-attr]
            return None
        parts = self._parts(source, depth)
        if parts is None:
            return None
        moved = [_moved(part, node, result, type, len(parts) > 1) for part in parts]
        return None if any(part is None for part in moved) else [part for part in moved if part is not None]

    def _joined(self, node: Node, type: TensorType, depth: int) -> list[_Part] | None:
        axis, at, found = int(node.attrs["axis"]) % len(type.dims), 0, []
        for value in node.inputs:
            one = value_facts.static(value)
            parts = None if one is None or value is None or 0 in one.dims else self._parts(value, depth)
            if parts is None or one is None:
                return None
            for part in parts:
                there = part.at[axis] + at
                found.append(replace(part, at=(*part.at[:axis], there, *part.at[axis + 1 :])))
            at += one.dims[axis]
        return found

    def _computed(self, node: Node, type: TensorType, depth: int) -> list[_Part] | None:
        """Joins the operands' programs to one, for each part of the operand that has several parts."""
        if not _plain_attrs(node.attrs) or not all(_plain_attrs(step.attrs) for step in node.epilogue):
            return None
        if any(value is None for value in node.inputs):
            return None
        operands = [self._parts(value, depth) for value in node.inputs if value is not None]
        given = [parts for parts in operands if parts is not None]
        if len(given) < len(operands) or sum(len(parts) > 1 for parts in given) > 1:
            return None
        many = next((parts for parts in given if len(parts) > 1), None)
        whole = type.size if many is None else sum(math.prod(p.dims) for p in many)
        if many is not None and (len(many[0].at) != len(type.dims) or whole != type.size):
            return None  # the operand is broadcast to the result
        boxes = [(part.at, part.dims) for part in many] if many is not None else [((0,) * len(type.dims), type.dims)]
        made = []
        for k, (at, dims) in enumerate(boxes):
            spread = [parts[k] if parts is many else _spread(parts[0], type.dims, at, dims) for parts in given]
            steps = _typed(node)
            if steps is None or any(part is None for part in spread):
                return None
            made.append(_program(at, [part for part in spread if part is not None], steps))
        return made


def _fits(part: _Part) -> bool:
    return len(part.steps) <= MOST_STEPS and len(part.views) <= MOST_READS


def _whole(value: Value) -> PartialView | None:
    """The view of an existing tensor in its plain order, whatever its layout is."""
    type = value_facts.static(value)
    if type is None or 0 in type.dims or type.layout not in (PLAIN, NHWC):
        return None
    axes, step = [], 1
    for size in reversed(type.dims):
        axes.append(((size, step),) if size > 1 else ())
        step *= size
    return PartialView(value, 0, tuple(reversed(axes)))


def _spread(part: _Part, whole: Sequence[int], at: Sequence[int], dims: Sequence[int]) -> _Part | None:
    """An operand over a box of the result to which it is broadcast."""
    missing = len(whole) - len(part.at)
    views = []
    for view in part.views:
        axes = (*((),) * missing, *view.axes)
        wide = replace(view, axes=tuple(a or (((n, 0),) if n > 1 else ()) for a, n in zip(axes, whole, strict=True)))
        for axis, (start, size) in enumerate(zip(at, dims, strict=True)):
            cut = wide.cut(axis, start, size)
            if cut is None:
                return None
            wide = cut
        views.append(wide)
    return replace(part, at=tuple(at), views=tuple(views))


def _typed(node: Node) -> list[tuple[str, tuple[int, ...], DType, Mapping[str, Any]]] | None:
    """A node and its epilogue as steps, each with its result type; arguments are numbered as in `Fused`."""
    types: list[Any] = [v.type if v is not None else None for v in node.inputs]
    first = tuple(range(len(node.main_inputs)))
    made: list[TensorType] = []
    found = []
    for op, args, attrs in [(node.op, first, node.attrs), *((s.op, s.args, s.attrs) for s in node.epilogue)]:
        spec = lookup(op)
        if spec is None:
            return None
        type = spec.infer([Operand(types[i] if i >= 0 else made[~i]) for i in args], attrs, 1)[0]
        if not isinstance(type, TensorType):
            return None
        made.append(type)
        found.append((op, tuple(args), type.dtype, attrs))
    return found


def _program(at: tuple[int, ...], parts: Sequence[_Part], steps: Sequence[tuple[Any, ...]]) -> _Part:
    """The programs of the operands in order, followed by that of a node."""
    views: list[PartialView] = []
    before: list[PieceStep] = []
    results = []
    for part in parts:
        first, base = len(views), len(before)
        views += part.views
        for step in part.steps:
            args = tuple(i + first if i >= 0 else ~(~i + base) for i in step.args)
            before.append(replace(step, args=args))
        results.append(~(len(before) - 1) if part.steps else first)
    own = len(before)
    for op, args, dtype, attrs in steps:
        given = tuple(results[i] if i >= 0 else ~(~i + own) for i in args)
        before.append(PieceStep(op, given, dtype, attrs))
    return _Part(at, tuple(views), tuple(before))


def _moved(part: _Part, node: Node, result: Value, type: TensorType, several: bool) -> _Part | None:
    """The part that a moving node makes of a part, or None."""
    source = node.inputs[0]
    assert source is not None and source.tensor is not None
    dims = source.tensor.dims
    if node.op == REORDER or (node.op in _RESHAPES and dims == type.dims):
        return part
    if node.op in _RESHAPES:
        same = 0
        while same < min(len(dims), len(type.dims)) and dims[-1 - same] == type.dims[-1 - same]:
            same += 1
        lead = len(dims) - same
        if several and (any(part.at[:lead]) or part.dims[:lead] != dims[:lead]):
            return None
        kept = part.dims[lead:]
        views = [view.reshaped((*type.dims[: len(type.dims) - same], *kept)) for view in part.views]
        at = (*(0,) * (len(type.dims) - same), *part.at[lead:])
    elif node.op == "Transpose":
        perm = [int(p) for p in node.attrs.get("perm") or reversed(range(len(dims)))]
        views, at = [view.permuted(perm) for view in part.views], tuple(part.at[p] for p in perm)
    elif several:
        return None
    else:
        at = (0,) * len(type.dims)
        views = [_cut(view, node, result, type, dims) for view in part.views]
    found = [view for view in views if view is not None]
    return replace(part, at=at, views=tuple(found)) if len(found) == len(views) else None


def _cut(view: PartialView, node: Node, result: Value, type: TensorType, dims: tuple[int, ...]) -> PartialView | None:
    """The view after Split, Slice, Expand, or a Resize to whole multiples; None if that is impossible."""
    if node.op == "Split":
        axis = int(node.attrs.get("axis", 0)) % len(dims)
        before = [value_facts.static(v) for v in node.outputs[: result.index]]
        return view.cut(axis, sum(t.dims[axis] for t in before if t is not None), type.dims[axis])
    if node.op == "Expand":
        axes = ((),) * (len(type.dims) - len(dims)) + view.axes
        wide = (a or (((n, 0),) if n > 1 else ()) for a, n in zip(axes, type.dims, strict=True))
        return replace(view, axes=tuple(wide))
    if node.op == "Resize":
        if not _repeats(node, dims, type.dims):
            return None
        factors = [b // a for a, b in zip(dims, type.dims, strict=True)]
        axes = tuple((*a, (f, 0)) if f > 1 else a for a, f in zip(view.axes, factors, strict=True))
        return replace(view, axes=axes)
    starts, axes_, steps = (value_facts.int_list(node.input(i)) for i in (1, 3, 4))
    if starts is None or any(v is not None and v.const is None for v in node.inputs[1:]):
        return None
    if any(step != 1 for step in steps or ()):
        return None
    found: PartialView | None = view
    for start, axis in zip(starts, axes_ if axes_ is not None else range(len(starts)), strict=True):
        axis %= len(dims)
        begin = min(max(start + (dims[axis] if start < 0 else 0), 0), dims[axis])
        found = None if found is None else found.cut(axis, begin, type.dims[axis])
    return found


def _repeats(node: Node, dims: tuple[int, ...], made: tuple[int, ...]) -> bool:
    """Whether a Resize repeats each element as often as the result is larger, according to the reference's tables."""
    values = [None if v is None else v.const for v in (node.input(i) for i in (1, 2, 3))]
    rests = [b % a for a, b in zip(dims, made, strict=True)]
    if node.attrs.get("mode", "nearest") != "nearest" or any(isinstance(r, SymInt) or r for r in rests):
        return False
    if any(node.input(i) is not None and value is None for i, value in zip((1, 2, 3), values, strict=True)):
        return False
    roi, scales, sizes = values
    for step in resized(dims, roi, scales, sizes, node.attrs):
        found = taps(dims[step.axis], step, node.attrs)
        wanted = np.arange(step.out) // (step.out // dims[step.axis])
        if found.outside is not None or not np.array_equal(found.indices[:, 0], wanted):
            return False
    return True

"""Decides which values share bytes: views, contiguous slices and splits, concatenations, results in place."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from tunewright.ir.graph import Node, Value
from tunewright.ir.symbolic import same
from tunewright.ir.types import NHWC, PLAIN, TensorType
from tunewright.ops import lookup
from tunewright.ops.internal.reorder import REORDER, moves_nothing
from tunewright.ops.onnx.tensors.slicing import limits

from .plan import static_tensor


@dataclass
class Sharing:
    """``place``: value -> (storage, byte offset). ``sizes``: bytes per storage. ``free``: nodes that move nothing."""

    place: dict[Value, tuple[int, int]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    free: set[Node] = field(default_factory=set)
    members: list[list[Value]] = field(default_factory=list)

    def new(self, value: Value, nbytes: int) -> None:
        """Give a value a storage of its own."""
        self.sizes.append(nbytes)
        self.members.append([])
        self.put(value, len(self.sizes) - 1, 0)

    def put(self, value: Value, storage: int, offset: int) -> None:
        self.place[value] = (storage, offset)
        self.members[storage].append(value)


def share(
    nodes: Sequence[Node], leaving: Sequence[Value], boundary: Sequence[Value], written: Container[Value] = ()
) -> Sharing:
    """Assign storage to every planned value. ``written``: values in planned memory that control flow writes."""
    sharing = Sharing()
    kept = set(leaving) | set(boundary)
    last = {v: at for at, node in enumerate(nodes) for v in node.inputs if v is not None}
    parts = _concat_parts(nodes, kept)
    waiting: dict[Value, tuple[Value, int]] = {}  # part -> (concatenation's output, offset in it)
    for concat, offsets in parts.items():
        waiting.update({v: (concat.output, at) for v, at in offsets.items()})
    for at, node in enumerate(nodes):
        if _is_view(node, sharing):
            source = node.inputs[0]
            assert source is not None
            storage, base = sharing.place[source]
            for value, offset in zip(node.outputs, _view_offsets(node), strict=True):
                sharing.put(value, storage, base + offset)
            sharing.free.add(node)
            continue
        if node in parts:
            sharing.free.add(node)
            continue
        for value in node.outputs:
            type = static_tensor(value.type)
            if type is None or (node.bodies and value not in written):  # a body makes its own outputs
                continue
            if value in waiting:
                whole, offset = waiting[value]
                if whole not in sharing.place:
                    sharing.new(whole, _nbytes(whole))
                storage, base = sharing.place[whole]
                sharing.put(value, storage, base + offset)
                continue
            victim = _in_place(node, value, at, last, sharing, kept)
            if victim is not None:
                sharing.put(value, *sharing.place[victim])
            else:
                sharing.new(value, type.nbytes)
    return sharing


def _nbytes(value: Value) -> int:
    type = static_tensor(value.type)
    assert type is not None
    return type.nbytes


def _is_view(node: Node, sharing: Sharing) -> bool:
    """Whether the outputs are contiguous parts of the first input's bytes, and that input is planned."""
    source = node.input(0)
    if source is None or source not in sharing.place or node.epilogue:
        return False
    if any(static_tensor(v.type) is None for v in node.outputs):
        return False
    if node.op == REORDER:
        return moves_nothing(source.type, node.output.type)  # type: ignore[arg-type]
    if node.op == "Transpose":
        return _keeps_order(node)
    spec = lookup(node.op)
    if spec is not None and spec.view:
        return _nbytes(node.output) == _nbytes(source) and node.output.type.dtype == source.type.dtype  # type: ignore[union-attr]
    return bool(_view_offsets(node)) if node.op in ("Slice", "Split") else False


def _keeps_order(node: Node) -> bool:
    """Whether the node is a Transpose that moves only axes of length one."""
    source = static_tensor(node.inputs[0].type if node.inputs[0] is not None else None)
    if source is None or source.layout != PLAIN or node.output.tensor is None or node.output.tensor.layout != PLAIN:
        return False
    perm = node.attrs.get("perm") or tuple(reversed(range(len(source.dims))))
    order = [int(axis) for axis in perm if source.dims[int(axis)] != 1]
    return order == sorted(order)


def _view_offsets(node: Node) -> list[int]:
    """Byte offset of each output inside the input; empty when the parts are not contiguous."""
    source = node.inputs[0]
    assert source is not None
    if node.op == "Split":
        axis = int(node.attrs.get("axis", 0)) % len(source.tensor.dims)  # type: ignore[union-attr]
        if _outer(source.tensor, axis) != 1:  # type: ignore[arg-type]
            return []
        offsets, at = [], 0
        for value in node.outputs:
            offsets.append(at)
            at += _nbytes(value)
        return offsets
    if node.op == "Slice":
        return _slice_offset(node)
    return [0]


def _outer(type: TensorType, axis: int) -> int:
    """The number of elements outside an axis, in memory order: a part of the axis lies in as many pieces."""
    order = (0, *range(2, len(type.dims)), 1) if type.layout == NHWC else tuple(range(len(type.dims)))
    return math.prod(type.dims[a] for a in order[: order.index(axis)])


def _slice_offset(node: Node) -> list[int]:
    """Byte offset of a contiguous slice; empty for any other.

    A slice with step 1 is contiguous if every dimension before the last cut one has a single element left.
    """
    source = node.inputs[0]
    assert source is not None and source.tensor is not None
    given = [None if v is None or v.const is None else v.const.reshape(-1) for v in node.inputs[1:]]
    if any(v is not None and v.const is None for v in node.inputs[1:]) or len(given) < 2:
        return []
    starts, ends = given[0], given[1]
    assert starts is not None and ends is not None
    dims = source.tensor.dims
    axes = given[2] if len(given) > 2 and given[2] is not None else range(len(starts))
    steps = given[3] if len(given) > 3 and given[3] is not None else [1] * len(starts)
    begin = [0] * len(dims)
    size = list(dims)
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes, steps, strict=True):
        if step != 1:
            return []
        axis = int(axis) % len(dims)
        lo, hi = limits(start, end, 1, dims[axis])
        if hi <= lo:
            return []
        begin[axis], size[axis] = lo, hi - lo
    if source.tensor.layout == NHWC:
        dims, begin, size = ((x[0], *x[2:], x[1]) for x in (dims, begin, size))  # type: ignore[assignment]
    block = source.tensor.layout.block
    if block:  # memory holds blocks on the channel axis and lanes at the end; a slice begins with a block
        dims, begin, size = source.tensor.physical, [*begin, 0], [*size, block]
        begin[1], size[1] = begin[1] // block, -(-size[1] // block)
    cut = [a for a in range(len(dims)) if not same([size[a]], [dims[a]])]
    if cut and math.prod(size[: max(cut)]) != 1:
        return []
    strides = [math.prod(dims[a + 1 :]) for a in range(len(dims))]
    return [sum(b * s for b, s in zip(begin, strides, strict=True)) * source.tensor.dtype.itemsize]


def _concat_parts(nodes: Sequence[Node], kept: set[Value]) -> dict[Node, dict[Value, int]]:
    """Find concatenations whose inputs can be written into the result: contiguous, made here, each used once."""
    made = {v: node for node in nodes for v in node.outputs}
    taken: set[Value] = set()
    found: dict[Node, dict[Value, int]] = {}
    for node in nodes:
        whole = static_tensor(node.output.type) if node.op == "Concat" else None
        if whole is None or node.epilogue:
            continue
        axis = int(node.attrs.get("axis", 0)) % max(1, len(whole.dims))
        if _outer(whole, axis) != 1 or len(set(node.inputs)) != len(node.inputs) or node.output in taken:
            continue
        offsets: dict[Value, int] = {}
        at = 0
        for value in node.inputs:
            if (
                value is None
                or value not in made
                or value in kept
                or value in taken
                or static_tensor(value.type) is None
            ):
                break
            if len(value.uses) != 1 or _may_alias(made[value]):
                break
            offsets[value] = at
            at += _nbytes(value)
        else:
            found[node] = offsets
            taken.update(offsets)
            taken.add(node.output)
    return found


def _may_alias(node: Node) -> bool:
    """Whether the node's output may lie inside other bytes, so that it cannot be told where to write."""
    if node.op == REORDER:
        source = node.inputs[0]
        assert source is not None
        return moves_nothing(source.type, node.output.type)  # type: ignore[arg-type]
    spec = lookup(node.op)
    is_view = (spec is not None and spec.view) or (node.op == "Transpose" and _keeps_order(node))
    return node.op in ("Slice", "Split", "Concat") or is_view or bool(node.bodies)


def _in_place(
    node: Node, value: Value, at: int, last: dict[Value, int], sharing: Sharing, kept: set[Value]
) -> Value | None:
    """Find an input whose bytes the result may take over: it dies here and is read element by element."""
    spec = lookup(node.op)
    if spec is None or len(node.outputs) != 1:
        return None
    # An element-wise operation may overwrite any input. Others may overwrite inputs that only the epilogue reads (a
    # residual).
    candidates = node.inputs if spec.elementwise else node.inputs[len(node.main_inputs) :]
    protected = set() if spec.elementwise else set(node.main_inputs)
    for victim in candidates:
        if victim is None or victim in protected or victim not in sharing.place or victim.tensor is None:
            continue
        if not victim.tensor.is_same(value.type):
            continue
        storage = sharing.place[victim][0]
        if not same([sharing.sizes[storage]], [_nbytes(victim)]):
            continue
        # The node may read a view of the same bytes in another order than it writes the result.
        if any(v is not None and v is not victim and sharing.place.get(v, (-1,))[0] == storage for v in node.inputs):
            continue
        if all(v not in kept and last.get(v, at) <= at for v in sharing.members[storage]):
            sharing.members[storage].clear()  # all members are dead; the list stays short in long chains
            return victim
    return None

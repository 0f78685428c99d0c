"""Computes values that are the same in every iteration of a loop once, in front of the loop.

The loop may never run. Therefore only nodes move that certainly cannot fail: pure ones whose operands fit each other
for all sizes of open dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tunewright.errors import ModelError
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import Dim, DType, Shape
from tunewright.ops import lookup
from tunewright.ops.infer import infer_node

from .. import value_facts
from ..base import Context

#: the most bytes of a result that may always move
MOST_BYTES = 1 << 20
#: the most columns of a product for each column of its operand
MOST_GROWTH = 4
#: Element-wise operations that accept every whole number; a division does not.
_WHOLE = frozenset({"Add", "Sub", "Mul", "Neg", "Abs", "Min", "Max", "Identity", "Cast", "Equal", "Less", "Greater"})

#: element-wise operations with further conditions on their operands than broadcasting
_PARTICULAR = frozenset({"BitShift", "CastLike", "Clip", "PRelu", "SwiGLU"})


class HoistInvariants:
    """Moves nodes out of the body of a Loop or Scan if they depend only on captured values."""

    name = "hoist-invariants"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op in ("Loop", "Scan") and node.bodies and node.captures:
                changed |= self._hoist(graph, node, context)
        return changed

    def _hoist(self, graph: Graph, loop: Node, context: Context) -> bool:
        body, at = loop.bodies["body"], len(loop.inputs) - loop.captures
        formals = body.inputs[len(body.inputs) - loop.captures :]
        outer = {f: v for f, v in zip(formals, loop.inputs[at:], strict=True) if v is not None}
        moved: list[Node] = []
        for node in body.nodes:
            if not any(v in outer for v in node.inputs) or any(body.is_output(v) for v in node.outputs):
                continue
            if not all(v is None or v.const is not None or v in outer for v in node.inputs):
                continue
            if _move(graph, node, outer, f"{loop.name}/", names=not context.in_body):
                moved.append(node)
        for node in moved:
            context.log.applied(self.name, node)
        _capture(graph, loop, moved, outer)
        return bool(moved)


def _move(graph: Graph, node: Node, outer: dict[Value, Value], prefix: str, names: bool) -> bool:
    """Add a copy of the node in front of the loop, if it cannot fail there. Returns whether it was added."""
    spec = lookup(node.op)
    if spec is None or not spec.pure or node.bodies or node.epilogue:
        return False
    inputs = [None if v is None else outer.get(v, v) for v in node.inputs]
    if any(v is not None and (v.tensor is None or v.tensor.shape is None) for v in inputs):
        return False
    if not _cannot_fail(node, inputs, names):
        return False
    constants = [v if v is None or v.const is None else graph.constant(v.const, v.name) for v in inputs]
    twin = graph.add_copy(node, constants, name=f"{prefix}{node.name}")
    try:
        infer_node(twin, spec)
        fits = _stays_small(twin, inputs)
    except ModelError:  # The node would fail after all, and whether the loop runs is unknown.
        fits = False
    if not fits:
        graph.remove(twin)
        return False
    outer.update(zip(node.outputs, twin.outputs, strict=True))
    return True


def _capture(graph: Graph, loop: Node, moved: Sequence[Node], outer: Mapping[Value, Value]) -> None:
    """Capture the results of moved nodes that the rest of the body reads, and remove those nodes from the body."""
    body = loop.bodies["body"]
    gone = set(moved)
    for node in moved:
        for value in node.outputs:
            if any(user not in gone for user in value.users):
                formal = body.add_input(value.name, outer[value].type or value.type)
                body.replace(value, formal)
                graph.set_inputs(loop, [*loop.inputs, outer[value]])
                loop.captures += 1
    for node in reversed(moved):
        body.remove(node)


def _stays_small(node: Node, inputs: Sequence[Value | None]) -> bool:
    """Whether no result is much larger than an existing operand: a loop that never runs must not need memory."""
    type = node.output.tensor
    if type is not None and type.is_static and type.nbytes <= MOST_BYTES:
        return True
    shapes = [value_facts.shape(v) or () for v in inputs]
    if node.op == "MatMul":
        deep, wide = shapes[1]
        return isinstance(deep, int) and isinstance(wide, int) and wide <= MOST_GROWTH * deep
    return node.op in _CHECKS or any(_dominates(dims, shapes) for dims in shapes)


def _dominates(dims: Shape, shapes: Sequence[Shape]) -> bool:
    """Whether broadcasting makes nothing larger than an operand of these dimensions."""
    for other in shapes:
        pairs = zip(reversed(dims), reversed(other), strict=False)
        if other is not dims and (len(other) > len(dims) or any(b not in (1, a) or (b is None) for a, b in pairs)):
            return False
    return True


# -- nodes that cannot fail --------------------------------------------------------------------------------------------
def _cannot_fail(node: Node, inputs: Sequence[Value | None], names: bool) -> bool:
    spec = lookup(node.op)
    shapes = [value_facts.shape(v) or () for v in inputs]
    if node.op in _CHECKS:
        return _CHECKS[node.op](node, inputs, shapes)
    if spec is None or not spec.elementwise or None in inputs or node.op in _PARTICULAR or "::" in node.op:
        return False
    kinds = {value_facts.dtype(v) for v in inputs}
    numbers = all(k is not None and (k.is_float or k in (DType.INT32, DType.INT64, DType.BOOL)) for k in kinds)
    whole = any(k is not None and not k.is_float for k in kinds)
    if not numbers or (whole and node.op not in _WHOLE) or (node.op == "Cast" and not _to_number(node)):
        return False
    return _surely_broadcast(shapes, names)


def _to_number(node: Node) -> bool:
    to = DType.of_onnx(int(node.attrs["to"]))
    return to in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.INT64, DType.BOOL)


def _surely_broadcast(shapes: Sequence[Shape], names: bool) -> bool:
    """Whether sizes are equal or 1, axis by axis."""
    rank = max(len(s) for s in shapes)
    for axis in range(1, rank + 1):
        dims: set[Dim] = {s[-axis] for s in shapes if len(s) >= axis} - {1}
        if len(dims) > 1 or (len(shapes) > 1 and _is_open(dims, names) and not _alone(shapes, axis)):
            return False
    return True


def _is_open(dims: set[Dim], names: bool) -> bool:
    return any(d is None or (isinstance(d, str) and not names) for d in dims)


def _alone(shapes: Sequence[Shape], axis: int) -> bool:
    """Whether only one operand has more than 1 along that axis."""
    return sum(len(s) >= axis and s[-axis] != 1 for s in shapes) <= 1


def _product(node: Node, inputs: Sequence[Value | None], shapes: Sequence[Shape]) -> bool:
    a, b = shapes[:2]
    if len(a) < 2 or len(b) != 2:
        return False
    kinds = {value_facts.dtype(v) for v in inputs}
    return isinstance(a[-1], int) and a[-1] == b[0] and kinds <= {DType.FLOAT32, DType.FLOAT16, DType.FLOAT64}


def _transpose(node: Node, inputs: Sequence[Value | None], shapes: Sequence[Shape]) -> bool:
    perm = node.attrs.get("perm")
    return perm is None or sorted(int(p) for p in perm) == list(range(len(shapes[0])))


def _shape(node: Node, inputs: Sequence[Value | None], shapes: Sequence[Shape]) -> bool:
    return True


def _unsqueeze(node: Node, inputs: Sequence[Value | None], shapes: Sequence[Shape]) -> bool:
    axes = value_facts.int_list(inputs[1])
    rank = len(shapes[0]) + len(axes or ())
    return axes is not None and all(-rank <= a < rank for a in axes) and len({a % rank for a in axes}) == len(axes)


def _gather(node: Node, inputs: Sequence[Value | None], shapes: Sequence[Shape]) -> bool:
    index, axis = value_facts.int_list(inputs[1]), int(node.attrs.get("axis", 0))
    if index is None or not -len(shapes[0]) <= axis < len(shapes[0]):
        return False
    size = shapes[0][axis]
    return isinstance(size, int) and len(index) <= size and all(-size <= i < size for i in index)


_CHECKS: Mapping[str, Callable[[Node, Sequence[Value | None], Sequence[Shape]], bool]] = {
    "MatMul": _product,
    "Transpose": _transpose,
    "Shape": _shape,
    "Unsqueeze": _unsqueeze,
    "Gather": _gather,
}

"""Types of the outputs of Loop, Scan and If, where they are the same in every iteration and branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from ..errors import TunewrightError
from ..ir.graph import Graph, Node, Value
from ..ir.symbolic import SymArray, Whole, greater
from ..ir.types import PLAIN, DType, TensorType, Type

#: infers the types of a graph whose inputs have types
Infer = Callable[[Graph], object]
ITERATION, CONDITION = TensorType(DType.INT64, ()), TensorType(DType.BOOL, ())


def infer_control(node: Node, infer: Infer, max_bytes: int = 0) -> bool:
    """Set the types of a node's outputs where all its inputs are tensors of known shape. True when a type became known.

    An error in a body is not yet an error of the model, because the body may never run.
    """
    if all(v.type is not None and v.type.is_static for v in node.outputs) or node.op not in _KINDS:
        return False
    try:
        types = _KINDS[node.op](node, infer)
    except TunewrightError:
        return False
    changed = False
    for value, type in zip(node.outputs, types or (), strict=False):
        fits = type is not None and type.is_static and not 0 < max_bytes < type.nbytes
        if fits and not (value.type is not None and value.type.is_static):
            value.type, changed = type, True
    return changed


def body_types(node: Node) -> list[TensorType] | None:
    """Types of the inputs of each body, where they are the same in every iteration; else None."""
    formal = list(node.inputs[: len(node.inputs) - node.captures])
    captured = [static(v) for v in node.inputs[len(formal) :]]
    if node.op == "If":
        found: list[TensorType | None] = []
    elif node.op == "Loop":
        found = [ITERATION, CONDITION, *(static(v) for v in formal[2:])]
    else:
        state = states(node)
        found = [*(static(v) for v in formal[:state]), *_slices(node, formal[state:])]
    found += captured
    return None if None in found else found  # type: ignore[return-value]


def static(value: Value | None) -> TensorType | None:
    """The type of a plain tensor of known shape, else None. Its sizes may be symbolic."""
    type = None if value is None else value.type
    if isinstance(type, TensorType) and type.is_static and type.dtype is not DType.STRING and type.layout == PLAIN:
        return type
    return None


def know_sizes(node: Node, body: Graph) -> None:
    """Replace captured tensors of symbolic sizes by constants in ``body``, the copy for planning with them."""
    for k in range(1, node.captures + 1):
        outer, formal = node.inputs[-k], body.inputs[-k]
        if outer is not None and isinstance(outer.const, SymArray):
            made = body.constant(outer.const, formal.name)
            made.type = outer.type
            body.replace(formal, made)


def states(node: Node) -> int:
    """The number of values that a loop carries from one iteration to the next."""
    formal = len(node.inputs) - node.captures
    return max(0, formal - 2) if node.op == "Loop" else formal - int(node.attrs["num_scan_inputs"])


def goes_on(body: Graph) -> bool:
    """Whether the body of a Loop always continues: it returns its own condition input, or a constant."""
    value = body.outputs[0]
    while value.producer is not None and value.producer.op == "Identity" and value.producer.inputs[0] is not None:
        value = value.producer.inputs[0]
    return value is body.inputs[1] or (value.const is not None and bool(value.const.all()))


def loop_trips(node: Node) -> tuple[Whole, str]:
    """The number of iterations of a Loop; a string with the reason where it is unknown."""
    formal = node.inputs[: len(node.inputs) - node.captures]
    count = formal[0] if formal else None
    start = formal[1] if len(formal) > 1 else None
    if count is None or count.const is None or count.const.size != 1:
        return 0, "the number of iterations is not constant"
    if start is not None and (start.const is None or start.const.size != 1):
        return 0, "the condition is not constant"
    if start is not None and not bool(start.const.reshape(())):  # type: ignore[union-attr]
        return 0, ""
    if not goes_on(node.bodies["body"]):
        return 0, "the body decides when to stop"
    return greater(0, single(count)), ""


def single(value: Value) -> Whole:
    """The integer value of a constant of one element."""
    assert value.const is not None
    found: Whole = value.const.reshape(()).item()
    return found


def scan_axes(node: Node, outputs: int) -> tuple[list[int], list[int]]:
    """The axes along which a Scan splits its inputs and joins its outputs."""
    inputs = [int(a) for a in node.attrs.get("scan_input_axes") or [0] * int(node.attrs["num_scan_inputs"])]
    return inputs, [int(a) for a in node.attrs.get("scan_output_axes") or [0] * outputs]


def scan_length(node: Node) -> Whole | None:
    """The length of a Scan; None where it is unknown or its inputs differ in length."""
    first = states(node)
    lengths: list[Whole] = []
    for value, axis in zip(node.inputs[first:], scan_axes(node, 0)[0], strict=False):
        type = static(value)
        rank = 0 if type is None else len(type.dims)
        if type is None or not -rank <= axis < rank:
            return None
        lengths.append(type.dims[axis])
    return lengths[0] if lengths and all(length == lengths[0] for length in lengths) else None


def _slices(node: Node, scanned: Sequence[Value | None]) -> list[TensorType | None]:
    """Types of the slices that a Scan takes from its inputs in one iteration."""
    found: list[TensorType | None] = []
    for value, axis in zip(scanned, scan_axes(node, 0)[0], strict=True):
        type = static(value)
        rank = 0 if type is None else len(type.dims)
        if type is None or not -rank <= axis < rank:
            return [None]
        found.append(type.with_shape(type.dims[: axis % rank] + type.dims[axis % rank + 1 :]))
    return found


def made_by(node: Node, body: Graph, types: Sequence[Type], infer: Infer) -> list[TensorType | None]:
    """Types of the outputs of a node's body for inputs of the given types."""
    if len(types) != len(body.inputs):
        return []
    twin = body.clone()
    know_sizes(node, twin)
    for value, type in zip(twin.inputs, types, strict=True):
        value.type = type
    infer(twin)
    return [static(v) for v in twin.outputs]


def _branches(node: Node, infer: Infer) -> list[TensorType | None] | None:
    types = body_types(node)
    if types is None:
        return None
    known = None if node.inputs[0] is None else node.inputs[0].const
    if known is not None and known.size == 1:  # the other one never runs
        return made_by(node, node.bodies["then_branch" if known.all() else "else_branch"], types, infer)
    one, *others = [made_by(node, body, types, infer) for body in node.bodies.values()]
    return one if all(made == one for made in others) else None


def _loop(node: Node, infer: Infer) -> list[TensorType | None] | None:
    types = body_types(node)
    made = [] if types is None else made_by(node, node.bodies["body"], types, infer)
    count = states(node)
    if types is None or not made or made[1 : 1 + count] != types[2 : 2 + count]:
        return None
    trips, unknown = loop_trips(node)
    return [*made[1 : 1 + count], *(None if unknown else _stacked(t, trips, 0) for t in made[1 + count :])]


def _scan(node: Node, infer: Infer) -> list[TensorType | None] | None:
    types, length = body_types(node), scan_length(node)
    made = [] if types is None else made_by(node, node.bodies["body"], types, infer)
    count = states(node)
    if types is None or length is None or not made or made[:count] != types[:count]:
        return None
    axes = scan_axes(node, len(made) - count)[1]
    return [*made[:count], *(_stacked(t, length, a) for t, a in zip(made[count:], axes, strict=True))]


def _stacked(type: TensorType | None, count: Whole, axis: int) -> TensorType | None:
    """The type of ``count`` tensors stacked along a new axis."""
    if type is None or not -len(type.dims) - 1 <= axis <= len(type.dims):
        return None
    axis %= len(type.dims) + 1
    return with_dims(type, (*type.dims[:axis], count, *type.dims[axis:]))


def with_dims(type: TensorType, dims: Sequence[Whole]) -> TensorType:
    """The type with other sizes, some of which may be symbolic."""
    return type.with_shape(cast("tuple[int, ...]", tuple(dims)))


_KINDS: dict[str, Callable[[Node, Infer], list[TensorType | None] | None]] = {
    "If": _branches, "Loop": _loop, "Scan": _scan,
}  # fmt: skip

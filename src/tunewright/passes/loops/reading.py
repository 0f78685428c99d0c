"""A Loop or a Scan in one form: the slices it scans, the values it carries and collects, and its iterations."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunewright.ir.graph import Graph, Node, Value

from .. import value_facts
from ..control.control import plain
from .counts import DEEPEST, ITERATION, Count, CountSizes, limits, runs_as_often_as, split_sequence


class NotReadError(Exception):
    """Why a loop does not have this form, in words for the log."""


@dataclass(frozen=True)
class IterationSlices:
    """One slice of a tensor for each iteration: the tensor, its axis, and whether the last slice comes first.

    ``axis`` None: every iteration has the whole tensor.
    """

    tensor: Value
    axis: int | None
    backwards: bool


@dataclass(frozen=True)
class Carried:
    """A value that an iteration takes from the previous one: its first value, and its names in the body and after the
    loop.

    ``next`` is the value for the next iteration, ``last`` the result of the loop.
    """

    first: Value
    inside: Value
    next: Value
    last: Value


@dataclass(frozen=True)
class Collected:
    """The values of ``value`` in all iterations, along a new axis of ``result``."""

    value: Value
    result: Value
    axis: int
    backwards: bool = False
    #: whether the parts are joined along an existing axis instead
    joined: bool = False


@dataclass
class Reading:
    """A loop in this form.

    ``scanned``: value of the body -> its slice, and whether the sliced axis stays, with one element.
    """

    graph: Graph
    node: Node
    body: Graph
    sizes: CountSizes
    scanned: dict[Value, tuple[IterationSlices, bool]] = field(default_factory=dict)
    carried: list[Carried] = field(default_factory=list)
    collected: list[Collected] = field(default_factory=list)
    #: (result, value in front of the loop) of results that the loop does not change
    unchanged: list[tuple[Value, Value]] = field(default_factory=list)

    @property
    def length(self) -> Count:
        """The length of the scanned axis, which is the number of iterations."""
        return self.length_of(next(iter(self.scanned.values()))[0])

    def length_of(self, slices: IterationSlices) -> Count:
        assert slices.axis is not None
        return self.sizes.dim(slices.tensor, slices.axis)

    def is_read(self, value: Value) -> bool:
        return self.graph.is_read(value)


def read(graph: Graph, node: Node, names: bool) -> Reading:
    """Read a loop; raises NotReadError. ``names``: equal names of dimensions mean equal sizes in this graph."""
    found = Reading(graph, node, node.bodies["body"], CountSizes({}, _outer(node), names))
    if node.op == "Loop":
        _read_loop(found)
    else:
        _read_scan(found)
    slices = [s for s, _ in found.scanned.values()]
    if not slices:
        raise NotReadError("it takes no slice of a tensor in each iteration")
    if len({found.length_of(s) for s in slices}) != 1:
        raise NotReadError("the lengths of what it scans may differ")
    if len({s.backwards for s in slices}) != 1:
        raise NotReadError("it scans in both directions")
    if node.op == "Loop":
        _check_trips(found)
    return found


def _outer(node: Node) -> dict[Value, Value]:
    """The captured values, by their values in the body."""
    body = node.bodies["body"]
    at, inner = len(node.inputs) - node.captures, len(body.inputs) - node.captures
    pairs = zip(body.inputs[inner:], node.inputs[at:], strict=True)
    return {formal: value for formal, value in pairs if value is not None}


def _carry(found: Reading, first: Value | None, inside: Value, then: Value, last: Value) -> None:
    if first is None:
        raise NotReadError("a carried value is absent")
    if plain(then) is inside:
        found.sizes = CountSizes(found.sizes.known, {**found.sizes.outer, inside: first}, found.sizes.names)
        found.unchanged.append((last, first))
    else:
        found.carried.append(Carried(first, inside, then, last))


# -- Scan --------------------------------------------------------------------------------------------------------------
def _read_scan(found: Reading) -> None:
    node, body, attrs = found.node, found.body, found.node.attrs
    m = int(attrs["num_scan_inputs"])
    states = len(node.inputs) - node.captures - m
    axes, backwards = attrs.get("scan_input_axes") or [0] * m, attrs.get("scan_input_directions") or [0] * m
    for k in range(m):
        tensor = node.inputs[states + k]
        n = value_facts.rank(tensor)
        if tensor is None or n is None or not -n <= int(axes[k]) < n:
            raise NotReadError(f"the rank of scan input {k} is not known")
        found.scanned[body.inputs[states + k]] = IterationSlices(tensor, int(axes[k]) % n, bool(backwards[k])), False
    for k in range(states):
        _carry(found, node.inputs[k], body.inputs[k], body.outputs[k], node.outputs[k])
    made = len(body.outputs) - states
    axes, backwards = attrs.get("scan_output_axes") or [0] * made, attrs.get("scan_output_directions") or [0] * made
    for k in range(made):
        value, result = body.outputs[states + k], node.outputs[states + k]
        found.collected.append(Collected(value, result, int(axes[k]), bool(backwards[k])))


# -- Loop --------------------------------------------------------------------------------------------------------------
def _read_loop(found: Reading) -> None:
    node, body = found.node, found.body
    formal = node.inputs[: len(node.inputs) - node.captures]
    states = max(0, len(formal) - 2)
    found.sizes = CountSizes({body.inputs[0]: Count.symbol(ITERATION)}, found.sizes.outer, found.sizes.names)
    for k in range(states):
        _carry(found, formal[2 + k], body.inputs[2 + k], body.outputs[1 + k], node.outputs[k])
    _counters(found)
    _sequences(found)
    for k, result in enumerate(node.outputs[states:]):
        found.collected.append(Collected(body.outputs[1 + states + k], result, 0))
    for inner in body.nodes:
        slices = _slice(inner, found)
        if slices is not None:
            found.scanned[inner.output] = slices


def _counters(found: Reading) -> None:
    """Replaces carried numbers that change by a constant step from a known start with functions of the iteration
    number."""
    kept = []
    for carried in found.carried:
        sizes = found.sizes
        start, mark = sizes.scalar(carried.first), Count.symbol((carried.inside, 0))
        after = CountSizes({**sizes.known, carried.inside: mark}, sizes.outer, sizes.names).scalar(carried.next)
        step = None if after is None else after.plus(mark, -1).constant
        if start is None or step is None:
            kept.append(carried)
        elif found.is_read(carried.last):
            raise NotReadError(f"the count %{carried.last.name} is read behind it")
        else:
            now = start.plus(Count.symbol(ITERATION), step)
            found.sizes = CountSizes({**sizes.known, carried.inside: now}, sizes.outer, sizes.names)
    found.carried = kept


def _sequences(found: Reading) -> None:
    """Recognises sequences that grow by one value in each iteration and become one tensor after the loop."""
    kept = []
    for carried in found.carried:
        grow, start = carried.next.producer, plain(carried.first).producer
        if grow is None or start is None or grow.op != "SequenceInsert" or start.op != "SequenceEmpty":
            kept.append(carried)
            continue
        if grow.inputs[0] is not carried.inside or grow.input(2) is not None or len(carried.inside.uses) != 1:
            raise NotReadError(f"the sequence %{carried.last.name} does not grow at its end alone")
        if found.graph.is_output(carried.last):
            raise NotReadError(f"the sequence %{carried.last.name} is a result of the model")
        for reader in carried.last.users:
            if reader.op != "ConcatFromSequence" or grow.inputs[1] is None:
                raise NotReadError(f"the sequence %{carried.last.name} is read by {reader.name!r} ({reader.op})")
            axis, joined = int(reader.attrs["axis"]), not reader.attrs.get("new_axis", 0)
            found.collected.append(Collected(grow.inputs[1], reader.output, axis, joined=joined))
    found.carried = kept


def _slice(node: Node, found: Reading) -> tuple[IterationSlices, bool] | None:
    """The slice that a node takes of a tensor in each iteration, if these are successive slices; else None."""
    if node.op not in ("Gather", "SequenceAt", "Slice") or node.inputs[0] is None or node.inputs[0].const is not None:
        return None
    sizes, index = found.sizes, node.inputs[1]
    tensor: Value | None = sizes.outer.get(node.inputs[0])
    if tensor is None:
        return None
    if node.op == "SequenceAt":
        split = split_sequence(tensor)
        return None if split is None else _along(*split, index, False, sizes)
    n = value_facts.rank(tensor)
    if n is None:
        return None
    if node.op == "Gather":
        known, axis = _rank(index, found), int(node.attrs.get("axis", 0)) % n
        return None if known not in (0, 1) else _along(tensor, axis, index, known == 1, sizes)
    axes, steps = value_facts.int_list(node.input(3)), value_facts.int_list(node.input(4))
    first, last = sizes.scalar(index), sizes.scalar(node.inputs[2])
    if first is None or last is None or not axes or last.plus(first, -1) != Count(1):
        return None
    return None if node.input(4) is not None and steps != [1] else _along(tensor, axes[0] % n, index, True, sizes)


def _along(
    tensor: Value, axis: int, index: Value | None, stays: bool, sizes: CountSizes
) -> tuple[IterationSlices, bool] | None:
    at, step = sizes.scalar(index), Count.symbol(ITERATION)
    if at == step:
        return IterationSlices(tensor, axis, False), stays
    if at is not None and at.plus(step) == sizes.dim(tensor, axis).plus(Count(-1)):
        return IterationSlices(tensor, axis, True), stays
    return None


def _rank(value: Value | None, found: Reading, depth: int = 0) -> int | None:
    """The rank of a count in the body, or None.

    It ignores the model's declarations, and follows the values that the executor provides.
    """
    if value is None or depth > DEEPEST:
        return None
    if value.const is not None:
        return value.const.ndim
    if value is found.body.inputs[0]:
        return 0
    if value in found.sizes.known:
        at = found.body.inputs.index(value)
        return value_facts.rank(found.node.inputs[at])
    if value in found.sizes.outer:
        return value_facts.rank(found.sizes.outer[value])
    node = value.producer
    if node is None or not node.inputs:
        return None
    if node.op in ("Reshape", "Unsqueeze"):
        given = value_facts.int_list(node.input(1))
        before = 0 if node.op == "Reshape" else _rank(node.inputs[0], found, depth + 1)
        return None if given is None or before is None else before + len(given)
    if node.op == "Squeeze":
        return 0
    ranks = [_rank(v, found, depth + 1) for v in node.inputs]
    known = node.op in ("Identity", "Cast", "Add", "Sub", "Mul", "Neg") and None not in ranks
    return max(r or 0 for r in ranks) if known else None


# -- number of iterations ----------------------------------------------------------------------------------------------
def _check_trips(found: Reading) -> None:
    node, sizes = found.node, found.sizes
    count, condition = [*node.inputs[: len(node.inputs) - node.captures], None, None][:2]
    most = None if count is None else sizes.scalar(count)
    if count is not None and most is None:
        raise NotReadError("the number of iterations is not known to be the length of what it scans")
    first = [] if condition is None else limits(condition, sizes)
    then = limits(found.body.outputs[0], sizes, found.body.inputs[1])
    if first is None or then is None:
        raise NotReadError("its condition depends on more than the number of iterations")
    reason = runs_as_often_as(found.length, most, first, [limit.plus(Count(1)) for limit in then])
    if reason is not None:
        raise NotReadError(reason)

"""Loops that count up to a bound: their condition says how often they run, as exporters of while loops write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import DType
from tunewright.ops.control_types import goes_on

from ..base import Context

#: a comparison, and the one that says the same of its operands in the other order
_TURNED = {"Less": "Greater", "Greater": "Less", "LessOrEqual": "GreaterOrEqual", "GreaterOrEqual": "LessOrEqual"}
_REFUTED = {"Less": "GreaterOrEqual", "Greater": "LessOrEqual", "LessOrEqual": "Greater", "GreaterOrEqual": "Less"}


class CountedLoops:
    """The number of iterations of a Loop becomes its trip count where a comparison of a counter ends it.

    Behind n iterations a counter is begin + n * step; the loop ends when its comparison is false for the first time.
    Where it is compared with a constant the trip count is one, too; a bound from outside of the loop makes it a
    difference. Where the condition asks for more, the trip count is a bound, else the condition is dropped.
    """

    name = "counted-loops"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op != "Loop" or not node.bodies or goes_on(node.bodies["body"]) or not _starts(node):
                continue
            parts = list(_parts(node.bodies["body"].outputs[0]))
            bounds = [_bound(node, part) or _open_bound(node, part) for part in parts if not _is_true(node, part)]
            known = [bound for bound in bounds if isinstance(bound, int)]
            open = [bound for bound in bounds if isinstance(bound, _Difference)]
            if not known and not open:
                context.log.refused(self.name, node, "no comparison of a counter ends it")
                continue
            exact = len(known) + len(open) == len(bounds)
            if open:
                done = exact and self.count(graph, node, known, open)
            else:
                done = self.rewrite(graph, node, min(known), exact)
            if done:
                context.log.applied(self.name, node)
                changed = True
        return changed

    def count(self, graph: Graph, node: Node, known: Sequence[int], open: Sequence[_Difference]) -> bool:
        """The trip count is computed in front of the loop: the least of all bounds, and of the one that is given."""
        formal = list(node.inputs[: len(node.inputs) - node.captures])
        if formal[0] is not None and not (formal[0].tensor is not None and formal[0].tensor.shape == ()):
            return False
        origin, bounds = node.origin, [formal[0]] if formal[0] is not None else []
        bounds += [graph.constant(np.asarray(bound, np.int64), f"{node.name}/bound") for bound in known]
        one = graph.constant(np.asarray(1, np.int64), f"{node.name}/one")
        for difference in open:
            wide = graph.add("Cast", [difference.end], {"to": _INT64}, name=f"{node.name}/end", origin=origin).output
            begin = graph.constant(np.asarray(difference.begin, np.int64), f"{node.name}/begin")
            sides = [begin, wide] if difference.down else [wide, begin]
            steps = graph.add("Sub", sides, name=f"{node.name}/steps", origin=origin).output
            bounds.append(graph.add("Max", [steps, one], name=f"{node.name}/first", origin=origin).output)
        if len(bounds) > 1:
            bounds = [graph.add("Min", bounds, name=f"{node.name}/least", origin=origin).output]
        formal[0] = bounds[0]
        graph.set_inputs(node, [*formal, *node.inputs[len(node.inputs) - node.captures :]])
        self.drop_condition(node)
        return True

    def drop_condition(self, node: Node) -> None:
        """Nothing but its trip count ends the loop."""
        body = node.bodies["body"]
        body.outputs = [body.constant(np.asarray(True), "true"), *body.outputs[1:]]

    def rewrite(self, graph: Graph, node: Node, most: int, exact: bool) -> bool:
        """The most iterations; ``exact``: nothing else ends the loop."""
        trips = node.inputs[0] if len(node.inputs) > node.captures else None
        if trips is not None and (trips.const is None or trips.const.size != 1):
            return False  # which of the two is less is not known
        given = None if trips is None else max(0, int(trips.const.reshape(())))  # type: ignore[union-attr]
        if not exact and given is not None and given <= most:
            return False
        count = most if given is None else min(given, most)
        formal = list(node.inputs[: len(node.inputs) - node.captures])
        formal[:1] = [graph.constant(np.asarray(count, np.int64), f"{node.name}/trips")]
        graph.set_inputs(node, [*formal, *node.inputs[len(node.inputs) - node.captures :]])
        if exact:
            self.drop_condition(node)
        return True


def _starts(node: Node) -> bool:
    """Whether the first iteration depends on the trip count alone."""
    formal = node.inputs[: len(node.inputs) - node.captures]
    start = formal[1] if len(formal) > 1 else None
    return start is None or (start.const is not None and start.const.size == 1 and bool(start.const.reshape(())))


def _parts(value: Value) -> Iterator[Value]:
    """Values that are true together when this one is."""
    node = value.producer
    if node is not None and node.op in ("And", "Identity") and not node.epilogue:
        for part in node.inputs:
            assert part is not None
            yield from _parts(part)
    else:
        yield value


def _is_true(node: Node, value: Value) -> bool:
    """Whether an iteration is given a true condition, because there would be none otherwise."""
    return value is node.bodies["body"].inputs[1] or (value.const is not None and bool(value.const.all()))


@dataclass(frozen=True)
class _Counter:
    """What an integer is behind n iterations: begin + n * step. While an iteration runs, n is one more."""

    begin: int
    step: int


def _bound(node: Node, part: Value) -> int | None:
    """The iteration behind which a comparison is false for the first time; None where that is not known."""
    op, left, right = _comparison(part)
    if left is None or right is None:
        return None
    one, other = _counter(node, left), _counter(node, right)
    if one is None or other is None:
        return None
    if other.step:
        one, other, op = other, one, _TURNED[op]
    if other.step or (one.step <= 0 if op.startswith("Less") else one.step >= 0):
        return None
    if op.startswith("Greater"):
        one, other = _Counter(-one.begin, -one.step), _Counter(-other.begin, 0)
    least = other.begin + op.endswith("OrEqual")  # from this number on it is false
    if max(abs(one.begin), abs(least), abs(least + one.step)) >= 1 << 31:
        return None  # an int32 would run over
    return max(1, -((one.begin - least) // one.step))


@dataclass(frozen=True)
class _Difference:
    """The iterations that a counter takes from a number to a value of the graph around the loop, one at a time."""

    begin: int
    end: Value
    down: bool


def _open_bound(node: Node, part: Value) -> _Difference | None:
    """How far a counter is from a single integer that the loop captures; None where a comparison is another one."""
    op, left, right = _comparison(part)
    if left is None or right is None:
        return None
    if _captured(node, right) is None:
        left, right, op = right, left, _TURNED[op]
    counter, end = _counter(node, left), _captured(node, right)
    step = {"Less": 1, "Greater": -1}.get(op)
    if counter is None or end is None or counter.step != step or abs(counter.begin) >= 1 << 31:
        return None
    type = end.tensor
    if type is None or type.shape != () or type.dtype not in (DType.INT32, DType.INT64):
        return None
    return _Difference(counter.begin, end, step < 0)


def _captured(node: Node, value: Value) -> Value | None:
    """What a value of the body is in the graph around it, as an integer of whatever width."""
    maker, inputs = value.producer, node.bodies["body"].inputs
    if maker is not None and maker.op == "Cast" and int(maker.attrs.get("to", 0)) == _INT64 and not maker.epilogue:
        inner = maker.inputs[0]
        return None if inner is None else _captured(node, inner)
    back = len(inputs) - inputs.index(value) if value in inputs else 0
    return node.inputs[-back] if 0 < back <= node.captures else None


def _comparison(part: Value) -> tuple[str, Value | None, Value | None]:
    node = part.producer
    if node is not None and node.op == "Not" and not node.epilogue and node.inputs[0] is not None:
        op, left, right = _comparison(node.inputs[0])
        return _REFUTED.get(op, ""), left, right
    if node is None or node.op not in _TURNED or node.epilogue:
        return "", None, None
    return node.op, node.inputs[0], node.inputs[1]


def _counter(node: Node, value: Value, depth: int = 0) -> _Counter | None:
    """The value as a counter, seen by the comparison in an iteration: n counts that iteration, too."""
    body = node.bodies["body"]
    if value.const is not None:
        return _Counter(_integer(value), 0) if _is_integer(value) else None
    if value is body.inputs[0]:
        return _Counter(-1, 1)
    maker = value.producer
    if maker is None:
        return _state(node, value) if depth == 0 else None
    if depth > 4 or maker.epilogue or maker.op not in ("Add", "Sub", "Identity", "Cast"):
        return None
    if maker.op == "Cast" and int(maker.attrs.get("to", 0)) not in _INTEGERS:
        return None
    terms = [v if v is None else _term(node, v, depth) for v in maker.inputs]
    if None in terms:
        return None
    first, *rest = terms
    for term in rest:
        sign = -1 if maker.op == "Sub" else 1
        first = _Counter(first.begin + sign * term.begin, first.step + sign * term.step)  # type: ignore[union-attr]
    return first


def _term(node: Node, value: Value, depth: int) -> _Counter | None:
    if value.producer is None and value.const is None and value is not node.bodies["body"].inputs[0]:
        return _state(node, value)
    return _counter(node, value, depth + 1)


def _state(node: Node, value: Value) -> _Counter | None:
    """A state that begins with a constant and has a constant added in each iteration, or stays as it is."""
    body = node.bodies["body"]
    at = body.inputs.index(value) if value in body.inputs else -1
    first = node.inputs[at] if 2 <= at < len(node.inputs) - node.captures else None
    if first is None or first.const is None or not _is_integer(first):
        return None
    after = body.outputs[at - 1]
    while after.producer is not None and after.producer.op == "Identity" and after.producer.inputs[0] is not None:
        after = after.producer.inputs[0]
    step = 0
    if after is not value:
        maker = after.producer
        if maker is None or maker.op not in ("Add", "Sub") or maker.epilogue:
            return None
        left, right = maker.inputs
        if maker.op == "Add" and right is value:
            left, right = right, left
        if left is not value or right is None or right.const is None or not _is_integer(right):
            return None
        step = _integer(right) if maker.op == "Add" else -_integer(right)
    return _Counter(_integer(first) - step, step)


#: element types in which a counter does not run over before it reaches a constant: int32, int64
_INTEGERS = (6, 7)
_INT64 = 7


def _is_integer(value: Value) -> bool:
    const = value.const
    return const is not None and const.size == 1 and const.dtype in (np.dtype(np.int32), np.dtype(np.int64))


def _integer(value: Value) -> int:
    assert value.const is not None
    return int(value.const.reshape(()))

"""If, Loop, Scan and SequenceMap: each body is a program, run by the request that runs the node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunewright.errors import ExecutionError, LimitError
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE, SymInt
from tunewright.ir.types import TensorType
from tunewright.ops.control_types import goes_on

from ..plans.program import Environment, Program

if TYPE_CHECKING:
    from ..requests.executor import Executor


class Control(ABC):
    """A control-flow node. Its last ``captures`` inputs go to every body unchanged."""

    def __init__(self, node: Node, env: Environment, repeated: bool = False) -> None:
        self.node, self.env = node, env
        self.captures = node.captures
        self.max_iterations = env.settings.max_iterations
        #: why the request runs the node and not a launch, and which of the model's nodes prevent it
        self.why_not_compiled = ""
        self.blamed: tuple[str, ...] = ()
        self.repeated = repeated | (node.op != "If")
        repeated = self.repeated
        self.bodies = {key: Program(body, env, True, _open(node, body), repeated) for key, body in node.bodies.items()}

    def split(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Divide the inputs into formal inputs and captured values."""
        at = len(inputs) - self.captures
        return list(inputs[:at]), list(inputs[at:])

    @abstractmethod
    def run(self, executor: Executor, inputs: Sequence[Any]) -> Sequence[Any]: ...


class IfRunner(Control):
    def run(self, executor: Executor, inputs: Sequence[Any]) -> Sequence[Any]:
        (condition, *_), captured = self.split(inputs)
        return executor.run(self.branch(condition), captured)

    def branch(self, condition: Any) -> Program:
        return self.bodies["then_branch" if _truth(condition, "the condition") else "else_branch"]


class LoopRunner(Control):
    def run(self, executor: Executor, inputs: Sequence[Any]) -> Sequence[Any]:
        formal, captured = self.split(inputs)
        trips, condition, *carried = [*formal, None, None][: max(2, len(formal))]
        limit = None if trips is None else _count(trips)
        go = condition is None or _truth(condition, "the condition")
        body = self.bodies["body"]
        if go and goes_on(body.graph) and (limit is None or limit > self.max_iterations):
            raise self.too_long("never ends" if limit is None else f"runs {limit:,} times")
        collected: list[list[Any]] = [[] for _ in body.graph.outputs[1 + len(carried) :]]
        iteration = 0
        while go and (limit is None or iteration < limit):
            executor.iterations += 1  # counts all loops together: nested loops multiply
            if executor.iterations > self.max_iterations:
                raise self.too_long("the loops of the model do not end")
            results = executor.run(body, [np.asarray(iteration, np.int64), np.asarray(True), *carried, *captured])
            go = _truth(results[0], "the condition that the body makes")
            carried = list(results[1 : 1 + len(carried)])
            for rows, value in zip(collected, results[1 + len(carried) :], strict=True):
                rows.append(value)
            iteration += 1
        scans = [stack(rows, body.graph, 1 + len(carried) + k) for k, rows in enumerate(collected)]
        return [*(carried if iteration else _detached(carried)), *scans]

    def too_long(self, what: str) -> LimitError:
        return too_long(self.node, what, self.max_iterations)


def too_long(node: Node, what: str, most: int) -> LimitError:
    """The error for a loop that takes too many iterations."""
    hint = f"the limit is MAX_ITERATIONS = {most:,}"
    return LimitError(what, where=f"node {node.name!r} ({node.op})", hint=hint)


class ScanRunner(Control):
    def run(self, executor: Executor, inputs: Sequence[Any]) -> Sequence[Any]:
        formal, captured = self.split(inputs)
        attrs, body = self.node.attrs, self.bodies["body"]
        m = int(attrs["num_scan_inputs"])
        state, scanned = formal[: len(formal) - m], formal[len(formal) - m :]
        n_out = len(body.graph.outputs) - len(state)
        axes = attrs.get("scan_input_axes") or [0] * m
        directions = attrs.get("scan_input_directions") or [0] * m
        rows = [
            np.flip(_move(x, a, 0), 0) if d else _move(x, a, 0)
            for x, a, d in zip(scanned, axes, directions, strict=True)
        ]
        lengths = {len(r) for r in rows}
        if len(lengths) != 1:
            raise ExecutionError(f"the scanned inputs have different lengths: {sorted(lengths)}")
        collected: list[list[Any]] = [[] for _ in range(n_out)]
        (length,) = lengths
        for t in range(length):
            results = executor.run(body, [*state, *(np.array(r[t], order="C") for r in rows), *captured])
            state = list(results[: len(state)])
            for made, value in zip(collected, results[len(state) :], strict=True):
                made.append(value)
        out_axes = attrs.get("scan_output_axes") or [0] * n_out
        out_directions = attrs.get("scan_output_directions") or [0] * n_out
        scans = []
        for k, (made, axis, direction) in enumerate(zip(collected, out_axes, out_directions, strict=True)):
            whole = stack(made[::-1] if direction else made, body.graph, len(state) + k)
            scans.append(np.ascontiguousarray(_move(whole, 0, axis)))  # kernels take contiguous memory
        return [*(state if length else _detached(state)), *scans]


class SequenceMap(Control):
    def run(self, executor: Executor, inputs: Sequence[Any]) -> Sequence[Any]:
        formal, captured = self.split(inputs)
        body = self.bodies["body"]
        first = formal[0]
        if not isinstance(first, list):
            raise ExecutionError("the first input is not a sequence")
        if any(isinstance(x, list) and len(x) != len(first) for x in formal):
            raise ExecutionError("the sequences have different lengths")
        results: list[list[Any]] = [[] for _ in body.graph.outputs]
        for i in range(len(first)):
            row = [x[i] if isinstance(x, list) else x for x in formal]
            for made, value in zip(results, executor.run(body, [*row, *captured]), strict=True):
                made.append(value)
        return results


_KINDS: dict[str, type[Control]] = {
    "If": IfRunner,
    "Loop": LoopRunner,
    "Scan": ScanRunner,
    "SequenceMap": SequenceMap,
}


def make_control(node: Node, env: Environment, repeated: bool = False) -> Control | None:
    """Return the runner of a control-flow node; None for any other node. ``repeated``: the node is inside a loop."""
    return _KINDS[node.op](node, env, repeated) if node.bodies and node.op in _KINDS else None


def stack(rows: list[Any], graph: Graph, output: int) -> np.ndarray[Any, Any]:
    """Stack results of iterations along a new first axis. Without iterations, the body's types give the shape."""
    if rows:
        shapes = {np.shape(row) for row in rows}
        if len(shapes) > 1 or not all(isinstance(row, np.ndarray) for row in rows):
            raise ExecutionError(f"the iterations make results of different shapes: {sorted(map(list, shapes))[:4]}")
        return np.stack(rows)
    type = graph.outputs[output].type
    if not isinstance(type, TensorType):
        return np.empty((0,), np.float32)
    dims = [d if isinstance(d, WHOLE) else 0 for d in type.shape or ()]
    return np.empty((0, *dims), type.dtype.numpy)


def _open(node: Node, body: Graph) -> set[tuple[int, int]]:
    """(input, axis) of the sizes in a body that are symbolic in the plan being made."""
    given: list[Value | None] = [None] * len(body.inputs)
    for back in range(1, node.captures + 1):
        given[-back] = node.inputs[-back]
    if node.op == "Loop":
        carried = node.inputs[2 : len(node.inputs) - node.captures]
        given[2 : 2 + len(carried)] = carried
    return {
        (at, axis)
        for at, value in enumerate(given)
        if value is not None and value.tensor is not None
        for axis, size in enumerate(value.tensor.shape or ())
        if isinstance(size, SymInt)
    }


def _detached(values: Sequence[Any]) -> list[Any]:
    """Copy the inputs that a loop without iterations returns: their bytes may be reused as soon as the step is over."""
    return [value.copy() if isinstance(value, np.ndarray) else value for value in values]


def _move(array: Any, source: int, destination: int) -> np.ndarray[Any, Any]:
    """Call np.moveaxis with axes from a model. Raises ExecutionError for axes out of range."""
    rank = array.ndim if isinstance(array, np.ndarray) else 0
    for axis in (source, destination):
        if not -rank <= axis < rank:
            raise ExecutionError(f"scans along axis {axis} of a value of rank {rank}")
    return np.moveaxis(array, source, destination)


def _count(value: Any) -> int:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise ExecutionError(f"the trip count is {array.dtype} of shape {list(array.shape)} instead of one integer")
    return int(array.reshape(()))


def _truth(value: Any, what: str) -> bool:
    array = np.asarray(value)
    if array.size != 1:
        raise ExecutionError(f"{what} has shape {list(array.shape)} instead of one element")
    return bool(array.reshape(()))

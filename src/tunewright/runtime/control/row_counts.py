"""Steps that make as many rows as the data says, inside a launch, together with the steps behind them.

A kernel of NonZero, Compress or NonMaxSuppression writes its rows and their number. This number is a late symbol
(`ir/launch_symbols.py`). Memory is planned for the most rows; the launch computes what depends on the number once it is
known. Such steps become one node of the graph, whose body is planned like that of a loop. If the launch's rows are
wrong for the actual number, the request runs the same nodes one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from tunewright.devices.control_rows import Block
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import SymArray, SymInt
from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops.control_types import static
from tunewright.ops.internal.append import STANDS_FOR
from tunewright.ops.internal.row_counts import COUNTED, GATHERED
from tunewright.solvers.base import attrs_at_hand

from ..plans.plan import Counts
from ..plans.program import Environment, Program
from ..plans.template import Traced
from .given_sizes import NUMBERS, SIZES, Given, given_sizes
from .interpreter import Control

if TYPE_CHECKING:
    from ..requests.executor import Executor

LOG = logging.getLogger("tunewright")
#: most attempts, each with fewer of the nodes behind
ATTEMPTS = 6


class Counted(Control):
    """Steps that make rows, and the steps behind them. The request can run them as a separate program."""

    def __init__(self, node: Node, env: Environment, repeated: bool, otherwise: Counts) -> None:
        super().__init__(node, env, repeated)
        self.otherwise.counts = otherwise

    @property
    def otherwise(self) -> Program:
        return self.bodies["otherwise"]

    def prepare(self) -> None:
        """Choose kernels for the program that the request runs by itself."""
        self.otherwise.plan(tuple(None if v is None else v.type for v in self.node.inputs))

    def run(self, executor: Executor, inputs: Sequence[Any]) -> Sequence[Any]:
        return executor.run(self.otherwise, list(inputs))


def gather(
    graph: Graph, env: Environment, traced: Traced | None, repeated: bool, counts: Counts
) -> tuple[Graph, dict[Node, tuple[Control, Block]]]:
    """Gather the steps that make rows into one node. Returns the new graph and the node's block.

    Returns the graph unchanged where this fails.
    """
    from .control_rows import block_of

    makers = [node for node in graph.nodes if node.op in COUNTED and all(v is None or _known(v) for v in node.inputs)]
    if counts is Counts.NEVER or not env.device.runs_control:
        return graph, {}
    settings, given = env.settings, Given()
    if not (settings.shape_templates and settings.join_launches and env.device.serves_classes and env.device.compiles):
        counts = Counts.ALONE  # sizes computed during a launch need kernels for classes of shapes
    else:
        given = given_sizes(graph, {v for node in _behind(graph, makers, ()) for v in node.outputs})
    left_out: set[str] = set()
    for _ in range(ATTEMPTS):
        behind = counts is Counts.BEHIND
        members = _behind(graph, [*makers, *given.nodes], left_out) if behind else _makers(makers, left_out)
        if not any(one.op in COUNTED or one.op in SIZES for one in members):
            break
        twin, node = _gathered(graph, members, given.readers if behind else ())
        alone = all(graph_node.op in COUNTED for graph_node in members)
        runner = Counted(node, env, repeated, Counts.NEVER if alone else Counts.ALONE)
        try:
            found = block_of(runner, repeated, traced)
        except Exception:  # a plan without the block reports what is wrong, if anything is
            LOG.debug("%s: sizes that depend on data", graph.name, exc_info=True)
            found = "a defect"
        if isinstance(found, Block):
            return twin, {node: (runner, found)}
        LOG.debug("%s: %d nodes are not part of a launch: %s", graph.name, len(members), found)
        # leave out control flow first: without it, most of the rest fits into a launch
        blamed = {one.output.name for one in members if one.bodies}
        blamed = blamed or {one.output.name for one in members if set(one.origin) & set(runner.blamed)}
        if blamed:
            left_out |= blamed
        elif counts is Counts.BEHIND:
            counts = Counts.ALONE
        else:
            break
    return graph, {}


def opened(type: Type | None) -> Type | None:
    """Return the type without symbolic sizes: they become unknown."""
    if not isinstance(type, TensorType) or type.shape is None or not type.is_symbolic:
        return type
    return type.with_shape(tuple(None if isinstance(d, SymInt) else d for d in type.shape))


def _known(value: Value) -> bool:
    return value.const is not None or static(value) is not None


def _makers(makers: Sequence[Node], left_out: Collection[str]) -> list[Node]:
    return [node for node in makers if node.output.name not in left_out]


def _behind(graph: Graph, makers: Sequence[Node], left_out: Collection[str]) -> list[Node]:
    """Nodes that make rows, and all that follow, without the nodes left out and what follows those."""
    inside: set[Value] = set()
    beyond: set[Value] = set()
    found = []
    for node in graph.nodes:
        given = [v for v in node.inputs if v is not None]
        if not any(v in inside or v in beyond for v in given) and node not in makers:
            continue
        outside = node.output.name in left_out or attrs_at_hand(node.attrs) is not node.attrs
        if outside or any(v in beyond for v in given):
            beyond.update(node.outputs)
            continue
        inside.update(node.outputs)
        found.append(node)
    return found


def _gathered(
    graph: Graph, members: Sequence[Node], readers: Collection[tuple[str, int]] = ()
) -> tuple[Graph, Node]:  # fmt: skip
    """Copy the graph so that one node stands for its members. ``readers``: see `Given`."""
    names = {node.output.name for node in members}
    twin = graph.clone()
    chosen = [node for node in twin.nodes if node.output.name in names]
    inside = {v for node in chosen for v in node.outputs}
    leaving = [
        v for node in chosen for v in node.outputs
        if twin.is_output(v) or any(user not in chosen for user in v.users)
    ]  # fmt: skip
    given = dict.fromkeys(
        v for node in chosen for v in node.inputs
        if v is not None and v not in inside and (v.const is None or isinstance(v.const, SymArray))
    )  # fmt: skip
    bodies = {
        "body": _part(chosen, [*given], leaving, counted=True, readers=readers),
        "otherwise": _part(chosen, [*given], leaving, counted=False),
    }
    first = chosen[0]
    made = twin.add(
        GATHERED, [*given], {STANDS_FOR: first.op}, outputs=[v.name for v in leaving], types=[v.type for v in leaving],
        name=first.name, origin=[o for node in chosen for o in node.origin], bodies=bodies, captures=len(given),
    )  # fmt: skip
    for old, new in zip(leaving, made.outputs, strict=True):
        twin.replace(old, new)
    for node in reversed(chosen):
        twin.remove(node)
    twin.sort()
    return twin, made


def _numbers(part: Graph, value: Value) -> Value:
    """Add a node for the integers of a tensor, as a launch reads them."""
    given = value
    if value.tensor is not None and value.tensor.dtype is not DType.INT64:
        wide = value.tensor.with_dtype(DType.INT64)
        given = part.add("Cast", [value], {"to": 7}, outputs=[f"{value.name}_wide"], types=[wide]).output
    return part.add(NUMBERS, [given], outputs=[f"{value.name}_numbers"], types=[value.type]).output


def _part(
    nodes: Sequence[Node], given: Sequence[Value], leaving: Sequence[Value], counted: bool,
    readers: Collection[tuple[str, int]] = (),
) -> Graph:  # fmt: skip
    """Copy nodes into a graph of their own. ``counted``: nodes that make rows also return how many."""
    part, of = Graph("rows"), (lambda type: type) if counted else opened  # what is planned later knows no symbols
    mapping = {value: part.add_input(value.name, of(value.type)) for value in given}
    numbers: dict[Value, Value] = {}
    for node in nodes:
        inputs: list[Value | None] = []
        for i, v in enumerate(node.inputs):
            if v is not None and v not in mapping:
                assert v.const is not None
                mapping[v] = part.constant(v.const, v.name)
            if v is not None and (node.output.name, i) in readers:
                if v not in numbers:
                    numbers[v] = _numbers(part, mapping[v])
                inputs.append(numbers[v])
            else:
                inputs.append(None if v is None else mapping[v])
        types = [of(v.type) for v in node.outputs]
        if not counted or node.op not in COUNTED:
            copy = part.add_copy(node, inputs, types)
        else:
            names = [*(v.name for v in node.outputs), f"{node.output.name}_count"]
            copy = part.add(
                COUNTED[node.op], inputs, node.attrs, outputs=names, types=types, name=node.name, origin=node.origin
            )
        mapping.update(zip(node.outputs, copy.outputs, strict=False))
    for value in leaving:
        part.add_output(mapping[value], value.name)
    return part

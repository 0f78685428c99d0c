"""Steps that make as many rows as the data says, inside a launch, with the steps behind them.

A kernel of NonZero, Compress or NonMaxSuppression writes its rows, and how many there are. That number is a late symbol
(`ir/launch_symbols.py`): memory is planned for the most rows, and the launch computes what depends on their number when
it is known. Such steps become one node of the graph, whose body is planned like that of a loop. Where that is not right
for the rows that there are, the request runs the same nodes one after the other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunewright.devices.control_rows import Block, Compute, Counter, Late, LaunchRow, Outer, Ragged, Ref, Row
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.launch_symbols import Unbounded, guards_of, is_late, newest, upper, value_at
from tunewright.ir.symbolic import MOST, ShapeTrace, SymArray, SymInt, Whole, greater, hint, lesser
from tunewright.ir.types import TensorType, Type
from tunewright.ops.control_types import static, with_dims
from tunewright.ops.infer import Budget, propagate
from tunewright.ops.internal.append import STANDS_FOR
from tunewright.ops.internal.row_counts import COUNTED, PLAIN_OP, rows_axis
from tunewright.solvers.base import attrs_at_hand

from ..plans.plan import Counts, Plan
from ..plans.program import Environment, Program
from ..plans.template import ShapeClass, Traced, Untraceable
from .body_rows import MOST_ROOM, NotRows, made_type
from .interpreter import Control

if TYPE_CHECKING:
    from ..requests.executor import Executor
    from .control_rows import BlockWriter

LOG = logging.getLogger("tunewright")
#: the node that such steps become
GATHERED = "tunewright::Counted"
#: how many rows kernels are chosen for, where there may be more
FORESEEN = 128
#: attempts with fewer and fewer of the nodes behind
ATTEMPTS = 6


class Counted(Control):
    """Steps that make rows, and steps behind them. The request runs them as a program of its own."""

    def __init__(self, node: Node, env: Environment, repeated: bool, otherwise: Counts) -> None:
        super().__init__(node, env, repeated)
        self.otherwise.counts = otherwise

    @property
    def otherwise(self) -> Program:
        return self.bodies["otherwise"]

    def prepare(self) -> None:
        """Choose the kernels for what the request runs by itself."""
        self.otherwise.plan(tuple(None if v is None else v.type for v in self.node.inputs))

    def run(self, executor: Executor, inputs: Sequence[Any]) -> Sequence[Any]:
        return executor.run(self.otherwise, list(inputs))


def gather(
    graph: Graph, env: Environment, traced: Traced | None, repeated: bool, counts: Counts
) -> tuple[Graph, dict[Node, tuple[Control, Block]]]:
    """The graph with steps that make rows as one node, whose block is made already; as it is, where that cannot be."""
    from .control_rows import block_of

    makers = [node for node in graph.nodes if node.op in COUNTED and all(v is None or _known(v) for v in node.inputs)]
    if counts is Counts.NEVER or not makers or not env.device.runs_control:
        return graph, {}
    settings = env.settings
    if not (settings.shape_templates and settings.join_launches and env.device.serves_classes and env.device.compiles):
        counts = Counts.ALONE  # sizes in the middle of a launch need kernels for classes of shapes
    left_out: set[str] = set()
    for _ in range(ATTEMPTS):
        members = _behind(graph, makers, left_out) if counts is Counts.BEHIND else _makers(makers, left_out)
        if not members:
            break
        twin, node = _gathered(graph, members)
        alone = all(graph_node.op in COUNTED for graph_node in members)
        runner = Counted(node, env, repeated, Counts.NEVER if alone else Counts.ALONE)
        try:
            found = block_of(runner, repeated, traced)
        except Exception:  # a plan without it says what is wrong, if anything is
            LOG.debug("%s: sizes that depend on data", graph.name, exc_info=True)
            found = "a defect"
        if isinstance(found, Block):
            return twin, {node: (runner, found)}
        LOG.debug("%s: %d nodes are not part of a launch: %s", graph.name, len(members), found)
        blamed = {one.output.name for one in members if set(one.origin) & set(runner.blamed)}
        if blamed:
            left_out |= blamed
        elif counts is Counts.BEHIND:
            counts = Counts.ALONE
        else:
            break
    return graph, {}


def opened(type: Type | None) -> Type | None:
    """The type without symbolic sizes."""
    if not isinstance(type, TensorType) or type.shape is None or not type.is_symbolic:
        return type
    return type.with_shape(tuple(None if isinstance(d, SymInt) else d for d in type.shape))


def _known(value: Value) -> bool:
    return value.const is not None or static(value) is not None


def _makers(makers: Sequence[Node], left_out: Collection[str]) -> list[Node]:
    return [node for node in makers if node.output.name not in left_out]


def _behind(graph: Graph, makers: Sequence[Node], left_out: Collection[str]) -> list[Node]:
    """Nodes that make rows, and all that follows them but for what follows those that are left out."""
    inside: set[Value] = set()
    beyond: set[Value] = set()
    found = []
    for node in graph.nodes:
        given = [v for v in node.inputs if v is not None]
        if not any(v in inside or v in beyond for v in given) and node not in makers:
            continue
        outside = node.bodies or node.output.name in left_out or attrs_at_hand(node.attrs) is not node.attrs
        if outside or any(v in beyond for v in given):
            beyond.update(node.outputs)
            continue
        inside.update(node.outputs)
        found.append(node)
    return found


def _gathered(graph: Graph, members: Sequence[Node]) -> tuple[Graph, Node]:
    """A copy of the graph in which one node stands for some."""
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
        "body": _part(chosen, [*given], leaving, counted=True),
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


def _part(nodes: Sequence[Node], given: Sequence[Value], leaving: Sequence[Value], counted: bool) -> Graph:
    """Nodes as a graph of their own. ``counted``: those that make rows also say how many, at the end of its outputs."""
    part, of = Graph("rows"), (lambda type: type) if counted else opened  # what is planned later knows no symbols
    mapping = {value: part.add_input(value.name, of(value.type)) for value in given}
    counts: list[Value] = []
    for node in nodes:
        inputs: list[Value | None] = []
        for v in node.inputs:
            if v is not None and v not in mapping:
                assert v.const is not None
                mapping[v] = part.constant(v.const, v.name)
            inputs.append(None if v is None else mapping[v])
        types = [of(v.type) for v in node.outputs]
        if not counted or node.op not in COUNTED:
            copy = part.add_copy(node, inputs, types)
        else:
            names = [*(v.name for v in node.outputs), f"{node.output.name}_count"]
            copy = part.add(
                COUNTED[node.op], inputs, node.attrs, outputs=names, types=types, name=node.name, origin=node.origin
            )
            counts.append(copy.outputs[-1])
        mapping.update(zip(node.outputs, copy.outputs, strict=False))
    for value in leaving:
        part.add_output(mapping[value], value.name)
    for value in counts:
        part.add_output(value)
    return part


@dataclass(eq=False)
class _Count:
    """How many rows a step makes."""

    symbol: SymInt
    late: Late


def counted_rows(writer: BlockWriter, runner: Counted, ins: Sequence[Ref | None], outs: Sequence[Ref]) -> list[Row]:
    """The rows of steps that make rows, and of the steps behind them."""
    node = runner.node
    if any(ref != Ref(Outer(True, k)) for k, ref in enumerate(outs)):
        raise NotRows("the number of its rows depends on data, and it is inside of a loop or branch")
    if writer.traced is None:
        writer.traced = writer.own = Traced(ShapeTrace(), ShapeClass((), ()))
    types = [static(v) for v in node.inputs]
    if None in types:
        raise NotRows("the shapes of its inputs are not known")
    program = runner.bodies["body"]
    try:
        counts = _symbols(node, program.graph, types, writer.traced)  # type: ignore[arg-type]
        plan = writer.known(program.part(tuple(types), node, writer.traced))
    except (Untraceable, Unbounded) as why:
        raise NotRows(str(why), getattr(why, "node", None)) from None
    check_counts([one.late for one in counts], writer.traced.trace, writer.traced.bounds)
    at = [Ref(one.late.counter) for one in counts]
    rows = writer.straight(plan, ins, [*outs, *at])
    told = [*_told(writer, plan, node, writer.traced)]
    return [*_with_counts(rows, counts, told)]


def _symbols(node: Node, body: Graph, types: Sequence[TensorType], traced: Traced) -> list[_Count]:
    """A late symbol for each step that makes rows, in order, as the size of its results."""
    from tunewright.ops.control_types import know_sizes

    twin, known = body.clone(), {v.name: v for v in body.values()}
    for value, given in zip(twin.inputs, types, strict=True):
        value.type = given
    know_sizes(node, twin)
    found: list[_Count] = []
    waiting = [one for one in twin.nodes if one.op in PLAIN_OP]
    for one in waiting:
        propagate(twin, Budget())
        if any(v is not None and static(v) is None and v.const is None for v in one.inputs):
            raise NotRows(f"node {one.name!r} ({PLAIN_OP[one.op]}) takes tensors of unknown shape")
        axis = rows_axis(one.op, one.attrs)
        top = greater(2, upper(_most_rows(one), traced.bounds))
        name, bound = f"r{len(traced.trace.atoms)}", MOST if isinstance(top, SymInt) else top
        symbol = traced.trace.late(name, min(FORESEEN, int(hint(top))), 0, bound)
        traced.bounds[newest(symbol)] = (top, 0)
        for value in _lengths(one, axis):
            type = value.tensor
            assert type is not None and type.shape is not None
            dims = tuple(symbol if d is None else d for d in type.shape)
            value.type = known[value.name].type = with_dims(type, dims)  # type: ignore[arg-type]
        found.append(_Count(symbol, Late(newest(symbol), Counter())))
    return found


def _lengths(node: Node, axis: int) -> Iterator[Value]:
    """Results whose size along an axis is the count."""
    for value in node.outputs[:-1]:
        if value.tensor is None or value.tensor.shape is None:
            raise NotRows(f"the rank of {value.name!r} is not known")
        yield value


def _most_rows(node: Node) -> Whole:
    """The most rows that there can be."""
    given = [None if v is None else static(v) for v in node.inputs]
    x = given[0]
    assert x is not None
    name = PLAIN_OP[node.op]
    if name == "NonMaxSuppression":
        scores, limit = given[1], node.inputs[2] if len(node.inputs) > 2 else None
        assert scores is not None
        batch, classes, boxes = scores.dims
        if limit is None or (limit.const is not None and not limit.const.size):
            return 0
        if limit.const is not None:
            boxes = lesser(boxes, greater(0, limit.const.reshape(-1).tolist()[0]))
        return batch * classes * boxes
    axis = node.attrs.get("axis")
    if name == "NonZero" or axis is None:
        return x.size
    return x.dims[int(axis)]


def _with_counts(rows: Sequence[Row], counts: Sequence[_Count], told: Sequence[tuple[Counter, Whole]]) -> Iterator[Row]:
    """The rows, with a row behind each launch that says how many there are: it computes what depends on that."""
    waiting = list(counts)
    for row in rows:
        yield row
        if not isinstance(row, LaunchRow):
            continue
        made = [one for one in waiting if any(ref == Ref(one.late.counter) for ref in row.outs)]
        for one in made:
            if one is not waiting[0]:
                raise NotRows("what makes rows runs in another order than it stands in the model")
            del waiting[0]
            yield Compute(one.late, () if waiting else tuple(told))
    if waiting:
        raise NotRows("no step computes the number of rows")


def _told(writer: BlockWriter, plan: Plan, node: Node, traced: Traced) -> Iterator[tuple[Counter, Whole]]:
    """Sizes of results that the launch tells; those results have room for the most that these can be."""
    for k, value in enumerate(node.outputs):
        type = made_type(plan, k)
        assert type is not None
        if static(value) is not None:
            continue  # whatever the number of rows is
        value.type = opened(value.type)
        room = with_dims(type, [upper(d, traced.bounds) for d in type.dims])
        if math.prod(map(hint, room.dims)) * type.dtype.itemsize > MOST_ROOM:
            raise NotRows(f"room for {room} would be too much")
        counters = tuple(Counter() if is_late(d) else None for d in type.dims)
        writer.ragged.append(Ragged(k, room, counters[0] or Counter(), 1, told=counters))
        yield from ((c, d) for c, d in zip(counters, type.dims, strict=True) if c is not None)


def check_counts(counts: Sequence[Late], trace: ShapeTrace, bounds: Mapping[int, tuple[Whole, Whole]]) -> None:
    """Refuse decisions that are right for hardly any other number of rows than the one at hand."""
    for late in counts:
        symbol, most = trace.atoms[late.atom], hint(bounds[late.atom][0])
        others = {n for n in (symbol.hint - 1, symbol.hint // 2 + 1, (symbol.hint + most) // 2, most) if n >= 2}
        for how, left, answer in guards_of(trace, late.atom):
            values = [value_at(left, {late.atom: int(n)}) for n in others]
            if all(((v == 0) if how == "==" else (v < 0)) is not answer for v in values if values):
                raise NotRows(f"a plan for {symbol.hint} rows is wrong for other numbers of rows")

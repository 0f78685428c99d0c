"""The rows of steps whose sizes depend on data: a stage for each number that the launch finds out.

A stage ends with the step that makes the number of rows. What follows is planned with that number as a late symbol. It
gets extra plans for no rows and for one row if these need other kernels or other views. The launch takes the plan that
fits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tunewright.devices.control_rows import (
    Cases,
    Compute,
    CopyRow,
    Counter,
    Late,
    Outer,
    Ragged,
    Ref,
    Row,
    Set,
    Tell,
    Variable,
)
from tunewright.errors import TunewrightError
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.launch_symbols import Unbounded, guards_of, is_late, newest, root, upper, value_at
from tunewright.ir.symbolic import LEAST, MOST, ShapeTrace, SymInt, Whole, greater, hint, lesser, same, sym_array
from tunewright.ir.types import DType, TensorType
from tunewright.ops.control_types import know_sizes, static, with_dims
from tunewright.ops.internal.row_counts import PLAIN_OP
from tunewright.passes.base import run_passes
from tunewright.passes.standard import KNOW_SHAPES

from ..plans.plan import Plan
from ..plans.program import Program
from ..plans.template import ShapeClass, Traced, Untraceable
from .body_rows import MOST_ROOM, NotRows, Refs, made_type
from .given_sizes import NUMBERS, foreseen_of, most_of

if TYPE_CHECKING:
    from .control_rows import BlockWriter
    from .row_counts import Counted

LOG = logging.getLogger("tunewright")
#: number of rows that kernels are chosen for, where more are possible
FORESEEN = 128
#: assumed value of a number from a tensor, if nothing better is known; each further number is larger by as much
FEW = 8
#: numbers of rows that may have plans of their own
APART = (0, 1)
#: most numbers with their own plan because they equal another size
MOST_EQUAL = 2
#: most such plans, and most numbers that a launch finds out one after the other
MOST_APART, MOST_STAGES = 12, 32


def counted_rows(writer: BlockWriter, runner: Counted, ins: Refs, outs: Sequence[Ref]) -> list[Row]:
    """Write the rows of steps that make rows, and of the steps behind them. Raises NotRows."""
    node = runner.node
    if any(ref != Ref(Outer(True, k)) for k, ref in enumerate(outs)):
        raise NotRows("the number of its rows depends on data, and it is inside of a loop or branch")
    if writer.traced is None:
        writer.traced = writer.own = Traced(ShapeTrace(), ShapeClass((), ()))
    types = [static(v) for v in node.inputs]
    if None in types:
        raise NotRows("the shapes of what it takes are not known")
    body = runner.bodies.pop("body").graph.clone()
    if sum(one.op in PLAIN_OP or one.op == NUMBERS for one in body.nodes) > MOST_STAGES:
        raise NotRows(f"there are over {MOST_STAGES} numbers that depend on data")
    places = {value.name: ref for value, ref in zip(body.inputs, ins, strict=True) if ref is not None}
    for value, type in zip(body.inputs, types, strict=True):
        value.type = type
    know_sizes(node, body)
    return _Staged(writer, runner, writer.traced, outs).rows(body, places)


@dataclass(eq=False)
class _Staged:
    """The stages of one node."""

    writer: BlockWriter
    runner: Counted
    traced: Traced
    #: where the node's results belong
    outs: Sequence[Ref]
    #: results whose sizes the launch tells, by output number
    told: dict[int, Ragged] = field(default_factory=dict)
    #: plans for single numbers of rows that were attempted
    apart: int = 0

    def rows(self, graph: Graph, places: Mapping[str, Ref], path: str = "rows") -> list[Row]:
        """Write the rows of everything not made yet. ``path``: names the plans."""
        run_passes(graph, (KNOW_SHAPES,), self.runner.env.context)
        for node in graph.nodes:
            if node.op in PLAIN_OP and node.output.name not in places:
                return self.counted(graph, node, places, path)
            if node.op == NUMBERS:
                return self.given(graph, node, places, path)
        return self.last(graph, places, path)

    # -- stages -----------------------------------------------------------------------------------------------------
    def counted(self, graph: Graph, maker: Node, places: Mapping[str, Ref], path: str) -> list[Row]:
        """Write the rows of a step that makes a number of rows, and of what follows it."""
        known = all(v is None or v.const is not None or static(v) is not None for v in maker.inputs)
        if not known:
            raise NotRows(f"node {maker.name!r} ({PLAIN_OP[maker.op]}) takes tensors of unknown shape", maker)
        top = upper(_most_rows(maker), self.traced.bounds)
        is_few = isinstance(top, int) and top <= APART[-1]
        number = top if is_few else self.symbol(min(FORESEEN, int(hint(top)) - 1), top)
        typed, counted = _with_rows(graph, maker, number), Counter()
        rows, made = self.stage(typed, maker.output.name, places, path, Ref(counted))
        behind = {**places, **made}

        def rows_for(n: Whole) -> list[Row]:
            of_n = typed if n is number else _with_rows(graph, maker, n)
            return self.rows(of_n, behind, f"{path}, {n.text if isinstance(n, SymInt) else n}")

        if isinstance(number, SymInt):
            return [*rows, *self.cases(Late(newest(number), counted), rows_for, number)]
        return [*rows, *self.few(counted, rows_for, number)]

    def given(self, graph: Graph, node: Node, places: Mapping[str, Ref], path: str) -> list[Row]:
        """Write the rows that read numbers, and those of what follows them."""
        source = node.inputs[0]
        assert source is not None
        type = static(source)
        if source.const is not None:  # with sizes known, the number is a constant
            return self.rows(_with_numbers(graph, node, source.const.reshape(-1).tolist()), places, path)
        if type is None or type.dtype is not DType.INT64:
            raise NotRows(f"the launch cannot read {source.name!r}")
        rows: list[Row] = []
        if source.name not in places:
            assert source.producer is not None
            rows, made = self.stage(graph, source.producer.output.name, places, path)
            places = {**places, **made}
        most, counters = most_of(graph, node), [Counter() for _ in range(type.size)]
        few = foreseen_of(graph, node) or FEW
        foreseen = [min(few * (k + 1), MOST if most is None else most) for k, _ in enumerate(counters)]
        numbers = [self.symbol(one, MOST if most is None else most) for one in foreseen]
        begin = Variable()
        rows.append(Set(begin, places[source.name]))
        rows += [CopyRow(Ref(counter), Ref(begin, 8 * k), 8) for k, counter in enumerate(counters)]
        lates = [Late(newest(number), counter) for number, counter in zip(numbers, counters, strict=True)]
        for late, number in zip(lates, numbers, strict=True):
            late.code.check("<", number, False)
            late.code.check("<", number.most - number, False)

        def rows_for(n: Whole) -> list[Row]:
            name = n.text if isinstance(n, SymInt) else n
            return self.rows(_with_numbers(graph, node, [*numbers[:-1], n]), places, f"{path}, {name}")

        return [*rows, *map(Compute, lates[:-1]), *self.cases(lates[-1], rows_for, numbers[-1])]

    def stage(
        self, graph: Graph, wanted: str, places: Mapping[str, Ref], path: str, count: Ref | None = None
    ) -> tuple[list[Row], dict[str, Ref]]:  # fmt: skip
        """Write the rows of the node whose first output is ``wanted``, and of what it needs.

        Also returns where results lie. The node's last output goes to ``count``.
        """
        last = next(node for node in graph.nodes if node.output.name == wanted)
        nodes = _needed(graph, last, places)
        made = self.made(graph, nodes)
        by_name = {value.name: value for value in graph.values()}
        counts = [] if count is None else [count]
        outputs = [by_name[name] for name in made] + [last.outputs[-1] for _ in counts]
        part = _cut(graph, places, outputs)
        plan = self.plan(part, path)
        return self.writer.straight(plan, [places[v.name] for v in part.inputs], [*made.values(), *counts]), made

    def cases(self, late: Late, rows_for: Callable[[Whole], list[Row]], number: SymInt) -> list[Row]:
        """Write the rows of what follows a number, now that the launch knows it."""
        begin = self.writer.nbytes
        general = [Compute(late), *rows_for(number)]
        check_count(late, self.traced)
        wanted = [*APART, *self.coincidences(late)[:MOST_EQUAL]]
        failing = [n for n in wanted if n <= hint(number.most) and not self.holds(late, n)]
        return self.apart_from(general, late.counter, failing, rows_for, begin)

    def few(self, counter: Counter, rows_for: Callable[[Whole], list[Row]], most: int) -> list[Row]:
        """Do the same for a number that is at most one: each value has rows of its own."""
        begin = self.writer.nbytes
        rows = self.apart_from(rows_for(most), counter, [*range(most)], rows_for, begin)
        cases = rows[0].cases if rows and isinstance(rows[0], Cases) else {}
        if len(cases) < most:  # no guard tells the launch that these rows are wrong for other numbers
            raise NotRows(f"not every number of rows up to {most} has rows of its own")
        return rows

    def apart_from(
        self, general: list[Row], counter: Counter, numbers: Sequence[int], rows_for: Callable[[Whole], list[Row]],
        begin: Whole,
    ) -> list[Row]:  # fmt: skip
        """Choose between general rows and rows for single numbers. All use the memory from ``begin`` on."""
        most, cases = self.writer.nbytes, dict[int, list[Row]]()
        for n in numbers:
            self.writer.nbytes = begin
            found = self.rows_apart(rows_for, n)
            if found is not None:
                cases[n] = found
                most = greater(most, self.writer.nbytes)
        self.writer.nbytes = most
        return [Cases(counter, cases, general)] if cases else general

    def symbol(self, foreseen: int, top: Whole) -> SymInt:
        """Make the symbol of a number that the launch finds out, at most ``top``."""
        trace = self.traced.trace
        symbol = trace.late(f"r{len(trace.atoms)}", max(2, foreseen), 0, MOST if isinstance(top, SymInt) else top)
        self.traced.bounds[newest(symbol)] = (top, 0)
        return symbol

    def rows_apart(self, rows_for: Callable[[Whole], list[Row]], number: int) -> list[Row] | None:
        """Write the rows for one number. None: there are none."""
        self.apart += 1
        if self.apart > MOST_APART:
            return None
        try:
            return rows_for(number)
        except (NotRows, TunewrightError) as why:  # the request reports what is wrong, if anything is
            LOG.debug("%s: for %d rows: %s", self.runner.node.name, number, why)
        return None

    def holds(self, late: Late, number: int) -> bool:
        """Whether the guards hold for this number, as far as known."""
        guards = guards_of(self.traced.trace, late.atom)
        return all(_answer(how, left, {late.atom: number}) is answer for how, left, answer in guards)

    def coincidences(self, late: Late) -> list[int]:
        """Numbers that equal another size of the model, where a guard would decide otherwise."""
        guards = guards_of(self.traced.trace, late.atom)
        found = {root(left, late.atom) for how, left, answer in guards if how == "==" and not answer}
        return sorted(n for n in found if n is not None and n >= LEAST)

    def made(self, graph: Graph, nodes: Sequence[Node]) -> dict[str, Ref]:
        """Find places for the results of a stage that later steps need, by name."""
        inside, found = {*nodes}, dict[str, Ref]()
        outs = {value.name: ref for value, ref in zip(graph.outputs, self.outs, strict=True)}
        for node in nodes:
            for value in node.outputs:
                if value.name in outs:
                    found[value.name] = outs[value.name]
                elif any(user not in inside for user in value.users):
                    type = static(value)
                    if type is None:
                        raise NotRows(f"the shape of {value.name!r} is not known", node)
                    found[value.name] = self.writer.local(type.nbytes)
        return found

    def last(self, graph: Graph, places: Mapping[str, Ref], path: str) -> list[Row]:
        """Write the rows of everything that is left, and rows that tell the sizes of results."""
        waiting = {k: ref for k, ref in enumerate(self.outs) if places.get(graph.outputs[k].name) != ref}
        types = [static(value) for value in graph.outputs]
        rows: list[Row] = []
        if waiting:
            part = _cut(graph, places, [graph.outputs[k] for k in waiting])
            plan = self.plan(part, path)
            rows = self.writer.straight(plan, [places[v.name] for v in part.inputs], [*waiting.values()])
            for at, k in enumerate(waiting):
                types[k] = made_type(plan, at)
        return [*rows, *self.tell(types)]

    def plan(self, part: Graph, path: str) -> Plan:
        """Plan a stage."""
        runner = self.runner
        program = runner.bodies[path] = Program(part, runner.env, True, repeated=runner.repeated)
        try:
            plan = program.part(tuple(v.type for v in part.inputs), Node(part.name, part.name, {}), self.traced)
        except (Untraceable, Unbounded) as why:
            raise NotRows(str(why), getattr(why, "node", None)) from None
        return self.writer.known(plan)

    # -- sizes of results ---------------------------------------------------------------------------------------------
    def tell(self, types: Sequence[TensorType | None]) -> list[Row]:
        """Write rows that tell the sizes of results. Each result has room for its largest size in the first stages."""
        told: list[tuple[Counter, Whole]] = []
        for k, (value, type) in enumerate(zip(self.runner.node.outputs, types, strict=True)):
            if type is None:
                raise NotRows(f"the shape of {value.name!r} is not known")
            known = static(value)
            if known is not None:
                if not same(known.dims, type.dims):
                    raise NotRows(f"{value.name!r} is {known}, and {type} is made")
                continue
            if k not in self.told:
                self.told[k] = self.room(k, type)
            room = self.told[k]
            assert room.told is not None
            dims = [*zip(type.dims, room.type.dims, room.told, strict=len(type.dims) == len(room.told))]
            if len(type.dims) != len(room.told) or not all(_fits(*dim) for dim in dims):
                raise NotRows(f"{type} is made, and there is room for {room.type}")
            told += [(counter, size) for size, _, counter in dims if counter is not None]
        return [Tell(told)] if told else []

    def room(self, k: int, type: TensorType) -> Ragged:
        """Make a result with room for its largest sizes."""
        room = with_dims(type, [upper(d, self.traced.bounds) for d in type.dims])
        if math.prod(map(hint, room.dims)) * type.dtype.itemsize > MOST_ROOM:
            raise NotRows(f"room for {room} would be too much")
        tensor = self.runner.node.outputs[k].tensor
        declared = [None] * len(type.dims) if tensor is None or tensor.shape is None else tensor.shape
        # a size known in one stage may differ in the next: at most one row, or none
        open_ = [is_late(d) or not isinstance(s, int | SymInt) for d, s in zip(type.dims, declared, strict=True)]
        counters = tuple(Counter() if one else None for one in open_)
        found = Ragged(k, room, counters[0] or Counter(), 1, told=counters)
        self.writer.ragged.append(found)
        return found


def _fits(size: Whole, room: Whole, counter: Counter | None) -> bool:
    """Whether there is room for a size. Without a counter, the size must be known before the launch."""
    if same([size], [room]) or (counter is not None and is_late(size)):
        return True
    least = room.least if isinstance(room, SymInt) else room
    return counter is not None and isinstance(size, int) and size <= least


# -- graphs -----------------------------------------------------------------------------------------------------------
def _needed(graph: Graph, maker: Node, places: Mapping[str, Ref]) -> list[Node]:
    """A node and all nodes it needs that are not made yet, in order."""
    found, waiting = {maker}, [maker]
    while waiting:
        for value in waiting.pop().inputs:
            made_by = None if value is None or value.name in places else value.producer
            if made_by is not None and made_by not in found:
                found.add(made_by)
                waiting.append(made_by)
    return [node for node in graph.nodes if node in found]


def _cut(graph: Graph, places: Mapping[str, Ref], outputs: Sequence[Value]) -> Graph:
    """Copy the nodes that make some values out of existing ones into a graph of their own."""
    part, mapping = Graph("rows"), dict[Value, Value]()

    def of(value: Value) -> Value:
        if value not in mapping:
            if value.const is not None:
                mapping[value] = part.constant(value.const, value.name)
                mapping[value].type = value.type
            else:
                assert value.name in places
                mapping[value] = part.add_input(value.name, value.type)
        return mapping[value]

    needed = dict.fromkeys(
        node for value in outputs if value.producer is not None for node in _needed(graph, value.producer, places)
    )
    for node in (one for one in graph.nodes if one in needed):
        twin = part.add_copy(node, [None if v is None else of(v) for v in node.inputs], [v.type for v in node.outputs])
        mapping |= {old: new for old, new in zip(node.outputs, twin.outputs, strict=True) if old.name not in places}
    for value in outputs:
        part.add_output(of(value), value.name)
    return part


def _with_rows(graph: Graph, maker: Node, number: Whole) -> Graph:
    """Copy a graph so that a node makes this number of rows."""
    twin = graph.clone()
    node = next(one for one in twin.nodes if one.output.name == maker.output.name)
    for value in node.outputs[:-1]:
        type = value.tensor
        if type is None or type.shape is None:
            raise NotRows(f"the rank of {value.name!r} is not known", maker)
        value.type = with_dims(type, tuple(number if d is None else d for d in type.shape))  # type: ignore[misc]
    return twin


def _with_numbers(graph: Graph, node: Node, numbers: Sequence[Whole]) -> Graph:
    """Copy a graph so that the numbers that a launch reads are these."""
    twin = graph.clone()
    reader = next(one for one in twin.nodes if one.output.name == node.output.name)
    type = reader.output.tensor
    assert type is not None
    made = twin.constant(sym_array(list(numbers)).reshape(type.dims), reader.output.name)
    made.type = type
    twin.replace(reader.output, made)
    twin.remove(reader)
    return twin


def _most_rows(node: Node) -> Whole:
    """The largest number of rows that the node can make."""
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


# -- guards -----------------------------------------------------------------------------------------------------------
def check_count(late: Late, traced: Traced) -> None:
    """Raise NotRows for guards that hold for hardly any number of rows but the one at hand."""
    symbol, most = traced.trace.atoms[late.atom], hint(traced.bounds[late.atom][0])
    others = {n for n in (symbol.hint - 1, symbol.hint // 2 + 1, (symbol.hint + most) // 2, most) if n >= 2}
    for how, left, answer in guards_of(traced.trace, late.atom):
        if others and all(_answer(how, left, {late.atom: int(n)}) is not answer for n in others):
            raise NotRows(f"what is right for {symbol.hint} rows is not for others")


def _answer(how: str, left: SymInt, values: Mapping[int, int]) -> bool:
    """Whether the comparison of a guard is true for these values of late symbols."""
    value = value_at(left, values)
    return bool(value == 0 if how == "==" else value < 0)

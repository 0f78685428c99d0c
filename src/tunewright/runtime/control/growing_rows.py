"""Loops whose states grow, inside a launch: the launch computes their sizes in each iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tunewright.devices.control_rows import (
    Compute,
    CopyRow,
    Counter,
    Late,
    LaunchRow,
    LoopRow,
    Outer,
    Ragged,
    Ref,
    Row,
    Set,
    SizeList,
    Variable,
    refs,
    settle,
    walk,
)
from tunewright.ir.launch_symbols import Unbounded, guards_of, is_late, newest, value_at
from tunewright.ir.symbolic import MOST, ShapeTrace, SymInt, Whole, greater, hint, same
from tunewright.ir.types import DType, TensorType
from tunewright.ops.control_types import body_types, single, states, with_dims

from ..plans.plan import Plan
from ..plans.template import ShapeClass, Traced, Untraceable, bring_at_hand
from .body_rows import (
    MOST_ROOM,
    TRUE,
    BodyOutputs,
    NotRows,
    Refs,
    Stream,
    TooLarge,
    check_condition,
    given_at_first,
    made_type,
    stream_of,
)
from .growth import MOST_FIRST, Growth, Irregular, growth_of
from .interpreter import Control

if TYPE_CHECKING:
    from .control_rows import BlockWriter

#: numbers of iterations to make room for; the first whose memory is within the limit is used
ROOMS = (4096, 512, 64)
#: about how many iterations of such a loop kernels are chosen for
FORESEEN = 16


class OfOthers(Exception):
    """The plan for later iterations is wrong for the first ``apart`` ones."""

    def __init__(self, apart: int) -> None:
        super().__init__(f"the first {apart} iterations need bodies of their own")
        self.apart = apart


def growth(runner: Control) -> Growth | None:
    """Return how the states of a loop grow. None: they do not grow, or nothing is known."""
    types = body_types(runner.node)
    if types is None:
        return None
    try:
        return growth_of(runner.node, types)
    except Irregular:
        return None  # planning the body reports what is wrong


def growing_loop(
    writer: BlockWriter, runner: Control, growth: Growth, ins: Refs, outs: Sequence[Ref], endless: bool
) -> list[Row]:
    """Write the rows of a Loop whose states grow. Raises NotRows."""
    if any(ref != Ref(Outer(True, k)) for k, ref in enumerate(outs)):
        raise NotRows("its states grow, and it is inside of another loop or branch")
    if not runner.env.serves_classes:
        raise NotRows("its states grow, and there are no plans for classes of shapes")
    if writer.traced is None:
        writer.traced = writer.own = Traced(ShapeTrace(), ShapeClass((), ()))
    begin, before, rooms = writer.nbytes, len(writer.ragged), [*ROOMS]
    while True:
        try:
            return _Growing(writer, runner, growth, ins, outs, endless, rooms[0]).rows()
        except OfOthers as error:
            growth = replace(growth, apart=error.apart)
        except TooLarge as error:
            if not rooms[1:]:
                raise NotRows(str(error)) from None
            del rooms[0]
        writer.nbytes = begin
        del writer.ragged[before:]


@dataclass(eq=False)
class _Growing:
    """The rows of a Loop whose states grow, with room for some number of iterations."""

    writer: BlockWriter
    runner: Control
    growth: Growth
    ins: Refs
    outs: Sequence[Ref]
    endless: bool
    room: int
    counter: Counter = field(default_factory=Counter)

    def rows(self) -> list[Row]:
        count, most, number = states(self.runner.node), self.most, self.number()
        plan = self.steady(number)
        firsts = [self.plan(self.growth.first[k], f"{number.text}, first {k}") for k in range(self.growth.apart)]
        limit, start = ([*self.ins[: len(self.ins) - self.runner.captures], None, None])[:2]
        condition, carried = Variable(), [Variable() for _ in range(count)]
        scans = [self.collected((*firsts, plan), k) for k in range(count, len(self.outs))]
        for k, (type, steps) in enumerate(zip(self.growth.first[0], self.growth.steps, strict=True)):
            self.writer.ragged.append(Ragged(k, type, self.counter, most, steps))
        rows: list[Row] = [Set(condition, start or TRUE)]
        rows += [Set(v, given_at_first(ref)) for v, ref in zip(carried, self.ins[2:], strict=False)]
        bodies = [self.body(one, condition, carried, scans, rows) for one in (*firsts, plan)]
        late = Late(newest(number), self.counter)
        if self.may_be_more:
            late.code.check("<", number - most, True)
        behind = [
            CopyRow(ref, Ref(v), type.nbytes)
            for ref, v, type in zip(self.outs, carried, self.growth.types(number), strict=False)
        ]
        at_end = Late(late.atom, self.counter)
        node, done = self.runner.node, bodies.pop()
        rows.append(
            LoopRow(self.counter, limit, Ref(condition), done, self.endless, node, bodies, late, behind, at_end)
        )
        scratch = [row.kernel.most_scratch.values() for row in walk(rows) if isinstance(row, LaunchRow)]
        nbytes = hint(self.writer.nbytes) + max((sum(map(hint, each)) for each in scratch), default=0)
        if nbytes > min(MOST_ROOM, self.runner.env.settings.max_memory_bytes):
            raise TooLarge(f"its states grow, and room for {hint(most):,} iterations would be too much")
        return rows

    @property
    def trips(self) -> Whole | None:
        """The number of iterations, if it is known before the launch and not too large."""
        node = self.runner.node
        limit = node.inputs[0] if len(node.inputs) > self.runner.captures else None
        if limit is None or limit.const is None:
            return None
        trips = greater(0, single(limit))
        return trips if hint(trips) <= min(self.runner.max_iterations, self.fitting) else None

    @property
    def fitting(self) -> int:
        """The number of iterations for which there is memory."""
        return MOST_ROOM // max(1, self.growth.grown_bytes())

    @property
    def most(self) -> Whole:
        """The number of iterations to make room for."""
        trips = self.trips
        return max(1, min(self.room, self.runner.max_iterations, self.fitting)) if trips is None else trips

    @property
    def may_be_more(self) -> bool:
        return self.trips is None

    def number(self) -> SymInt:
        """Make the symbol for the number of an iteration."""
        most, apart, traced = self.most, self.growth.apart, self.traced
        if hint(most) <= apart:
            raise NotRows("its states grow, and it has few iterations")
        foreseen, name = min(apart + FORESEEN, hint(most) - 1), f"i{len(traced.trace.atoms)}"
        number = traced.trace.late(name, foreseen, apart, MOST if isinstance(most, SymInt) else most - 1)
        traced.bounds[newest(number)] = (most - 1, apart)
        return number

    @property
    def traced(self) -> Traced:
        assert self.writer.traced is not None
        return self.writer.traced

    def steady(self, number: SymInt) -> Plan:
        """Plan the body for all iterations but the first ones."""
        plan = self.plan(self.growth.types(number), number.text)
        for k, wanted in enumerate(self.growth.types(number + 1)):
            made = made_type(plan, 1 + k)
            if made is None or not _is(made, wanted):
                name = self.runner.node.outputs[k].name
                raise NotRows(f"{name!r} grows in another way than in the first iterations")
        apart = _holding(self.traced.trace, newest(number))
        if apart != self.growth.apart:
            raise OfOthers(apart)
        return plan

    def plan(self, given: Sequence[TensorType], key: str) -> Plan:
        """Plan the body for these states."""
        types, runner = body_types(self.runner.node), self.runner
        assert types is not None
        types[2 : 2 + len(given)] = given
        try:
            plan = runner.bodies["body"].part(tuple(types), runner.node, self.traced, key)
        except (Untraceable, Unbounded) as why:
            raise NotRows(f"its states grow, and {why}") from None
        check_condition(plan)
        return self.writer.known(plan)

    def body(
        self, plan: Plan, condition: Variable, carried: Sequence[Variable], scans: Sequence[Stream], front: list[Row]
    ) -> list[Row]:
        """Write the rows of an iteration. The rows in front of the loop go to ``front``."""
        captured = self.ins[len(self.ins) - self.runner.captures :]
        inputs = [Ref(self.counter), Ref(condition), *(Ref(v) for v in carried), *captured]
        again = ({} if self.endless else {0: condition}) | {1 + k: v for k, v in enumerate(carried)}
        made = BodyOutputs(plan, len(carried), 1, () if self.endless else (0,))
        before, rows = self.writer.iterate(made, inputs, again, scans)
        front += before
        return rows

    def collected(self, plans: Sequence[Plan], output: int) -> Stream:
        """Return the rows of a scan output as a stream."""
        rows, most = [made_type(plan, 1 + output) for plan in plans], self.most
        row, limit = rows[0], self.runner.env.settings.max_tensor_bytes
        if row is None or not all(one is not None and _is(one, row) for one in rows):
            raise NotRows("the rows that it collects grow")
        if hint(most) * row.at_hand.nbytes > min(MOST_ROOM, limit or MOST_ROOM):
            raise TooLarge(f"room for {hint(most):,} times {row} would be too much")
        self.writer.ragged.append(Ragged(output, row, self.counter, most))
        return stream_of(self.outs[output], with_dims(row, (most, *row.dims)), 0, False)


def _is(a: TensorType, b: TensorType) -> bool:
    """Whether two types have the same element type and the same size expressions. This adds no guards."""
    return a.dtype is b.dtype and same(a.dims, b.dims)


def _holding(trace: ShapeTrace, atom: int) -> int:
    """Return the first iteration from which on the guards of a body hold, as far as foreseen.

    Raises NotRows if more than the first few iterations break them.
    """
    symbol = trace.atoms[atom]
    least = int(symbol.least)
    foreseen = [k for k in range(least, symbol.hint + 2) if k <= symbol.most]
    for how, left, answer in guards_of(trace, atom):
        values = {k: value_at(left, {atom: k}) for k in foreseen}
        fails = [k for k, value in values.items() if ((value == 0) if how == "==" else (value < 0)) is not answer]
        least = max([least, *(k + 1 for k in fails)])
    if least > MOST_FIRST:
        raise NotRows(f"its states grow, and a plan for iteration {symbol.hint} is wrong for other iterations")
    return least


def settle_late(rows: Sequence[Row], writer: BlockWriter) -> None:
    """Let the rows compute what depends on late numbers, and check the guards on these numbers."""
    if writer.traced is None:
        return
    for row in walk(rows):
        late = row.late if isinstance(row, LoopRow | Compute) else None
        if late is not None:
            for how, left, answer in guards_of(writer.traced.trace, late.atom):
                late.code.check(how, left, answer)
        for ref in refs(row):
            is_int64 = not isinstance(ref.base, SizeList) or ref.base.dtype == DType.INT64.numpy
            if isinstance(ref.base, SizeList) and not is_int64 and any(map(is_late, ref.base.array.flat)):
                raise NotRows(f"a {ref.base.dtype} consists of sizes that a launch computes")
    try:
        settle(rows)
    except Unbounded as why:
        raise NotRows(f"{why} would have to be computed in a launch") from None
    if writer.own is not None:
        for graph in writer.own.graphs:
            bring_at_hand(graph)
        writer.own.trace.is_open = False

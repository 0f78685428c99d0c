"""Turns control flow into rows of a launch: a node whose bodies can be planned becomes a block of rows.

A body's plan says where its values lie. This module turns each place into an address (`devices/control_rows.py`).
Inputs of a body lie where the node's inputs lie, or in a variable that an iteration changes. Results of a body lie in
memory of the block, or in the node's own output. A value that one iteration hands to the next alternates between two
buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunewright.devices.control_rows import (
    Block,
    Branch,
    CopyRow,
    Counter,
    Fixed,
    LaunchRow,
    LoopRow,
    Outer,
    Own,
    Ragged,
    Ref,
    Row,
    Set,
    SizeList,
    Variable,
    walk,
)  # fmt: skip
from tunewright.errors import TunewrightError
from tunewright.ir.graph import Node
from tunewright.ir.launch_symbols import upper
from tunewright.ir.symbolic import SymArray, Whole, greater, sym_array
from tunewright.ir.types import DType, TensorType
from tunewright.ops.control_types import (
    body_types,
    goes_on,
    loop_trips,
    scan_axes,
    scan_length,
    single,
    states,
    static,
    with_dims,
)

from ..plans.memory_layout import aligned
from ..plans.plan import Plan, SlotPlace
from ..plans.template import Traced
from . import interpreter
from .body_rows import (
    MOST_ROOM,
    OWN,
    TRUE,
    Body,
    BodyOutputs,
    BodyStep,
    Buffers,
    NotRows,
    Refs,
    Stream,
    begins,
    check_condition,
    check_single,
    check_types,
    fills,
    given_at_first,
    made_bytes,
    made_type,
    only_user,
    result_bytes,
    stream_of,
    users_of,
)
from .counted_rows import counted_rows
from .growing_rows import growing_loop, growth, settle_late
from .interpreter import Control
from .row_counts import Counted

#: most nodes in branches of an If outside loops: each is planned and its weights packed, even if it never runs
MOST_IN_BRANCHES = 100


def block_of(runner: Control, repeated: bool = False, traced: Traced | None = None) -> Block | str:
    """Make the block of a control-flow node, or say why it cannot be one.

    ``repeated``: the node is inside a loop. ``traced``: the plan is for a class of shapes, and so are those of the
    bodies.
    """
    node = runner.node
    settings = runner.env.settings
    if not settings.join_launches and not isinstance(runner, Counted):
        return "JOIN_LAUNCHES is NO"
    if not repeated and not _is_small(node):
        return f"its branches have over {MOST_IN_BRANCHES} nodes, and only those of the one that runs are planned"
    device = runner.env.device
    if not device.runs_control:
        return f"{device.name} runs no control flow in a launch"
    writer, runner.blamed = BlockWriter(traced), ()
    ins = [None if v is None else Ref(Outer(False, i)) for i, v in enumerate(node.inputs)]
    outs = [Ref(Outer(True, i)) for i, _ in enumerate(node.outputs)]
    try:
        rows = writer.node(runner, ins, outs)
        if any(not row.kernel.is_linkable for row in walk(rows) if isinstance(row, LaunchRow)):
            return f"its kernels are not all linked on {device.name}"
        settle_late(rows, writer)
    except NotRows as why:
        runner.blamed = () if why.node is None else why.node.origin
        return str(why)
    except TunewrightError as error:  # the error is of a body, which may never run
        return f"a body cannot be planned: {error.what}"
    if writer.nbytes > settings.max_memory_bytes:
        return f"it would need {writer.nbytes:,} bytes, and MAX_MEMORY_BYTES is {settings.max_memory_bytes:,}"
    return Block(rows, writer.nbytes, writer.ragged, tag=node)


def _is_small(node: Node) -> bool:
    """Whether its bodies may all be planned, used or not: those of a loop, and branches of few nodes."""
    size = sum(len(graph) for body in node.bodies.values() for graph in body.walk())
    return node.op != "If" or size <= MOST_IN_BRANCHES


@dataclass(eq=False)
class BlockWriter:
    """Writes the rows of one node, and of the nodes in its bodies."""

    #: the trace, where the plan is for a class of shapes
    traced: Traced | None = None
    #: bytes of the block's memory that are in use
    nbytes: Whole = 0
    #: outputs whose length is known only after the launch
    ragged: list[Ragged] = field(default_factory=list)
    #: the writer's own trace, for late sizes in a plan for one shape
    own: Traced | None = None

    def local(self, nbytes: Whole) -> Ref:
        """Reserve memory of the block."""
        at = self.nbytes
        self.nbytes += aligned(nbytes if self.traced is None else upper(nbytes, self.traced.bounds))
        return Ref(OWN, at)

    def node(self, runner: Control, ins: Refs, outs: Sequence[Ref]) -> list[Row]:
        """Write the rows of a node, with its tensors. Raises NotRows."""
        if isinstance(runner, Counted):
            return counted_rows(self, runner, ins, outs)
        write = {
            interpreter.IfRunner: self.branch,
            interpreter.LoopRunner: self.loop,
            interpreter.ScanRunner: self.scan,
        }.get(type(runner))
        if write is None:
            raise NotRows(f"{runner.node.op} is not compiled")
        return write(runner, ins, outs)

    def plan(self, runner: Control, key: str) -> Plan:
        """Plan a body."""
        types = body_types(runner.node)
        if types is None:
            raise NotRows("the shapes of its inputs are unknown, or change between iterations")
        if self.traced is not None and _is_open(runner.node, types):
            plan = runner.bodies[key].part(tuple(types), runner.node, self.traced)
        else:
            plan = runner.bodies[key].plan(tuple(types))
        return self.known(plan)

    def known(self, plan: Plan) -> Plan:
        """Return the plan of a body if the shapes of all its results are known. Raises NotRows otherwise."""
        if plan.rest is not None:
            raise NotRows("shapes in its body depend on data", plan.rest.graph.nodes[0])
        for output, (kind, slot) in enumerate(plan.outputs):
            if kind != "slot" or plan.slots[slot].place is SlotPlace.DYNAMIC or made_type(plan, output) is None:
                made_by = next((step.node for step in plan.steps if slot in step.outs), None)
                raise NotRows(f"the shape of {plan.slots[slot].name!r} depends on data", made_by)
        return plan

    def body(self, plan: Plan, inputs: Refs, results: Mapping[int, Ref]) -> tuple[Body, list[Row]]:
        """Write the rows of one pass through a body."""
        arena = plan.arena_bytes if plan.open is None else plan.open.arena_bytes
        body = Body(plan, inputs, self.local(arena).offset, results)
        rows: list[Row] = []
        for step in plan.steps:
            if step.optimized_out:
                continue
            ins, outs = [body.ref(i) for i in step.ins], [body.ref(i) for i in step.outs]
            if step.control is not None:
                if step.block is None:
                    raise NotRows(f"node {step.node.name!r} ({step.node.op}) in it is not compiled", step.node)
                rows += self.node(step.control, ins, [ref for ref in outs if ref is not None])
            elif step.kernel is None or step.on_host or not step.kernel.is_linkable:
                what = f"node {step.node.name!r} ({step.node.op})"
                raise NotRows(f"{what} in its body has no kernel that can be linked", step.node)
            else:
                rows.append(LaunchRow(step.kernel, tuple(ins), tuple(outs), BodyStep(plan, step)))
        return body, rows

    # -- If ---------------------------------------------------------------------------------------------------------

    def branch(self, runner: Control, ins: Refs, outs: Sequence[Ref]) -> list[Row]:
        condition = check_single(runner, 0, DType.BOOL)
        begin = most = self.nbytes
        found: list[list[Row]] = []
        for key in ("then_branch", "else_branch"):
            self.nbytes = begin  # only one branch runs
            found.append(self.one_branch(runner, key, ins[1:], outs))
            most = greater(most, self.nbytes)
        self.nbytes = most
        ref = ins[condition]
        assert ref is not None
        return [Branch(ref, *found)]

    def one_branch(self, runner: Control, key: str, captured: Refs, outs: Sequence[Ref]) -> list[Row]:
        plan = self.plan(runner, key)
        check_types(runner, plan, range(len(outs)), range(len(outs)))
        return self.straight(plan, captured, outs)

    def straight(self, plan: Plan, inputs: Refs, outs: Sequence[Ref]) -> list[Row]:
        """Write the rows of one pass through a body, with its results in ``outs``."""
        users = users_of(plan)
        results: dict[int, Ref] = {}
        begin: list[Row] = []
        direct: set[int] = set()
        for storage, nbytes in result_bytes(plan).items():
            whole = only_user(plan, storage, users[storage])
            if whole is None:
                results[storage] = self.local(nbytes)
                continue
            direct.add(whole)
            results[storage] = outs[whole]
            if not all(begins(plan, i) for i, slot in enumerate(plan.slots) if slot.storage == storage):
                variable = Variable()  # the body writes parts of this output in place
                begin.append(Set(variable, outs[whole]))
                results[storage] = Ref(variable)
        body, rows = self.body(plan, inputs, results)
        return [*begin, *rows, *(self.copy(body, k, outs[k]) for k in range(len(outs)) if k not in direct)]

    def copy(self, body: Body, output: int, to: Ref) -> Row:
        """Copy an output of a body to another place."""
        source = body.ref(body.plan.outputs[output][1])
        assert source is not None
        return CopyRow(to, source, made_bytes(body.plan, output))

    # -- Loop and Scan ------------------------------------------------------------------------------------------------

    def loop(self, runner: Control, ins: Refs, outs: Sequence[Ref]) -> list[Row]:
        node, graph = runner.node, runner.bodies["body"].graph
        limit, start = ([*ins[: len(ins) - runner.captures], None, None])[:2]
        if limit is not None:
            check_single(runner, 0, DType.INT64)
        if start is not None:
            check_single(runner, 1, DType.BOOL)
        endless, (trips, unknown) = goes_on(graph), loop_trips(node)
        if endless and limit is None:
            raise NotRows("it never ends")
        grows = growth(runner)
        if grows is not None:
            return growing_loop(self, runner, grows, ins, outs, endless)
        plan, count = self.plan(runner, "body"), states(node)
        check_types(runner, plan, range(1, 1 + count), range(count))
        check_condition(plan)
        condition, counter = Variable(), Counter()
        shape = BodyOutputs(plan, count, 1, () if endless else (0,))
        scans: list[Stream] = []
        for k in range(count, len(outs)):
            if unknown:
                whole = self.open(runner, plan, k, outs[k], counter, unknown, endless)
            else:
                whole = _stacked(runner, plan, 1 + k, k, 0, trips)
            scans.append(stream_of(outs[k], whole, 0, False))
        carried = [Variable() for _ in range(count)]
        inputs = [Ref(counter), Ref(condition), *(Ref(v) for v in carried), *ins[len(ins) - runner.captures :]]
        begin: list[Row] = [Set(condition, start or TRUE)]
        begin += [Set(v, given_at_first(ref)) for v, ref in zip(carried, ins[2:], strict=False)]
        again = {} if endless else {0: condition}
        again |= {1 + k: v for k, v in enumerate(carried)}
        before, body = self.iterate(shape, inputs, again, scans)
        row = LoopRow(counter, limit, Ref(condition), body, endless, node)
        return [*begin, *before, row, *self.last(plan, carried, 1, outs)]

    def open(
        self, runner: Control, plan: Plan, output: int, ref: Ref, counter: Counter, why: str, endless: bool
    ) -> TensorType:
        """Return the type of a Loop's scan output whose length is known only afterwards, with room for every row."""
        limit, row = (runner.node.inputs or [None])[0], made_type(plan, 1 + output)
        assert row is not None
        most = None if limit is None or limit.const is None else greater(0, single(limit))
        if ref != Ref(Outer(True, output)) or limit is None:
            raise NotRows(f"{why}, so it is not known how long its outputs become")
        if most is None and not (endless and limit.producer is None):
            raise NotRows(f"{why}, so there is no bound for how long its outputs become")
        if most is not None and (most > runner.max_iterations or most * row.nbytes > MOST_ROOM):
            raise NotRows(f"{why}, and room for {most:,} times {row} would be too much")
        self.ragged.append(Ragged(output, row, counter, most))
        return with_dims(row, (0 if most is None else most, *row.dims))

    def scan(self, runner: Control, ins: Refs, outs: Sequence[Ref]) -> list[Row]:
        node, length = runner.node, scan_length(runner.node)
        if length is None:
            raise NotRows("the length of what it scans is not known")
        plan, count = self.plan(runner, "body"), states(node)
        check_types(runner, plan, range(count), range(count))
        taken, put = scan_axes(node, len(outs) - count)
        backwards = [bool(d) for d in node.attrs.get("scan_input_directions") or [0] * len(taken)]
        upwards = [bool(d) for d in node.attrs.get("scan_output_directions") or [0] * len(put)]
        carried = [Variable() for _ in range(count)]
        rows = [_scanned(ins[count + k], runner, count + k, a, backwards[k]) for k, a in enumerate(taken)]
        scans = [
            stream_of(outs[count + k], _stacked(runner, plan, count + k, count + k, a, length), a, upwards[k])
            for k, a in enumerate(put)
        ]
        captured = ins[len(ins) - runner.captures :]
        inputs = [*(Ref(v) for v in carried), *(Ref(stream.at) for stream in rows), *captured]
        begin: list[Row] = [Set(v, given_at_first(ref)) for v, ref in zip(carried, ins, strict=False)]
        begin += [stream.begin() for stream in rows]
        before, body = self.iterate(BodyOutputs(plan, count, 0, ()), inputs, dict(enumerate(carried)), scans)
        times = sym_array(length)
        limit = Ref(SizeList(times, DType.INT64.numpy) if isinstance(times, SymArray) else Fixed(times))
        row = LoopRow(Counter(), limit, TRUE, [*body, *(stream.turn() for stream in rows)], True, node)
        return [*begin, *before, row, *self.last(plan, carried, 0, outs)]

    def iterate(
        self, shape: BodyOutputs, inputs: Refs, again: Mapping[int, Variable], scans: Sequence[Stream]
    ) -> tuple[list[Row], list[Row]]:
        """Write the rows in front of a loop, and those of an iteration. ``again``: outputs for the next iteration."""
        plan = shape.plan
        results, before, behind, direct = self.results(shape, again, scans)
        body, rows = self.body(plan, inputs, results)
        copies: list[Row] = []
        moves: list[Row] = []
        for output, variable in again.items():
            slot, nbytes = plan.outputs[output][1], made_bytes(plan, output)
            ref = body.ref(slot)
            assert ref is not None
            if ref.is_all_of(variable):
                continue  # handed on unchanged
            if plan.slots[slot].place is SlotPlace.INPUT and not isinstance(ref.base, Outer | Own | Fixed | SizeList):
                # this value lasts for one iteration only: another state, the iteration's number, a row
                buffers = self.buffers(nbytes)
                before += buffers.begin()
                copies.append(CopyRow(Ref(buffers.now), ref, nbytes))
                behind = [*buffers.turn(), *behind]
                ref = Ref(buffers.now)
            moves.append(Set(variable, ref))
        for k, stream in enumerate(scans):
            if k not in direct:
                before.append(stream.begin())
                copies.append(self.copy(body, shape.first + k, Ref(stream.at)))
                behind.append(stream.turn())
        return before, [*rows, *copies, *moves, *behind]

    def results(
        self, shape: BodyOutputs, again: Mapping[int, Variable], scans: Sequence[Stream]
    ) -> tuple[dict[int, Ref], list[Row], list[Row], set[int]]:
        """Decide where a body's results lie.

        Returns these places, the rows that prepare and turn them, and the scans that are written there.
        """
        plan, users = shape.plan, users_of(shape.plan)
        results: dict[int, Ref] = {}
        before: list[Row] = []
        behind: list[Row] = []
        direct: set[int] = set()
        for storage, nbytes in result_bytes(plan).items():
            whole = [u for u in users[storage] if u >= shape.first and fills(plan, u, storage)]
            if whole:  # each iteration writes its row directly into the output
                stream = scans[whole[0] - shape.first]
                direct.add(whole[0] - shape.first)
                results[storage] = Ref(stream.at)
                before.append(stream.begin())
                behind.append(stream.turn())
            elif any(u in again for u in users[storage]) and not shape.is_condition(storage, users[storage]):
                buffers = self.buffers(nbytes)
                results[storage] = Ref(buffers.now)
                before += buffers.begin()
                behind += buffers.turn()
            else:
                results[storage] = self.local(nbytes)
        return results, before, behind, direct

    def buffers(self, nbytes: Whole) -> Buffers:
        return Buffers(Variable(), Variable(), Variable(), (self.local(nbytes), self.local(nbytes)))

    def last(self, plan: Plan, carried: Sequence[Variable], first: int, outs: Sequence[Ref]) -> list[Row]:
        """Copy the states behind the last iteration to the node's outputs."""
        return [CopyRow(outs[k], Ref(v), made_bytes(plan, first + k)) for k, v in enumerate(carried)]


def _stacked(runner: Control, plan: Plan, made: int, output: int, axis: int, length: Whole) -> TensorType:
    """Return the type of a scan output if it holds exactly ``length`` rows. Raises NotRows otherwise."""
    value, row = runner.node.outputs[output], made_type(plan, made)
    whole = static(value)
    if row is None or whole is None or not -len(whole.dims) <= axis < len(whole.dims):
        raise NotRows(f"the shape of {value.name!r} is not known")
    at = axis % len(whole.dims)
    if whole.with_shape((*whole.dims[:at], *whole.dims[at + 1 :])) != row or whole.dims[at] != length:
        raise NotRows(f"{value.name!r} is {whole}, and its {length} rows are {row}")
    return whole


def _scanned(ref: Ref | None, runner: Control, index: int, axis: int, backwards: bool) -> Stream:
    """Return the rows of a scan input as a stream."""
    whole = static(runner.node.inputs[index])
    assert ref is not None and whole is not None
    return stream_of(ref, whole, axis, backwards)


def _is_open(node: Node, types: Sequence[TensorType]) -> bool:
    """Whether the bodies of a node depend on symbolic sizes."""
    captured = node.inputs[len(node.inputs) - node.captures :]
    return any(t.is_symbolic for t in types) or any(v is not None and isinstance(v.const, SymArray) for v in captured)

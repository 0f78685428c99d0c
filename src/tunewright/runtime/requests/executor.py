"""Run plans with memory of their own. Each request has one executor, which runs one inference at a time."""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from typing import Any, NoReturn

import numpy as np

from tunewright.devices.base import Device, Hints
from tunewright.devices.executable import Loops
from tunewright.devices.reports import KernelError
from tunewright.errors import ExecutionError
from tunewright.ir.graph import Node
from tunewright.ops.internal.append import STANDS_FOR

from ..control.decision import Decision
from ..control.interpreter import too_long
from ..control.ragged_results import make_room, used
from ..insight import profiler_ranges
from ..insight.counters import Counters
from ..plans.plan import Plan, Step
from ..plans.program import Program, type_of
from .frame import BoundSegment, Frame
from .remote_tensors import Stay

#: tensors of one inference, by slot
Values = MutableMapping[int, Any]


class Executor:
    """The frames and the queue of a request, and its counters if they are wanted."""

    def __init__(
        self, device: Device, counters: Counters | None = None, max_tensor_bytes: int = 0, hints: Hints | None = None
    ) -> None:
        self.counters, self.max_tensor_bytes = counters, max_tensor_bytes
        self._hints = hints or Hints()
        self.queue = device.request_queue(self._hints)
        #: iterations of all loops since the inference began
        self.iterations = 0
        #: seconds spent so far on copies to and from the device, counted only with counters
        self.copied = 0.0
        #: The keys are strong: a frame keeps its plan anyway, and weak keys take ten times as long.
        self._frames: dict[Plan, Frame] = {}
        #: pairs of an input's number and the number of the output that replaces it in the next inference
        self.continued: Sequence[tuple[int, int]] = ()

    def frames(self) -> list[tuple[Plan, Frame]]:
        """The plans that have frames, with their frames."""
        return list(self._frames.items())

    def prepare(self, plan: Plan) -> Frame:
        """Make the frame for a plan. Another thread may do this while an inference by another plan runs here."""
        frame = self._frames[plan] = Frame(plan, self.queue, self.counters is not None, self.continued)
        return frame

    def has(self, plan: Plan) -> bool:
        """Whether the executor has a frame for a plan. Any thread may ask."""
        return plan in self._frames

    def frame(self, plan: Plan) -> Frame | None:
        """The frame for a plan; None: the executor has none."""
        return self._frames.get(plan)

    def forget(self, plan: Plan) -> None:
        """Give up the frame for a plan."""
        self._frames.pop(plan, None)

    @property
    def launches(self) -> int:
        """Kernels launched so far."""
        return self.queue.launches

    def run(
        self, program: Program, inputs: Sequence[Any], stay: Stay | None = None, plan: Plan | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Run a program once. The caller owns the results.

        ``plan`` and ``sizes``: the plan for these inputs and the values of its symbols, if they are known. With
        ``stay`` tensors stay in the device's memory, and kernels may still be computing them.
        """
        plan = plan or program.plan_for(inputs)
        if stay is not None and plan.template is not None and plan.template.states:
            plan, sizes = program.plan(tuple(type_of(value) for value in inputs)), None  # results that grow are views
        frame = self._frames.get(plan)
        if frame is None:
            program.runs_in(self)
            frame = self.prepare(plan)
        inputs, values = frame.take(inputs, stay is None, sizes)
        if frame.decision is not None and stay is None and profiler_ranges.active is None:
            known = frame.decision(inputs)
            if known is not None:
                return self._decided(frame.decision, *known)
        if self.counters is not None:
            self.counters.enter(plan)
        if frame.copies:
            self._copy_inputs(frame, values)
        results, queue = frame.results, self.queue
        if results.piece and stay is None and not frame.filling:
            record, names = results.new(values), results.names
        else:
            record, names = self._new_results(frame, values, inputs, stay), None
        try:
            self.invoke(frame, values)
            if names is not None:
                made = list(queue.fetch([record[name] for name in names]))
                if queue.watching:
                    self._check_reports()
            else:
                made = self._results(frame, values, inputs, stay, record)
        except BaseException:
            queue.forget()
            queue.finish()  # running kernels still write to memory that is given up here
            raise
        if frame.decision is not None:
            frame.decision.learn(inputs, slot_value(frame, values, frame.decision.condition))
        if plan.rest is None and not frame.copied:
            return made
        return self._completed(frame, values, made, stay)

    def _decided(self, decision: Decision, branch: Program, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a plan from the branch that its inputs are known to choose."""
        try:
            made = self.run(branch, inputs)
        except (ExecutionError, MemoryError) as error:
            _raise(error, decision.step)
        return [made[i] for i in decision.outputs]

    def _copy_inputs(self, frame: Frame, values: Values) -> None:
        """Copy the inputs to the device's memory."""
        begin, queue = time.perf_counter(), self.queue
        for at, memory in frame.copies:
            if values[at] is memory:
                continue
            queue.put(values[at], memory)
            if type(values[at]) is not np.ndarray:  # a tensor of the caller: kernels use the copy
                values[at] = memory
        if self.counters is not None:
            queue.finish()
            self._copied(self.counters, "inputs", begin, [memory for _, memory in frame.copies])

    def _new_results(self, frame: Frame, values: Values, inputs: Sequence[Any], stay: Stay | None) -> Any:
        """Make memory for results that stay, grow or are large: one array each, unless they may share a piece."""
        results = frame.results
        if results.piece and not frame.filling and stay is not None and not stay.into:
            return results.new(values)
        plan, lent = frame.plan, dict[int, Any]()
        if stay is not None and plan.device.shares_memory:
            lent = stay.storages(plan, inputs, results.shapes(), results.nbytes)
        if frame.growing is not None:
            lent |= frame.growing.memory(results.nbytes)
        lent |= {filled.storage: array.reshape(-1).view(np.uint8) for filled, array in frame.filling}
        buffers = {s: lent[s] if s in lent else plan.device.alloc(nbytes) for s, nbytes in results.nbytes.items()}
        results.arrays(buffers, values)
        return None

    def invoke(self, frame: Frame, values: Values) -> None:
        """Run all segments, one after the other."""
        watched = self.counters is not None or profiler_ranges.active is not None
        one: BoundSegment | None = None
        try:
            for one in frame.segments:
                if watched:
                    self.watch(frame, one, values)
                elif one.invoke is not None:
                    one.invoke(values)
                else:
                    self._special(frame, one, values)
                for i in one.release:
                    values.pop(i, None)
        except KernelError as error:
            raise _located(error) from None
        except (ExecutionError, MemoryError) as error:
            assert one is not None
            if len(one.segment.steps) > 1:
                raise
            _raise(error, one.segment.steps[0])

    def _special(self, frame: Frame, one: BoundSegment, values: Values) -> None:
        """Run a segment that has loops or control flow, or that this executor runs itself."""
        bound = one.bound
        if bound is None:
            self._control(frame, one.segment.steps[0], values)
        elif bound.loops is None:
            bound.invoke(values)
        else:
            left = one.most - self.iterations
            bound.loops.allow(max(0, left))
            make_room(one.ragged, frame.rooms, values, (left, one.most), self.max_tensor_bytes)
            bound.invoke(values)
            self.queue.finish()
            escaped = self._escaped(frame, one, bound.loops, values)
            self.iterations += bound.loops.taken()
            failed = bound.loops.failed()
            if failed is not None:
                tag, trips = failed
                assert isinstance(tag, Node)
                what = "the loops of the model do not end" if trips is None else f"runs {trips:,} times"
                raise too_long(tag, what, one.most)
            for slot, ragged, _, node in one.ragged:
                if node not in escaped:
                    values[slot] = used(ragged, frame.rooms[ragged], values[slot], bound.loops.counted)

    def _escaped(self, frame: Frame, one: BoundSegment, loops: Loops, values: Values) -> list[Node]:
        """Run the control flow that a launch has left to the host, then the rest of the segment. Return its nodes."""
        found: list[Node] = []
        while (number := loops.left()) is not None:
            step = one.segment.steps[number]
            found.append(step.node)
            for i in (slot for slot, _, _, node in one.ragged if node is step.node):
                values[i] = None  # drops the room that it had
            self._control(frame, step, values)
            loops.allow(max(0, one.most - self.iterations), anew=False)
            assert one.bound is not None
            one.bound.invoke(values)
            self.queue.finish()
        return found

    def _control(self, frame: Frame, step: Step, values: Values) -> None:
        queue = self.queue
        assert step.control is not None
        ins = queue.fetch([slot_value(frame, values, i) for i in step.ins])
        self._check_reports()
        for i, made in zip(step.outs, step.control.run(self, ins), strict=False):
            if i < 0:
                continue
            there = slot_value(frame, values, i)
            if there is None:
                values[i] = made
            else:
                queue.put(made, there)

    def watch(self, frame: Frame, one: BoundSegment, values: Values) -> None:
        """Run a segment that counters record or that an outside profiler shows."""
        watched, steps = profiler_ranges.active, one.segment.steps
        if watched is None:
            self._counted(frame, one, values)
            return
        node = steps[0].node
        with watched(node.name or node.output.name if len(steps) == 1 else f"{len(steps)} kernels"):
            self._counted(frame, one, values)

    def _counted(self, frame: Frame, one: BoundSegment, values: Values) -> None:
        counters, queue, steps = self.counters, self.queue, one.segment.steps
        executable = one.segment.executable
        if counters is None:
            self._special(frame, one, values)
        elif executable is not None and executable.timed and one.bound is not None:
            begin = time.perf_counter()
            self._special(frame, one, values)
            queue.finish()
            counters.record_together(steps, one.bound.seconds(), begin, time.perf_counter())
            counters.record_inside(one.bound.inside())
        else:
            begin, launches = queue.now(), queue.launches
            self._special(frame, one, values)
            counters.record(steps[0], queue.now() - begin, queue.launches - launches, begin)

    def _results(
        self, frame: Frame, values: Values, inputs: Sequence[Any], stay: Stay | None, record: Any
    ) -> list[Any]:
        """Return a plan's outputs, finished and where the caller wants them. None stands for outputs of a later
        program."""
        plan, queue = frame.plan, self.queue
        for i, name in () if record is None else frame.results.after:
            values[i] = record[name]
        outputs: list[Any] = [None] * len(plan.outputs)
        for at, i in frame.outputs:
            outputs[at] = slot_value(frame, values, i)
        if frame.growing is not None:
            for state, view in zip(frame.growing.states, frame.growing.views(), strict=True):
                outputs[state.output] = view
        made: Sequence[Any] = outputs
        if stay is not None and not plan.device.shares_memory:
            made = stay.keep(plan, made, queue, () if frame.room is None else frame.room.handed())
        elif self.counters is None or plan.device.shares_memory:
            made = queue.fetch(made)
        else:
            queue.finish()
            begin, there = time.perf_counter(), made
            made = queue.fetch(made)
            self._copied(self.counters, "results", begin, there)
        self._check_reports()
        return made if isinstance(made, list) else list(made)

    def _completed(self, frame: Frame, values: Values, made: Sequence[Any], stay: Stay | None) -> list[Any]:
        """Add the outputs of the program that follows a plan, and copy outputs that share memory."""
        plan, rest = frame.plan, list[Any]()
        if plan.rest is not None:
            given = self.queue.fetch([slot_value(frame, values, i) for i in plan.rest_inputs])
            rest = self.run(plan.rest, given, stay and stay.rest(plan))
        outputs = [rest[i] if kind == "rest" else v for (kind, i), v in zip(plan.outputs, made, strict=True)]
        for at in frame.copied:
            if isinstance(outputs[at], np.ndarray):
                outputs[at] = outputs[at].copy()
        return outputs

    def _copied(self, counters: Counters, name: str, begin: float, moved: Sequence[Any]) -> None:
        """Record a copy to or from the device that took the time since ``begin``."""
        end = time.perf_counter()
        self.copied += end - begin
        nbytes = sum(array.nbytes for array in moved if hasattr(array, "nbytes") and not isinstance(array, np.ndarray))
        counters.record_copy(name, begin, end, nbytes)

    def _check_reports(self) -> None:
        """Raise the errors that finished kernels report about their inputs."""
        if self.queue.watching:
            try:
                self.queue.check()
            except KernelError as error:
                raise _located(error) from None


def slot_value(frame: Frame, values: Values, i: int) -> Any:
    """The value in a slot; None for slot -1."""
    if i < 0:
        return None
    return values[i] if i in values else frame.memory[i]


def _where(step: Step) -> str:
    return f"node {step.node.name!r} ({step.node.attrs.get(STANDS_FOR, step.node.op)})"


def _raise(error: ExecutionError | MemoryError, step: Step) -> NoReturn:
    """Raise an error, and add the step if the error names no place."""
    if isinstance(error, MemoryError):
        raise ExecutionError("not enough memory", where=_where(step)) from error
    if error.where:
        raise error
    raise ExecutionError(error.what, where=_where(step), hint=error.hint) from error


def _located(error: KernelError) -> ExecutionError:
    """Turn a kernel's report into the error for the user. It names the step, which may be in a body."""
    subject = error.subject
    # otherwise the subject has a step in a body
    return error.at(_where(subject if isinstance(subject, Step) else subject.step))

"""Runs plans with memory of its own. One executor per request: never two inferences at a time in it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..devices.base import Device, Hints, Queue, address, in_order
from ..devices.reports import KernelError
from ..errors import ExecutionError, TunewrightError
from ..ir.graph import Node
from ..ir.symbolic import LEAST
from ..ir.types import TensorType
from ..ops import lookup
from ..ops.append import STANDS_FOR
from ..ops.infer import check_results
from ..passes.grow_states import MOST_NEW
from ..solvers.base import Kernel
from . import ranges
from .brief import Single, Switch
from .control import too_long
from .counters import Counters
from .memory import side_by_side
from .plan import Place, Plan, Run, Step, static_tensor
from .program import Program, type_of
from .ragged import make_room, own_memory, used
from .remote import Stay
from .states import Buffer, Filled, State, continued, grown, keep
from .template import SPARE, Fit, Template


class Frame:
    """A request's memory for one plan: the arena, every slot that does not change, and kernels with their arguments."""

    def __init__(self, plan: Plan, queue: Queue, runs: Mapping[int, Run], counted: bool = False) -> None:
        self.plan, self.queue, device = plan, queue, plan.device
        template = plan.template
        self.arena = device.alloc(plan.arena_bytes) if plan.arena_bytes and template is None else None
        #: the sizes that everything here is for, where the plan is for a class of shapes
        self.sizes: tuple[int, ...] | None = None
        self.values: list[Any] = [None] * len(plan.slots)
        #: slots in memory that is made anew for each inference: where in which storage, and as what
        self.results: list[tuple[int, int, int, tuple[int, ...], np.dtype[Any]]] = []
        #: outputs that share their bytes with an input, a weight or another one: the caller gets copies
        self.copied = plan.shared_outputs()
        #: inputs that are copied to the device at each inference, and where to
        self.copies: list[tuple[int, Any]] = []
        shared = device.shares_memory
        #: bytes of what is made anew; where results are copied to the host, their memory is the frame's
        self.fresh = plan.results if shared else {}
        #: where each of them begins in a piece of so many bytes; empty: they are too large to share one
        self.begins, self.piece = side_by_side(self.fresh)
        buffers = {} if shared else {storage: device.alloc(nbytes) for storage, nbytes in plan.results.items()}
        on_device = {i for step in plan.steps if not step.on_host for i in step.ins}
        for i, slot in enumerate(plan.slots):
            if slot.place is Place.CONST:
                own = template is not None and i in template.constants and slot.const is not None
                self.values[i] = slot.const.copy() if own and slot.const is not None else slot.const
            elif slot.place is Place.ARENA and template is not None:
                continue  # see `fit`
            elif slot.place is Place.ARENA:
                assert self.arena is not None and isinstance(slot.type, TensorType)
                self.values[i] = device.view(self.arena, plan.arena_offsets[slot.storage] + slot.offset, slot.type)
            elif slot.place is Place.RESULT and shared:
                assert isinstance(slot.type, TensorType)
                self.results.append((i, slot.storage, slot.offset, slot.type.physical, slot.type.dtype.numpy))
            elif slot.place is Place.RESULT:
                assert isinstance(slot.type, TensorType)
                self.values[i] = device.view(buffers[slot.storage], slot.offset, slot.type)
            elif slot.place is Place.INPUT and not shared and i in on_device:
                type = static_tensor(slot.type)
                if type is not None:
                    self.values[i] = device.view(device.alloc(type.nbytes), 0, type)
                    self.copies.append((i, self.values[i]))
        arena = {i for i, slot in enumerate(plan.slots) if slot.place is Place.ARENA and template is not None}
        lasting = {i for i, value in enumerate(self.values) if value is not None} | {-1}
        #: inputs that results continue, with the memory of those
        self.states: list[tuple[State, Buffer]] = []
        #: each step with what runs it: without arguments where they never change in this frame
        self.actions: list[_Action | _Together] = []
        self.together: list[_Together] = []
        together = {step for run in runs.values() for step in run.steps}
        for at, step in enumerate(plan.steps):
            if at in runs:
                self.together.append(_Together(runs[at], self.values, queue, counted, arena))
                self.actions.append(self.together[-1])
            if step.optimized_out or step in together:
                continue
            action = _Action(step, [plan.slots[i].storage >= 0 for i in step.outs])
            kernel = step.kernel
            if kernel is not None and step.on_host and not shared:
                kernel = _Detour(kernel)
            if kernel is not None and lasting.issuperset((*step.ins, *step.outs)):  # none of `viewed`
                ins = [None if i < 0 else self.values[i] for i in step.ins]
                action.bound = kernel.bind(queue, ins, [self.values[i] for i in step.outs])
            elif kernel is not None:
                action.launch = kernel.launcher(queue)
            self.actions.append(action)
        #: slots in the arena that steps see as arrays, where those change with sizes
        seen = [a.step for a in self.actions if isinstance(a, _Action)]
        seen += [step for run in self.together for step in run.escaping]
        self.viewed = arena & {i for step in seen for i in (*step.ins, *step.outs)}
        self._counted = counted
        #: of steps that append: where their table says how
        self.appends: dict[int, tuple[Any, list[int]]] = {}
        #: by the number of a step: is the past copied, how far its outer rows are apart
        self.words: dict[int, tuple[int, int]] = {}
        for state in () if template is None else template.states:
            step = plan.steps[state.step]
            run = next(t for t in self.together if step in t.run.steps)
            self.appends[state.step] = run.launcher.words(run.run.steps.index(step), ("COPY", "PAST_STEP"))
        #: inputs with room that this inference writes into, and of steps that may do so where their table says it
        self.filling: list[tuple[Filled, np.ndarray[Any, Any]]] = []
        self.fills: list[tuple[Filled, Any, int]] = []
        for filled in plan.filled:
            step = plan.steps[filled.step]
            for run in (t for t in self.together if step in t.run.steps):
                table, (copy,) = run.launcher.words(run.run.steps.index(step), ("COPY",))
                self.fills.append((filled, table, copy))
        #: ways around all of this, where nothing is counted
        self.single = None if counted or template is not None else Single.of(plan, self)
        self.switch = None if counted else Switch.of(plan, self)

    @property
    def arena_bytes(self) -> int:
        return 0 if self.arena is None else int(self.arena.nbytes)

    def touch(self) -> None:
        """Have the system give pages to its memory now, and not while somebody waits. Nobody uses it yet."""
        if isinstance(self.arena, np.ndarray):
            self.arena.fill(0)

    def fit(self, inputs: Sequence[Any]) -> None:
        """Have everything for the sizes of these inputs, where the plan is for a class of shapes."""
        plan, template = self.plan, self.plan.template
        assert template is not None
        sizes = template.pattern.sizes(inputs)
        assert sizes is not None
        spare = self._continued(template.states, inputs) if template.states else SPARE
        if self.sizes == (*sizes, spare):
            return
        fit = template.fit(sizes, spare)
        assert fit is not None, "the plan is of another class of shapes"
        values, device = fit.values, plan.device
        if fit.arena_bytes and (self.arena is None or self.arena.nbytes < fit.arena_bytes):
            self.arena = None  # before there is another one
            self.arena = device.alloc(fit.arena_bytes if self.sizes is None else fit.arena_bytes * 5 // 4)

        def shape(i: int) -> tuple[int, ...]:
            type = plan.slots[i].type
            assert isinstance(type, TensorType)
            places = template.shapes.get(i)
            return type.physical if places is None else tuple([values[at] for at in places])

        def offset(i: int) -> int:
            at = template.offsets.get(i)
            return plan.slots[i].offset if at is None else values[at]

        base = 0 if self.arena is None else address(self.arena)
        for together in self.together:
            begins = {i: base + fit.offsets[plan.slots[i].storage] + offset(i) for i in together.arena}
            together.fit(fit, template, begins)
        for i in self.viewed:
            slot = plan.slots[i]
            assert isinstance(slot.type, TensorType) and self.arena is not None
            begin = fit.offsets[slot.storage] + offset(i)
            self.values[i] = np.ndarray(shape(i), slot.type.dtype.numpy, self.arena, begin)
        for i in template.constants:
            template.fill(fit, i, self.values[i])
        self.fresh = fit.results
        self.begins, self.piece = ({}, 0) if template.states else side_by_side(self.fresh)
        self.results = [
            (i, storage, offset(i), shape(i), dtype) for i, storage, _, _, dtype in self.results
        ]  # fmt: skip
        self.single = None if self._counted or template.states else Single.of(plan, self)
        self.sizes = (*sizes, spare)

    def _continued(self, states: Sequence[State], inputs: Sequence[Any]) -> int:
        """Decide for each input that a result continues whether that is done in place; rows to spare."""
        self.states = []
        found = [continued(inputs[state.input], state.rows, LEAST + MOST_NEW) for state in states]
        rows = max(inputs[state.input].shape[state.axis] + state.rows for state in states)
        spares = [
            buffer.capacity - inputs[state.input].shape[state.axis] - MOST_NEW
            for state, buffer in zip(states, found, strict=True)
            if buffer is not None
        ]
        spare = spares[0] if spares else grown(rows) - rows
        for state, buffer in zip(states, found, strict=True):
            past = inputs[state.input]
            used = past.shape[state.axis]
            in_place = buffer is not None and buffer.capacity == used + spare + MOST_NEW
            if not in_place:
                shape = (*past.shape[: state.axis], used + spare + MOST_NEW, *past.shape[state.axis + 1 :])
                buffer = Buffer(shape, past.dtype, state.axis, used + state.rows)
            assert buffer is not None
            self.states.append((state, buffer))
            apart = past.strides[state.axis - 1] // past.itemsize if state.axis else past.size
            self.words[state.step] = (int(not in_place), apart)
        return int(spare)

    def append(self) -> None:
        """Say how the past comes into the memory of each result that continues it."""
        for number, (copies, apart) in self.words.items():
            table, (copy, step) = self.appends[number]
            table[copy], table[step] = copies, apart

    def fill(self, inputs: Sequence[Any], may: bool) -> None:
        """Decide for each input with room whether the result is written into it; ``may``: nobody says where it goes."""
        self.filling = []
        for filled, table, copy in self.fills:
            array = inputs[filled.input]
            own = keep(array) and may and not address(array) % 64
            table[copy] = int(not own)
            if own:
                self.filling.append((filled, array))


class _Detour(Kernel):
    """A kernel of the host between those of a device with memory of its own."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.kernel = kernel.name, kernel

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        here = [None if out is None else np.empty(out.shape, out.dtype) for out in outputs]
        made = self.kernel.run(queue, queue.fetch(inputs), here)
        for array, out in zip(made, outputs, strict=True):
            if out is not None:
                queue.put(array, out)
        return made


@dataclass(eq=False)
class _Action:
    step: Step
    #: of each output: its memory is planned
    planned: list[bool]
    bound: Callable[[], object] | None = None
    launch: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] | None = None


class _Together:
    """Steps that are one launch, with the places of arguments that are each inference's own."""

    def __init__(
        self, run: Run, values: Sequence[Any], queue: Queue, counted: bool = False, arena: Collection[int] = ()
    ) -> None:
        """``arena``: slots whose places change with sizes; `fit` sets them."""
        parts = [part for step in run.steps if (part := step.block or step.kernel) is not None]
        self.run, self.launcher = run, run.linker.link(parts, queue)
        #: control flow that a launch may leave to the request
        self.escaping = [step for step in run.steps if step.block is not None and step.block.escapes]
        #: iterations that all loops of an inference may take
        self.most = max((step.control.max_iterations for step in run.steps if step.control is not None), default=0)
        if counted:
            self.launcher.clock()
        own: dict[int, list[tuple[int, bool, int]]] = {}
        moving: dict[int, list[tuple[int, bool, int]]] = {}
        for kernel, step in enumerate(run.steps):
            for output, slots in ((False, step.ins), (True, step.outs)):
                for index, slot in enumerate(slots):
                    if slot >= 0 and values[slot] is not None:
                        self.launcher.set(kernel, output, index, values[slot])
                    elif slot in arena:
                        moving.setdefault(slot, []).append((kernel, output, index))
                    elif slot >= 0:
                        own.setdefault(slot, []).append((kernel, output, index))
        self.arena = [*moving]
        self._moving = [self.launcher.places(uses) for uses in moving.values()]
        #: outputs that become as long as a loop: where, how much room they need, and the slot that says so
        self.ragged = [
            (step.outs[one.output], one, step.ins[0] if one.most is None else -1, step.node)
            for step in run.steps if step.block is not None for one in step.block.ragged
        ]  # fmt: skip
        #: how many rows of which shape each of them may have, by the sizes at hand
        self.rooms = {one: (one.most, one.type.dims) for _, one, _, _ in self.ragged}
        self.own = [(slot, self.launcher.setter(uses)) for slot, uses in own.items()]
        #: where their addresses are written, where that is how they are set
        self.places = {slot: self.launcher.places(uses) for slot, uses in own.items()}

    def fit(self, fit: Fit, template: Template, addresses: Mapping[int, int]) -> None:
        """Set what depends on sizes, and where slots in the arena are."""
        place = template.formulas.place
        self.launcher.fit(fit.values, place, fit.posed)
        for _, one, _, _ in self.ragged:
            dims = tuple([fit.values[place(d)] for d in one.type.dims])
            self.rooms[one] = None if one.most is None else fit.values[place(one.most)], dims
        for slot, found in zip(self.arena, self._moving, strict=True):
            assert found is not None
            table, places = found
            for at in places:
                table[at] = addresses[slot]

    def __call__(self, values: Sequence[Any]) -> None:
        for slot, set in self.own:
            set(values[slot])
        self.launcher()


class Executor:
    """Frames, a queue, and counters when they are wanted."""

    def __init__(
        self, device: Device, counters: Counters | None = None, max_tensor_bytes: int = 0, hints: Hints | None = None
    ) -> None:
        self.counters, self.max_tensor_bytes = counters, max_tensor_bytes
        self._hints = hints or Hints()
        self.queue = device.request_queue(self._hints)
        #: of all loops, since the inference began
        self.iterations = 0
        #: seconds that copies to and from the device took so far, where that is counted
        self.copied = 0.0
        self._frames: weakref.WeakKeyDictionary[Plan, Frame] = weakref.WeakKeyDictionary()

    def frames(self) -> list[tuple[Plan, Frame]]:
        """The memory that is held for each plan that has run."""
        return list(self._frames.items())

    def prepare(self, plan: Plan) -> Frame:
        """Make the memory for a plan. Another thread may do it while an inference by another plan runs here."""
        frame = self._frames[plan] = Frame(plan, self.queue, self._runs(plan), self.counters is not None)
        return frame

    def has(self, plan: Plan) -> bool:
        """There is memory for a plan. Any thread may ask."""
        return plan in self._frames

    def forget(self, plan: Plan) -> None:
        """Give up the memory for a plan."""
        self._frames.pop(plan, None)

    def run(
        self, program: Program, inputs: Sequence[Any], stay: Stay | None = None, plan: Plan | None = None
    ) -> list[Any]:
        """One pass through a program, by its plan for these inputs if that is known; the results are the caller's.

        With ``stay`` tensors stay in the device's memory, and may still be being computed.
        """
        plan = plan or program.plan_for(inputs)
        if stay is not None and plan.template is not None and plan.template.states:
            plan = program.plan(tuple(type_of(value) for value in inputs))  # results that grow are views
        frame = self._frames.get(plan) or self.prepare(plan)
        if any(type(value) is np.ndarray and not value.flags.c_contiguous for value in inputs):
            apart = () if plan.template is None else plan.template.apart
            inputs = [v if at in apart or not isinstance(v, np.ndarray) else in_order(v) for at, v in enumerate(inputs)]
        if plan.template is not None:
            frame.fit(inputs)
            frame.append()
        if frame.fills:
            frame.fill(inputs, stay is None)
        queue = self.queue
        made: Sequence[Any]
        if stay is None and ranges.active is None:
            if frame.single is not None and not frame.filling:
                try:
                    return frame.single(inputs)
                except KernelError as error:
                    raise _located(error, frame.together[0].run.steps) from None
                finally:
                    queue.finish()
            if frame.switch is not None and (branch := frame.switch(inputs)) is not None:
                try:
                    made = self.run(*branch)
                    return [made[i] for i in frame.switch.outputs]
                except (ExecutionError, MemoryError):
                    pass  # the step itself says where it was
        if self.counters is not None:
            self.counters.enter(plan)
        values = list(frame.values)
        for at, value in zip(plan.inputs, inputs, strict=True):
            values[at] = value
        begin = time.perf_counter()
        for at, memory in frame.copies:
            queue.put(values[at], memory)
            if type(values[at]) is not np.ndarray:  # a caller's, which kernels need not know
                values[at] = memory
        if self.counters is not None and frame.copies:
            queue.finish()
            self._copied(self.counters, "inputs", begin, [memory for _, memory in frame.copies])
        if frame.begins and not frame.filling and (stay is None or not stay.into):
            piece = np.empty(frame.piece, np.uint8)
            begin_at = -address(piece) % 64
            for i, storage, offset, shape, dtype in frame.results:
                values[i] = np.ndarray(shape, dtype, piece, begin_at + frame.begins[storage] + offset)
        else:
            lent: dict[int, Any] = {}
            if stay is not None and plan.device.shares_memory:
                shapes = {i: shape for i, _, _, shape, _ in frame.results}
                lent = stay.storages(plan, inputs, shapes, frame.fresh)
            lent |= {state.storage: buffer.memory for state, buffer in frame.states}
            lent |= {filled.storage: array.reshape(-1).view(np.uint8) for filled, array in frame.filling}
            buffers = {s: lent[s] if s in lent else plan.device.alloc(nbytes) for s, nbytes in frame.fresh.items()}
            for i, storage, offset, shape, dtype in frame.results:
                values[i] = np.ndarray(shape, dtype, buffers[storage], offset)
        try:
            watched = ranges.active
            for action in frame.actions:
                if watched is not None:
                    self._in_range(watched, action, values, queue)
                elif isinstance(action, _Together):
                    self.together(action, values, queue)
                else:
                    self.step(action, values, queue)
            made = [values[i] if kind == "slot" else None for kind, i in plan.outputs]
            for state, buffer in frame.states:
                made[state.output] = buffer.view(inputs[state.input].shape[state.axis] + state.rows)
            if stay is None or plan.device.shares_memory:
                if self.counters is None or plan.device.shares_memory:
                    made = queue.fetch(made)
                else:
                    queue.finish()
                    begin, there = time.perf_counter(), made
                    made = queue.fetch(made)
                    self._copied(self.counters, "results", begin, there)
            else:
                made = stay.keep(plan, made, queue)
            self.check_reports()
        except BaseException:
            queue.forget()
            queue.finish()  # what runs still writes to memory that is given up here
            raise
        if frame.switch is not None:
            frame.switch.learn(inputs, values)
        rest: Sequence[Any] = ()
        if plan.rest is not None:
            rest = self.run(plan.rest, queue.fetch([values[i] for i in plan.rest_inputs]), stay and stay.rest(plan))
        outputs = [rest[i] if kind == "rest" else v for (kind, i), v in zip(plan.outputs, made, strict=True)]
        for at in frame.copied:
            if isinstance(outputs[at], np.ndarray):
                outputs[at] = outputs[at].copy()
        return outputs

    @property
    def launches(self) -> int:
        """Kernels launched so far."""
        return self.queue.launches

    def spent(self) -> tuple[float, int]:
        """Seconds that were spent waiting for kernels so far, and how many were launched."""
        return self.queue.waited, self.queue.launches

    def _runs(self, plan: Plan) -> Mapping[int, Run]:
        """What is linked: nothing where steps are counted and a launch does not tell how long each took."""
        if self.counters is None or all(run.linker.timed for run in plan.runs.values()):
            return plan.runs
        return {}

    def _copied(self, counters: Counters, name: str, begin: float, moved: Sequence[Any]) -> None:
        """What was in or is now in the device's memory was copied since ``begin``."""
        end = time.perf_counter()
        self.copied += end - begin
        nbytes = sum(array.nbytes for array in moved if hasattr(array, "nbytes") and not isinstance(array, np.ndarray))
        counters.record_copy(name, begin, end, nbytes)

    def _in_range(
        self, watched: ranges.Range, action: _Action | _Together, values: list[Any], queue: Queue
    ) -> None:
        if isinstance(action, _Together):
            with watched(f"{len(action.run.steps)} kernels"):
                self.together(action, values, queue)
            return
        node = action.step.node
        with watched(node.name or node.output.name):
            self.step(action, values, queue)

    def together(self, action: _Together, values: list[Any], queue: Queue) -> None:
        begin, launcher = time.perf_counter(), action.launcher
        if launcher.loops:
            launcher.bound(max(0, action.most - self.iterations))
            iterations = action.most - self.iterations, action.most
            make_room(action.ragged, action.rooms, values, iterations, self.max_tensor_bytes)
        self.run_together(action, values)
        if launcher.loops:
            left = self.escaped(action, values, queue) if action.escaping else ()
            self.bounded(action)
            for slot, one, _, node in action.ragged:
                if node not in left:
                    values[slot] = used(one, action.rooms[one][1], values[slot], launcher.counted(one.counter))
        if self.counters is not None:
            queue.finish()
            times = launcher.seconds()
            self.counters.record_together(action.run.steps, times, begin, time.perf_counter())
            self.counters.record_inside(launcher.inside())

    def run_together(self, action: _Together, values: list[Any]) -> None:
        try:
            action(values)
        except KernelError as error:
            raise _located(error, action.run.steps) from None

    def escaped(self, action: _Together, values: list[Any], queue: Queue) -> list[Node]:
        """Run the control flow that the launch has left, and what is behind it. Answers which."""
        found: list[Node] = []
        while True:
            queue.finish()
            number = action.launcher.escaped()
            if number is None:
                return found
            step = action.run.steps[number]
            found.append(step.node)
            self.launch(_Action(step, own_memory(step)), values, queue)
            action.launcher.bound(max(0, action.most - self.iterations), anew=False)
            self.run_together(action, values)

    def bounded(self, action: _Together) -> None:
        """LimitError where loops in a launch took more iterations than there may be."""
        self.queue.finish()
        taken, tag, trips = action.launcher.iterated()
        self.iterations += taken
        if isinstance(tag, Node):
            what = "the loops of the model do not end" if trips is None else f"runs {trips:,} times"
            raise too_long(tag, what, action.most)

    def step(self, action: _Action, values: list[Any], queue: Queue) -> None:
        step = action.step
        counted = self.counters is not None
        begin, launches = (queue.now(), self.launches) if counted else (0.0, 0)
        try:
            if step.on_host:
                queue.finish()
                self.check_reports()
            queue.launching = step
            if action.bound is not None:
                action.bound()
            else:
                self.launch(action, values, queue)
        except ExecutionError as error:
            if error.where:
                raise
            raise ExecutionError(error.what, where=_where(step), hint=error.hint) from error
        except TunewrightError:
            raise
        except MemoryError as error:
            raise ExecutionError("not enough memory", where=_where(step)) from error
        if self.counters is not None:
            self.counters.record(step, queue.now() - begin, self.launches - launches, begin)

    def launch(self, action: _Action, values: list[Any], queue: Queue) -> None:
        """A step whose arguments are this inference's own."""
        step = action.step
        ins: Sequence[Any] = [None if i < 0 else values[i] for i in step.ins]
        if step.control is not None:
            ins = queue.fetch(ins)
            self.check_reports()
            made = step.control.run(self, ins)
        else:
            assert action.launch is not None
            if not all(action.planned):
                ins = queue.fetch(ins)  # how large its results are may depend on values that are being computed
                self.check_reports()
                self.check(step, ins)
            outs = [values[i] if planned else None for i, planned in zip(step.outs, action.planned, strict=True)]
            made = action.launch(ins, outs)
        for i, planned, value in zip(step.outs, action.planned, made, strict=False):
            if not planned:
                values[i] = value
            elif step.control is not None:
                queue.put(value, values[i])
        for i in step.release:
            values[i] = None

    def check_reports(self) -> None:
        """Raise what kernels that have finished say of their inputs."""
        if not self.queue.watching:
            return
        try:
            self.queue.check()
        except KernelError as error:
            raise error.at(_where(error.subject)) from None

    def check(self, step: Step, ins: Sequence[Any]) -> None:
        """Bound the results of a step that allocates them itself."""
        spec = lookup(step.node.op)
        if spec is not None:
            check_results(step.node, spec, ins, self.max_tensor_bytes)


def _where(step: Step) -> str:
    return f"node {step.node.name!r} ({step.node.attrs.get(STANDS_FOR, step.node.op)})"


def _located(error: KernelError, steps: Sequence[Step]) -> ExecutionError:
    """An error of one launch for several steps, which says in which it was."""
    subject = error.subject
    return error.at(_where(steps[subject] if isinstance(subject, int) else subject.step))  # the other one: in a body

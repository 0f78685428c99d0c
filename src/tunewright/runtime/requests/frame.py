"""The memory of a request for one plan, and the executables of the plan bound to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tunewright.devices.base import Queue, address, in_order
from tunewright.devices.control_rows import Ragged
from tunewright.devices.executable import Bound
from tunewright.ir.graph import Node
from tunewright.ir.symbolic import hint
from tunewright.ir.types import TensorType
from tunewright.passes.attention.grow_states import MOST_NEW

from ..control.decision import Decision
from ..control.ragged_results import RaggedRoom
from ..plans.growing_buffers import Filled, Growing, keep
from ..plans.plan import Plan, Segment, SlotPlace, static_tensor
from ..plans.template import SPARE, Fit, Template
from .result_memory import Results, ResultSlot
from .room import Room

#: numpy's flags C_CONTIGUOUS and ALIGNED: the array has no gaps and every element is aligned
IN_ORDER = 0x1 | 0x100


@dataclass(eq=False)
class BoundSegment:
    """A segment of a plan, bound to the memory of a request."""

    segment: Segment
    #: None: the request runs the segment itself
    bound: Bound | None
    #: `Bound.invoke`, if the segment needs nothing else
    invoke: Callable[[MutableMapping[int, Any]], None] | None
    #: slots whose values no later segment reads
    release: tuple[int, ...]
    #: the most iterations that all loops of an inference may take together
    most: int
    #: outputs as long as a loop runs: slot, description, slot of the maximal length (-1: none), node
    ragged: list[tuple[int, Ragged, int, Node]]


class Frame:
    """The memory of a request for one plan: the arena, all slots that do not change, and the bound segments."""

    def __init__(
        self, plan: Plan, queue: Queue, counted: bool = False, continued: Sequence[tuple[int, int]] = ()
    ) -> None:  # fmt: skip
        self.plan, self.queue, device = plan, queue, plan.device
        template = plan.template
        self.arena = device.alloc(plan.arena_bytes) if plan.arena_bytes and template is None else None
        #: the sizes that the frame is fitted to, if the plan serves a class of shapes
        self.sizes: tuple[int, ...] | None = None
        #: values that stay in the same place in every inference, by slot
        self.memory: list[Any] = [None] * len(plan.slots)
        #: outputs that share bytes with an input, a weight or another output: the caller gets copies
        self.copied = plan.shared_outputs()
        #: inputs that each inference copies to the device, with their destinations
        self.copies: list[tuple[int, Any]] = []
        #: memory for changing sizes, on a device with memory of its own
        self.room = None if template is None or device.shares_memory else Room(plan, queue, self.memory, continued)
        found = self._place()
        arena = {i for i, slot in enumerate(plan.slots) if slot.place is SlotPlace.ARENA and template is not None}
        fitted = arena if self.room is None else self.room.slots
        self.segments = [one for segment in plan.segments for one in self._bind(segment, fitted, counted)]
        seen = {i for one in self.segments if not _takes_addresses(one) for i in one.segment.slots}
        # A launch may leave control flow to the request, which then needs arrays.
        escaping = [s for one in self.segments for s in one.segment.steps if s.block is not None and s.block.escapes]
        seen |= {i for step in escaping for i in (*step.ins, *step.outs) if i >= 0}
        #: arena slots that the host uses as arrays and whose shapes change with sizes
        self._viewed = arena & seen
        #: result slots that are used as arrays during the inference
        self._arrays = {one.slot for one in found} & seen
        states = () if template is None else template.states
        #: inputs that must be contiguous
        self._in_order = [i for i in range(len(plan.inputs)) if template is None or i not in template.apart]
        #: Inputs that results continue, and those results: their segments receive the addresses.
        self._pasts = [(one.input, plan.inputs[one.input]) for one in states if plan.inputs[one.input] not in seen]
        grown = {one.storage for one in states}
        self._grown = [one for one in found if one.storage in grown and one.slot not in seen]
        found = [one for one in found if one not in self._grown]
        #: the maximal size of each ragged output, for the current sizes
        ragged = [one for each in self.segments for _, one, _, _ in each.ragged]
        self.rooms = {one: RaggedRoom.of(one, lambda number: int(hint(number))) for one in ragged}
        #: results that grow; None: the plan has none
        self.growing = Growing(states) if states else None
        #: For each appending step: its table, and the entries for "copy the past" and for the distance of rows.
        self._appends = [self._words(state.step, "COPY", "PAST_STEP") for state in states]
        #: outputs that do not grow, each with its slot; -1: a later program makes it
        grows = {one.output for one in states}
        self.outputs = [
            (at, i if kind == "slot" else -1) for at, (kind, i) in enumerate(plan.outputs) if at not in grows
        ]
        #: The pattern does not check these inputs again: `growing` knows that their sizes are right.
        known = frozenset(one.input for one in states)
        self._beside = replace(template.pattern, known=known) if template is not None and states else None
        self._others = [at for at in range(len(plan.inputs)) if at not in known]
        #: the sizes that constants consist of
        self._filled: dict[int, list[int]] = {}
        #: `filling`: inputs with room that this inference writes into. `fills`: steps that can do so, with their table.
        self.filling: list[tuple[Filled, np.ndarray[Any, Any]]] = []
        self.fills: list[tuple[Filled, Any, int]] = []
        for filled in plan.filled:
            table, (copy,) = self._words(filled.step, "COPY")
            self.fills.append((filled, table, copy))
        #: set if the plan only decides which branch of an If runs
        self.decision = None if counted else Decision.of(plan)
        #: results made anew by each inference; where results are copied to the host, the frame owns their memory
        self.results = self._results_in(found, plan.results if device.shares_memory else {})
        #: whether the results differ for other sizes
        self._results_vary = template is not None and any(
            template.varies(one.slot, one.storage) for one in self.results.found
        )
        #: results for earlier sizes
        self._known: weakref.WeakKeyDictionary[Fit, Results] = weakref.WeakKeyDictionary()

    def _results_in(self, found: Sequence[ResultSlot], nbytes: Mapping[int, int]) -> Results:
        template = self.plan.template
        grown = {one.storage for one in self._grown}
        made = {storage: size for storage, size in nbytes.items() if storage not in grown}
        # Results that grow and are used as arrays have memory of their own.
        share = template is None or not any(state.storage in made for state in template.states)
        return Results(self.plan, found, made, self._arrays, share)

    def _place(self) -> list[ResultSlot]:
        """Make the memory for all slots that stay in place. Return the result slots, which do not."""
        found = []
        plan, device, template = self.plan, self.plan.device, self.plan.template
        shared = device.shares_memory
        own = set() if self.room is None else self.room.slots
        kept = {} if shared or self.room is not None else plan.results
        buffers = {storage: device.alloc(nbytes) for storage, nbytes in kept.items()}
        on_device = {i for step in plan.steps if not step.on_host for i in step.ins}
        for i, slot in enumerate(plan.slots):
            type = static_tensor(slot.type)
            if i in own or self.memory[i] is not None:  # see `fit`
                continue
            if slot.place is SlotPlace.CONST:
                filled = template is not None and i in template.constants and slot.const is not None
                self.memory[i] = slot.const.copy() if filled and slot.const is not None else slot.const
            elif slot.place is SlotPlace.ARENA and template is None:  # with a template: see `fit`
                assert self.arena is not None and type is not None
                self.memory[i] = device.view(self.arena, plan.arena_offsets[slot.storage] + slot.offset, type)
            elif slot.place is SlotPlace.RESULT and shared:
                assert type is not None
                found.append(ResultSlot(i, slot.storage, slot.offset, type.physical, type.dtype.numpy))
            elif slot.place is SlotPlace.RESULT:
                assert type is not None
                self.memory[i] = device.view(buffers[slot.storage], slot.offset, type)
            elif slot.place is SlotPlace.INPUT and not shared and i in on_device and type is not None:
                self.memory[i] = device.view(device.alloc(type.nbytes), 0, type)
                self.copies.append((i, self.memory[i]))
        return found

    def _bind(self, segment: Segment, arena: set[int], counted: bool) -> list[BoundSegment]:
        """Bind a segment. Bind each step by itself if steps are counted and the executable does not report their times.
        """
        executable, steps = segment.executable, segment.steps
        untold = counted and executable is not None and not executable.timed
        if untold and (len(steps) > 1 or steps[0].block is not None):
            link = self.plan.device.link
            apart = [Segment([s], partial(link, [s.part]) if s.block is None else None) for s in steps]
            return [made for one in apart for made in self._bind(one, arena, counted)]
        bound = None if executable is None else executable.bind(self.queue, self.memory, arena, counted)
        most = max((step.control.max_iterations for step in segment.steps if step.control is not None), default=0)
        release = tuple(i for step in segment.steps for i in step.release)
        ragged = [
            (step.outs[one.output], one, step.ins[0] if one.most is None else -1, step.node)
            for step in segment.steps if step.block is not None for one in step.block.ragged
        ]  # fmt: skip
        invoke = None if bound is None or bound.loops is not None else bound.invoke
        return [BoundSegment(segment, bound, invoke, release, most, ragged)]

    def _words(self, step: int, *names: str) -> tuple[Any, list[int]]:
        """Find a linked step's table, and the positions of the named numbers in it."""
        for one in self.segments:
            if self.plan.steps[step] in one.segment.steps and one.bound is not None:
                return one.bound.words(one.segment.steps.index(self.plan.steps[step]), names)
        raise AssertionError("the step is in no segment")

    @property
    def arena_bytes(self) -> int:
        if self.room is not None:
            return self.room.nbytes
        return 0 if self.arena is None else int(self.arena.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes that the bound segments hold."""
        return sum(one.bound.nbytes for one in self.segments if one.bound is not None)

    def touch(self) -> None:
        """Make the system map the pages of the arena now, not during an inference. Call it before the frame is in use.
        """
        if isinstance(self.arena, np.ndarray):
            self.arena.fill(0)

    def take(
        self, inputs: Sequence[Any], may_fill: bool, sizes: tuple[int, ...] | None = None
    ) -> tuple[Sequence[Any], dict[int, Any]]:
        """Prepare the frame for these inputs. Return the inputs without gaps, and the values by slot.

        ``may_fill``: the inference may write into inputs that their owner gave up. ``sizes``: the values of the plan's
        symbols, if they are known.
        """
        for i in self._in_order:
            value = inputs[i]
            if type(value) is np.ndarray and not value.flags.c_contiguous:
                wanted = {at for at in self._in_order if isinstance(inputs[at], np.ndarray)}
                inputs = [in_order(v) if at in wanted else v for at, v in enumerate(inputs)]
                break
        values = dict(zip(self.plan.inputs, inputs, strict=True))
        if self.plan.template is not None:
            self.fit(inputs, sizes)
            if self.growing is not None:
                self._append(self.growing, inputs)
        if self.fills:
            self.fill(inputs, may_fill)
        return inputs, values

    def fit(self, inputs: Sequence[Any], sizes: tuple[int, ...] | None = None) -> None:
        """Fit the frame to the sizes of these inputs. Only for plans that serve a class of shapes."""
        plan, template = self.plan, self.plan.template
        assert template is not None
        sizes = sizes or template.pattern.sizes(inputs)
        assert sizes is not None
        if self.room is not None:
            if self.sizes != (*sizes, SPARE) or self.room.continues:
                self._fit_room(self.room, sizes, inputs)
            return
        spare, growing = SPARE, self.growing
        if growing is not None:
            spare = growing.take([inputs[one.input] for one in growing.states]) - MOST_NEW
        if self.sizes == (*sizes, spare):
            return
        fit = template.fit(sizes, spare)
        assert fit is not None, "the plan is of another class of shapes"
        if fit.arena_bytes and (self.arena is None or self.arena.nbytes < fit.arena_bytes):
            self.arena = None  # frees the old arena before the new one is allocated
            self.arena = plan.device.alloc(fit.arena_bytes if self.sizes is None else fit.arena_bytes * 5 // 4)
        self.sizes = None  # stays None if memory runs out or Ctrl-C interrupts the work below
        values, begin = fit.values, 0 if self.arena is None else address(self.arena)
        for each in self.segments:
            if each.bound is not None and _takes_addresses(each):
                each.bound.fit(fit.sizes, begin, template.begins)
        for i in self._viewed:
            type = plan.slots[i].type
            assert isinstance(type, TensorType) and self.arena is not None
            shape = self._shape(i, fit, template)
            self.memory[i] = np.ndarray(shape, type.dtype.numpy, self.arena, values[template.begins[i]])
        template.fill(fit, self.memory, self._filled)
        place = fit.sizes.place
        self.rooms = {one: RaggedRoom.of(one, lambda number: values[place(number)]) for one in self.rooms}
        if self._results_vary:
            self.results = self._fitted_results(fit, template)
        self.sizes = (*sizes, spare)

    def _fit_room(self, room: Room, sizes: tuple[int, ...], inputs: Sequence[Any]) -> None:
        """Do what `fit` does, on a device with memory of its own."""
        self.sizes = None  # stays None if the work below is interrupted
        fit, largest, layout = room.fit(sizes, inputs)
        self.copies = room.copies()
        for each in self.segments:
            if each.bound is not None:
                each.bound.refit(fit.sizes, largest.sizes, layout)
        self.sizes = (*sizes, SPARE)

    def _fitted_results(self, fit: Fit, template: Template) -> Results:
        """Return the results for these sizes, and reuse the present ones if they are equal."""
        known, now = self._known.get(fit), self.results
        if known is not None:
            return known
        found = [
            ResultSlot(one.slot, one.storage, self._offset(one.slot, fit, template),
                       self._shape(one.slot, fit, template), one.dtype)
            for one in now.found
        ]  # fmt: skip
        nbytes = {storage: fit.values[at] for storage, at in template.results.items()}
        if found == now.found and all(now.nbytes[storage] == nbytes[storage] for storage in now.nbytes):
            return now
        made = self._known[fit] = self._results_in(found, nbytes)
        return made

    def _shape(self, i: int, fit: Fit, template: Template) -> tuple[int, ...]:
        places, type = template.shapes.get(i), self.plan.slots[i].type
        assert isinstance(type, TensorType)
        return type.physical if places is None else tuple([fit.values[at] for at in places])

    def _offset(self, i: int, fit: Fit, template: Template) -> int:
        at = template.offsets.get(i)
        return self.plan.slots[i].offset if at is None else fit.values[at]

    def expect(self) -> None:
        """Tell the device of the first segment that an inference begins once its sizes are prepared."""
        for each in self.segments[:1]:
            if each.bound is not None:
                each.bound.expect()

    def following(self, inputs: Sequence[Any]) -> tuple[tuple[int, ...], int] | None:
        """Return the values of the plan's symbols and the spare rows, for inputs that continue the last results.

        None: the inputs do not continue them.
        """
        if self._beside is None:
            return None
        assert self.growing is not None
        spare = self.growing.next_spare([inputs[one.input] for one in self.growing.states])
        if spare is None or not all(is_plain(inputs[at]) for at in self._others):
            return None
        sizes = self._beside.sizes(inputs)
        return None if sizes is None else (sizes, spare - MOST_NEW)

    def _append(self, growing: Growing, inputs: Sequence[Any]) -> None:
        """Tell the appending steps whether they copy the past, and give the segments the addresses of past and result.
        """
        if growing.stays:
            return
        for (table, (copy, step)), (copies, apart) in zip(self._appends, growing.copied, strict=True):
            table[copy], table[step] = copies, apart
        places = {slot: address(inputs[at]) for at, slot in self._pasts}
        begins = growing.begins()
        places |= {one.slot: begins[one.storage] + one.offset for one in self._grown}
        for each in self.segments:
            if each.bound is not None and _takes_addresses(each):
                each.bound.place(places)

    def fill(self, inputs: Sequence[Any], may: bool) -> None:
        """Decide for each input with room whether the inference writes the result into it.

        ``may``: the caller named no place for the results.
        """
        self.filling = []
        for filled, table, copy in self.fills:
            array = inputs[filled.input]
            own = keep(array) and may and not address(array) % 64
            table[copy] = int(not own)
            if own:
                self.filling.append((filled, array))


def is_plain(value: Any) -> bool:
    """Whether a value is a contiguous, aligned numpy array."""
    return type(value) is np.ndarray and value.flags.num & IN_ORDER == IN_ORDER


def _takes_addresses(one: BoundSegment) -> bool:
    return one.segment.executable is not None and one.segment.executable.takes_addresses

"""A request's memory for a plan that serves a class of shapes, on a device with memory of its own.

All of it is one buffer. Its layout fits somewhat larger sizes (the *room*), so tensors stay in place while sizes change
a little. What a device has recorded with their addresses stays valid for all these sizes.

An output that the next inference takes as an input (a state) has two places, which change roles after each inference.
So nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewright.devices.base import Queue
from tunewright.ir.types import TensorType

from ..plans.memory_layout import ALIGNMENT
from ..plans.plan import Plan, SlotPlace
from ..plans.template import SPARE, Fit

#: Tensors begin at multiples of this number of bytes.
_LINE = 256
#: Sizes up to `_FINE` share a room. Larger ones are rounded up to `_STEPS` steps between powers of two.
_FINE, _STEPS = 16, 4
#: the least room of sizes that grow
_GROWING = 128


def rounded(size: int, grows: bool = False) -> int:
    """Return the size of the room for a size: at most a quarter larger, or a power of two for sizes that grow."""
    if grows:
        return max(_GROWING, 1 << (size - 1).bit_length())
    if size <= _FINE:
        return _FINE
    step = max(_FINE, (1 << (size - 1).bit_length() - 1) // _STEPS)
    return -(-size // step) * step


@dataclass(frozen=True)
class _Pair:
    """An input and the output that the next inference takes in its place: numbers, slots, the output's storage."""

    input: int
    output: int
    past: int
    present: int
    storage: int


@dataclass
class _Layout:
    """The places of all tensors for some sizes."""

    sizes: tuple[int, ...]
    room: Fit
    nbytes: int = 0
    #: places by the slot of an input, and by the storage of a result
    inputs: dict[int, int] = field(default_factory=dict)
    results: dict[int, int] = field(default_factory=dict)
    #: both places of each pair
    pairs: list[tuple[int, int]] = field(default_factory=list)

    def take(self, nbytes: int) -> int:
        """Reserve the place of the next tensor."""
        begin = self.nbytes
        self.nbytes += max(1, -(-nbytes // _LINE)) * _LINE
        return begin


class Room:
    """Memory for the inputs, the results and the arena of a plan, and the tensors in it."""

    def __init__(
        self, plan: Plan, queue: Queue, memory: list[Any], continued: Collection[tuple[int, int]] = ()
    ) -> None:  # fmt: skip
        """``memory``: the request's tensors by slot; this object sets them.

        ``continued``: pairs of an input's number and the number of the output that replaces it in the next inference.
        """
        template = plan.template
        assert template is not None
        self._plan, self._queue, self._memory, self._template = plan, queue, memory, template
        on_device = {i for step in plan.steps if not step.on_host for i in step.ins}
        #: slots of inputs that are copied to the device, and slots of results
        self._inputs = [i for i in plan.inputs if i in on_device and isinstance(plan.slots[i].type, TensorType)]
        self._results = [i for i, slot in enumerate(plan.slots) if slot.place is SlotPlace.RESULT]
        self._pairs = [*self._found(continued)]
        self._of_pair = {
            pair.storage: [i for i in self._results if plan.slots[i].storage == pair.storage] for pair in self._pairs
        }
        #: slots whose shapes or places change within a layout
        self._changing = {i for i in self.slots if i in template.shapes or i in template.offsets}
        #: positions of all sizes in bytes that may be larger for other sizes
        self._bounds = sorted({nbytes for _, nbytes in template.storages.values()} | {*template.results.values()})
        #: offsets within storages that depend on sizes: tensors there move
        self._moving = [*template.offsets.values()]
        self._layout: _Layout | None = None
        self._buffer: Any = None
        #: the offset in the buffer and the shape of each tensor
        self._placed: dict[int, tuple[int, tuple[int, ...]]] = {}
        #: changes with the buffer
        self._generation = 0
        #: which of its two places holds the past of each pair
        self._side = 0
        #: results of pairs that the last inference made, and the side that holds them
        self._made: tuple[dict[int, Any], int] = {}, 0
        #: constants that consist of sizes, as the host writes them: arrays, their bytes, and the copy on the device
        self._constants, self._bytes_of_constants, self._there = self._own_constants()
        self._numbers: dict[int, list[int]] = {}

    @property
    def slots(self) -> set[int]:
        """Slots whose memory depends on sizes."""
        return {*self._inputs, *self._results, *self._template.begins}

    @property
    def continues(self) -> bool:
        """Whether some places change with each inference."""
        return bool(self._pairs)

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else int(self._buffer.nbytes)

    def fit(self, sizes: tuple[int, ...], inputs: Sequence[Any]) -> tuple[Fit, Fit, Hashable]:
        """Place every tensor for these sizes. Return the fit for them, the fit for the room, and a key of the layout.
        """
        fit = self._template.fit(sizes, SPARE)
        assert fit is not None, "the plan is of another class of shapes"
        layout = self._laid_out(sizes, fit)
        made, side = self._made
        if made and all(inputs[pair.input] is made.get(pair.output) for pair in self._pairs):
            self._side = side
        self._place(layout, fit, self._changing if self._placed else self.slots)
        for pair, (past, present) in zip(self._pairs, layout.pairs, strict=True):
            if self._side:
                past, present = present, past
            there = made.get(pair.output)
            if there is not None and inputs[pair.input] is there and side == self._side:
                self._memory[pair.past], self._placed[pair.past] = there, (past, there.shape)
            else:
                self._put(pair.past, fit, past)
            for i in self._of_pair[pair.storage]:
                self._put(i, fit, present + self._offset(i, fit))
        self._fill(fit)
        moved = tuple([fit.values[at] for at in self._moving])
        return fit, layout.room, (self._generation, layout.sizes, self._side, moved)

    def copies(self) -> list[tuple[int, Any]]:
        """The inputs that are copied to the device, with their destinations."""
        return [(i, self._memory[i]) for i in self._inputs]

    def handed(self) -> Collection[int]:
        """End the inference. Return the numbers of the outputs that stay in place for the next one."""
        self._made = {pair.output: self._memory[pair.present] for pair in self._pairs}, 1 - self._side
        return self._made[0]

    # -- where everything is -------------------------------------------------------------------------------------------
    def _found(self, continued: Collection[tuple[int, int]]) -> Iterator[_Pair]:
        plan, taken = self._plan, set[int]()
        shared = plan.shared_outputs()
        for input, output in continued:
            past, (kind, present) = plan.inputs[input], plan.outputs[output]
            slot = plan.slots[present] if kind == "slot" else None
            if slot is None or slot.place is not SlotPlace.RESULT or past not in self._inputs or output in shared:
                continue
            if slot.offset or present in self._template.offsets or slot.storage in taken:
                continue
            taken.add(slot.storage)
            yield _Pair(input, output, past, present, slot.storage)

    def _laid_out(self, sizes: tuple[int, ...], fit: Fit) -> _Layout:
        """Return the layout for some sizes, and make the memory for it."""
        larger = tuple(rounded(size, self.continues) for size in sizes)
        known = self._layout
        if known is not None and known.sizes in (larger, sizes) and self._fits_in(fit, known.room):
            return known
        room = self._template.fit(larger, SPARE)
        if room is None or not self._fits_in(fit, room):
            larger, room = sizes, fit
        made = self._layout = _Layout(larger, room)
        self._placed.clear()
        made.take(room.arena_bytes)
        paired = {pair.past for pair in self._pairs}
        made.inputs = {i: made.take(self._bytes(i, room)) for i in self._inputs if i not in paired}
        owned = {pair.storage for pair in self._pairs}
        made.results = {s: made.take(self._result_bytes(s, room)) for s in self._plan.results if s not in owned}
        for pair in self._pairs:
            nbytes = max(self._bytes(pair.past, room), self._result_bytes(pair.storage, room))
            made.pairs.append((made.take(nbytes), made.take(nbytes)))
        if self._pairs or self._buffer is None or self._buffer.nbytes < made.nbytes:
            self._queue.finish()  # no kernel may still use the buffer that is freed here
            if not self._pairs:  # with pairs, the old buffer holds the past until it is copied
                self._buffer = None
            self._buffer = self._plan.device.alloc(made.nbytes)
            self._generation, self._made = self._generation + 1, ({}, 0)
        return made

    def _place(self, layout: _Layout, fit: Fit, slots: Collection[int]) -> None:
        """Put these slots in their places, except slots of pairs."""
        template = self._template
        for i in slots:
            if i in template.within:
                storage, at = template.within[i]
                self._put(i, fit, layout.room.values[template.storages[storage][0]] + fit.values[at])
            elif i in layout.inputs:
                self._put(i, fit, layout.inputs[i])
            elif self._plan.slots[i].storage in layout.results:
                self._put(i, fit, layout.results[self._plan.slots[i].storage] + self._offset(i, fit))

    def _offset(self, i: int, fit: Fit) -> int:
        at = self._template.offsets.get(i)
        return self._plan.slots[i].offset if at is None else fit.values[at]

    def _fits_in(self, fit: Fit, room: Fit) -> bool:
        """Whether every tensor is at most as large as in the room. Inputs always are, since no size is larger."""
        small, large = fit.values, room.values
        return all(small[at] <= large[at] for at in self._bounds)

    def _bytes(self, i: int, fit: Fit) -> int:
        return math.prod(self._shape(i, fit)) * self._type(i).dtype.itemsize

    def _result_bytes(self, storage: int, fit: Fit) -> int:
        at = self._template.results.get(storage)
        return self._plan.results[storage] if at is None else fit.values[at]

    def _type(self, i: int) -> TensorType:
        type = self._plan.slots[i].type
        assert isinstance(type, TensorType)
        return type

    def _shape(self, i: int, fit: Fit) -> tuple[int, ...]:
        places = self._template.shapes.get(i)
        return self._type(i).physical if places is None else tuple([fit.values[at] for at in places])

    def _put(self, i: int, fit: Fit, offset: int) -> None:
        """Put a tensor at an offset of the buffer."""
        place = offset, self._shape(i, fit)
        if self._placed.get(i) != place:
            type = TensorType(self._type(i).dtype, place[1])  # the shape is in physical order
            self._memory[i], self._placed[i] = self._plan.device.view(self._buffer, offset, type), place

    # -- constants -----------------------------------------------------------------------------------------------------
    def _own_constants(self) -> tuple[dict[int, Any], Any, Any]:
        """Return the constants as arrays of the host, the bytes that hold them all, and the copy on the device."""
        plan, begins, total = self._plan, dict[int, int](), 0
        for i in self._template.constants:
            const = plan.slots[i].const
            assert const is not None
            begins[i], total = total, total + -(-const.nbytes // ALIGNMENT) * ALIGNMENT
        host, there, arrays = np.zeros(total, np.uint8), plan.device.alloc(total), dict[int, Any]()
        for i, begin in begins.items():
            type = TensorType.of(plan.slots[i].const)  # type: ignore[arg-type]
            arrays[i] = np.ndarray(type.dims, type.dtype.numpy, host, begin)
            arrays[i][...] = plan.slots[i].const
            self._memory[i] = plan.device.view(there, begin, type)
        return arrays, host, there

    def _fill(self, fit: Fit) -> None:
        before = dict(self._numbers)
        self._template.fill(fit, self._constants, self._numbers)
        if self._numbers != before:
            self._queue.put(self._bytes_of_constants, self._there)

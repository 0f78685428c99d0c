"""Memory for the results of a plan. Each inference makes new memory, because the caller keeps the results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunewright.devices.base import address

from ..plans.memory_layout import side_by_side
from ..plans.plan import Plan


class ResultSlot(NamedTuple):
    """A slot of a result: its storage, its offset there, its shape and type."""

    slot: int
    storage: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Results:
    """The places of the results for given sizes. Small results are fields of a record in one piece of memory."""

    def __init__(
        self, plan: Plan, found: Sequence[ResultSlot], nbytes: Mapping[int, int], arrays: Collection[int], share: bool
    ) -> None:
        """``nbytes``: the size of each storage. ``share``: the results may lie in one piece of memory.

        ``arrays``: slots that must be arrays while the plan runs. Addresses serve for the others.
        """
        self.found, self.nbytes = found, nbytes
        begins, piece = side_by_side(nbytes) if share else ({}, 0)
        #: bytes of the piece; 0: the results are too large to share one, or may not
        self.piece = piece if begins else 0
        kinds = {one.slot: one for one in found} if begins else {}
        places = {slot: begins[one.storage] + one.offset for slot, one in kinds.items()}
        outputs = [i if kind == "slot" else -1 for kind, i in plan.outputs]
        wanted = [slot for slot in places if slot in arrays or slot in outputs or slot in plan.rest_inputs]
        #: slots passed as addresses; slots read as fields before the plan runs; slots read as fields after it
        self._places = [(slot, at) for slot, at in places.items() if slot not in arrays]
        self._before = [(slot, str(slot)) for slot in wanted if slot in arrays]
        self.after = [(slot, str(slot)) for slot in wanted if slot not in arrays]
        #: the field of each output of the plan; None: some outputs are no fields, or another program follows
        self.names = [str(slot) for slot in outputs] if set(outputs) <= set(wanted) and not plan.rest_inputs else None
        # Reading a field takes a third of the time of making an array.
        formats, offsets = [(kinds[i].dtype, kinds[i].shape) for i in wanted], [places[i] for i in wanted]
        self._record = np.dtype({"names": [*map(str, wanted)], "formats": formats, "offsets": offsets})

    def new(self, values: MutableMapping[int, Any]) -> Any:
        """Make a record in a new piece of memory, and add the place of each result to ``values``."""
        piece = np.empty(self.piece, np.uint8)
        where = address(piece)
        begin = -where % 64
        where += begin
        for slot, at in self._places:
            values[slot] = where + at
        record = np.ndarray((), self._record, piece, begin)
        for slot, name in self._before:
            values[slot] = record[name]
        return record

    def arrays(self, buffers: Mapping[int, Any], values: MutableMapping[int, Any]) -> None:
        """Add each result to ``values`` as an array in its storage."""
        for one in self.found:
            values[one.slot] = np.ndarray(one.shape, one.dtype, buffers[one.storage], one.offset)

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """The shapes of the slots."""
        return {one.slot: one.shape for one in self.found}

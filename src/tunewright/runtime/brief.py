"""Plans of which little is left to do in Python: small networks take no longer than the steps around their launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices.base import address
from ..ops import lookup
from ..solvers.base import Launcher
from .control import If
from .plan import Place, Plan, Step, static_tensor
from .program import Program

if TYPE_CHECKING:
    from .executor import Frame

#: values of what decides that a `Switch` remembers
MOST = 64


class Single:
    """A plan that is one launch, with small results: only addresses change from one inference to the next."""

    @classmethod
    def of(cls, plan: Plan, frame: Frame) -> Single | None:
        """None where a plan is not so."""
        if len(frame.together) != 1 or len(frame.actions) != 1 or plan.rest is not None:
            return None
        if frame.together[0].launcher.loops:
            return None
        begins = {i: frame.begins[storage] + offset for i, storage, offset, _, _ in frame.results if frame.begins}
        if frame.copies or frame.copied or not begins or any(i not in begins for _, i in plan.outputs):
            return None
        (action,), known = frame.together, {*plan.inputs, *begins}
        own = {slot: places for slot, places in action.places.items() if places is not None and slot in known}
        return cls(plan, frame, action.launcher, own, begins) if len(own) == len(action.places) else None

    def __init__(
        self, plan: Plan, frame: Frame, launcher: Launcher, own: Mapping[int, tuple[Any, list[int]]],
        begins: Mapping[int, int],
    ) -> None:  # fmt: skip
        self.launcher, self.bytes = launcher, frame.piece
        at = {slot: number for number, slot in enumerate(plan.inputs)}
        #: where addresses are written: of inputs by their number, and of what begins so far behind the first result
        self.inputs = [(at[slot], table, places) for slot, (table, places) in own.items() if slot in at]
        self.outputs = [(begins[slot], table, places) for slot, (table, places) in own.items() if slot in begins]
        #: results as the fields of a record: to get a field takes a third of the time of making an array
        self.names = [str(number) for number, _ in enumerate(plan.outputs)]
        kinds = {i: (dtype, shape) for i, _, _, shape, dtype in frame.results}
        formats, offsets = [kinds[i] for _, i in plan.outputs], [begins[i] for _, i in plan.outputs]
        self.record = np.dtype({"names": self.names, "formats": formats, "offsets": offsets})

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Launch it; the results are there when the queue was waited for."""
        for number, table, places in self.inputs:
            where = address(inputs[number])
            for at in places:
                table[at] = where
        piece = np.empty(self.bytes, np.uint8)
        where = address(piece)
        begin = -where % 64
        where += begin
        for offset, table, places in self.outputs:
            for at in places:
                table[at] = where + offset
        record = np.ndarray((), self.record, piece, begin)
        self.launcher()
        return [record[name] for name in self.names]


class Switch:
    """A plan that only decides, by single numbers among its inputs, which branch of an If makes its results.

    What they decided before is known: neither that is computed again, nor is the plan gone through.
    """

    @classmethod
    def of(cls, plan: Plan, frame: Frame) -> Switch | None:
        """None where a plan is not so."""
        if not plan.steps or plan.rest is not None or frame.copied or not plan.device.shares_memory:
            return None
        if plan.template is not None and plan.template.constants:
            return None  # sizes decide, too
        *before, last = plan.steps
        if not isinstance(last.control, If) or last.block is not None or len(last.ins) != 1 + last.control.captures:
            return None
        if any(i not in last.outs for _, i in plan.outputs):
            return None
        for step in before:
            spec = lookup(step.node.op)
            if step.control is not None or spec is None or not spec.pure:
                return None
        made = {i for step in before for i in step.outs}
        read = {last.ins[0], *(i for step in before for i in step.ins if i >= 0)} - made
        decides = [i for i in read if plan.slots[i].place is not Place.CONST]
        for i in decides:
            type = static_tensor(plan.slots[i].type)
            if i not in plan.inputs or type is None or type.dtype.numpy.kind not in "iub" or type.size != 1:
                return None
        captured = last.ins[1:]
        if any(i not in plan.inputs and (i < 0 or plan.slots[i].place is not Place.CONST) for i in captured):
            return None
        return cls(plan, last, last.control, decides)

    def __init__(self, plan: Plan, step: Step, control: If, decides: Sequence[int]) -> None:
        at = {slot: number for number, slot in enumerate(plan.inputs)}
        self.control, (self.condition, *captured) = control, step.ins
        self.decides = [at[i] for i in decides]
        #: what the branch takes: the number of an input, or a constant
        self.captured = [(at[i], None) if i in at else (-1, plan.slots[i].const) for i in captured]
        #: which of the branch's results each of the plan's is
        self.outputs = [step.outs.index(i) for _, i in plan.outputs]
        self.known: dict[tuple[Any, ...], Program] = {}

    def __call__(self, inputs: Sequence[Any]) -> tuple[Program, list[Any]] | None:
        """The branch for these inputs, with what it takes; None: nobody knows yet."""
        body = self.known.get(tuple([inputs[number].item() for number in self.decides]))
        if body is None:
            return None
        return body, [const if number < 0 else inputs[number] for number, const in self.captured]

    def learn(self, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        """These inputs were decided about."""
        if len(self.known) >= MOST:
            self.known.clear()
        key = tuple([inputs[number].item() for number in self.decides])
        self.known[key] = self.control.branch(values[self.condition])

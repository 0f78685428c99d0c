"""Remembers which branch of an If makes the results of a plan, so that the condition is not computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunewright.ops import lookup

from ..plans.plan import Plan, SlotPlace, Step, static_tensor
from ..plans.program import Program
from .interpreter import IfRunner

#: most decisions that a `Decision` remembers
MOST = 64


class Decision:
    """The decisions of a plan that does one thing: choose the branch of an If that makes its results.

    Single numbers among the inputs decide. For numbers that it has met before, the branch runs at once.
    """

    @classmethod
    def of(cls, plan: Plan) -> Decision | None:
        """The decisions of a plan. None: it does more, or other things than single numbers decide."""
        if not plan.steps or plan.rest is not None or plan.shared_outputs() or not plan.device.shares_memory:
            return None
        if plan.template is not None and plan.template.constants:
            return None  # sizes decide as well
        *before, last = plan.steps
        if (
            not isinstance(last.control, IfRunner)
            or last.block is not None
            or len(last.ins) != 1 + last.control.captures
        ):
            return None
        if any(i not in last.outs for _, i in plan.outputs):
            return None
        for step in before:
            spec = lookup(step.node.op)
            if step.control is not None or spec is None or not spec.pure:
                return None
        made = {i for step in before for i in step.outs}
        read = {last.ins[0], *(i for step in before for i in step.ins if i >= 0)} - made
        decides = [i for i in read if plan.slots[i].place is not SlotPlace.CONST]
        for i in decides:
            type = static_tensor(plan.slots[i].type)
            if i not in plan.inputs or type is None or type.dtype.numpy.kind not in "iub" or type.size != 1:
                return None
        captured = last.ins[1:]
        if any(i not in plan.inputs and (i < 0 or plan.slots[i].place is not SlotPlace.CONST) for i in captured):
            return None
        return cls(plan, last, last.control, decides)

    def __init__(self, plan: Plan, step: Step, control: IfRunner, decides: Sequence[int]) -> None:
        at = {slot: number for number, slot in enumerate(plan.inputs)}
        self.step, self.control, (self.condition, *captured) = step, control, step.ins
        self.decides = [at[i] for i in decides]
        #: the inputs of the branch: the number of an input of the plan, or a constant
        self.captured = [(at[i], None) if i in at else (-1, plan.slots[i].const) for i in captured]
        #: the result of the branch that each output of the plan is
        self.outputs = [step.outs.index(i) for _, i in plan.outputs]
        self.known: dict[tuple[Any, ...], Program] = {}

    def __call__(self, inputs: Sequence[Any]) -> tuple[Program, list[Any]] | None:
        """The branch for these inputs, and its own inputs. None: not decided yet."""
        body = self.known.get(tuple([inputs[number].item() for number in self.decides]))
        if body is None:
            return None
        return body, [const if number < 0 else inputs[number] for number, const in self.captured]

    def learn(self, inputs: Sequence[Any], condition: Any) -> None:
        """Remember the branch that a condition chose for these inputs."""
        if len(self.known) >= MOST:
            self.known.clear()
        key = tuple([inputs[number].item() for number in self.decides])
        self.known[key] = self.control.branch(condition)

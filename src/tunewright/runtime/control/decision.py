"""Remembers which branch of an If makes the results of a plan, so that no request computes the condition again."""

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
    """The decisions of a plan whose results come from one If.

    Single numbers among the inputs decide. For numbers seen before, the request runs the branch at once.
    """

    @classmethod
    def of(cls, plan: Plan) -> Decision | None:
        """Make the decisions of a plan. None: the plan does more, or other inputs decide than single numbers."""
        if not plan.steps or plan.rest is not None or plan.shared_outputs() or not plan.device.shares_memory:
            return None
        if plan.template is not None and plan.template.constants:
            return None  # sizes also decide
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
        #: inputs of the branch: each is an input of the plan by number, or a constant
        self.captured = [(at[i], None) if i in at else (-1, plan.slots[i].const) for i in captured]
        #: for each output of the plan: the number of the branch's result
        self.outputs = [step.outs.index(i) for _, i in plan.outputs]
        self.known: dict[tuple[Any, ...], Program] = {}

    def __call__(self, inputs: Sequence[Any]) -> tuple[Program, list[Any]] | None:
        """Return the branch for these inputs, and the branch's inputs. None: no decision is known yet."""
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

"""Bodies of loops and branches as rows of a launch: where their values lie, and what they return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tunewright.devices.control_rows import Base, Fixed, Own, Ref, Row, Set, SizeList, Variable
from tunewright.ir.graph import Node
from tunewright.ir.symbolic import Whole, greater, same
from tunewright.ir.types import DType, TensorType
from tunewright.ops.control_types import static, with_dims

from ..plans.plan import Plan, SlotPlace, Step
from .interpreter import Control

Refs: TypeAlias = Sequence[Ref | None]
TRUE = Ref(Fixed(np.ones((), np.bool_)))
#: most bytes of room for rows that a loop may never make
MOST_ROOM = 64 << 20


class NotRows(Exception):
    """Says why the request runs a node by itself. ``node``: the node of the body that prevents a launch, if known."""

    def __init__(self, why: str, node: Node | None = None) -> None:
        super().__init__(why)
        self.node = node


class TooLarge(NotRows):
    """The rows would need too much memory."""


@dataclass(frozen=True, eq=False)
class BodyStep:
    """A step of a body, to which times are attributed."""

    plan: Plan
    step: Step


@dataclass(eq=False)
class Buffers:
    """Two buffers that iterations write in turn, with the current and the next one."""

    now: Variable
    then: Variable
    spare: Variable
    places: tuple[Ref, Ref]

    def begin(self) -> list[Row]:
        return [Set(self.now, self.places[0]), Set(self.then, self.places[1])]

    def turn(self) -> list[Row]:
        return [Set(self.spare, Ref(self.now)), Set(self.now, Ref(self.then)), Set(self.then, Ref(self.spare))]


@dataclass(eq=False)
class Stream:
    """Rows of an input or output, one per iteration."""

    at: Variable
    first: Ref
    stride: Whole

    def begin(self) -> Row:
        return Set(self.at, self.first)

    def turn(self) -> Row:
        return Set(self.at, Ref(self.at, self.stride))


@dataclass(eq=False)
class Body:
    """A body's plan with the places of its values."""

    plan: Plan
    inputs: Refs
    arena: Whole
    #: the place of each storage that outlives the body
    results: Mapping[int, Ref]

    def ref(self, slot: int) -> Ref | None:
        if slot < 0:
            return None
        one, open = self.plan.slots[slot], self.plan.open
        if one.place is SlotPlace.INPUT:
            return self.inputs[self.plan.inputs.index(slot)]
        if one.place is SlotPlace.CONST:
            assert one.const is not None
            if open is not None and slot in open.constants:
                return Ref(SizeList(open.constants[slot], one.const.dtype))
            return Ref(Fixed(one.const))
        if one.place is SlotPlace.ARENA:
            offsets = self.plan.arena_offsets if open is None else open.arena_offsets
            return Ref(OWN, self.arena + offsets[one.storage] + offset_of(self.plan, slot))
        if one.place is SlotPlace.RESULT:
            return self.results[one.storage] + offset_of(self.plan, slot)
        raise NotRows(f"the shape of {one.name!r} depends on data")


OWN: Base = Own()


@dataclass(frozen=True, eq=False)
class BodyOutputs:
    """The outputs of a body: condition, states, scans."""

    plan: Plan
    states: int
    #: number of the first state among the outputs
    offset: int
    #: outputs that are the condition
    conditions: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number of the first scan output."""
        return self.offset + self.states

    def is_condition(self, storage: int, users: Sequence[int]) -> bool:
        """Whether a storage holds only the condition, and the next iteration does not read it."""
        given = self.plan.inputs[1] if self.conditions else -1
        return set(users) == set(self.conditions) and not any(given in step.ins for step in self.plan.steps)


def stream_of(ref: Ref, whole: TensorType, axis: int, backwards: bool) -> Stream:
    axis %= len(whole.dims)
    length = whole.dims[axis]
    if math.prod(whole.dims[:axis]) != 1:
        raise NotRows(f"its rows along axis {axis} of {whole} do not lie together")
    stride = math.prod(whole.dims[axis + 1 :]) * whole.dtype.itemsize
    if backwards:
        return Stream(Variable(), ref + stride * greater(0, length - 1), -stride)
    return Stream(Variable(), ref, stride)


def given_at_first(ref: Ref | None) -> Ref:
    if ref is None:
        raise NotRows("a state has no value at first")
    return ref


def check_single(runner: Control, index: int, dtype: DType) -> int:
    """Check that input ``index`` is one element of this type, and return ``index``. Raises NotRows."""
    type = static(runner.node.inputs[index])
    if type is None or type.size != 1 or type.dtype is not dtype:
        raise NotRows(f"input {index} is no single {dtype}")
    return index


def check_condition(plan: Plan) -> None:
    type = made_type(plan, 0)
    if type is None or type.size != 1 or type.dtype is not DType.BOOL:
        raise NotRows("the condition that the body returns is not one bool")


def check_types(runner: Control, plan: Plan, made: Sequence[int], outputs: Sequence[int]) -> None:
    """Check that outputs of the node have the known types that the body makes. Raises NotRows."""
    for one, other in zip(made, outputs, strict=True):
        type, known = made_type(plan, one), static(runner.node.outputs[other])
        if type is None or type != known:
            name = runner.node.outputs[other].name
            raise NotRows(f"{name!r} is {runner.node.outputs[other].type}, and the body makes {type}")


def made_type(plan: Plan, output: int) -> TensorType | None:
    """Return the type of a body's output if it is a plain tensor of known shape. Otherwise None."""
    at = plan.outputs[output][1]
    type = plan.slots[at].type
    if not isinstance(type, TensorType) or not type.is_static or type.layout.name != "plain":
        return None
    return type if plan.open is None else with_dims(type, plan.open.shapes.get(at, type.dims))


def made_bytes(plan: Plan, output: int) -> Whole:
    type = made_type(plan, output)
    assert type is not None
    return type.nbytes


def offset_of(plan: Plan, slot: int) -> Whole:
    """Where a slot begins in its storage."""
    at_hand = plan.slots[slot].offset
    return at_hand if plan.open is None else plan.open.offsets.get(slot, at_hand)


def begins(plan: Plan, slot: int) -> bool:
    """Whether a slot is at the beginning of its storage for all sizes."""
    return same([offset_of(plan, slot)], [0])


def result_bytes(plan: Plan) -> Mapping[int, Whole]:
    """Bytes of each storage that outlives a body."""
    return plan.results if plan.open is None else plan.open.results


def users_of(plan: Plan) -> dict[int, list[int]]:
    """For each storage that outlives the plan, the outputs in it."""
    found: dict[int, list[int]] = {storage: [] for storage in plan.results}
    for output, (_, slot) in enumerate(plan.outputs):
        if plan.slots[slot].place is SlotPlace.RESULT:
            found[plan.slots[slot].storage].append(output)
    return found


def fills(plan: Plan, output: int, storage: int) -> bool:
    """Whether an output takes up all of its storage."""
    return begins(plan, plan.outputs[output][1]) and same([made_bytes(plan, output)], [result_bytes(plan)[storage]])


def only_user(plan: Plan, storage: int, users: Sequence[int]) -> int | None:
    """Return the output that takes up all of its storage, if it is the only one there. Otherwise None."""
    return users[0] if len(users) == 1 and fills(plan, users[0], storage) else None

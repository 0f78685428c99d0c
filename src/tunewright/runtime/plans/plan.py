"""A plan: steps over numbered slots, and where each slot's bytes lie."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tunewright.devices.base import Device
from tunewright.devices.control_rows import Block
from tunewright.devices.executable import Executable, Part
from tunewright.ir.graph import Node
from tunewright.ir.types import DType, TensorType, Type
from tunewright.solvers.base import Kernel
from tunewright.tuning.tuner import Choice

if TYPE_CHECKING:
    from ..control.interpreter import Control
    from .growing_buffers import Filled
    from .program import Packed, Program
    from .template import Open, Template


class SlotPlace(enum.Enum):
    """Where the bytes of a slot come from."""

    INPUT = "input"  # the caller's array
    CONST = "const"  # a weight
    ARENA = "arena"  # the plan's arena
    RESULT = "result"  # made anew for each inference: the slot, or a view of it, is an output of the model
    DYNAMIC = "dynamic"  # made by the step, because the shape depends on data or the value is no plain tensor


class Counts(enum.Enum):
    """Which steps whose sizes depend on data may be part of a launch (`runtime/control/row_counts.py`)."""

    BEHIND = "those that make rows, and what follows"
    ALONE = "those that make rows"
    NEVER = "none"


@dataclass(frozen=True)
class Slot:
    """One value of the plan. ``storage`` numbers the arena buffer or result buffer that it lies in, at ``offset``."""

    name: str
    place: SlotPlace
    type: Type | None = None
    const: np.ndarray[Any, Any] | None = field(default=None, compare=False)
    storage: int = -1
    offset: int = 0
    #: where the slot is a constant that was packed for a kernel: the packed constant
    packed: Packed | None = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class Step:
    """One kernel, or one control-flow node, with its slots (-1: absent)."""

    node: Node
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    kernel: Kernel | None = None
    control: Control | None = None
    #: where the step is control flow inside a launch: its rows
    block: Block | None = None
    choice: Choice | None = None
    #: the step moves nothing: its output is a view of its input, or was written in place
    optimized_out: bool = False
    #: dynamic slots that nobody reads after this step
    release: tuple[int, ...] = ()

    @property
    def on_host(self) -> bool:
        """Whether the step runs on the host, whatever the device is."""
        if self.block is not None:
            return False
        return self.control is not None or (self.choice is not None and self.choice.solver.host)

    @property
    def part(self) -> Part:
        """The step as a device links it."""
        run = self.block or self.kernel
        assert run is not None
        return Part(run, self.ins, self.outs, self)


@dataclass(eq=False)
class Segment:
    """Neighbouring steps that form one executable."""

    steps: list[Step]
    #: makes the executable; None: control flow that the request runs itself
    link: Callable[[], Executable] | None

    @cached_property
    def executable(self) -> Executable | None:
        """The executable, linked when the first request binds it. A body's plan inside another plan is never linked."""
        return None if self.link is None else self.link()

    @property
    def slots(self) -> set[int]:
        """Every slot that the segment reads or writes."""
        return {i for step in self.steps for i in (*step.ins, *step.outs) if i >= 0}


@dataclass(eq=False)
class Plan:
    """Everything that inference needs for one set of input types.

    Immutable once made; requests bring their own memory.
    """

    #: where the plan runs
    device: Device
    types: tuple[Type | None, ...]
    inputs: tuple[int, ...]
    slots: list[Slot]
    steps: list[Step]
    #: offset of each storage in the arena, and bytes of each result storage
    arena_offsets: dict[int, int]
    arena_bytes: int
    results: dict[int, int]
    #: where each output comes from: a slot, or an output of the rest
    outputs: list[tuple[str, int]]
    #: what runs after this plan if shapes depend on data, and the slots that it takes
    rest: Program | None = None
    rest_inputs: tuple[int, ...] = ()
    #: other shapes that the plan serves, and what changes with them; the plan's own types and sizes are those it was
    #: made for
    template: Template | None = None
    #: where the plan is of a body, in a plan for a class of shapes: its parts that depend on sizes
    open: Open | None = None
    #: all that runs, in order
    segments: list[Segment] = field(default_factory=list)
    #: inputs that results may be written into
    filled: list[Filled] = field(default_factory=list)

    def shared_outputs(self) -> list[int]:
        """Outputs that share memory with an input, a weight or another output: callers get copies of them."""
        found, taken = [], set[tuple[str, int]]()
        for at, (kind, i) in enumerate(self.outputs):
            if kind != "slot":
                continue
            slot = self.slots[i]
            mark = ("storage", slot.storage) if slot.storage >= 0 else ("slot", i)
            if slot.place in (SlotPlace.INPUT, SlotPlace.CONST) or mark in taken:
                found.append(at)
            taken.add(mark)
        return found


def static_tensor(type: Type | None) -> TensorType | None:
    """Return the type if its bytes can be planned: a tensor of known shape and plain elements. Otherwise None."""
    if isinstance(type, TensorType) and type.is_static and type.dtype is not DType.STRING:
        return type
    return None


def format_plan(plan: Plan) -> str:
    """Stable text for golden tests and people."""
    lines = []
    for i, slot in enumerate(plan.slots):
        where = slot.place.value
        if slot.place is SlotPlace.ARENA:
            where += f"[{plan.arena_offsets[slot.storage] + slot.offset}]"
        elif slot.place is SlotPlace.RESULT:
            where += f"[{slot.storage}+{slot.offset}]"
        lines.append(f"s{i} %{slot.name}: {slot.type or '?'} {where}")
    for step in plan.steps:
        outs, ins = (", ".join("_" if k < 0 else f"s{k}" for k in ks) for ks in (step.outs, step.ins))
        how = "optimized out" if step.optimized_out else step.kernel.name if step.kernel else "control"
        how += " rows" if step.block is not None else ""
        lines.append(f"{outs} = {step.node.op}({ins}) [{how}]")
    lines.append(f"arena {plan.arena_bytes} bytes")
    lines.append("return " + ", ".join(f"s{i}" if kind == "slot" else f"rest.{i}" for kind, i in plan.outputs))
    return "\n".join(lines)

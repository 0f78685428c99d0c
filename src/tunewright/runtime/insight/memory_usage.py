"""How much memory models hold, by purpose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..plans.plan import Plan
from ..plans.program import Program
from ..requests.executor import Executor
from ..requests.request import DeviceModel
from ..requests.request_meter import alive

#: Bytes by purpose. ``constants``: weights, original and prepared for kernels. ``arenas``: values between the layers of
#: each request. ``staging``: inputs and results on their way to a device and back. ``scratch``: memory of kernels.
Usage = dict[str, int]
PURPOSES = ("constants", "arenas", "staging", "scratch")


def usage(models: Iterable[DeviceModel]) -> Usage:
    """Return the bytes that these models and their requests hold. Shared weights count once."""
    found = dict.fromkeys(PURPOSES, 0)
    constants: dict[int, int] = {}
    for model in models:
        for array in _constants(model):
            constants[id(array)] = array.nbytes if any(array.strides) else array.itemsize  # see `like_nothing`
        for request in alive(model.requests):
            _add(found, request.executor)
    found["constants"] = sum(constants.values())
    return found


def live(device: str) -> list[DeviceModel]:
    """The models that are on a device now."""
    return [model for model in alive(DeviceModel.live) if model.device_name == device]


def plans(program: Program) -> Iterator[Plan]:
    """Yield every plan of a program, and those that follow when shapes depend on data."""
    for plan in program.plans:
        yield plan
        if plan.rest is not None:
            yield from plans(plan.rest)


def _constants(model: DeviceModel) -> Iterator[Any]:
    for graph in model.graph.walk():
        for node in graph.nodes:
            for value in node.inputs:
                if value is not None and value.const is not None:
                    yield value.const
    for plan in plans(model.program):
        for slot in plan.slots:
            if slot.const is not None:
                yield slot.const


def _add(found: Usage, executor: Executor) -> None:
    for plan, frame in executor.frames():
        found["arenas"] += frame.arena_bytes + frame.nbytes
        if not plan.device.shares_memory:
            found["staging"] += sum(plan.results.values()) + sum(memory.nbytes for _, memory in frame.copies)
            held = {id(v): v.staging.nbytes for v in frame.memory if getattr(v, "staging", None) is not None}
            found["staging"] += sum(held.values())
    found["scratch"] += executor.queue.scratch_bytes

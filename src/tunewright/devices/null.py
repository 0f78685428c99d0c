"""The Null device: runs nothing on a scripted clock, so the whole pipeline is tested without hardware or noise."""

from __future__ import annotations

from collections.abc import Callable

from .base import Device, Queue, Target


class NullQueue(Queue):
    """A queue whose clock advances only by the time that kernels say they took."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class NullDevice(Device):
    """A device whose kernels do nothing. ``script(solver id, problem key)`` returns the seconds of each."""

    family = "null"
    kinds = ("NULL",)
    is_hidden = True

    @classmethod
    def available(cls) -> list[str] | str:
        return ["NULL"]

    def __init__(self, name: str = "NULL", script: Callable[[str, str], float] | None = None) -> None:
        self.name = name
        self.target = Target("null", "nothing", "null", 1, (("script", "1"),), language="null")
        self.script = script or (lambda solver, problem: 1e-6)

    def queue(self) -> NullQueue:
        return NullQueue()


DEVICES = (NullDevice,)

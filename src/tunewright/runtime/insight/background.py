"""What a user holds of tuning that goes on while a model serves: `BackgroundTuning` and its `BackgroundStatus`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class KernelSwap:
    """Kernels that took the place of others in the running model, or had to go back."""

    #: when, in seconds since 1970
    at: float
    #: the solver and config of each, by the problem that it solves
    kernels: dict[str, str]
    #: how many times as fast as before the network was: median, and the interval that it lies in
    gain: tuple[float, float, float]
    #: pairs of inferences that were compared
    pairs: int


@dataclass(frozen=True)
class BackgroundStatus:
    """How far background tuning is."""

    #: starting, waiting (for requests that say which shapes matter), tuning, comparing (two plans), paused, done,
    #: stopped or failed
    phase: str
    #: why it is done, stopped or failed, or what it waits for
    why: str
    layers_done: int
    layers_left: int
    #: candidates that were tried
    candidates: int
    #: samples so far, and those of them that a request interrupted, which were thrown away
    samples: int
    interrupted: int
    #: how many times as fast as at the beginning the model runs now, as far as comparisons were sure of it
    gain: float
    #: seconds of work in the helper process, and seconds since the beginning
    worked: float
    elapsed: float
    #: how often the helper process had to be started again
    restarts: int = 0
    #: the process id of the helper; 0: none runs
    helper: int = 0
    last_swap: KernelSwap | None = None
    last_rollback: KernelSwap | None = None


#: is told what happened ("layer", "swap", "rollback", "keep", "restart", "phase"), and how far it is
Report: TypeAlias = Callable[[str, BackgroundStatus], Any]


class BackgroundTuning(ABC):
    """Tuning beside a model that serves. All of it may be called from any thread."""

    @abstractmethod
    def pause(self) -> None:
        """Begin nothing more until `resume`. What runs in the helper ends within a step."""

    @abstractmethod
    def resume(self) -> None:
        """Go on."""

    @abstractmethod
    def status(self) -> BackgroundStatus:
        """How far it is."""

    @abstractmethod
    def stop(self) -> None:
        """End it, with its processes. The model keeps the kernels that it has; what was found is stored."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is nothing more to do; False where it takes longer than ``timeout`` seconds."""

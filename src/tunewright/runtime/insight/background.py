"""The user's handle of tuning that goes on while a model serves: `BackgroundTuning` and its `BackgroundStatus`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class KernelSwap:
    """Kernels that replaced others in the running model, or that were rolled back."""

    #: when, in seconds since 1970
    at: float
    #: the solver and config of each kernel, by the problem that it solves
    kernels: dict[str, str]
    #: the network's speed-up: median, and the bounds of its interval
    gain: tuple[float, float, float]
    #: pairs of inferences that were compared
    pairs: int


@dataclass(frozen=True)
class BackgroundStatus:
    """The progress of background tuning."""

    #: starting, waiting (for requests that say which shapes matter), tuning, comparing (two plans), paused, done,
    #: stopped or failed
    phase: str
    #: why it is done, stopped or failed, or what it waits for
    why: str
    layers_done: int
    layers_left: int
    #: candidates that were tried
    candidates: int
    #: samples so far, and how many of them were discarded because a request interrupted them
    samples: int
    interrupted: int
    #: the model's speed-up since the beginning, as far as comparisons were sure of it
    gain: float
    #: seconds of work in the helper process, and seconds since the beginning
    worked: float
    elapsed: float
    #: how often the helper process was restarted
    restarts: int = 0
    #: the process id of the helper; 0: none runs
    helper: int = 0
    last_swap: KernelSwap | None = None
    last_rollback: KernelSwap | None = None


#: called with an event ("layer", "swap", "rollback", "keep", "restart", "phase") and the status
Report: TypeAlias = Callable[[str, BackgroundStatus], Any]


class BackgroundTuning(ABC):
    """Tuning beside a model that serves. Any thread may call all of it."""

    @abstractmethod
    def pause(self) -> None:
        """Begin no more work until `resume`. The helper ends its running work within a step."""

    @abstractmethod
    def resume(self) -> None:
        """Continue after `pause`."""

    @abstractmethod
    def status(self) -> BackgroundStatus:
        """Return the progress."""

    @abstractmethod
    def stop(self) -> None:
        """End the tuning and its processes. The model keeps its kernels, and the results are stored."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is nothing more to do. False: it takes longer than ``timeout`` seconds."""

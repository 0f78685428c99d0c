"""Interface of plugins. A plugin serves a device name: it tells which nodes it can run, and compiles models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..frontend.model import Model
from ..runtime.requests.compiled import CompiledModel
from ..settings import Settings


@dataclass(frozen=True)
class Support:
    """The solver that would run a node, marked if it runs on the host; or why there is none. True if there is one."""

    solver: str | None
    on_host: bool = False
    #: the reasons of the operation's other solvers
    rejected: Mapping[str, str] = field(default_factory=dict)
    #: the device, if the model uses several
    device: str = ""

    def __bool__(self) -> bool:
        return self.solver is not None


@dataclass(frozen=True)
class ServingChoice:
    """How requests of a model are served, and why."""

    streams: int
    #: number of requests that keeps all streams busy
    requests: int
    #: number of requests that run together
    batch: int
    why: str


class Plugin(ABC):
    """Serves one device string."""

    name: str

    @abstractmethod
    def query(self, model: Model, settings: Settings) -> dict[str, Support]:
        """Return, for each node by name, the solver that runs it here, or why there is none."""

    def choice(self, model: Model, settings: Settings) -> ServingChoice | None:
        """Return how requests would be served, without compiling or measuring.

        None if several devices serve, each in its way.
        """
        return None

    @abstractmethod
    def compile(self, model: Model, settings: Settings, *, consume: bool = False) -> CompiledModel:
        """Compile a model. ``consume``: the caller gives up the model, so compilation may take it apart."""

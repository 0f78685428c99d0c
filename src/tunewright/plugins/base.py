"""A plugin serves a device name: it says which nodes it can run, and compiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..frontend.model import Model
from ..runtime.compiled import CompiledModel
from ..settings import Settings


@dataclass(frozen=True)
class Support:
    """The solver that would run a node, or why there is none; a solver on the host is marked. True if there is one."""

    solver: str | None
    on_host: bool = False
    #: what every other solver of the operation said
    rejected: Mapping[str, str] = field(default_factory=dict)
    #: the device, where the model has several
    device: str = ""

    def __bool__(self) -> bool:
        return self.solver is not None


@dataclass(frozen=True)
class Choice:
    """How requests of a model are served, and why."""

    streams: int
    #: that keep all of them busy
    requests: int
    #: that run together
    batch: int
    why: str


class Plugin(ABC):
    """Serves one device string."""

    name: str

    @abstractmethod
    def query(self, model: Model, settings: Settings) -> dict[str, Support]:
        """Per node of the model, by name: who runs it here, or why nobody."""

    def choice(self, model: Model, settings: Settings) -> Choice | None:
        """How requests would be served; nothing is compiled or measured. None: by several devices, each in its way."""
        return None

    @abstractmethod
    def compile(self, model: Model, settings: Settings, *, consume: bool = False) -> CompiledModel:
        """``consume``: the model is nobody else's, and may be taken apart."""

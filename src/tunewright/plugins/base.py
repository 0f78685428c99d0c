"""A plugin serves a device name: it says which nodes it can run, and compiles."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..frontend.model import Model
from ..runtime.request import CompiledModel
from ..settings import Settings


class Plugin(ABC):
    """Serves one device string."""

    name: str

    @abstractmethod
    def query(self, model: Model, settings: Settings) -> dict[str, str | None]:
        """Per node of the model: None when it can run here, else the reason why not."""

    @abstractmethod
    def compile(self, model: Model, settings: Settings) -> CompiledModel: ...

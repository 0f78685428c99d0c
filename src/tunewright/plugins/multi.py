"""``MULTI:GPU.0,CPU``: each request goes to a free device, the first listed preferred (docs/multi.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import SettingsError
from ..frontend.model import Model
from ..runtime.requests.compiled import CompiledModel
from ..runtime.several.multi import CandidateDevice, DevicePool
from ..runtime.several.multi_model import PoolModel
from ..settings import Settings
from .base import Plugin, Support
from .batch import with_batches
from .device_strings import parse, split, usable
from .find import single
from .single import SingleDevice

LOG = logging.getLogger("tunewright")


class ConfiguredDevice:
    """One of several devices, with its settings."""

    def __init__(self, name: str, requests: int, settings: Settings) -> None:
        """``requests``: number that it takes at a time, each on its share of the device; 0: as the settings say."""
        #: settings that differ from the given ones
        self.own = {"DEVICE_ID": ""} | ({"NUM_STREAMS": requests} if requests else {})
        self.settings, self.fixed = Settings.make(self.own, settings), bool(requests)
        self.single: SingleDevice = single(name, self.settings)
        # A given number means requests and not batches of them.
        self.plugin: Plugin = self.single if requests else with_batches(self.single, self.settings)
        self.name = self.single.name

    @property
    def shares_cores(self) -> bool:
        return self.single.device.target.traits.shares_cores

    def candidate(self, model: Model) -> CandidateDevice:
        compile: Callable[[], CompiledModel] = partial(self.plugin.compile, model, self.settings)
        return CandidateDevice(self.name, self.requests, self.fixed, compile, self.single.device.broken)

    @property
    def requests(self) -> int:
        """The number of requests that the device takes at a time."""
        return getattr(self.plugin, "requests", self.single.streams)


def parts(names: Sequence[str], settings: Settings, kind: str) -> list[ConfiguredDevice]:
    """Return the usable devices. Raises `SettingsError` or `DeviceError` if there is none, or if one is named twice."""
    opened = usable(
        [(name, partial(ConfiguredDevice, name, count, settings)) for name, count in parse(names, kind)], kind
    )
    found, seen = [part for _, part in opened], dict[str, str]()
    for name, part in opened:
        if part.name in seen:
            raise SettingsError(f"{kind}: {name} is the same device as {seen[part.name]}", hint="name each device once")
        seen[part.name] = name
    return found


def warn_of_references(found: Sequence[ConfiguredDevice], kind: str) -> None:
    """Warn if a GPU shares requests with numpy references: they hold the GIL, and the GPU's host thread needs it."""
    slow = [part.name for part in found if part.shares_cores and part.single.device.runs_references]
    fast = [part.name for part in found if not part.shares_cores]
    if slow and fast:
        LOG.warning("%s: %s computes in numpy, for which %s waits, too: more is done without it (`tunewright devices` "
                    "says why it has no kernels)", kind, slow[0], fast[0])  # fmt: skip


def support(found: Sequence[ConfiguredDevice], model: Model) -> dict[str, Support]:
    """Return the answers of the first device that runs the whole model, or of the first device if none does."""
    answers = (part.single.query(model, part.settings) for part in found)
    first = next(answers)
    return first if all(first.values()) else next((a for a in answers if all(a.values())), first)


class Multi(Plugin):
    """All devices serve; each request goes to the first free one in their order."""

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        names = list(names) or split(settings.multi_device_priorities)
        self.parts = parts(names, settings, "MULTI")
        self.name = f"MULTI:{','.join(names)}"

    def query(self, model: Model, settings: Settings) -> dict[str, Support]:
        return support(self.parts, model)

    def compile(self, model: Model, settings: Settings, *, consume: bool = False) -> CompiledModel:
        def others(text: str) -> list[CandidateDevice]:
            return [part.candidate(model) for part in parts(split(text), settings, "MULTI")]

        warn_of_references(self.parts, "MULTI")
        pool = DevicePool("MULTI", [part.candidate(model) for part in self.parts], together=True)
        pool.compile_all()
        return PoolModel(self.name, pool, settings, others)

"""``AUTO`` and ``AUTO:GPU.0,CPU``: the best device that is ready serves (docs/multi.md).

While a GPU compiles or tunes, the CPU serves; then the GPU takes over without interrupting requests. A device that
fails or cannot compile the model is replaced by the next one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence

from ..errors import DeviceError
from ..frontend.model import Model
from ..runtime.requests.compiled import CompiledModel
from ..runtime.several.multi import DevicePool
from ..runtime.several.multi_model import PoolModel
from ..settings import Settings
from .base import Plugin, Support
from .device_strings import split
from .multi import ConfiguredDevice, parts, support, warn_of_references
from .single import visible

LOG = logging.getLogger("tunewright")

_LEVELS = {"LOW": 0, "MEDIUM": 1, "HIGH": 2}


class _Claims:
    """The models of AUTO in this process. Those with a higher MODEL_PRIORITY choose devices first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: weakref.WeakKeyDictionary[DevicePool, int] = weakref.WeakKeyDictionary()

    def add(self, pool: DevicePool, level: int) -> None:
        with self._lock:
            self._pools[pool] = level
        # Attached to the pool and not to the model that holds it: the pool would otherwise still exist when this runs.
        weakref.finalize(pool, self._settle_soon).atexit = False
        self.settle()

    def remove(self, pool: DevicePool) -> None:
        with self._lock:
            self._pools.pop(pool, None)
        self.settle()

    def settle(self) -> None:
        """Tell every model which devices the models above it want."""
        with self._lock:
            wanted: list[tuple[int, str]] = []
            for pool, level in sorted(self._pools.items(), key=lambda item: -item[1]):
                taken = frozenset(name for other, name in wanted if other > level)
                pool.leave_to_others(taken)
                wanted.append((level, pool.wanted(taken)))

    def _settle_soon(self) -> None:
        """Call `settle` in a thread, since a model may end anywhere, even while a thread holds a lock."""
        threading.Thread(target=self.settle, name="tunewright-auto", daemon=True).start()


_CLAIMS = _Claims()


class Auto(Plugin):
    """The best device serves, or all devices if the hint is CUMULATIVE_THROUGHPUT."""

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        names = list(names) or split(settings.multi_device_priorities)
        self.parts = parts(names, settings, "AUTO") if names else _all(settings)
        self.name = f"AUTO:{','.join(names)}" if names else "AUTO"

    def query(self, model: Model, settings: Settings) -> dict[str, Support]:
        return support(self.parts, model)

    def compile(self, model: Model, settings: Settings, *, consume: bool = False) -> CompiledModel:
        if len(self.parts) == 1:  # without a choice, the only device serves
            only = self.parts[0]
            LOG.info("AUTO: %s is the only device", only.name)
            return only.plugin.compile(model, only.settings, consume=consume)
        together = settings.performance_hint == "CUMULATIVE_THROUGHPUT"
        pool = DevicePool("AUTO", [part.candidate(model) for part in self.parts], together)
        if together:
            warn_of_references(self.parts, "AUTO")
        else:
            _CLAIMS.add(pool, _LEVELS[settings.model_priority])
        # The CPU compiles within about a second, so nobody needs to wait for the other devices.
        try:
            pool.compile_first(next((part.name for part in self.parts if part.shares_cores), None))
        except BaseException:
            _CLAIMS.remove(pool)
            raise
        return PoolModel(self.name, pool, settings)


def _all(settings: Settings) -> list[ConfiguredDevice]:
    """Return every device that can be opened: GPUs in order, then the CPU."""
    found = []
    for name in sorted(visible(), key=lambda name: (not name.startswith("GPU"), len(name), name)):
        try:
            found.append(ConfiguredDevice(name, 0, settings))
        except DeviceError as error:
            LOG.info("AUTO: %s is left out: %s", name, error)
    if not found:
        raise DeviceError("AUTO: no device can be opened", hint="`tunewright devices` tells why")
    return found

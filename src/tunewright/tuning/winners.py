"""Programs of what a session found to be fast: they go into the kernel cache, so that nobody compiles them again.

Only programs of compiling processes are stored, in which no candidate ever ran: one that writes where it must not
cannot reach what later processes load.
"""

from __future__ import annotations

from ..devices.base import Device
from ..devices.kernel_cache import KernelCache
from ..settings import Settings
from .measure import Measurer
from .session import Outcome


def keep_programs(measurer: Measurer, outcome: Outcome, device: Device, settings: Settings) -> None:
    """Store the programs of all candidates that have records, which are the default and the fastest."""
    cache = KernelCache.of(settings)
    if cache is None:
        return
    for record in outcome.records:
        for key, files in measurer.programs((record.key.solver, record.config)).items():
            if cache.peek(key) is None:
                cache.put(key, files, device.kernel_label)

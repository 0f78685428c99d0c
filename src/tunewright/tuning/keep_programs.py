"""Store the programs of a session's fastest candidates in the kernel cache, so that they are not compiled again.

Only programs from compiling processes are stored, because no candidate ever ran there. A candidate that writes out of
bounds therefore cannot change what later processes load.
"""

from __future__ import annotations

from ..devices.base import Device
from ..devices.kernel_cache import KernelCache
from ..measure.base import Measurer
from ..settings import Settings
from .session import Outcome


def keep_programs(measurer: Measurer, outcome: Outcome, device: Device, settings: Settings) -> None:
    """Store the programs of all candidates with records, which are the default and the fastest."""
    cache = KernelCache.of(settings)
    if cache is None:
        return
    for record in outcome.records:
        for key, files in measurer.programs((record.key.solver, record.config)).items():
            if cache.peek(key) is None:
                cache.put(key, files, device.kernel_label)

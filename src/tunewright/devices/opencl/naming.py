"""OpenCL devices as the package sees them: their names, and their support for queues and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import pci
from ..base import Hints

#: hint -> the extension that supports it, and its queue property
_QUEUE_HINTS = {
    "priority": ("cl_khr_priority_hints", 0x1096),
    "throttle": ("cl_khr_throttle_hints", 0x1097),
}
_LEVELS = {"HIGH": 1, "MEDIUM": 2, "LOW": 4}


def queue_properties(device: Any, hints: Hints) -> list[int]:
    """Return the queue properties for hints, as far as the device supports them."""
    known, found = device.extensions.split(), list[int]()
    for name, (extension, number) in _QUEUE_HINTS.items():
        if extension in known:
            found += [number, _LEVELS[getattr(hints, name)]]
    return found


def names(
    devices: Iterable[Any], taken: Sequence[str | None] = (), why_not: Callable[[Any], str] = lambda device: ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return devices by the package's names, and why others cannot be used.

    A processor is named CPU and its runtime, the newest of several versions. GPUs are GPU.0, GPU.1, ..., integrated
    ones first. ``taken``: where the GPUs that CUDA offers are, in order. They get the first numbers; the same GPU
    through OpenCL is called GPU.N.OPENCL. ``why_not`` returns what is wrong with a device, empty for nothing.
    """
    devices = list(devices)
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def offer(name: str, device: Any) -> None:
        why = "" if name in found else why_not(device)
        if why:
            reasons.setdefault(name, why)
        else:
            found.setdefault(name, device)
            reasons.pop(name, None)

    for device in sorted(filter(is_cpu, devices), key=_newest_first):
        offer(f"CPU.{runtime_of(device)}", device)
    known, others = {place: k for k, place in enumerate(taken) if place is not None}, len(taken)
    for device in sorted(filter(is_gpu, devices), key=lambda d: not d.host_unified_memory):
        if not svm_kinds(device):
            reasons[device.name] = _WITHOUT_SVM
            continue
        place = pci.of_opencl(device) if known else None
        if place in known:
            offer(f"GPU.{known[place]}.OPENCL", device)
        else:
            offer(f"GPU.{others}", device)
            others += 1
    return found, reasons


_WITHOUT_SVM = "its OpenCL runtime has no shared virtual memory, which kernels need for their pointers"


def runtime_of(device: Any) -> str:
    """Return the short name of the runtime that offers a device."""
    name = device.platform.name.upper()
    return next((short for text, short in (("PORTABLE", "POCL"), ("POCL", "POCL"), ("INTEL", "INTEL")) if text in name),
                name.split()[0])  # fmt: skip


def _newest_first(device: Any) -> list[int]:
    return [-int(n) for n in re.findall(r"\d+", device.driver_version)]


def is_cpu(device: Any) -> bool:
    import pyopencl as cl

    return bool(device.type & cl.device_type.CPU)


def is_gpu(device: Any) -> bool:
    import pyopencl as cl

    return bool(device.type & cl.device_type.GPU)


def svm_kinds(device: Any) -> int:
    """Return the kinds of shared virtual memory that a device supports: bits of cl.device_svm_capabilities."""
    import pyopencl as cl

    try:
        return int(device.svm_capabilities)
    except cl.Error:  # the runtime is older than this query
        return 0


def shares_memory(device: Any) -> bool:
    """Whether kernels may work on host memory that OpenCL does not know of."""
    import pyopencl as cl

    return is_cpu(device) or bool(svm_kinds(device) & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM)


def gpu_cache(device: Any) -> int:
    """Return the bytes of the last-level cache. Some drivers report the first level instead, so it is assumed large."""
    return max(int(device.global_mem_cache_size), 64 << 20)

"""OpenCL devices as we see them: their names, and what they know of queues and memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from . import pci
from .base import Hints

#: how PoCL names the processor when kernels run in the thread that launches them
WITHOUT_THREADS = "basic-"
#: hint -> the extension that has it, and its property of a queue
_QUEUE_HINTS = {
    "priority": ("cl_khr_priority_hints", 0x1096),
    "throttle": ("cl_khr_throttle_hints", 0x1097),
}
_LEVELS = {"HIGH": 1, "MEDIUM": 2, "LOW": 4}


def queue_properties(device: Any, hints: Hints) -> list[int]:
    """What a queue is made with so that it follows hints, as far as the device knows them."""
    known, found = device.extensions.split(), list[int]()
    for name, (extension, number) in _QUEUE_HINTS.items():
        if extension in known:
            found += [number, _LEVELS[getattr(hints, name)]]
    return found


def names(devices: Iterable[Any], taken: Sequence[str | None] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """Devices by our names (GPU.0, GPU.1, ...: integrated ones first), and why others cannot be used.

    ``taken``: where the GPUs are that CUDA offers, in order. They have the first numbers; what is the same GPU is
    called GPU.N.OPENCL.
    """
    import pyopencl as cl

    devices = list(devices)
    found: dict[str, Any] = {}
    for device in sorted(filter(is_cpu, devices), key=_preference):
        if device.name.startswith(WITHOUT_THREADS):
            continue
        found.setdefault("CPU", device)
        found.setdefault(f"CPU.{runtime_of(device)}", device)
    gpus = [d for d in devices if d.type & cl.device_type.GPU]
    usable = [d for d in gpus if svm_kinds(d)]
    known, others = {place: k for k, place in enumerate(taken) if place is not None}, len(taken)
    for device in sorted(usable, key=lambda d: not d.host_unified_memory):
        place = pci.of_opencl(device) if known else None
        if place in known:
            found.setdefault(f"GPU.{known[place]}.OPENCL", device)
        else:
            found[f"GPU.{others}"] = device
            others += 1
    without = "its OpenCL runtime has no shared virtual memory, which kernels need for their pointers"
    return found, {d.name: without for d in gpus if d not in usable}


def runtime_of(device: Any) -> str:
    """Short name of the runtime that offers a device."""
    name = device.platform.name.upper()
    return next((short for text, short in (("PORTABLE", "POCL"), ("POCL", "POCL"), ("INTEL", "INTEL")) if text in name),
                name.split()[0])  # fmt: skip


def _preference(device: Any) -> tuple[int, list[int]]:
    """PoCL, then Intel's runtime (kernels take 1.4 to 1.8 times as long there); the newest first."""
    numbers = [-int(n) for n in re.findall(r"\d+", device.driver_version)]
    return {"POCL": 0, "INTEL": 1}.get(runtime_of(device), 2), numbers


def is_cpu(device: Any) -> bool:
    import pyopencl as cl

    return bool(device.type & cl.device_type.CPU)


def svm_kinds(device: Any) -> int:
    """What kinds of shared virtual memory a device has: bits of cl.device_svm_capabilities."""
    import pyopencl as cl

    try:
        return int(device.svm_capabilities)
    except cl.Error:  # it was made before there was any
        return 0


def gpu_cache(device: Any) -> int:
    """Bytes of the last level; some drivers tell the first one's size instead, so it is taken to be large."""
    return max(int(device.global_mem_cache_size), 64 << 20)

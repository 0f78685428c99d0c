"""Devices that compile kernels, as another process would find them: nothing is in memory."""

from __future__ import annotations

import copy

import pytest

from helpers import opencl_runtime
from tunewright.devices.c_device import CDevice
from tunewright.devices.native import programs
from tunewright.plugins.single import open_device

#: the CPU device, and an OpenCL runtime
NAMES = [
    pytest.param("CPU", marks=pytest.mark.skipif(open_device("CPU").family == "host", reason="has no kernels")),
    pytest.param(opencl_runtime.NAME, marks=opencl_runtime.needs_opencl, id="OpenCL"),
]


def fresh(name: str) -> CDevice:
    if name == opencl_runtime.NAME:
        return opencl_runtime.device()
    made = copy.copy(open_device(name))
    old = made._programs
    made._programs = programs.NativePrograms(old._flags, old._compiler, old._title)
    return made

"""Other ways to run the conformance tests of kernels than on the CPU device as users have it.

TUNEWRIGHT_TEST_KERNELS names one of `FORMS`, CPU_ISA the instruction set; in the process that pytest then runs in,
"CPU" is a device of that form. `test_kernel_forms` starts such processes.

- ``strict``: as users have it, but every text compiles without warnings and needs nothing but the C library's
  mathematics.
- ``guarded``: every buffer ends, and in a second run begins, at a page that cannot be accessed.
- ``sanitised``: the same with traps for what C leaves undefined.
- ``qemu``: texts for aarch64, run by an emulator.
"""

from __future__ import annotations

import importlib
import os

from tunewright.devices.base import Device
from tunewright.plugins import single

VARIABLE = "TUNEWRIGHT_TEST_KERNELS"
#: a module here, and the device in it
FORMS = {
    "strict": ("strict", "StrictDevice"), "guarded": ("guarded", "GuardedDevice"),
    "sanitised": ("guarded", "SanitisedDevice"), "qemu": ("qemu", "QemuDevice"),
}  # fmt: skip


def enter() -> None:
    """Make "CPU" the device that the environment asks for: before anything opens one."""
    form = os.environ.get(VARIABLE)
    if form:
        module, name = FORMS[form]
        made: type[Device] = getattr(importlib.import_module(f"conformance.{module}"), name)
        single.families()[made.family] = made

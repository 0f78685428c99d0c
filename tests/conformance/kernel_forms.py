"""Other ways to run the conformance tests of kernels than on the CPU device as users have it.

``--cpu`` takes these names, too; CPU_ISA says for which instruction set. `test_kernel_forms` starts processes of pytest
that do.

- CPU.STRICT: as users have it, but every text compiles without warnings and needs nothing but the C library's
  mathematics.
- CPU.GUARDED: every buffer ends, and in a second run begins, at a page that cannot be accessed.
- CPU.SANITISED: the same with traps for what C leaves undefined.
- CPU.QEMU: texts for aarch64, run by an emulator.
"""

from __future__ import annotations

import importlib

from tunewright.devices.base import Device
from tunewright.plugins import single

#: a module here, and the device in it
FORMS = {
    "CPU.STRICT": ("strict", "StrictDevice"), "CPU.GUARDED": ("guarded", "GuardedDevice"),
    "CPU.SANITISED": ("guarded", "SanitisedDevice"), "CPU.QEMU": ("qemu", "QemuDevice"),
}  # fmt: skip


def offer(name: str | None) -> None:
    """Let a device of such a name be opened: before anything asks which there are."""
    if name in FORMS:
        module, device = FORMS[name]
        made: type[Device] = getattr(importlib.import_module(f"conformance.{module}"), device)
        single.families()[made.family] = made

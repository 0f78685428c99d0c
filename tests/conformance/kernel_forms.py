"""Other ways to run the conformance tests of kernels than on the CPU device as users have it.

``--cpu`` takes these names, too; CPU_ISA says for which instruction set. `test_kernel_forms` starts processes of pytest
that do.

- CPU.STRICT: as users have it, but every text compiles without warnings and needs nothing but the C library's
  mathematics.
- CPU.GUARDED: every buffer ends, and in a second run begins, at a page that cannot be accessed.
- CPU.SANITISED: the same with traps for what C leaves undefined.
- CPU.QEMU: texts for aarch64, run by an emulator.
- CPU.SYNTAX.X86-64-V4 and so on, for any instruction set: nothing runs, texts of both dialects parse without warnings.
"""

from __future__ import annotations

import importlib

import pytest

from tunewright.devices.base import Device
from tunewright.plugins import single

#: a module here, and the device in it
FORMS = {
    "CPU.STRICT": ("strict", "StrictDevice"), "CPU.GUARDED": ("guarded", "GuardedDevice"),
    "CPU.SANITISED": ("guarded", "SanitisedDevice"), "CPU.QEMU": ("qemu", "QemuDevice"),
}  # fmt: skip


def offer(name: str | None) -> None:
    """Let a device of such a name be opened: before anything asks which there are."""
    made: type[Device] | None = None
    if name in FORMS:
        module, device = FORMS[name]
        made = getattr(importlib.import_module(f"conformance.{module}"), device)
    elif name is not None and name.startswith("CPU.SYNTAX."):
        made = importlib.import_module("conformance.syntax").of_level(name)
    if made is not None:
        refused = made.available()
        if isinstance(refused, str):
            raise pytest.UsageError(f"--cpu {name}: {refused}")
        single.families()[made.family] = made

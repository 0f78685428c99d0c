"""The OpenCL runtime that tests use: Intel's for the processor, which `make test` installs where it can get the wheel.

Another one for the processor does as well. Without any, tests that need one are skipped with the reason.
"""

from __future__ import annotations

import pytest

from tunewright.devices.opencl.device import OpenCLDevice
from tunewright.plugins.single import available


def _find() -> tuple[str, str]:
    names, reasons = available()
    found = sorted(name for name, family in names.items() if family is OpenCLDevice and name.startswith("CPU."))
    if not found:
        return "", "; ".join(why for name, why in reasons.items() if name == "opencl" or name.startswith("CPU."))
    return ("CPU.INTEL" if "CPU.INTEL" in found else found[0]), ""


#: its device's name, or nothing and why
NAME, WHY_NOT = _find()
needs_opencl = pytest.mark.skipif(not NAME, reason=WHY_NOT or "there is one")


def device(**options: bool) -> OpenCLDevice:
    """A device of its own, which nobody else has compiled for."""
    return OpenCLDevice(NAME, **options)

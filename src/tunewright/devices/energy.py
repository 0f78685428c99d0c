"""Energy that a device has used: RAPL for processors (Linux's powercap), NVML for NVIDIA GPUs."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from pathlib import Path

#: folder where Linux tells the energy of processors
POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"


class EnergyMeter(ABC):
    """A meter of the joules that a device has used since some moment."""

    name: str

    @abstractmethod
    def joules(self) -> float:
        """Return the joules so far. The number only grows."""


class Rapl(EnergyMeter):
    """Meter of all packages of the processor. Their counters wrap around from time to time."""

    name = "RAPL"

    def __init__(self, packages: list[Path]) -> None:
        self._packages = packages
        self._most = [int((p / "max_energy_range_uj").read_text("ascii")) for p in packages]
        self._last = self._read()
        self._sum = 0.0

    def joules(self) -> float:
        now = self._read()
        for before, after, most in zip(self._last, now, self._most, strict=True):
            self._sum += (after - before if after >= before else after + most - before) * 1e-6
        self._last = now
        return self._sum

    def _read(self) -> list[int]:
        return [int((package / "energy_uj").read_text("ascii")) for package in self._packages]


class Nvml(EnergyMeter):
    """Meter of one NVIDIA GPU."""

    name = "NVML"

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def joules(self) -> float:
        found = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(found)):
            raise OSError("NVML does not tell the energy of this GPU")
        return found.value * 1e-3


def meter(kind: str, number: int = 0, powercap: Path = POWERCAP) -> EnergyMeter | str:
    """Return the meter of a kind of device (cpu, gpu), or the reason why there is none."""
    return _nvml(number) if kind == "gpu" else _rapl(powercap)


def _rapl(powercap: Path) -> EnergyMeter | str:
    packages = sorted(p for p in powercap.glob("intel-rapl:*") if p.name.count(":") == 1)
    if not packages:
        return f"{powercap} has no counters of the processor's energy (RAPL): virtual machines rarely have them"
    try:
        return Rapl(packages)
    except PermissionError:
        return f"{packages[0] / 'energy_uj'} may be read by root alone: make it readable, or run as root"
    except (OSError, ValueError) as error:
        return f"{packages[0]} cannot be read: {error}"


def _nvml(number: int) -> EnergyMeter | str:
    try:
        library = ctypes.CDLL(_NVML)
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
            return "NVML does not know this GPU"
        found = Nvml(library, handle)
        found.joules()
    except (OSError, AttributeError) as error:
        return f"NVML cannot be asked: {error}"
    return found

"""What tests of worker processes share: measurers that find the extension of faulty candidates, and what they say."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from faults.faulty.faulty import OP
from tunewright.ir.types import DType, TensorType
from tunewright.measure.base import Candidate
from tunewright.measure.isolated import Isolated
from tunewright.search.base import Status
from tunewright.solvers.base import Problem

FOLDER = Path(__file__).parent / "faulty"
TYPE = TensorType(DType.FLOAT32, (64, 64))
PROBLEM = Problem(OP, (TYPE,), (TYPE,), {}, constant=(False,))
IDS = {"CPU.HOST": "faulty.host", "CPU": "opencl.faulty.shape"}

CRASHED, TIMEOUT, WRONG, FAILED = Status.CRASHED, Status.TIMEOUT, Status.WRONG, Status.FAILED
#: what becomes of each, and a part of the reason
HOST = {
    "segfault": (CRASHED, "SIGSEGV"),
    "abort": (CRASHED, "SIGABRT (it printed: something is very wrong)"),
    "leave": (CRASHED, "exit status 3"),
    "hang": (TIMEOUT, "longer than 1 s"),
    "hold": (TIMEOUT, "longer than 1 s"),
    "sleep": (TIMEOUT, "longer than 1 s"),
    "hoard": (FAILED, "MemoryError"),
    "flood": (CRASHED, "flooded its output"),
    "flood_errors": (CRASHED, "flooded its output"),
    "garble": (CRASHED, "its process sent a frame"),
    "orphan": (CRASHED, "SIGSEGV"),
    "nan": (WRONG, "NaN"),
    "percent": (WRONG, "against"),
    "turncoat": (WRONG, "right at first and wrong later"),
    "nothing": (WRONG, "output 0"),
    "beyond": (WRONG, "out of bounds"),
    "later": (WRONG, "output 0"),
    "slow_clock": (WRONG, "its clock disagrees"),
    "dead_clock": (WRONG, "impossible time"),
}
#: segfault, abort, hang, sleep, huge allocation, flood, NaN, wrong by 1 %, right then wrong, no-op, out of bounds, liar
TWELVE = ("segfault", "abort", "hang", "sleep", "hoard", "flood", "nan", "percent", "turncoat", "nothing", "beyond",
          "slow_clock")  # fmt: skip
DEVICE = {
    "hang": (TIMEOUT, "longer than 2 s"),
    "crash": (CRASHED, "SIGSEGV"),
    "nan": (WRONG, "NaN"),
    "percent": (WRONG, "against"),
    "nothing": (WRONG, "output 0"),
    "half": (WRONG, "output 0"),
    "beyond": (WRONG, "out of bounds"),
    "before": (WRONG, "out of bounds"),
    "syntax": (FAILED, "cannot compile"),
    "endless": (TIMEOUT, "longer than 2 s"),
}
#: seconds: nobody waits for a hang longer than for anything else
PATIENT, HASTY = 30.0, {"CPU.HOST": 1.0, "CPU": 2.0}


def interpreter(folder: Path) -> str:
    """Python with the extension installed. It is the worker's alone: a process never forgets what it discovered."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{FOLDER}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def faulty(device: str, how: str, pace: int = 1) -> Candidate:
    return IDS[device], {"how": how, "pace": pace}


def measurer(folder: Path, device: str, timeout: float = PATIENT, memory_bytes: int = 1 << 30) -> Isolated:
    return Isolated(device, timeout, python=interpreter(folder), memory_bytes=memory_bytes)


def pid(measurer: Isolated) -> int:
    """Of the worker that runs."""
    return measurer._workers[0].process.pid


def is_gone(number: int, seconds: float = 30.0, group: bool = False) -> bool:
    """A process, or everything in its group, ends within some seconds."""
    late = time.monotonic() + seconds
    while _is_there(number, group):
        if time.monotonic() > late:
            return False
        time.sleep(0.01)
    return True


def _is_there(number: int, group: bool) -> bool:
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit():
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z" and (int(fields[2]) if group else int(name)) == number:
                    found.append(name)
        except OSError:
            continue
    return bool(found)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """Processes that this one started, ended ones that nobody has waited for included."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found |= {int(n) for n in (task / "children").read_text().split()}
    return found

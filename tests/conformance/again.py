"""Tests of kernels once more, in a process of their own, with another device in the place of CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
#: tests of the CPU device's kernels
KERNELS = sorted(path for path in HERE.glob("test_kernels_*.py") if "cuda" not in path.name)


def run(modules: Sequence[Path], device: str, *options: str, level: str = "", least: int = 0) -> Counter[str]:
    """How many tests of some modules passed, were skipped and so on; AssertionError when one failed.

    ``level``: what CPU_ISA is, if not what it is here. ``least``: that many have to pass.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--cpu", device]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if level:
        environment["TUNEWRIGHT_CPU_ISA"] = level
    done = subprocess.run(
        [*command, *options, *map(str, modules)], cwd=HERE.parents[1], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    last = done.stdout.rstrip().rpartition("\n")[2]
    said = f"{device} {level}: {last}"
    print(said)
    assert done.returncode == 0, f"{said}\n{done.stdout[-10_000:]}{done.stderr[-2_000:]}"
    counts = Counter({what: int(count) for count, what in re.findall(r"(\d+) (passed|skipped|xfailed)", last)})
    assert counts["passed"] >= least, said
    return counts

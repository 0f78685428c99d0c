"""Kernels through an OpenCL runtime for the processor: tests of the CPU device's kernels, with that one in its place.

The short form runs a sixth of them, of every family; soak all, and ONNX's node tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opencl_runtime

HERE = Path(__file__).parent
KERNELS = sorted(path for path in HERE.glob("test_kernels_*.py") if "cuda" not in path.name)
GROUPS = 4

pytestmark = [
    opencl_runtime.needs_opencl,
    pytest.mark.skipif("not config.getoption('--cpu') is None", reason="it is in the CPU device's place"),
]


def run(modules: list[Path], *options: str, least: int) -> None:
    """Tests of modules in a process of its own. ``least``: how many there are at least."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--cpu", opencl_runtime.NAME]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *options, *map(str, modules)], cwd=HERE.parents[1], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= least, done.stdout[-500:]


@pytest.mark.parametrize("group", range(GROUPS))
def test_some_kernels_of_every_family(group: int) -> None:
    run(KERNELS[group::GROUPS], "-m", "not soak", "--each", "6", least=40)


@pytest.mark.soak
@pytest.mark.parametrize("group", range(GROUPS))
def test_all_kernels(group: int) -> None:
    run(KERNELS[group::GROUPS], least=300)


@pytest.mark.soak
def test_the_node_tests_of_onnx() -> None:
    run([HERE / "test_onnx_backend.py"], "-k", "test_node", least=1800)

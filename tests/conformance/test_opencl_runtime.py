"""Kernels through an OpenCL runtime for the processor: tests of the CPU device's kernels, with that one in its place.

The short form runs a sixth of them, of every family; soak all, and ONNX's node tests.
"""

from __future__ import annotations

import pytest

from conformance.again import HERE, KERNELS, run
from helpers import opencl_runtime

GROUPS = 4

pytestmark = [
    opencl_runtime.needs_opencl,
    pytest.mark.skipif("not config.getoption('--cpu') is None", reason="it is in the CPU device's place"),
]


@pytest.mark.parametrize("group", range(GROUPS))
def test_some_kernels_of_every_family(group: int) -> None:
    run(KERNELS[group::GROUPS], opencl_runtime.NAME, "-m", "not soak", "--each", "6", least=40)


@pytest.mark.soak
@pytest.mark.parametrize("group", range(GROUPS))
def test_all_kernels(group: int) -> None:
    run(KERNELS[group::GROUPS], opencl_runtime.NAME, least=300)


@pytest.mark.soak
def test_the_node_tests_of_onnx() -> None:
    run([HERE / "test_onnx_backend.py"], opencl_runtime.NAME, "-k", "test_node", least=1800)

"""The CUDA device that the tests of its kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from conformance import interpreter  # before any module here imports Triton

if TYPE_CHECKING:
    from tunewright.devices.cuda import CudaDevice


@pytest.fixture(scope="session")
def device() -> Iterator[CudaDevice]:
    """In Triton's interpreter, or on a GPU: see interpreter.py."""
    from tunewright.devices.cuda import CudaDevice

    with interpreter.repaired():
        yield CudaDevice("GPU.0", raw=interpreter.RAW)

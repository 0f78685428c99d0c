"""What conformance tests share: forms of the CPU device (see `kernel_forms`), a check of all texts, the CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from conformance import (
    interpreter,  # before any module here imports Triton
    kernel_forms,
    strict,
)

if TYPE_CHECKING:
    from tunewright.devices.cuda.device import CudaDevice


def pytest_configure(config: pytest.Config) -> None:
    kernel_forms.offer(config.getoption("--cpu"))


@pytest.fixture(scope="module", autouse=True)
def watched() -> Iterator[None]:
    with strict.watched():
        yield


@pytest.fixture(scope="session")
def device() -> Iterator[CudaDevice]:
    """In Triton's interpreter, or on a GPU: see interpreter.py."""
    from tunewright.devices.cuda.device import CudaDevice

    with interpreter.repaired():
        yield CudaDevice("GPU.0", raw=interpreter.RAW)

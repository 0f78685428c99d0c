"""Runs single texts on devices that compile C: as a kernel with these tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunewright.devices.c_device import CDevice
from tunewright.devices.c_kernel import CKernel, CLaunchCall, In, Out, Text
from tunewright.ir.types import TensorType
from tunewright.solvers.base import Problem

Array = np.ndarray


def kernel(device: CDevice, call: CLaunchCall, inputs: Sequence[Array], outputs: Sequence[Array]) -> CKernel:
    """A call as the kernel of a problem with tensors like these."""
    types = [tuple(TensorType.of(array) for array in arrays) for arrays in (inputs, outputs)]
    return CKernel("test", Problem("Test", *types, {}, constant=(False,) * len(inputs)), device, [call], {})


def run_call(device: CDevice, call: CLaunchCall, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Run a call once, and wait for it."""
    queue = device.queue()
    kernel(device, call, inputs, outputs).run(queue, inputs, outputs)
    queue.finish()


def run_text(
    device: CDevice, text: str, name: str, grid: Sequence[int], arrays: Sequence[Array], local: Sequence[int] = ()
) -> None:
    """Run an entry point of a complete text once. Its arguments are these arrays, the last of which it writes to."""
    args = (*map(In, range(len(arrays) - 1)), Out(0))
    run_call(device, Text(name, tuple(grid), args, "", (), text, local=tuple(local)), arrays[:-1], arrays[-1:])

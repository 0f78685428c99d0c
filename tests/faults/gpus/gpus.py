"""CUDA devices for machines without a GPU, and candidates that break one: an extension, as it would be installed.

GPU.70 is Triton's interpreter, where kernels run; GPU.80 is an sm_90 that kernels are compiled for, and run nowhere. A
candidate that breaks the device does to GPU.70 what an illegal access does to a context: every later call fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

ILLEGAL = "CUDA error: an illegal memory access was encountered"


class Interpreted(CudaDevice):
    family = "interpreted"
    #: nobody gets it who does not ask for it
    priority = -1

    @classmethod
    def available(cls) -> list[str] | str:
        return ["GPU.70"]

    def __init__(self, name: str) -> None:
        super().__init__(name, raw="cpu")
        self.ill = ""

    def queue(self) -> CudaQueue:
        if self.ill:
            raise RuntimeError(self.ill)
        return super().queue()

    def broken(self) -> str:
        return self.ill or super().broken()


class Crossed(CudaDevice):
    family = "crossed"
    priority = -1

    @classmethod
    def available(cls) -> list[str] | str:
        return ["GPU.80"]

    def __init__(self, name: str) -> None:
        super().__init__(name, raw="cpu")
        self.target = replace(self.target, arch="sm_90", units=132)


class Breaking(CudaSolver):
    """Relu by torch; the config says what it does to the device, and from which run on."""

    id = "faulty.cuda"
    ops = frozenset({"Relu"})
    rank = 1000

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"how": ["good", "fails", "breaks", "turns"], "after": [0, 8, 1000]})

    def default(self, problem: Problem, target: Target) -> Config:
        return {"how": "good", "after": 0}

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        import torch

        how, left = config["how"], [int(config["after"])]

        def call(queue: CudaQueue, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            left[0] -= 1
            if left[0] < 0 and how == "fails":
                raise RuntimeError("too many resources requested for launch")
            if left[0] < 0 and how == "breaks":
                assert isinstance(device, Interpreted)
                device.ill = ILLEGAL
                raise RuntimeError(f"{ILLEGAL}\nCUDA kernel errors might be reported later")
            torch.clamp_min(inputs[0], 0.5 if left[0] < 0 and how == "turns" else 0, out=outputs[0])

        return call


DEVICES = (Interpreted, Crossed)
SOLVERS = (Breaking(),)

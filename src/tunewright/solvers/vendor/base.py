"""What calls of a vendor's library share: logical views of tensors, and the epilogue as one kernel behind the call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ...devices.base import Target
from ...devices.cuda import CudaDevice, CudaQueue
from ...ir.types import TensorType
from ...search.space import Space
from ..base import Config, Problem
from ..cuda import Call, CudaSolver
from ..triton.elementwise import default_block, launch, why_not_layouts
from ..triton.text import why_not_chain


class VendorSolver(CudaSolver):
    """The main operation as `operation` writes it, then the epilogue: one generated kernel, if there is any."""

    #: an algorithm that the library picks by itself may be another one tomorrow
    reproducible = False
    #: it can be told where to write: without an epilogue nothing is copied
    writes: ClassVar[bool] = False

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            if len(problem.outputs) != 1:
                return "an epilogue needs one output"
            return why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        if not problem.epilogue:
            return Space({})
        return Space({"block": [128, 256, 512, 1024, 2048, 4096], "warps": [1, 2, 4, 8]})

    def default(self, problem: Problem, target: Target) -> Config:
        return default_block(problem, target) if problem.epilogue else {}

    @abstractmethod
    def operation(self, problem: Problem) -> Callable[[Sequence[Any], Sequence[Any] | None], Any]:
        """(logical inputs, logical outputs to write into or None) -> the result, or results in a list."""

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        operation, count = self.operation(problem), len(problem.main_inputs)
        types = [t if isinstance(t, TensorType) else None for t in problem.inputs]
        made = [t for t in problem.outputs if isinstance(t, TensorType)]
        if problem.epilogue:
            finish = launch(problem, config, main=False)
            (out,) = made

            def with_epilogue(queue: CudaQueue, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
                ins = [logical(x, t) for x, t in zip(inputs[:count], types, strict=False)]
                result = physical(operation(ins, None), out)
                finish(queue, [result, *(x for x in inputs[count:] if x is not None)], outputs)

            return with_epilogue

        def alone(queue: CudaQueue, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            ins = [logical(x, t) for x, t in zip(inputs, types, strict=True)]
            outs = [logical(y, t) for y, t in zip(outputs, made, strict=True)]
            result = operation(ins, outs if self.writes else None)
            if not self.writes:
                for y, value in zip(outs, result if isinstance(result, (list, tuple)) else [result], strict=False):
                    y.copy_(value)

        return alone


def logical(tensor: Any, type: TensorType | None) -> Any:
    """A tensor in its logical order: a view."""
    if tensor is None or type is None or type.layout.name != "nhwc":
        return tensor
    rank = len(type.dims)
    return tensor.permute(0, rank - 1, *range(1, rank - 1))


def physical(tensor: Any, type: TensorType) -> Any:
    """A result as it lies in memory: a view where it lies so already."""
    if type.layout.name == "nhwc":
        rank = len(type.dims)
        tensor = tensor.permute(0, *range(2, rank), 1)
    return tensor.contiguous()

"""Common parts of library calls: logical views of tensors, and the epilogue as one kernel behind the call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from tunewright.devices.base import Device, Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue, torch_dtype
from tunewright.ir.symbolic import hint
from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Scalar, Space
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..base import Config, Kernel, Problem
from ..epilogue_types import main_type
from ..triton.elementwise.elementwise import default_block, launch, why_not_layouts
from ..triton.product import precision as multiply
from ..triton.source.compile import is_recording
from ..triton.source.text import why_not_chain

#: precisions of single-precision products; see `triton.multiply`
PRECISIONS = ("ieee", "tf32")


#: (logical inputs, logical outputs to write into or None) -> the result, or a list of results
Operation: TypeAlias = Callable[[Sequence[Any], Sequence[Any] | None], Any]


class VendorSolver(CudaSolver):
    """Runs the main operation by `operation`, then the epilogue, if any, as one generated kernel."""

    #: The library may choose another algorithm in another run.
    reproducible = False
    paged = False
    #: whether the operation can write into given outputs; without an epilogue this saves a copy
    writes: ClassVar[bool] = False
    #: whether the operation may multiply on tensor cores
    multiplies: ClassVar[bool] = False

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            if len(problem.outputs) != 1:
                return "an epilogue needs one output"
            return why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        params: dict[str, Sequence[Scalar]] = {}
        if self.rest(problem).epilogue:
            params |= {"block": [128, 256, 512, 1024, 2048, 4096], "warps": [1, 2, 4, 8]}
        return Space(params | ({"precision": PRECISIONS} if self._is_single(problem) else {}))

    def default(self, problem: Problem, target: Target) -> Config:
        config = default_block(problem, target) if self.rest(problem).epilogue else {}
        return {**config, **({"precision": PRECISIONS[0]} if self._is_single(problem) else {})}

    def inexact(self, problem: Problem, config: Config) -> str | None:
        return multiply.inexact(config)

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return multiply.marked(super().compile(problem, config, device), config)

    def _is_single(self, problem: Problem) -> bool:
        """Whether the operation multiplies single-precision numbers."""
        first = problem.inputs[0]
        return self.multiplies and isinstance(first, TensorType) and first.dtype is DType.FLOAT32

    @abstractmethod
    def operation(self, problem: Problem) -> Operation:
        """The main operation, with the first step of the epilogue where `rest` removes it."""

    def rest(self, problem: Problem) -> Problem:
        """The problem without the first step of its epilogue, where the library computes it from the step's first
        operand."""
        return problem

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        operation, count, rest = self.operation(problem), len(problem.main_inputs), self.rest(problem)
        taken = count if rest is problem else count + 1
        problem = rest
        if self._is_single(problem):
            operation = _in_precision(operation, str(config["precision"]))
        types = [t if isinstance(t, TensorType) else None for t in problem.inputs]
        made = [t for t in problem.outputs if isinstance(t, TensorType)]
        if problem.epilogue:
            finish = launch(problem, config, main=False)
            (out,) = made
            between = main_type(problem).dtype.numpy

            def with_epilogue(queue: CudaQueue, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
                if is_recording():  # a library call needs no compilation
                    result = outputs[0].new_empty([hint(d) for d in out.physical], dtype=torch_dtype(between))
                else:
                    ins = [logical(x, t) for x, t in zip(inputs[:taken], types, strict=False)]
                    result = physical(operation(ins, None), out)
                finish(queue, [result, *(x for x in inputs[count:] if x is not None)], outputs)

            return with_epilogue

        def alone(queue: CudaQueue, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            if is_recording():
                return
            ins = [logical(x, t) for x, t in zip(inputs[:taken], types, strict=False)]
            outs = [logical(y, t) for y, t in zip(outputs, made, strict=True)]
            result = operation(ins, outs if self.writes else None)
            if not self.writes:
                for y, value in zip(outs, result if isinstance(result, (list, tuple)) else [result], strict=False):
                    y.copy_(value)

        return alone


def _in_precision(operation: Operation, precision: str) -> Operation:
    """Set the precision of a call: "ieee" keeps single-precision factors exact. cuDNN rounds them unless told
    otherwise."""

    def run(inputs: Sequence[Any], outputs: Sequence[Any] | None) -> Any:
        import torch

        known: list[Any] = [torch.backends.cudnn, torch.backends.cuda.matmul]
        value: str | bool = precision == "tf32"
        name = "allow_tf32"
        # from torch 2.9 on, which warns about the older attribute
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            known, value, name = [torch.backends.cudnn.conv, known[1]], precision, "fp32_precision"
        before = [getattr(place, name) for place in known]
        try:
            for place in known:
                setattr(place, name, value)
            return operation(inputs, outputs)
        finally:
            for place, old in zip(known, before, strict=True):
                setattr(place, name, old)

    return run


def logical(tensor: Any, type: TensorType | None) -> Any:
    """A view of a tensor in its logical order."""
    if tensor is None or type is None or type.layout.name != "nhwc":
        return tensor
    rank = len(type.dims)
    return tensor.permute(0, rank - 1, *range(1, rank - 1))


def physical(tensor: Any, type: TensorType) -> Any:
    """A result in its physical order; a view where it already lies so."""
    if type.layout.name == "nhwc":
        rank = len(type.dims)
        tensor = tensor.permute(0, *range(2, rank), 1)
    return tensor.contiguous()

"""The base of this package's solvers: `CSolver`, whose kernels are emitted as C."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from tunewright.devices.base import Device, Target
from tunewright.devices.c_device import CDevice
from tunewright.devices.c_kernel import CKernel as CKernel
from tunewright.errors import ModelError
from tunewright.ir.types import PLAIN, DType, Layout, TensorType, Type
from tunewright.ops.infer import MISTAKES
from tunewright.solvers.base import Config, Kernel, Missing, Packing, Problem, Solver, tensor, why_not_type

from .emit import STORAGE, EmittedLaunch, Scratch
from .prelude import mathematics_of

#: kernels compute indices in 32 bits
MOST_ELEMENTS = 2**31 - 1


class CSolver(Solver):
    """A solver whose kernels are emitted as C.

    Each family is one class with two instances. With ``specialise`` False, kernels take shapes as arguments; this is
    the default, because a new shape compiles nothing. With True, shapes are literals in the text; tuning chooses these.
    """

    language = "c"
    serves_classes = True
    #: operations that the solver accepts
    ops: frozenset[str] = frozenset()
    #: element types of inputs and outputs
    dtypes: ClassVar[frozenset[DType]] = frozenset(STORAGE)
    #: further element types: of the epilogue's operands, and of the output of the epilogue
    stores: ClassVar[frozenset[DType]] = frozenset()
    #: layouts of inputs and outputs
    layouts: ClassVar[frozenset[str]] = frozenset({PLAIN.name})
    family: ClassVar[str]

    def __init__(self, specialise: bool = False) -> None:
        self.specialise = specialise
        self.id = f"opencl.{self.family}" + (".shape" if specialise else "")
        self.rank = self.rank + 1 if specialise else self.rank
        # The generic solver accepts the same problems, and compiles nothing for a new shape.
        self.tuned_only = specialise

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if problem.op not in self.ops:
            return f"solves {', '.join(sorted(self.ops))}"
        if None in (*problem.inputs[:1], *problem.outputs):
            return Missing("nothing is known of its input or its result")
        count, behind = len(problem.main_inputs), self.dtypes | self.stores
        for i, type in enumerate([*problem.inputs, *problem.outputs]):
            reason = self._type(type, self.dtypes if i < count else behind)
            if reason is not None:
                return reason
        try:
            reason = self.refuse(problem, target)
        except MISTAKES as error:  # The mistake is in the model; the host kernel reports where.
            return str(error) or repr(error)
        return self._double(problem, target) if reason is None and "fp64" in target.lacks else reason

    def _double(self, problem: Problem, target: Target) -> str | None:
        """Why a device without fp64 cannot run the problem: its tensors or its kernels use fp64."""
        if any(tensor(t).dtype is DType.FLOAT64 for t in [*problem.inputs, *problem.outputs] if t is not None):
            return f"{target.name} has no fp64"
        if problem.is_static:
            calls = self.calls(problem, self.default(problem, target), target)
            if any("f64" in call.text for call in calls):
                return f"computes in fp64, which {target.name} does not have"
        return None

    def _type(self, type: Type | None, dtypes: frozenset[DType]) -> str | None:
        reason = why_not_type(type, dtypes, self.layouts)
        if reason is None and isinstance(type, TensorType) and type.is_static and type.size > MOST_ELEMENTS:
            return f"{type} has more than {MOST_ELEMENTS} elements"
        return reason

    def refuse(self, problem: Problem, target: Target) -> str | None:
        """Further reasons to refuse a problem. Types may be open: then the answer holds for when shapes are known.

        A solver that computes fused steps overrides this. Without the refusal they would be left out of its results.
        """
        return "it computes no fused steps" if problem.epilogue else None

    @abstractmethod
    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        """The launches, in order, for a static problem."""

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        """How constant inputs are rearranged, once, before the kernel reads them."""
        return {}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        """The text that is compiled, without the declarations of a dialect."""
        texts = "\n".join(call.text for call in self.calls(problem, config, target))
        return mathematics_of(texts) + texts

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        kernel = self._made(problem, config, device)
        kernel.device.begin_build(kernel.texts)
        return kernel

    def workspace(self, problem: Problem, config: Config, device: Device) -> int:
        calls = self._made(problem, config, device).calls
        return sum({arg.name: arg.nbytes for call in calls for arg in call.args if isinstance(arg, Scratch)}.values())

    def compile_again(self, problem: Problem, config: Config, device: Device, before: Kernel) -> Kernel:
        kernel = self._made(problem, config, device)
        if isinstance(before, CKernel) and [c.text for c in kernel.calls] == [c.text for c in before.calls]:
            kernel.programs = before.programs
        else:
            kernel.device.begin_build(kernel.texts)
        return kernel

    def _made(self, problem: Problem, config: Config, device: Device) -> CKernel:
        assert isinstance(device, CDevice)
        try:
            calls = [c for c in self.calls(problem, config, device.target) if all(c.grid)]
        except MISTAKES as error:
            raise ModelError(str(error) or repr(error)) from error
        return CKernel(self.id, problem.at_hand, device, calls, self.packings(problem, config, device.target))


def both(solver: type[CSolver]) -> tuple[CSolver, CSolver]:
    """The generic and the specialised solver of a family."""
    return solver(False), solver(True)


def layout_of(type: Type | None) -> Layout:
    return type.layout if isinstance(type, TensorType) else PLAIN

"""What the solvers of this package share: `CSolver`, and `CKernel`, the kernel that launches what they emitted."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...devices import building
from ...devices.base import Device, Queue, Target
from ...devices.c_device import CDevice, CLaunch, CQueue
from ...devices.native import steps
from ...devices.native.device import NativeDevice
from ...devices.reports import Record
from ...errors import ModelError
from ...ir.symbolic import SymInt, Whole
from ...ir.types import PLAIN, DType, Layout, TensorType, Type
from ...ops.infer import MISTAKES
from ..base import Config, Kernel, Linker, Missing, Packing, Problem, Solver, tensor, why_not_type
from .emit import STORAGE, Call, In, Out, Report, Scratch, Table
from .prelude import mathematics_of

if TYPE_CHECKING:
    from .linked import OneKernel

#: indices are 32 bits wide
MOST_ELEMENTS = 2**31 - 1


class CSolver(Solver):
    """A solver whose kernels are emitted as C.

    A family is one class with two instances: ``specialise`` False takes shapes as arguments (the default: a new shape
    compiles nothing), True has them as literals (for tuning).
    """

    language = "c"
    serves_classes = True
    #: operations that it solves
    ops: frozenset[str] = frozenset()
    #: element types of inputs and outputs
    dtypes: ClassVar[frozenset[DType]] = frozenset(STORAGE)
    #: layouts of inputs and outputs
    layouts: ClassVar[frozenset[str]] = frozenset({PLAIN.name})
    family: ClassVar[str]

    def __init__(self, specialise: bool = False) -> None:
        self.specialise = specialise
        self.id = f"opencl.{self.family}" + (".shape" if specialise else "")
        self.rank = self.rank + 1 if specialise else self.rank
        self.tuned_only = specialise  # the generic one solves the same, and compiles nothing for a new shape

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if problem.op not in self.ops:
            return f"solves {', '.join(sorted(self.ops))}"
        if None in (*problem.inputs[:1], *problem.outputs):
            return Missing("nothing is known of its input or its result")
        for type in [*problem.inputs, *problem.outputs]:
            reason = self._type(type)
            if reason is not None:
                return reason
        try:
            reason = self.refuse(problem, target)
        except MISTAKES as error:  # of the model: the host says where it is
            return str(error) or repr(error)
        return self._double(problem, target) if reason is None and "fp64" in target.lacks else reason

    def _double(self, problem: Problem, target: Target) -> str | None:
        """What speaks against it on a device without fp64: its tensors, or what its kernels compute with."""
        if any(tensor(t).dtype is DType.FLOAT64 for t in [*problem.inputs, *problem.outputs] if t is not None):
            return f"{target.name} has no fp64"
        if problem.is_static:
            calls = self.calls(problem, self.default(problem, target), target)
            if any("f64" in call.text for call in calls):
                return f"computes in fp64, which {target.name} does not have"
        return None

    def _type(self, type: Type | None) -> str | None:
        reason = why_not_type(type, self.dtypes, self.layouts)
        if reason is None and isinstance(type, TensorType) and type.is_static and type.size > MOST_ELEMENTS:
            return f"{type} has more than {MOST_ELEMENTS} elements"
        return reason

    def refuse(self, problem: Problem, target: Target) -> str | None:
        """What else speaks against it. Types may be open: then the answer is for when shapes are known."""
        return None

    @abstractmethod
    def calls(self, problem: Problem, config: Config, target: Target) -> list[Call]:
        """The launches, in order, for a static problem."""

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        """How constant inputs are to be rearranged, once, before the kernel sees them."""
        return {}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        """What is compiled, but for the words of a dialect."""
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


class CKernel(Kernel):
    """Launches of compiled programs. Immutable; a request's argument lists are in what `launcher` returns."""

    def __init__(
        self, name: str, problem: Problem, device: CDevice, calls: Sequence[Call], packings: Mapping[int, Packing]
    ) -> None:
        self.name, self.problem, self.device = name, problem, device
        self.calls = [call.at_hand for call in calls]
        #: what of its launches depends on shapes, where it is made for a class of them
        self.open = OpenCalls.of(calls)
        self.packings = packings
        self.costs = Costs(len(calls))

    def limit_scratch(self, scratch: Mapping[str, Whole]) -> None:
        """Have so many bytes of scratch memory, where it depends on numbers that a launch finds out by itself."""
        assert self.open is not None
        self.most_scratch = dict(scratch)
        moving = {name: nbytes for name, nbytes in scratch.items() if isinstance(nbytes, SymInt)}
        self.open = replace(self.open, scratch=moving)

    @property
    def texts(self) -> list[str]:
        """The complete text of each launch."""
        return [call.program(self.device.dialect) for call in self.calls]

    @cached_property
    def programs(self) -> list[Any]:
        """Compiled, at the latest when they are needed."""
        with building.waiting():
            return [self.device.build(text) for text in self.texts]

    def prepare(self) -> None:
        _ = self.programs

    def is_like(self, other: Kernel) -> bool:
        return isinstance(other, CKernel) and [[*map(_kind, c.args)] for c in self.calls] == [
            [*map(_kind, c.args)] for c in other.calls
        ]

    @property
    def linker(self) -> Linker | None:
        if not isinstance(self.device, NativeDevice):
            return None
        from .linked import Linked  # which needs this module

        return Linked(self.device)

    def new(self, i: int) -> Any:
        """Memory for output i."""
        type = tensor(self.problem.outputs[i])
        return self.device.view(self.device.alloc(type.nbytes), 0, type)

    def launcher(self, queue: Queue, lasting: bool = True) -> Bound | OneKernel:
        if isinstance(self.device, NativeDevice):
            from .linked import OneKernel  # which needs this module

            return OneKernel(self, queue)
        return Bound(self, queue, lasting)

    def bind(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], object]:
        return self.launcher(queue).fix(inputs, outputs)

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(queue, CQueue)
        bound = self.launcher(queue, lasting=False)
        queue.keep(bound)
        return bound(inputs, outputs)


@dataclass(frozen=True)
class OpenCalls:
    """What of a kernel's launches depends on shapes: words of its rows in a table, and bytes of scratch memory."""

    #: (launch, word of its row, value)
    words: tuple[tuple[int, int, SymInt], ...]
    scratch: Mapping[str, SymInt]
    #: constants: launch, argument, what it is
    tables: tuple[tuple[int, int, Table], ...] = ()

    @property
    def sizes(self) -> list[Whole]:
        """Every number that is written down here."""
        found: list[Whole] = [value for _, _, value in self.words]
        tables = (table.words if table.is_late else table.sizes for _, _, table in self.tables)
        return [*found, *self.scratch.values(), *(size for sizes in tables for size in sizes)]

    @staticmethod
    def of(calls: Sequence[Call]) -> OpenCalls | None:
        """None where nothing does."""
        words: list[tuple[int, int, Any]] = []
        scratch: dict[str, Any] = {}
        tables: list[tuple[int, int, Table]] = []
        for launch, call in enumerate(calls):
            x, y, _ = (*call.grid, 1, 1)[:3]
            items = math.prod(call.grid)
            if items > steps.MOST_ITEMS:
                raise ModelError(f"a kernel over {items:,} work-items")
            words += [(launch, at, value) for at, value in ((1, x), (2, y), (3, items))]
            words += [(launch, steps.ROW + at, arg) for at, arg in enumerate(call.args)]
            tables += [(launch, at, arg) for at, arg in enumerate(call.args) if isinstance(arg, Table) and arg.is_open]
            scratch.update({arg.name: arg.nbytes for arg in call.args if isinstance(arg, Scratch)})
        found = tuple(each for each in words if isinstance(each[2], SymInt))
        sizes = {name: nbytes for name, nbytes in scratch.items() if isinstance(nbytes, SymInt)}
        return OpenCalls(found, sizes, tuple(tables)) if found or sizes or tables else None


def _kind(arg: Any) -> Any:
    """What an argument of a launch is, but for its value."""
    if isinstance(arg, In | Out | Report):
        return arg
    return arg.name if isinstance(arg, Scratch) else isinstance(arg, Table)


class Costs:
    """What the thread pool learned of a kernel's launches, for tables that are made later: it need not learn it again.

    A table of steps has the least ticks that it saw for 1024 items of each (`launch_table.c`); 0: it saw none.
    """

    def __init__(self, launches: int) -> None:
        self._known = np.zeros(launches, np.uint64)
        #: the table that was made last, and in each row where the launches' costs stand
        self._last: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def pass_on(self, table: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> None:
        """Write what is known into a new table, and learn from it from now on."""
        if self._last is not None:
            last, where = self._last
            seen = np.concatenate([last[where], [self._known]])
            unknown = np.iinfo(np.uint64).max
            least = np.where(seen == 0, unknown, seen).min(0)
            self._known = np.where(least == unknown, 0, least).astype(np.uint64)
        table[places] = self._known
        self._last = table, places


class Bound:
    """A kernel's launches for one request. ``lasting``: its constants are those of a plan, the same at each call."""

    def __init__(self, kernel: CKernel, queue: Queue, lasting: bool = True) -> None:
        self.kernel, self.queue, self.lasting = kernel, queue, lasting
        self.launches: list[CLaunch] = []
        self.pointers: list[tuple[CLaunch, int, In | Out]] = []
        self.scratch: dict[str, Any] = {}
        #: memory of the device for inputs that are the host's
        self.copies: dict[int, Any] = {}
        self.kept: Sequence[Any] = ()
        #: where its launches say what is wrong with their inputs, if they do
        self.report: Record | None = None
        for program, call in zip(kernel.programs, kernel.calls, strict=True):
            launch = kernel.device.launch(queue, program, call.name, call.grid)
            for at, arg in enumerate(call.args):
                if isinstance(arg, In | Out):
                    self.pointers.append((launch, at, arg))
                elif isinstance(arg, Scratch):
                    launch.set(at, self._scratch(arg))
                elif isinstance(arg, Table):
                    launch.set(at, kernel.device.constant(arg.array))
                elif isinstance(arg, Report):
                    launch.set(at, self._report())
                else:
                    launch.set(at, arg)
            self.launches.append(launch)

    def _scratch(self, arg: Scratch) -> Any:
        if arg.name not in self.scratch:
            assert isinstance(self.queue, CQueue)
            self.scratch[arg.name] = self.queue.borrow(self.kernel.device, len(self.scratch), arg.nbytes)
        assert self.scratch[arg.name].nbytes >= arg.nbytes, f"{arg.name} is of two sizes"
        return self.scratch[arg.name]

    def _report(self) -> Any:
        if self.report is None:
            assert isinstance(self.queue, CQueue)
            self.report = self.queue.reports.take(self, self.kernel.device)
        return self.report.memory

    def fix(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], object]:
        """With these arguments for good."""
        self._set(inputs, outputs)
        if len(self.launches) == 1 and self.report is None:
            return self.launches[0]
        return self._go

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        """With these arguments now; outputs that are None are made."""
        outputs = [self.kernel.new(i) if out is None else out for i, out in enumerate(outputs)]
        self._set(inputs, outputs)
        self._go()
        return outputs

    def _set(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        if not self.kernel.device.shares_memory:
            assert not any(isinstance(out, np.ndarray) for out in outputs), "results are in the device's memory"
            inputs = self._there(inputs)
        for launch, at, arg in self.pointers:
            launch.set(at, inputs[arg.index] if isinstance(arg, In) else outputs[arg.index])
        self.kept = (inputs, outputs)  # a launch is asynchronous: the bytes must live until it is over

    def _there(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs that the kernel reads, those of the host copied to the device's memory."""
        device, constant = self.kernel.device, self.kernel.problem.constant
        there = list(inputs)
        for i in {arg.index for _, _, arg in self.pointers if isinstance(arg, In)}:
            array = inputs[i]
            if not isinstance(array, np.ndarray):
                continue
            if self.lasting and constant[i]:
                there[i] = device.constant(array)
                continue
            copy = self.copies.get(i)
            if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
                type = TensorType.of(array)
                copy = self.copies[i] = device.view(device.alloc(type.nbytes), 0, type)
            self.queue.put(array, copy)
            there[i] = copy
        return there

    def _go(self) -> Sequence[Any]:
        for launch in self.launches:
            launch()
        if self.report is not None:
            assert isinstance(self.queue, CQueue)
            self.queue.reports.watched[self.report.place] = self.queue.launching
        return ()


def both(solver: type[CSolver]) -> tuple[CSolver, CSolver]:
    """The generic and the specialised solver of a family."""
    return solver(False), solver(True)


def layout_of(type: Type | None) -> Layout:
    return type.layout if isinstance(type, TensorType) else PLAIN

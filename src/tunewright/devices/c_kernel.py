"""Kernels in C as devices see them: launches with their arguments, some of which depend on shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..errors import ModelError
from ..ir.launch_symbols import is_late
from ..ir.symbolic import SymInt, Whole, hint
from ..ir.types import TensorType, Type
from . import build_options
from .base import Queue
from .c_device import CDevice, CQueue
from .executable import Kernel, Packing, Part
from .native import table_format


@dataclass(frozen=True)
class In:
    """Input number ``index`` of the problem."""

    index: int


@dataclass(frozen=True)
class Out:
    """Output number ``index`` of the problem."""

    index: int = 0


@dataclass(frozen=True)
class Scratch:
    """Memory for the launches of one execution of a kernel. Launches that use the same ``name`` share it.

    The kernels of a request share it, so its initial content is undefined.
    """

    name: str
    nbytes: int


@dataclass(frozen=True, eq=False)
class ConstantTable:
    """A constant that belongs to the kernel. If it consists of sizes, ``make`` computes it from them."""

    array: np.ndarray[Any, Any]
    sizes: tuple[Whole, ...] = ()
    make: Callable[..., np.ndarray[Any, Any]] | None = None
    #: its elements are the sizes themselves, as int32
    listed: bool = False

    @property
    def is_late(self) -> bool:
        """Whether the constant depends on numbers that a launch computes."""
        return any(map(is_late, self.sizes))

    @property
    def words(self) -> list[Whole]:
        """The sizes as 64-bit words of two elements each. Sizes are not negative."""
        assert self.listed
        sizes = [*self.sizes, 0]
        return [low + high * 2**32 for low, high in zip(sizes[::2], sizes[1::2], strict=False)]

    @property
    def is_open(self) -> bool:
        """Whether the constant depends on symbolic sizes. ``array`` is the constant for the sizes at hand."""
        return any(isinstance(size, SymInt) for size in self.sizes)

    @staticmethod
    def of(make: Callable[..., np.ndarray[Any, Any]], sizes: Sequence[Whole]) -> ConstantTable:
        """Make a constant from sizes. The function gets plain numbers, and must not depend on anything else."""
        return ConstantTable(make(*map(hint, sizes)), tuple(sizes), make)

    @staticmethod
    def list(sizes: Sequence[Whole]) -> ConstantTable:
        """Make a constant whose elements are the sizes themselves."""
        return dataclasses.replace(ConstantTable.of(_int32, sizes), listed=True)


def _int32(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int32)


@dataclass(frozen=True)
class ReportArgument:
    """Where a kernel writes faults of its inputs (`devices.reports`). All launches of a kernel share it."""


Arg: TypeAlias = In | Out | Scratch | ConstantTable | ReportArgument | np.generic | SymInt


@dataclass(frozen=True)
class CLaunchCall:
    """One launch: an entry point, over a grid of work-items, with its arguments in order."""

    name: str
    grid: tuple[int, ...]
    args: tuple[Arg, ...]
    #: parts of the text without words of a dialect: what precedes the kernel, its parameters, its body
    head: str
    params: tuple[str, ...]
    body: str
    #: work-items that OpenCL runs as a group; the grid is a multiple of it
    group: int = 1
    #: group size along each axis, if a user sets it; empty: the device decides
    local: tuple[int, ...] = ()

    @cached_property
    def text(self) -> str:
        """The text that identifies a kernel, whatever its dialect."""
        return f"{self.head}\nKERNEL {self.name}({', '.join(self.params)}) {{\n{self.body}\n}}\n"

    @property
    def at_hand(self) -> CLaunchCall:
        """The launch for the shapes at hand, if it is made for a class of shapes."""
        return dataclasses.replace(self, grid=tuple(hint(g) for g in self.grid), args=tuple(map(_arg, self.args)))

    def program(self, dialect: str) -> str:
        """Return the complete text in a dialect."""
        raise NotImplementedError


class Text(CLaunchCall):
    """A launch whose ``body`` is already a complete text."""

    def program(self, dialect: str) -> str:
        return self.body


def _arg(arg: Arg) -> Arg:
    if isinstance(arg, SymInt):
        return np.int32(arg.hint)
    return Scratch(arg.name, hint(arg.nbytes)) if isinstance(arg, Scratch) else arg


class KernelTensors(Protocol):
    """The tensors of a kernel, as far as its device asks."""

    @property
    def inputs(self) -> Sequence[Type | None]: ...

    @property
    def outputs(self) -> Sequence[Type | None]: ...

    @property
    def constant(self) -> Sequence[bool]:
        """Which inputs are constant."""


class CKernel(Kernel):
    """Launches of compiled programs. Immutable."""

    is_linkable = True

    def __init__(
        self,
        name: str,
        problem: KernelTensors,
        device: CDevice,
        calls: Sequence[CLaunchCall],
        packings: Mapping[int, Packing],
    ) -> None:
        self.name, self.problem, self.device = name, problem, device
        self.calls = [call.at_hand for call in calls]
        #: the parts of its launches that depend on shapes, if it is made for a class of shapes
        self.open = OpenCalls.of(calls)
        self.packings = packings
        self.costs = LaunchCosts(len(calls))

    def limit_scratch(self, scratch: Mapping[str, Whole]) -> None:
        """Set the bytes of scratch memory that depends on numbers which a launch computes.

        The caller does this for each node that the kernel serves. An earlier limit no longer counts among the sizes.
        """
        assert self.open is not None
        self.most_scratch = {**self.most_scratch, **scratch}
        moving = {name: nbytes for name, nbytes in scratch.items() if isinstance(nbytes, SymInt)}
        self.open = dataclasses.replace(self.open, scratch=moving)

    @property
    def texts(self) -> list[str]:
        """The complete text of each launch."""
        return [call.program(self.device.dialect) for call in self.calls]

    @cached_property
    def programs(self) -> list[Any]:
        """The compiled programs. Compiled at the latest when they are needed."""
        with build_options.waiting():
            return [self.device.build(text) for text in self.texts]

    def prepare(self) -> None:
        _ = self.programs

    def is_like(self, other: Kernel) -> bool:
        return isinstance(other, CKernel) and [[*map(_kind, c.args)] for c in self.calls] == [
            [*map(_kind, c.args)] for c in other.calls
        ]

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(queue, CQueue)
        made = [self.new(i) if out is None else out for i, out in enumerate(outputs)]
        given = [*inputs, *made]
        part = Part.alone(self, len(inputs), len(made), queue.running)
        bound = self.device.link([part]).bind(queue, [None] * len(given))
        queue.keep((bound, given))
        bound.invoke({number: value for number, value in enumerate(given) if value is not None})
        return made

    def new(self, i: int) -> Any:
        """Allocate memory for output i."""
        type = self.problem.outputs[i]
        assert isinstance(type, TensorType)
        return self.device.view(self.device.alloc(type.nbytes), 0, type)


@dataclass(frozen=True)
class OpenCalls:
    """The parts of a kernel's launches that depend on shapes: words of its rows in a table, and scratch memory."""

    #: (launch, word of its row, value)
    words: tuple[tuple[int, int, SymInt], ...]
    scratch: Mapping[str, SymInt]
    #: constants: launch, argument, constant
    tables: tuple[tuple[int, int, ConstantTable], ...] = ()

    @property
    def sizes(self) -> list[Whole]:
        """Every size in these launches."""
        found: list[Whole] = [value for _, _, value in self.words]
        tables = (table.words if table.is_late else table.sizes for _, _, table in self.tables)
        return [*found, *self.scratch.values(), *(size for sizes in tables for size in sizes)]

    @staticmethod
    def of(calls: Sequence[CLaunchCall]) -> OpenCalls | None:
        """Return the parts that depend on shapes, or None if there are none."""
        words: list[tuple[int, int, Any]] = []
        scratch: dict[str, Any] = {}
        tables: list[tuple[int, int, ConstantTable]] = []
        for launch, call in enumerate(calls):
            x, y, _ = (*call.grid, 1, 1)[:3]
            items = math.prod(call.grid)
            if items > table_format.MOST_ITEMS:
                raise ModelError(f"a kernel over {items:,} work-items")
            words += [(launch, at, value) for at, value in ((1, x), (2, y), (3, items))]
            words += [(launch, table_format.ROW + at, arg) for at, arg in enumerate(call.args)]
            tables += [
                (launch, at, arg) for at, arg in enumerate(call.args) if isinstance(arg, ConstantTable) and arg.is_open
            ]
            scratch.update({arg.name: arg.nbytes for arg in call.args if isinstance(arg, Scratch)})
        found = tuple(each for each in words if isinstance(each[2], SymInt))
        sizes = {name: nbytes for name, nbytes in scratch.items() if isinstance(nbytes, SymInt)}
        return OpenCalls(found, sizes, tuple(tables)) if found or sizes or tables else None


def _kind(arg: Any) -> Any:
    """Return what an argument of a launch is, apart from its value."""
    if isinstance(arg, In | Out | ReportArgument):
        return arg
    return arg.name if isinstance(arg, Scratch) else isinstance(arg, ConstantTable)


class LaunchCosts:
    """Costs of a kernel's launches that the thread pool has measured, to start later tables with.

    For each launch, a table of steps holds the fewest ticks measured for 1024 items (`launch_table.c`). 0: not
    measured.
    """

    def __init__(self, launches: int) -> None:
        self._known = np.zeros(launches, np.uint64)
        #: the last table, and the positions of the launches' costs in each row
        self._last: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def pass_on(self, table: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> None:
        """Write the known costs into a new table, and learn from that table from now on."""
        if self._last is not None:
            last, where = self._last
            seen = np.concatenate([last[where], [self._known]])
            unknown = np.iinfo(np.uint64).max
            least = np.where(seen == 0, unknown, seen).min(0)
            self._known = np.where(least == unknown, 0, least).astype(np.uint64)
        table[places] = self._known
        self._last = table, places

"""Control flow as data: kernels, loops and branches that a device may link into one launch with their neighbours.

The runtime writes a `Block` for a control-flow node (`runtime/control/control_rows.py`). A device that links blocks
makes the block part of a launch. Every tensor is a `Ref`: an address that is fixed, or that the launch itself changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from ..ir.launch_symbols import Code, is_late, newest
from ..ir.symbolic import SymInt, Whole
from ..ir.types import TensorType
from .executable import Kernel


@dataclass(frozen=True)
class Outer:
    """An input or output of the node itself."""

    output: bool
    index: int


@dataclass(frozen=True)
class Own:
    """Memory that belongs to the block."""


@dataclass(frozen=True, eq=False)
class Fixed:
    """A constant."""

    array: np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class SizeList:
    """A constant of integers, some of which are symbolic: elements of ``dtype``."""

    array: np.ndarray[Any, Any]
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class Variable:
    """An address that `Set` changes. Two variables are never equal."""


@dataclass(frozen=True, eq=False)
class Counter:
    """The number of finished iterations of a loop, an int64."""


Base: TypeAlias = Outer | Own | Fixed | SizeList | Variable | Counter


@dataclass(frozen=True)
class Ref:
    """Where a tensor begins. Offsets and sizes are symbolic in a plan for a class of shapes."""

    base: Base
    offset: Whole = 0

    def __add__(self, nbytes: Whole) -> Ref:
        return replace(self, offset=self.offset + nbytes)

    def is_all_of(self, base: Base) -> bool:
        """Whether the tensor begins where ``base`` does, whatever the sizes are."""
        return self.base is base and not isinstance(self.offset, SymInt) and self.offset == 0


@dataclass(frozen=True, eq=False)
class LaunchRow:
    """A kernel with its tensors (None: absent). ``tag``: the step that it belongs to, for counts."""

    kernel: Kernel
    ins: tuple[Ref | None, ...]
    outs: tuple[Ref | None, ...]
    tag: object = None


@dataclass(frozen=True)
class Set:
    """Set the variable to this address from now on."""

    variable: Variable
    to: Ref


@dataclass(frozen=True)
class CopyRow:
    """Copy bytes. Copies should be small if the device has no faster way to move them."""

    to: Ref
    source: Ref
    nbytes: Whole


@dataclass(eq=False)
class Late:
    """Numbers that change with a late symbol (`ir/launch_symbols.py`): the number of finished iterations of a loop.

    If a check of ``code`` fails, the rows do not fit what follows: the launch ends, and the request runs the node by
    itself.
    """

    atom: int
    counter: Counter
    code: Code = field(default_factory=Code)


@dataclass(frozen=True, eq=False)
class LoopRow:
    """Repeat ``body`` while the bool at ``condition`` is true, at most as often as the int64 at ``limit`` says.

    ``whole``: only the limit ends the loop. ``tag``: the node, for the error about too many iterations. ``first``:
    bodies of the first iterations, where these differ. ``late``: what each further iteration computes at its start, if
    its rows depend on the iteration. ``behind``: rows behind the loop, with ``at_end`` before them.
    """

    counter: Counter
    limit: Ref | None
    condition: Ref
    body: Sequence[Row]
    whole: bool = False
    tag: object = None
    first: Sequence[Sequence[Row]] = ()
    late: Late | None = None
    behind: Sequence[Row] = ()
    at_end: Late | None = None


@dataclass(frozen=True, eq=False)
class Branch:
    """Run one of two lists of rows, by the bool at ``condition``."""

    condition: Ref
    then: Sequence[Row]
    otherwise: Sequence[Row]


@dataclass(frozen=True, eq=False)
class Compute:
    """Compute the numbers that depend on a counter, once a kernel has written it. Later rows use them."""

    late: Late


@dataclass(frozen=True, eq=False)
class Cases:
    """Rows for some values of a counter, and rows for all other values."""

    counter: Counter
    cases: Mapping[int, Sequence[Row]]
    otherwise: Sequence[Row]


@dataclass(frozen=True, eq=False)
class Tell:
    """Set counters to numbers that are read when the launch is over."""

    told: Sequence[tuple[Counter, Whole]]


Row: TypeAlias = LaunchRow | Set | CopyRow | LoopRow | Branch | Compute | Cases | Tell


@dataclass(frozen=True, eq=False)
class Ragged:
    """An output whose length depends on a loop: each iteration makes a row of it, or makes it longer.

    ``type``: that of a row, or of a state before any iteration. ``steps``: how much each iteration adds to each size of
    the state. ``most``: the largest number of iterations; None: the node's first input says it, and is known before the
    launch.

    Or an output whose sizes the launch tells: ``told`` says where, None for sizes that are known. ``type`` then has the
    largest sizes.
    """

    output: int
    type: TensorType
    counter: Counter
    most: Whole | None
    steps: tuple[int, ...] | None = None
    told: tuple[Counter | None, ...] | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """A control-flow node as part of a launch, with memory of its own."""

    rows: Sequence[Row]
    nbytes: Whole
    #: outputs in memory of each inference, with room for the largest number of rows
    ragged: Sequence[Ragged] = ()
    #: tag of the node, for the times and failures of its rows
    tag: object = field(default=None, repr=False)

    @property
    def escapes(self) -> bool:
        """Whether a launch may find that the block's rows do not fit what follows."""
        return any(late.code.checks for late in lates(self.rows))


def walk(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield every row, including those of bodies and branches."""
    for row in rows:
        yield row
        if isinstance(row, LoopRow):
            for rows in (*row.first, row.body, row.behind):
                yield from walk(rows)
        elif isinstance(row, Branch):
            yield from walk(row.then)
            yield from walk(row.otherwise)
        elif isinstance(row, Cases):
            for rows in (*row.cases.values(), row.otherwise):
                yield from walk(rows)


def refs(row: Row) -> Iterator[Ref]:
    """Yield the tensors that a row itself reads or writes."""
    if isinstance(row, LaunchRow):
        found: tuple[Ref | None, ...] = (*row.ins, *row.outs)
    elif isinstance(row, CopyRow):
        found = row.to, row.source
    elif isinstance(row, LoopRow):
        found = row.limit, row.condition
    else:
        found = (row.condition,) if isinstance(row, Branch) else ()
    yield from (ref for ref in found if ref is not None)


def sizes(block: Block) -> Iterator[Whole]:
    """Yield every address and size of a block's tensors that is known before a launch."""
    yield block.nbytes
    for one in block.ragged:
        yield from one.type.dims
        if one.most is not None:
            yield one.most
    yield from (number for number in numbers(block.rows) if not is_late(number))
    for late in lates(block.rows):
        yield from late.code.leaves()


def numbers(rows: Sequence[Row]) -> Iterator[Whole]:
    """Yield every number in rows, including those in kernels that are in no other list."""
    for row in walk(rows):
        for ref in [*refs(row), *([row.to] if isinstance(row, Set) else [])]:
            yield ref.offset
            if isinstance(ref.base, SizeList):
                yield from ref.base.array.reshape(-1).tolist()
        if isinstance(row, CopyRow):
            yield row.nbytes
        elif isinstance(row, Tell):
            yield from (number for _, number in row.told)
        elif isinstance(row, LaunchRow):
            of_kernel = getattr(row.kernel, "open", None)
            yield from () if of_kernel is None else of_kernel.sizes


def lates(rows: Sequence[Row]) -> Iterator[Late]:
    """Yield every program of late numbers."""
    for row in walk(rows):
        if isinstance(row, LoopRow):
            yield from (late for late in (row.late, row.at_end) if late is not None)
        elif isinstance(row, Compute):
            yield row.late


def settle(rows: Sequence[Row], inside: Sequence[Late] = ()) -> None:
    """Have the programs of late numbers compute every late number of the rows."""
    for row in rows:
        if isinstance(row, Compute):
            inside = (*inside, row.late)
        if isinstance(row, LoopRow):
            _settle_loop(row, inside)
        elif isinstance(row, Branch):
            settle(row.then, inside)
            settle(row.otherwise, inside)
        elif isinstance(row, Cases):
            for body in (*row.cases.values(), row.otherwise):
                settle(body, inside)
        else:
            _settle_numbers(row, inside)


def _settle_loop(row: LoopRow, inside: Sequence[Late]) -> None:
    for body in row.first:
        settle(body, inside)
    settle(row.body, inside if row.late is None else (*inside, row.late))
    settle(row.behind, inside if row.at_end is None else (*inside, row.at_end))


def _settle_numbers(row: Row, inside: Sequence[Late]) -> None:
    for number in filter(is_late, numbers([row])):
        for late in inside:  # no program has the number if the rows are written again as part of others
            if late.atom == newest(number):
                late.code.value(number)

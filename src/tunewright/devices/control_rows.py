"""Control flow as data: kernels, loops and branches that a device may link into one launch with their neighbours.

The runtime writes a `Block` for a control-flow node (`runtime/control/control_rows.py`); a device that links blocks
makes it part of a launch. Every tensor is a `Ref`: an address that is fixed, or that the launch itself changes as it
goes.
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
    """How many iterations of a loop are over, an int64."""


Base: TypeAlias = Outer | Own | Fixed | SizeList | Variable | Counter


@dataclass(frozen=True)
class Ref:
    """Where a tensor begins. Offsets, like all sizes here, are symbolic in a plan for a class of shapes."""

    base: Base
    offset: Whole = 0

    def __add__(self, nbytes: Whole) -> Ref:
        return replace(self, offset=self.offset + nbytes)

    def is_all_of(self, base: Base) -> bool:
        """It begins where ``base`` does, whatever the sizes are."""
        return self.base is base and not isinstance(self.offset, SymInt) and self.offset == 0


@dataclass(frozen=True, eq=False)
class LaunchRow:
    """A kernel with its tensors (None: absent). ``tag``: the step that it is, for whoever counts."""

    kernel: Kernel
    ins: tuple[Ref | None, ...]
    outs: tuple[Ref | None, ...]
    tag: object = None


@dataclass(frozen=True)
class Set:
    """The variable is this address from now on."""

    variable: Variable
    to: Ref


@dataclass(frozen=True)
class CopyRow:
    """Copy bytes. What a device does not move in other ways should be small."""

    to: Ref
    source: Ref
    nbytes: Whole


@dataclass(eq=False)
class Late:
    """Numbers that change with a late symbol (`ir/launch_symbols.py`), which is how many iterations of a loop are over.

    Where a check of ``code`` fails, the rows are not right for what comes: the launch ends, and the request runs the
    node by itself.
    """

    atom: int
    counter: Counter
    code: Code = field(default_factory=Code)


@dataclass(frozen=True, eq=False)
class LoopRow:
    """Repeat ``body`` while the bool at ``condition`` is true, and as often as the int64 at ``limit`` says.

    ``whole``: nothing but the limit ends it. ``tag``: the node, for whoever tells that it took too many iterations.
    ``first``: bodies of the first iterations, where these differ. ``late``: what each further iteration computes
    at first, where its rows depend on which one it is. ``behind``: rows behind the loop, with ``at_end`` before them.
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
    """One of two, by the bool at ``condition``."""

    condition: Ref
    then: Sequence[Row]
    otherwise: Sequence[Row]


@dataclass(frozen=True, eq=False)
class Compute:
    """The number that a kernel has written to a counter is known: compute what depends on it from here on."""

    late: Late


@dataclass(frozen=True, eq=False)
class Cases:
    """Rows for some numbers that a counter may have, and rows for all others."""

    counter: Counter
    cases: Mapping[int, Sequence[Row]]
    otherwise: Sequence[Row]


@dataclass(frozen=True, eq=False)
class Tell:
    """Counters become numbers which are read when the launch is over."""

    told: Sequence[tuple[Counter, Whole]]


Row: TypeAlias = LaunchRow | Set | CopyRow | LoopRow | Branch | Compute | Cases | Tell


@dataclass(frozen=True, eq=False)
class Ragged:
    """An output that is as long as a loop: of which each iteration makes a row, or that each iteration makes longer.

    ``type``: of a row; of a state, without any iteration. ``steps``: how much each iteration adds to each size of the
    state. ``most``: iterations that there may be; None: what the node's first input says, which is there before the
    launch.

    Or one whose sizes the launch tells: ``told`` says where, None for those that are known; ``type`` has the most that
    they can be.
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
    #: outputs that are memory of each inference, for as many rows as there may be
    ragged: Sequence[Ragged] = ()
    #: of the node, where its rows' times and failures are told
    tag: object = field(default=None, repr=False)

    @property
    def escapes(self) -> bool:
        """It may turn out in a launch that its rows are not right for what comes."""
        return any(late.code.checks for late in lates(self.rows))


def walk(rows: Sequence[Row]) -> Iterator[Row]:
    """Every row, those of bodies and branches included."""
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
    """The tensors that a row itself reads or writes."""
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
    """Every number that says where a tensor of a block is or how large it is, and is known in front of a launch."""
    yield block.nbytes
    for one in block.ragged:
        yield from one.type.dims
        if one.most is not None:
            yield one.most
    yield from (number for number in numbers(block.rows) if not is_late(number))
    for late in lates(block.rows):
        yield from late.code.leaves()


def numbers(rows: Sequence[Row]) -> Iterator[Whole]:
    """Every number that rows consist of; those in kernels as well that are in no other list."""
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
    """Every program of late numbers."""
    for row in walk(rows):
        if isinstance(row, LoopRow):
            yield from (late for late in (row.late, row.at_end) if late is not None)
        elif isinstance(row, Compute):
            yield row.late


def settle(rows: Sequence[Row], inside: Sequence[Late] = ()) -> None:
    """Have the programs of late numbers compute every number of rows that is one."""
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
        for late in inside:  # none has it where the rows are written again as part of others
            if late.atom == newest(number):
                late.code.value(number)

"""Size-dependent parts of launches that are enqueued one by one, in plans for a class of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..c_device import CDevice, CLaunch
from ..c_kernel import ConstantTable, OpenCalls
from ..executable import Sizes
from ..native import table_format

#: the first word of a launch's grid: the sizes of two axes, and the number of work-items
_GRID = 1


class OpenArguments:
    """The grids, numbers, tables and scratch memory of one kernel's launches that depend on sizes.

    Each setting is recorded after it is made, because Ctrl-C may come in between.
    """

    def __init__(self, open: OpenCalls, grids: Sequence[tuple[int, ...]], device: CDevice) -> None:
        self._open, self._device = open, device
        #: positions of the numbers among a plan's values, from the first `fit` on: (launch, argument, value)
        self._numbers: list[tuple[int, int, int]] | None = None
        self._grids: list[tuple[int, list[int], list[tuple[int, int]]]] = []
        self._tables: list[_OpenTable] = []
        self._scratch: list[tuple[str, int]] = []
        self._known = [list(_words(grid)) for grid in grids]
        self._axes = [len(grid) for grid in grids]
        #: the numbers now set; None: those of the sizes that the kernel was made for
        self._last: list[int | None] = []

    def fit(self, launches: Sequence[CLaunch], sizes: Sizes) -> None:
        """Set the arguments that changed since the last call."""
        if self._numbers is None:
            self._find(sizes)
        assert self._numbers is not None
        values, last = sizes.values, self._last
        for k, (launch, at, place) in enumerate(self._numbers):
            value = values[place]
            if value != last[k]:
                launches[launch].number(at, value)
                last[k] = value
        for launch, words, places in self._grids:
            if any(words[word] != values[place] for word, place in places):
                grid = list(words)
                for word, place in places:
                    grid[word] = values[place]
                launches[launch].spread(_grid(grid, self._axes[launch]))
                words[:] = grid
        for table in self._tables:
            table.fit(launches[table.launch], values, self._device)

    def scratch(self, sizes: Sizes) -> Iterator[tuple[str, int]]:
        """Yield scratch memory by name, with its bytes."""
        for name, place in self._scratch:
            yield name, sizes.values[place]

    def _find(self, sizes: Sizes) -> None:
        place, grids = sizes.place, dict[int, list[tuple[int, int]]]()
        self._numbers = []
        for launch, word, value in self._open.words:
            if word >= table_format.ROW:
                self._numbers.append((launch, word - table_format.ROW, place(value)))
            else:
                grids.setdefault(launch, []).append((word - _GRID, place(value)))
        self._last = [None] * len(self._numbers)
        self._grids = [(launch, self._known[launch], places) for launch, places in grids.items()]
        self._tables = [_OpenTable(launch, at, table, sizes) for launch, at, table in self._open.tables]
        self._scratch = [(name, place(nbytes)) for name, nbytes in self._open.scratch.items()]


class _OpenTable:
    """A constant of a launch that consists of sizes."""

    def __init__(self, launch: int, at: int, table: ConstantTable, sizes: Sizes) -> None:
        self.launch, self._at, self._table = launch, at, table
        self._places = [sizes.place(size) for size in table.sizes]
        self._sizes: tuple[int, ...] | None = None
        #: keeps the array alive: the launch may hold only its address
        self._array = table.array

    def fit(self, launch: CLaunch, values: Sequence[int], device: CDevice) -> None:
        sizes = tuple([values[at] for at in self._places])
        if sizes != self._sizes:
            assert self._table.make is not None
            self._array = self._table.make(*sizes)
            launch.set(self._at, device.constant(self._array))
            self._sizes = sizes


def _words(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, x * y * z


def _grid(words: Sequence[int], axes: int) -> tuple[int, ...]:
    x, y, items = words
    return (x, y, items // (x * y))[:axes]

"""Kernels for a class of shapes: they read their sizes from a page in device memory.

A solver writes its text once with symbolic sizes. Where the text names a size, the kernel reads it from its part of the
page. So one compiled kernel and one recorded graph serve every size. A launch may have more programs than the current
sizes need; the surplus ones exit at once. A graph is recorded for the largest sizes that its memory has room for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tunewright.ir.symbolic import SymInt, Whole, same, spelling

from .compile import is_recording

#: the name of a size in a text; the number is the trace's
_NAME = re.compile(r"\bsize_(\d+)_\b")
#: words at the start of a kernel's part of the page: the numbers of programs along two axes; its sizes follow
GRID = 2
#: the largest divisor of a size that a kernel is told
_MOST_DIVISOR = 16
#: the result of a load: ``kernel[grid](*arguments, **constants)`` launches it
Loader = Callable[[str, str], Any]

_LOADER: ContextVar[Loader | None] = ContextVar("how kernels are loaded", default=None)
#: each kernel's part of the page
_PAGES: ContextVar[Mapping[Any, Any] | None] = ContextVar("pages of sizes", default=None)


class Unpaged(Exception):
    """A kernel's launch depends on sizes in a way that a page cannot express."""


def loader() -> Loader | None:
    """Return the loader that now replaces `text.load`, if any."""
    return _LOADER.get()


def of_class() -> bool:
    """Whether kernels loaded now are to serve a class of shapes."""
    return _LOADER.get() is not None


@dataclass(eq=False)
class PagedKernel:
    """One kernel with the numbers that it reads, in the order of its part of the page."""

    kernel: Any
    sizes: tuple[SymInt, ...]
    #: numbers of programs along two axes
    grid: tuple[Whole, Whole] | None = None

    @property
    def words(self) -> list[Whole]:
        assert self.grid is not None
        return [*self.grid, *self.sizes]

    def traced(self, grid: Sequence[Whole], *_: Any, **__: Any) -> None:
        """Record a launch with symbolic sizes."""
        x, y, z = (*grid, 1, 1)[:3]
        if isinstance(z, SymInt) or (self.grid is not None and not same(self.grid, (x, y))):
            raise Unpaged("it is launched several times, or along three axes")
        self.grid = x, y

    def launch(self, grid: Sequence[int], *arguments: Any, **keywords: Any) -> None:
        pages = _PAGES.get()
        page = _no_page() if is_recording() or pages is None else pages[self]
        self.kernel[grid](page, *arguments, **keywords)


class _Handle:
    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: Sequence[Whole]) -> Callable[..., None]:
        return partial(self._launch, grid)


@dataclass
class Tracing:
    """Loads the kernels of a call with symbolic sizes."""

    #: makes a launchable kernel from a text
    define: Callable[[str, str], Any]
    kernels: list[PagedKernel] = field(default_factory=list)
    _spelled: dict[int, SymInt] = field(default_factory=dict)

    @contextmanager
    def active(self) -> Iterator[None]:
        with _loading(self._load), spelling(self._name):
            yield

    def _name(self, size: SymInt) -> str:
        self._spelled[size.number] = size
        return f"size_{size.number}_"

    def _load(self, text: str, name: str) -> _Handle:
        numbers = [*dict.fromkeys(int(n) for n in _NAME.findall(text))]
        sizes = tuple(self._spelled[n] for n in numbers)
        order = {n: at for at, n in enumerate(numbers)}
        text = paged(_NAME.sub(lambda found: f"size{order[int(found[1])]}", text), name, sizes)
        self.kernels.append(PagedKernel(self.define(text, name), sizes))
        return _Handle(self.kernels[-1].traced)


def paged(text: str, name: str, sizes: Sequence[SymInt]) -> str:
    """Return a kernel's text that reads its sizes from a page, its first argument."""
    head, of, rest = text.partition(f"\ndef {name}(")
    arguments, end, body = rest.partition("):\n")
    assert of and end, "a kernel begins with one line"
    lines = ["if (tl.program_id(0) >= tl.load(sizes)) | (tl.program_id(1) >= tl.load(sizes + 1)):", "    return"]
    for at, size in enumerate(sizes):
        divisor = math.gcd(size.divisor, _MOST_DIVISOR)
        read = f"tl.load(sizes + {GRID + at})"
        lines.append(f"size{at} = {read if divisor == 1 else f'tl.multiple_of({read}, {divisor})'}")
    return head + of + "sizes, " + arguments + end + "".join(f"    {line}\n" for line in lines) + body


@contextmanager
def again(kernels: Sequence[PagedKernel]) -> Iterator[None]:
    """Make a call for plain sizes inside the block: it loads these kernels, one after another."""
    left = iter(kernels)
    with _loading(lambda text, name: _Handle(next(left).launch)):
        yield
    if next(left, None) is not None:
        raise Unpaged("it launches other kernels for these sizes")


@contextmanager
def pages(found: Mapping[PagedKernel, Any]) -> Iterator[None]:
    """Launches inside the block read their sizes from these pages."""
    token = _PAGES.set(found)
    try:
        yield
    finally:
        _PAGES.reset(token)


@contextmanager
def _loading(load: Loader) -> Iterator[None]:
    token = _LOADER.set(load)
    try:
        yield
    finally:
        _LOADER.reset(token)


def _no_page() -> Any:
    """Return a page without memory, for kernels that are only compiled."""
    import torch

    return torch.empty(4, dtype=torch.int32, device="meta")

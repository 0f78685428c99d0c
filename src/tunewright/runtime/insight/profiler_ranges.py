"""Ranges in the time lines of other tools: NVTX (Nsight) and ITT (VTune), if their Python packages are installed.

While ranges are on, inferences are ranges, and so are steps of plans that are launched one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec

Range = Callable[[str], AbstractContextManager[object]]

DOMAIN = "tunewright"
#: makes a range with a name; None: ranges are off
active: Range | None = None


def installed() -> list[str]:
    """The installed packages that can show ranges."""
    return [name for name in ("nvtx", "ittapi") if find_spec(name) is not None]


@contextmanager
def listening() -> Iterator[list[str]]:
    """Make ranges inside the block, if a package for them is installed. Yields the packages."""
    global active
    makers: list[Range] = []
    for name in installed():
        module = import_module(name)
        makers.append(_nvtx(module) if name == "nvtx" else _itt(module))

    @contextmanager
    def both(text: str) -> Iterator[None]:
        with ExitStack() as stack:
            for make in makers:
                stack.enter_context(make(text))
            yield

    active = None if not makers else makers[0] if len(makers) == 1 else both
    try:
        yield installed()
    finally:
        active = None


def _nvtx(module: object) -> Range:
    annotate = module.annotate  # type: ignore[attr-defined]
    return lambda text: annotate(text, domain=DOMAIN)


def _itt(module: object) -> Range:
    task = module.task  # type: ignore[attr-defined]
    return lambda text: task(text, DOMAIN)

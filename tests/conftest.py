"""Tests see neither the knowledge base of the user who runs them nor what ships, and leave no files where they run.

What ships changes with every tuning. Only tests/unit/knowledge/test_shipped.py asks for it.

Compiled kernels stay in pytest's cache (`--cache-clear` empties it), because compiling takes most of the time of a
first run. They stay out of the user's kernel cache: a whole run makes more than it holds, and would push out the
kernels of the user.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="tunewright-tests-")
os.environ["TUNEWRIGHT_SYSTEM_DB_PATH"] = tempfile.mkdtemp(prefix="tunewright-tests-")
os.environ["TUNEWRIGHT_TUNE_RESULT_PATH"] = ""

from tunewright.knowledge import open_databases  # settings that a test makes without the environment come here
from tunewright.plugins import single

open_databases.SHIPPED = Path(os.environ["TUNEWRIGHT_SYSTEM_DB_PATH"])
TEMPORARY = [Path(os.environ["XDG_DATA_HOME"]), open_databases.SHIPPED]


@atexit.register  # before any device is opened: it runs when they have stored what they compiled
def remove(process: int = os.getpid()) -> None:
    if os.getpid() == process:  # a fork of it leaves them alone
        for folder in TEMPORARY:
            shutil.rmtree(folder, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", metavar="DEVICE", help="what CPU means: CPU.INTEL runs tests of kernels through it")
    parser.addoption("--each", type=int, default=1, metavar="N", help="every Nth test of a module, and the first")
    parser.addoption("--most", type=int, metavar="N", help="at most N tests of a module, from all over it")


@pytest.hookimpl(trylast=True)  # of what other options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    items[:] = [item for module in modules.values() for item in _sample(config, module)]


def _sample(config: pytest.Config, module: list[pytest.Item]) -> list[pytest.Item]:
    kept = module[:: config.getoption("--each")]
    most = config.getoption("--most") or len(kept)
    return kept if len(kept) <= most else [kept[(2 * k + 1) * len(kept) // (2 * most)] for k in range(most)]


def pytest_configure(config: pytest.Config) -> None:
    instead = config.getoption("--cpu")
    if instead:
        opened = single._opened
        single._opened = lambda key: opened(instead if key == "CPU" else key)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; what tests start would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that started it has said so
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    kernels = (TEMPORARY[0] if cache is None else cache.mkdir("tunewright")) / "kernels"
    os.environ.setdefault("TUNEWRIGHT_CACHE_DIR", str(kernels))
    os.environ.setdefault("TUNEWRIGHT_CACHE_BYTES", str(4 << 30))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Half a million objects are made here that stay: looking for garbage among them took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


#: the generators of random numbers of each module, and their states when it was imported
_GENERATORS: dict[ModuleType, list[tuple[np.random.Generator, Any]]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reset generators that a module still shares among its tests (those of `conformance.cuda_cases.Made`)."""
    module = sys.modules.get(getattr(item, "module", sys).__name__)
    if module is None:
        return
    if module not in _GENERATORS:
        found = [value for value in vars(module).values() if isinstance(value, np.random.Generator)]
        _GENERATORS[module] = [(each, deepcopy(each.bit_generator.state)) for each in found]
    for each, state in _GENERATORS[module]:
        each.bit_generator.state = state


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of the test's own: its data do not depend on which tests ran before. A module may set SEED."""
    return np.random.default_rng(getattr(request.module, "SEED", 0))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: (exit code, stdout, stderr)."""
    from tunewright import tools

    def run(*arguments: object) -> tuple[int, str, str]:
        code = tools.execute([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run

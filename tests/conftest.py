"""Tests see neither the knowledge base of the user who runs them nor what ships, and leave no files where they run.

What ships changes with every tuning; tests/unit/test_shipped.py alone is about it, and asks for it.
"""

import gc
import os
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="tunewright-tests-")
os.environ["TUNEWRIGHT_SYSTEM_DB_PATH"] = tempfile.mkdtemp(prefix="tunewright-tests-")
os.environ["TUNEWRIGHT_TUNE_RESULT_PATH"] = ""

from tunewright.tuning import places  # settings that a test makes without the environment come here

places.SHIPPED = Path(os.environ["TUNEWRIGHT_SYSTEM_DB_PATH"])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Half a million objects are made here that stay: looking for garbage among them took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: (exit code, stdout, stderr)."""
    from tunewright import tools

    def run(*arguments: object) -> tuple[int, str, str]:
        code = tools.execute([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run

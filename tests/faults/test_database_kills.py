"""Writers of a knowledge base that are killed: nothing acknowledged is lost, nothing is torn, no reader waits long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.sandbox import SOURCE


def run(kind: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parents[1]}"}
    command = [sys.executable, "-m", "faults.killed_writers", kind, str(folder), str(kills), str(seed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def check(result: dict[str, Any], kills: int) -> None:
    print({name: value for name, value in result.items() if name != "lost"})
    assert result["lost"] == []
    assert result["damage"] == []
    assert result["wrong"] == ""
    assert result["longest"] < 5.0, "a reader was blocked"
    assert result["acknowledged"] > kills and result["rounds"] > 5, "too little happened for this to prove anything"
    assert result["seen"] == result["found"], "the reader has not seen everything in the end"
    assert result["aside"] == []


@pytest.mark.parametrize("kind", ["SQLITE", "SHARED"])
def test_killed_writers(kind: str, tmp_path: Path) -> None:
    check(run(kind, tmp_path, 12, 1), 12)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["SQLITE", "SHARED"])
def test_many_killed_writers(kind: str, tmp_path: Path) -> None:
    check(run(kind, tmp_path, 150, 2), 150)

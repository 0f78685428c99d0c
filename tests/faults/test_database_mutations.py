"""Mutated records and knowledge bases: only clear errors come out, and nothing is run, imported, connected or written.

500 by default, 10,000 with the marker ``soak``. A failure names its seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.mutate_records import mutation
from faults.sandbox import SOURCE, Worker

CHUNK = 250


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    one = Worker("-m", "faults.mutate_records", str(tmp_path_factory.mktemp("mutations")), seconds=120.0)
    yield one
    one.close()


def run(worker: Worker, first: int) -> None:
    answer = worker.call(seeds=[first, first + CHUNK])
    assert answer["outcome"] == "done", answer
    assert not answer["wrong"], answer["wrong"]
    # One that refuses everything at the door tests nothing, and neither does one that takes everything.
    assert answer["ok"] > CHUNK // 10 and answer["refused"] > CHUNK // 2, answer


@pytest.mark.parametrize("first", range(0, 500, CHUNK))
def test_mutations(worker: Worker, first: int) -> None:
    run(worker, first)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(500, 10_000, CHUNK))
def test_more_mutations(worker: Worker, first: int) -> None:
    run(worker, first)


def test_the_same_seed_is_the_same_mutation() -> None:
    for seed in range(50):
        assert mutation(seed) == mutation(seed)


def test_the_hook_sees_what_it_must(tmp_path: Path) -> None:
    """Each thing that is forbidden, done on purpose in a process of its own."""
    script = """
import os, socket, sqlite3, subprocess, sys
from pathlib import Path
from faults.mutate_records import Handler

class Watch(Handler):
    def __init__(self, folder):
        self.folder, self.seen, self.watching = folder, [], True
        sys.addaudithook(self._audit)

folder = Path(sys.argv[1])
outside, inside = str(folder / "outside"), str(folder / "inside" / "file")
(folder / "inside").mkdir()
watch = Watch(folder / "inside")

def seen(what):
    before = len(watch.seen)
    what()
    return len(watch.seen) > before

print(seen(lambda: eval("1")), seen(lambda: __import__("colorsys")), seen(lambda: socket.socket().close()),
      seen(lambda: subprocess.run(["true"])), seen(lambda: os.system("true")), seen(lambda: open(outside, "w").close()),
      seen(lambda: os.close(os.open(outside, os.O_RDWR))), seen(lambda: os.rename(outside, outside + "2")),
      seen(lambda: sqlite3.connect(outside).close()), seen(lambda: open(outside + "2").close()),
      seen(lambda: open(inside, "w").close()))
"""
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parents[1]}"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == ["True"] * 9 + ["False"] * 2

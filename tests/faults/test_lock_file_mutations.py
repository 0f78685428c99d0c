"""Damaged and hostile lockfiles: a clear error, or just the kernels that fit; nothing happens outside of the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import sandbox

SHORT, FULL, BATCH = 200, 10_000, 100


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sandbox.Worker]:
    monkeypatch.setenv("LOCK_FILES_FOLDER", str(tmp_path))
    worker = sandbox.Worker(str(Path(__file__).parent / "lock_files.py"), seconds=300.0)
    yield worker
    worker.close()


def survive(worker: sandbox.Worker, seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    for begin in range(seeds.start, seeds.stop, BATCH):
        answers = worker.call(seeds=list(range(begin, min(begin + BATCH, seeds.stop))))
        assert isinstance(answers, list), answers
        for answer in answers:
            assert answer["outcome"] in ("read", "refused"), f"{answer['name']}: {answer.get('message')}"
            assert not answer["wrong"], f"{answer['name']}: {answer['wrong']}"
            whole = answer["outcome"] == "read" and answer["count"] == 8
            outcomes["whole" if whole else "partly" if answer["outcome"] == "read" else "refused"] += 1
    # every way that a file can go is among them
    assert all(outcomes[kind] >= len(seeds) // 100 for kind in ("whole", "partly", "refused")), outcomes


def test_mutations(worker: sandbox.Worker) -> None:
    survive(worker, range(SHORT))


@pytest.mark.soak
def test_many_mutations(worker: sandbox.Worker) -> None:
    survive(worker, range(SHORT, FULL))


def test_the_hook_would_see_it(worker: sandbox.Worker) -> None:
    seen = worker.call(seeds=[])
    assert isinstance(seen, list), seen
    assert {"open", "os.rename", "socket.__new__", "subprocess.Popen", "compile", "exec", "import"} <= set(seen)
    assert seen[-1] == "open"  # to write, while reading

"""Damaged and hostile tuning files and lockfiles: a clear error, or what is sound; and nothing happens elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import sandbox

#: what makes and reads the files, and how many of them the short form has
KINDS = {"tuning_files": 400, "lock_files": 200}
FULL, BATCH = 10_000, 100


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def worker(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sandbox.Worker]:
    monkeypatch.setenv(f"{kind.upper()}_FOLDER", str(tmp_path))
    worker = sandbox.Worker(str(Path(__file__).parent / f"{kind}.py"), seconds=300.0)
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


def test_mutations(kind: str, worker: sandbox.Worker) -> None:
    survive(worker, range(KINDS[kind]))


@pytest.mark.soak
def test_many_mutations(kind: str, worker: sandbox.Worker) -> None:
    survive(worker, range(KINDS[kind], FULL))


def test_the_hook_would_see_it(worker: sandbox.Worker) -> None:
    seen = worker.call(seeds=[])
    assert isinstance(seen, list), seen
    assert {"open", "os.rename", "socket.__new__", "subprocess.Popen", "compile", "exec", "import"} <= set(seen)
    assert seen[-1] == "open"  # to write, while reading

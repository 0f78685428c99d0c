"""Mutations of models: whatever comes in, only our own errors come out, soon, and the process lives.

250 by default, 10,000 with the marker ``soak``; ``TUNEWRIGHT_TEST_MUTATIONS=FIRST:LAST`` runs any others. A failure
names its seed, and ``TUNEWRIGHT_TEST_MUTATIONS=SEED:SEED+1`` repeats it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.mutate import mutation, own_seeds, read_operator_seeds, write_operator_seeds
from faults.sandbox import Worker

#: seconds that one mutation may take; what is legal and slow is kept small by the worker's limits
SECONDS = 20.0
CHUNK = 250


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mutations") / "operators.json"
    write_operator_seeds(path)
    return path


@pytest.fixture(scope="module")
def worker(operators: Path) -> Iterator[Worker]:
    one = Worker("-m", "faults.mutate", str(operators), seconds=SECONDS)
    yield one
    one.close()


def run(worker: Worker, seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        answer = worker.call(seed=seed)
        outcomes[answer["outcome"]] += 1
        if answer["outcome"] not in ("ok", "refused"):
            wrong.append(f"seed {seed} {answer['outcome']}: {answer.get('name', '')}\n{answer['message']}")
    assert not wrong, f"{len(wrong)} of {len(seeds)} mutations; the first:\n" + "\n".join(wrong[:3])
    return outcomes


def ranges(first: int, last: int) -> list[range]:
    return [range(at, min(at + CHUNK, last)) for at in range(first, last, CHUNK)]


def chosen() -> list[range]:
    first, _, last = os.environ.get("TUNEWRIGHT_TEST_MUTATIONS", "0:250").partition(":")
    return ranges(int(first), int(last))


@pytest.mark.parametrize("seeds", chosen(), ids=str)
def test_mutations(worker: Worker, seeds: range) -> None:
    outcomes = run(worker, seeds)
    if len(seeds) == CHUNK:  # a test that refuses everything at the door tests nothing
        assert outcomes["ok"] > CHUNK // 10 and outcomes["refused"] > CHUNK // 10, outcomes


@pytest.mark.soak
@pytest.mark.parametrize("seeds", ranges(250, 10_000), ids=str)
def test_more_mutations(worker: Worker, seeds: range) -> None:
    run(worker, seeds)


def test_the_same_seed_is_the_same_model(operators: Path) -> None:
    for seed in range(20):
        made = {mutation(seed, own_seeds(), read_operator_seeds(operators)) for _ in range(2)}
        assert len(made) == 1


def test_every_seed_works(tmp_path: Path) -> None:
    """The models that the mutations start from are good ones."""
    worker = Worker("-m", "faults.sandbox")
    for name, data in own_seeds():
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(data)
        answer = worker.call(path=str(path))
        assert answer["outcome"] == "ok" and answer["ran"], (name, answer)
    worker.close()

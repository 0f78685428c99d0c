"""Workers and compilers of CUDA devices, on machines without a GPU: Triton's interpreter, and kernels for sm_90."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from faults.gpus.gpus import ILLEGAL, Breaking, Crossed, Interpreted
from tunewright.devices.cuda.device import CudaQueue
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType
from tunewright.measure import compile_pool, judge
from tunewright.measure import local as bench
from tunewright.measure.base import Candidate
from tunewright.measure.isolated import Isolated
from tunewright.search.base import Status
from tunewright.search.space import Config
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem

FOLDER = Path(__file__).parent / "gpus"
TYPE = TensorType(DType.FLOAT32, (8, 16))
RELU = Problem("Relu", (TYPE,), (TYPE,), {}, constant=(False,))
GOOD = "faulty.cuda", {"how": "good", "after": 0}
HALF = TensorType(DType.FLOAT16, (64, 64))
PRODUCT = Problem(
    "MatMul", (HALF, HALF), (HALF,), {}, constant=(False, True), epilogue=(Fused("Relu", (~0,)),)
)  # fmt: skip


def interpreter(folder: Path, interpreted: bool) -> str:
    """Python with the extension installed, and Triton as it is to be."""
    script = folder / "python"
    how = "TRITON_INTERPRET=1" if interpreted else "TRITON_INTERPRET=0"
    script.write_text(f'#!/bin/sh\n{how} PYTHONPATH="{FOLDER}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Isolated]:
    """One measurer for all: a worker takes seconds to load torch."""
    python = interpreter(tmp_path_factory.mktemp("python"), interpreted=True)
    with Isolated("GPU.70", 60.0, python=python, memory_bytes=2 << 30) as measurer:
        assert measurer.pose(RELU, regime="layer") is None
        yield measurer


def test_a_worker_opens_the_device_and_times_there(worker: Isolated) -> None:
    triton: Candidate = "triton.elementwise", {"block": 128, "warps": 4}
    for candidate in (GOOD, triton):
        attempt = worker.attempt(candidate)
        assert attempt.status is Status.OK, attempt.why
        assert len(attempt.samples) >= 3
    race = worker.race([GOOD, triton], 2)
    assert not race.fallen and [len(row) for row in race.samples] == [2, 2]


def test_one_that_fails_costs_nothing(worker: Isolated) -> None:
    assert worker.attempt(GOOD).status is Status.OK
    before = worker.starts
    failed = worker.attempt(("faulty.cuda", {"how": "fails", "after": 0}))
    assert failed.status is Status.FAILED and "too many resources" in failed.why
    assert worker.attempt(GOOD).status is Status.OK and worker.starts == before


def test_one_that_breaks_the_device_costs_the_worker(worker: Isolated) -> None:
    assert worker.attempt(GOOD).status is Status.OK
    before = worker.starts
    broken = worker.attempt(("faulty.cuda", {"how": "breaks", "after": 0}))
    assert broken.status is Status.CRASHED and broken.why == f"it broke the device: {ILLEGAL}"
    assert worker.attempt(GOOD).status is Status.OK and worker.starts == before + 1


@pytest.mark.soak
def test_one_that_breaks_it_in_a_race_is_found_out(worker: Isolated) -> None:
    breaks: Candidate = "faulty.cuda", {"how": "breaks", "after": 1000}
    race = worker.race([GOOD, breaks], 2000)
    assert set(race.fallen) == {1} and len(race.samples[0]) == 2000
    assert race.fallen[1].status is Status.CRASHED and ILLEGAL in race.fallen[1].why


@pytest.mark.parametrize("judged", [True, False])
def test_results_are_compared_where_they_are(judged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results stay on the device as long as they are what was right before; one that turns wrong is seen."""
    monkeypatch.setattr(bench, "CHEAP", 0)
    if not judged:  # as for a kernel with fewer digits than others, whose results are no measure for them
        monkeypatch.setattr(judge.Judge, "right", lambda *given: None)
    compared = []
    monkeypatch.setattr(CudaQueue, "equal", lambda queue, a, b: compared.append(b) or bool((a.raw == b.raw).all()))
    local = bench.LocalMeasurer(Interpreted("GPU.70"), [Breaking()])
    assert local.pose(RELU, regime="layer") is None
    assert local.attempt(GOOD).status is Status.OK
    kept = [right for e in local._entries.values() for b in e.bindings.values() for right in b.there.values()]
    assert kept and all(any(right is b for b in compared) for right in kept)
    turned = local.attempt(("faulty.cuda", {"how": "turns", "after": 8}))
    assert turned.status is Status.WRONG and "right at first and wrong later" in turned.why


def test_results_that_agree_with_right_ones_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    device, compared = Interpreted("GPU.70"), []
    real = judge.compare
    monkeypatch.setattr(judge, "compare", lambda *given: compared.append(1) or real(*given))
    solver, found = Breaking(), judge.Judge(RELU, device)
    verdicts, uploads = [], []
    holding = judge.Guarded.holding
    monkeypatch.setattr(judge.Guarded, "holding", lambda *given: uploads.append(1) or holding(*given))
    for how in ("good", "good", "turns"):
        kernel = solver.compile(RELU, {"how": how, "after": 0}, device)
        verdicts.append(found.check(kernel, device.queue()))
        if how == "good":
            assert len(compared) == len(uploads) == len(found.cases)  # of the first one alone
    assert verdicts[0] == verdicts[1] and not verdicts[0].wrong and verdicts[2].wrong


def test_candidates_are_compiled_beside_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real cubins for sm_90, by processes that open the device and never use it."""
    monkeypatch.setattr(compile_pool, "useful", lambda *_: 2)
    config = {"bm": 32, "bn": 32, "bk": 32, "split": 1, "warps": 2, "stages": 2, "group": 1}
    both: list[Candidate] = [("triton.matmul", config), ("triton.matmul", {**config, "split": 2})]
    python = interpreter(tmp_path, interpreted=False)
    with Isolated("GPU.80", 60.0, python=python, memory_bytes=4 << 30, target=Crossed("GPU.80").target) as measurer:
        measurer.expect(60.0)
        assert measurer.ahead == 4  # two are compiled while two are timed
        measurer.foresee(PRODUCT, both[:1])  # begins, and is not begun again
        measurer._ahead.pose({"problem": problem_json.to_json(PRODUCT)})  # without a worker, which could run nothing
        measurer.prepare(both)
        assert all(measurer.ready(candidate, 60.0) for candidate in both)
        assert measurer._ahead.compiled == 2
        for name, config in both:
            ((key, files),) = measurer._ahead.take((name, Config(config))).items()
            assert '"target": "cuda 90 32"' in key and files["kernel.cubin"].startswith(b"\x7fELF")

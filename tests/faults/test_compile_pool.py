"""Compiling ahead with real processes: what it gives is used, and what goes wrong in it changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from faults.workers import DEVICE, HASTY, PATIENT, PROBLEM, faulty, interpreter
from tunewright.devices.base import Device
from tunewright.devices.kernel_cache import KernelCache
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.record import Ratio
from tunewright.measure import compile_pool, protocol
from tunewright.measure.isolated import Isolated
from tunewright.plugins.single import open_device
from tunewright.search.base import Status
from tunewright.settings import Settings
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem, solvers
from tunewright.tuning import evidence
from tunewright.tuning.keep_programs import keep_programs
from tunewright.tuning.session import Outcome

TYPE = TensorType(DType.FLOAT32, (4, 96))
SOFTMAX = Problem("Softmax", (TYPE,), (TYPE,), {"axis": -1}, constant=(False,))
BODY = '#!/bin/sh\ncase "$*" in *measure.compile_worker*) {what};; esac\nexec "{python}" "$@"\n'


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("CPU")


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "useful", lambda *_: 2)


def candidates(device: Device) -> list[tuple[str, object]]:
    """Two that are compiled from different texts."""
    found: dict[str, tuple[str, object]] = {}
    for solver in solvers():
        if solver.language == "c" and solver.why_not(SOFTMAX, device.target) is None:
            for config in solver.space(SOFTMAX, device.target):
                found.setdefault(solver.source(SOFTMAX, config, device.target), (solver.id, config))
    return list(found.values())[:2]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_programs_reach_the_worker(device: Device) -> None:
    both = candidates(device)
    assert len(both) == 2
    with Isolated("CPU", 60.0, target=device.target) as measurer:
        assert measurer.ahead == 1
        measurer.expect(60.0)
        assert measurer.ahead == 2 and measurer.pose(SOFTMAX) is None
        measurer.prepare(both)
        assert all(measurer.ready(c, 60.0) for c in both) and measurer._ahead.compiled == 2
        sides = [side.process.pid for side in measurer._ahead.sides]
        assert [measurer.attempt(c).status for c in both] == [Status.OK] * 2
        assert not measurer.race(both, 3).fallen
        measurer.prepare(both)  # the worker has them
        assert measurer._ahead.compiled == 2 and not measurer._ahead._waiting
    assert len(sides) == 2 and all(map(is_gone, sides))


LOADED = """
import json, sys
from tunewright.devices import kernel_cache
from tunewright.devices.kernel_cache import Gathered
from tunewright.devices.native.compiler import ClangCommands as Compiler
from tunewright.measure import protocol as wire
from tunewright.measure.local import LocalMeasurer as Local
from tunewright.measure.worker import open_device
from tunewright.solvers import problem_json as serial
def never(self, *arguments):
    raise AssertionError("it was compiled again")
said = json.load(open(sys.argv[1]))
local = Local(open_device("CPU"))
Compiler.build = never
assert local.pose(serial.from_json(said["problem"])) is None
with kernel_cache.using(Gathered(wire.programs(said["programs"]), closed=True)):
    print(local.attempt(wire.candidates(said["candidates"])[0]))
"""


def test_what_one_process_compiled_another_loads(device: Device, tmp_path: Path) -> None:
    first = candidates(device)[0]
    with Isolated("CPU", 60.0, target=device.target) as measurer:
        measurer.expect(60.0)
        assert measurer.pose(SOFTMAX) is None
        measurer.prepare(candidates(device))
        assert measurer.ready(first, 60.0)
        programs = measurer._ahead.take(first)
    said = {"problem": problem_json.to_json(SOFTMAX), "candidates": protocol.candidates_json([first])}
    for given, wanted in ((programs, "Status.OK"), ({}, "compiled again")):
        (tmp_path / "said.json").write_text(json.dumps({**said, "programs": protocol.programs_json(given)}))
        command = [sys.executable, "-c", LOADED, str(tmp_path / "said.json")]
        environment = {**os.environ, "TUNEWRIGHT_CACHE_DIR": ""}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert wanted in ran.stdout, ran.stdout + ran.stderr


KEPT = """
import json, sys
from tunewright.devices.native.compiler import ClangCommands as Compiler
from tunewright.solvers import problem_json as serial
from tunewright.measure import protocol as wire
from tunewright.measure.local import compile_candidate
from tunewright.measure.worker import open_device
said, device, compiled = json.load(open(sys.argv[1])), open_device("CPU"), []
build = Compiler.build
Compiler.build = lambda self, text, *rest: compiled.append(text) or build(self, text, *rest)
for candidate in wire.candidates(said["candidates"]):
    compile_candidate(candidate, serial.from_json(said["problem"]), device).prepare()
    print("compiled" if compiled else "loaded")
"""


def test_what_a_search_found_fast_is_not_compiled_again(device: Device, tmp_path: Path) -> None:
    """Programs of the default and of the fastest are in the kernel cache after a search; those of losers are not."""
    winner, loser = candidates(device)
    settings = Settings.make({"CACHE_DIR": str(tmp_path / "cache")})
    with Isolated("CPU", 60.0, target=device.target) as measurer:
        measurer.expect(60.0)
        assert measurer.pose(SOFTMAX) is None
        measurer.prepare([winner, loser])
        assert measurer.ready(winner, 60.0)
        assert [measurer.attempt(c).status for c in (winner, loser)] == [Status.OK] * 2
        solver = next(s for s in solvers() if s.id == winner[0])
        record = evidence.measurement(
            SOFTMAX,
            device.target,
            solver,
            winner[1],
            evidence.ContestSamples([1e-3], 0.0, Ratio.one(), Ratio.one(), True, winner),
            measurer.regime(),
            {},
        )
        outcome = Outcome(winner, False, "", records=(record,))
        keep_programs(measurer, outcome, device, Settings.make({"CACHE_DIR": ""}))
        assert not (tmp_path / "cache").exists()
        keep_programs(measurer, outcome, device, settings)
        keep_programs(measurer, outcome, device, settings)
        assert measurer.pose(SOFTMAX) is None and not measurer.programs(winner), "another search has others"
    entries = KernelCache.of(settings).entries()
    assert entries and {entry.label for entry in entries} == {f"CPU {device.target.arch}"}
    said = {"problem": problem_json.to_json(SOFTMAX), "candidates": protocol.candidates_json([winner, loser])}
    (tmp_path / "said.json").write_text(json.dumps(said))
    environment = {**os.environ, "TUNEWRIGHT_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", KEPT, str(tmp_path / "said.json")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ran.stdout.split() == ["loaded", "compiled"], ran.stdout + ran.stderr


def test_what_a_worker_compiled_is_not_kept(device: Device, tmp_path: Path) -> None:
    """Candidates ran there: one that writes where it must not could have changed it."""
    settings = Settings.make({"CACHE_DIR": str(tmp_path / "cache")}, Settings.from_environment())
    with Isolated("CPU", 60.0, target=device.target, settings=settings) as measurer:
        assert measurer.pose(SOFTMAX) is None
        first = candidates(device)[0]
        assert measurer.attempt(first).status is Status.OK and not measurer.programs(first)
    labels = {entry.label for entry in KernelCache.of(settings).entries()}
    assert f"CPU {device.target.arch}" not in labels
    assert "thread pool" in labels, "what every process needs is found there by the next one"


@pytest.mark.parametrize("what", ["exit 3", "sleep 100", "echo nonsense; kill -9 $$"])
def test_where_they_do_not_start_the_worker_compiles(device: Device, tmp_path: Path, what: str) -> None:
    python = tmp_path / "python"
    python.write_text(BODY.format(what=what, python=sys.executable))
    python.chmod(0o755)
    with Isolated("CPU", 60.0, target=device.target, python=str(python)) as measurer:
        measurer.expect(60.0)
        assert measurer.pose(SOFTMAX) is None
        both = candidates(device)
        for _ in range(2):
            measurer.prepare(both)
            began = time.monotonic()
            hangs = what.startswith("sleep") and measurer.ahead == 2
            assert measurer.ready(both[0], 1.0 if hangs else 60.0) is not hangs and time.monotonic() < began + 60
        assert [measurer.attempt(c).status for c in both] == [Status.OK] * 2
        assert measurer.ahead == (2 if what.startswith("sleep") else 1)


def test_programs_that_are_none_are_compiled_again(device: Device) -> None:
    both = candidates(device)
    with Isolated("CPU", 60.0, target=device.target) as measurer:
        measurer.expect(60.0)
        assert measurer.pose(SOFTMAX) is None
        measurer.prepare(both)
        assert measurer.ready(both[0], 60.0)
        done = measurer._ahead._done
        for who, programs in done.items():
            rng = np.random.default_rng(0)
            done[who] = {key: {n: rng.bytes(len(d)) for n, d in files.items()} for key, files in programs.items()}
        assert [measurer.attempt(c).status for c in both] == [Status.OK] * 2


@pytest.mark.parametrize("how", ["crash", "syntax", "hang"])
def test_a_candidate_that_harms_its_compiler_is_found_out_by_the_worker(
    device: Device, tmp_path: Path, how: str
) -> None:
    seconds = HASTY["CPU"] if how == "hang" else PATIENT
    with Isolated("CPU", seconds, target=device.target, python=interpreter(tmp_path)) as measurer:
        measurer.expect(60.0)
        assert measurer.pose(PROBLEM) is None
        batch = [faulty("CPU", how), faulty("CPU", "good"), faulty("CPU", "good", 2)]
        measurer.prepare(batch)
        assert measurer.ready(batch[0], 60.0) and not measurer._ahead._waiting
        status, why = DEVICE[how]
        found = measurer.attempt(batch[0])
        assert found.status is status and why in found.why
        measurer.timeout = PATIENT
        assert [measurer.attempt(c).status for c in batch[1:]] == [Status.OK] * 2

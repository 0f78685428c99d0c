"""Faulty candidates: the parent lives, each gets its class and a reason, and the next good one works at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

from faults import workers
from faults.workers import DEVICE, HASTY, HOST, PATIENT, PROBLEM, TWELVE, faulty
from tunewright.measure.isolated import Isolated
from tunewright.plugins.single import open_device
from tunewright.search.base import Status

TESTS = Path(__file__).parents[1]
needs_kernels = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("python")


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[Isolated]:
    with workers.measurer(folder, "CPU.HOST") as found:
        assert isinstance(found, Isolated)
        yield found


@pytest.fixture(scope="module")
def device(folder: Path) -> Iterator[Isolated]:
    with workers.measurer(folder, "CPU") as found:
        assert isinstance(found, Isolated)
        yield found


def waited_for_a_core() -> float:
    """Seconds that this thread was ready to run while other processes had the cores."""
    try:
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def suffer(measurer: Isolated, how: str, expected: tuple[Status, str]) -> None:
    name = measurer.device_name
    assert measurer.pose(PROBLEM) is None
    assert measurer.attempt(faulty(name, "good")).status is Status.OK
    before = workers.pid(measurer)
    status, reason = expected
    measurer.timeout = HASTY[name] if status is Status.TIMEOUT else PATIENT
    idle, began, queued = time.thread_time(), time.monotonic(), waited_for_a_core()
    found = measurer.attempt(faulty(name, how))
    took, busy = time.monotonic() - began, time.thread_time() - idle
    late = waited_for_a_core() - queued
    assert found.status is status, found
    assert reason in found.why and not found.samples
    if status is Status.TIMEOUT:
        assert measurer.timeout - 0.1 <= took <= measurer.timeout + 2 + late
        assert busy < 0.2  # asleep while it waited
    if status is not Status.FAILED:
        assert workers.is_gone(before, group=True)
    measurer.timeout = PATIENT
    good = measurer.attempt(faulty(name, "good"))
    assert good.status is Status.OK, good
    assert good.samples and min(good.samples) > 0


def cases(found: Iterable[str], short: Collection[str]) -> list[object]:
    """Each class of fault is in the short form; other ways to the same are in the long one."""
    return [how if how in short else pytest.param(how, marks=pytest.mark.soak) for how in found]


@pytest.mark.parametrize("how", cases(HOST, TWELVE))
def test_on_the_host(host: Isolated, how: str) -> None:
    suffer(host, how, HOST[how])


@needs_kernels
@pytest.mark.parametrize("how", cases(DEVICE, ("hang", "crash", "beyond", "endless")))
def test_in_c(device: Isolated, how: str) -> None:
    suffer(device, how, DEVICE[how])


def test_a_worker_serves_many_candidates_and_problems(host: Isolated) -> None:
    host.pose(PROBLEM)
    host.attempt(faulty("CPU.HOST", "good"))
    before = host.starts
    for seed in range(5):
        assert host.pose(PROBLEM, seed) is None
        assert host.regime().kind == "cold"
        for pace in (1, 2):
            assert host.attempt(faulty("CPU.HOST", "good", pace)).status is Status.OK
        found = host.race([faulty("CPU.HOST", "good"), faulty("CPU.HOST", "good", 2)], 4)
        assert [len(row) for row in found.samples] == [4, 4] and not found.fallen
    assert host.starts == before


@pytest.mark.parametrize(("how", "status"), [("worn", Status.WRONG), ("worn_out", Status.CRASHED)])
def test_who_fails_in_a_race_falls_and_the_others_finish(host: Isolated, how: str, status: Status) -> None:
    """Also when it takes the process down, and nobody can say any more whose turn it was."""
    host.pose(PROBLEM)
    entrants = [faulty("CPU.HOST", *what) for what in (("good", 1), ("good", 1), (how, 1), ("good", 2))]
    assert {host.attempt(who).status for who in entrants} == {Status.OK}
    found = host.race(entrants, 100)
    assert list(found.fallen) == [2] and found.fallen[2].status is status
    assert [len(found.samples[i]) for i in (0, 1, 3)] == [100] * 3 and len(found.samples[2]) < 100
    assert host.attempt(entrants[0]).status is Status.OK


def test_a_worker_that_was_killed_from_outside(host: Isolated) -> None:
    """While it is idle or works: another takes its place, and the candidate is not to blame."""
    good = faulty("CPU.HOST", "good")
    host.pose(PROBLEM)
    host.attempt(good)
    os.kill(workers.pid(host), signal.SIGKILL)
    assert host.attempt(good).status is Status.OK
    killer = threading.Timer(0.1, os.kill, (workers.pid(host), signal.SIGKILL))
    killer.start()
    found = host.race([good, good], 300)
    killer.join()
    assert found.fallen == {} and [len(row) for row in found.samples] == [300, 300]


def test_a_worker_is_limited(host: Isolated) -> None:
    """No core is left, data has a bound, the system takes it first when memory is short, Ctrl-C does not reach it."""
    host.pose(PROBLEM)
    home = Path("/proc", str(workers.pid(host)))
    limits = {line[:26].strip(): line[26:].split()[:2] for line in (home / "limits").read_text().splitlines()}
    assert limits["Max core file size"] == ["0", "0"]
    assert limits["Max data size"] == [str(host.memory_bytes)] * 2
    assert (home / "oom_score_adj").read_text().strip() == "1000"
    assert os.getsid(workers.pid(host)) == workers.pid(host) != os.getsid(0)


def test_who_was_asleep_itself_does_not_call_it_a_hang(host: Isolated) -> None:
    """A parent that is stopped (Ctrl-Z) longer than the timeout finds the answer when it goes on."""
    good = faulty("CPU.HOST", "good")
    host.pose(PROBLEM)
    host.attempt(good)
    host.timeout = 0.5

    def stop(*_: object) -> None:
        time.sleep(1.0)

    old = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        found = host.race([good, good], 200)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        host.timeout = PATIENT
    assert not found.fallen


def test_ctrl_c_ends_the_worker_and_the_next_request_works(host: Isolated) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    host.pose(PROBLEM)
    host.attempt(faulty("CPU.HOST", "good"))
    before = workers.pid(host)
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            host.attempt(faulty("CPU.HOST", "sleep"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert workers.is_gone(before)
    assert host.attempt(faulty("CPU.HOST", "good")).status is Status.OK


def test_close_is_quick_and_not_for_good(host: Isolated) -> None:
    host.pose(PROBLEM)
    number = workers.pid(host)
    began = time.monotonic()
    host.close()
    assert time.monotonic() - began < 10, "it has half a second, and is killed then"
    assert workers.is_gone(number, 0)
    assert host.attempt(faulty("CPU.HOST", "good")).status is Status.OK


SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from faults import workers
measurer = workers.measurer(Path(sys.argv[1]), "CPU.HOST")
measurer.pose(workers.PROBLEM)
"""


def script(folder: Path, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + code, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("how", cases(["hold", "hang"], ["hold"]))
def test_the_worker_dies_with_its_parent(folder: Path, how: str) -> None:
    """By kill -9, while a candidate holds the interpreter for good, and a fork of the parent lives on."""
    code = f"""
child = os.fork()
if not child:
    time.sleep(120)
    os._exit(0)
print(child, workers.pid(measurer), flush=True)
measurer.attempt(workers.faulty("CPU.HOST", {how!r}))
"""
    with script(folder, code) as parent:
        assert parent.stdout is not None
        child, worker = map(int, parent.stdout.readline().split())
        time.sleep(0.3)
        parent.kill()
        try:
            assert workers.is_gone(worker)
        finally:
            os.kill(child, signal.SIGKILL)


def test_nothing_is_left_after_the_end_of_the_program(folder: Path) -> None:
    with script(folder, "print(workers.pid(measurer), flush=True)") as parent:
        output, errors = parent.communicate(timeout=300)
    assert parent.returncode == 0 and not errors
    assert workers.is_gone(int(output))


def test_a_fork_has_a_worker_of_its_own(folder: Path) -> None:
    """Whatever a fork does with an inherited measurer, and however it ends, the worker is its parent's."""
    code = """
good = workers.faulty("CPU.HOST", "good")
mine = workers.pid(measurer)
for use in (True, False):
    child = os.fork()
    if not child:
        if use:
            assert measurer.attempt(good).status == "OK"
            assert workers.pid(measurer) != mine
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert measurer.attempt(good).status == "OK" and workers.pid(measurer) == mine and measurer.starts == 1
print("fine")
"""
    with script(folder, code) as parent:
        output, errors = parent.communicate(timeout=300)
    assert output.strip() == "fine", errors


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.soak)])
def test_restarts_leak_nothing(folder: Path, count: int) -> None:
    """In a process of its own: other tests have children and open files, too."""
    code = f"""
good, flood = workers.faulty("CPU.HOST", "good"), workers.faulty("CPU.HOST", "flood")
measurer.attempt(good)
before, started = workers.descriptors(), measurer.starts
for _ in range({count}):
    assert measurer.attempt(flood).status == "CRASHED"
    assert measurer.attempt(good).status == "OK"
assert measurer.starts == started + {count}
assert workers.descriptors() == before
assert workers.children() == {{workers.pid(measurer)}}
print("fine")
"""
    with script(folder, code) as parent:
        output, errors = parent.communicate(timeout=600)
    assert output.strip() == "fine", errors


@pytest.mark.soak
@needs_kernels
def test_isolation_costs_little() -> None:
    """For kernels of about 10 ms, against the same in this process, in turns."""
    bench = TESTS.parent / "bench" / "isolation.py"
    done = subprocess.run([sys.executable, str(bench), "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["isolated_over_local"] <= 1.5

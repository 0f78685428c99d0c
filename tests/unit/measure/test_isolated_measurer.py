"""The parent's side of a worker, against workers that say what they should not; settings and modules reach it."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.devices.base import Target
from tunewright.devices.host import HostDevice
from tunewright.devices.null import NullDevice
from tunewright.errors import DeviceError
from tunewright.ir.types import DType, TensorType
from tunewright.measure import child_process, isolated, protocol
from tunewright.measure.base import Attempt, Race, Regime
from tunewright.measure.isolated import Isolated, measurer_for
from tunewright.measure.local import LocalMeasurer
from tunewright.search.base import Status
from tunewright.settings import Settings, child_environment
from tunewright.solvers.base import Problem

TYPE = TensorType(DType.FLOAT32, (8,))
PROBLEM = Problem("Relu", (TYPE,), (TYPE,), {}, constant=(False,))
CANDIDATE = ("some.solver", {"tile": 4})
OK = protocol.attempt_json(Attempt(Status.OK, samples=(1e-3, 2e-3, 3e-3)))

#: a worker that answers from a list: {"pose": [...], "attempt": [...], "race": [...]}; bytes are given in hex
FAKE = """#!{python} -S
import json, os, socket, struct, sys, time
channel = socket.socket(fileno=int(sys.argv[-2]))
script = json.load(open({script!r}))
def send(message):
    body = bytes.fromhex(message) if isinstance(message, str) else json.dumps(message).encode()
    channel.sendall(body if isinstance(message, str) else struct.pack("!I", len(body)) + body)
def receive():
    head = channel.recv(4)
    if not head:
        os._exit(0)
    (length,) = struct.unpack("!I", head)
    body = b""
    while len(body) < length:
        body += channel.recv(length - len(body))
    return json.loads(body)
for message in script["first"]:
    send(message)
while True:
    request = receive()
    for message in script[request["do"]]:
        if message == "sleep":
            time.sleep(60)
        elif message == "nap":
            time.sleep(0.05)
        elif message == "exit":
            os._exit(7)
        elif message == "hang up":
            channel.close()
            time.sleep(60)
        else:
            send(message if isinstance(message, str) else {{"number": request["number"], **message}})
"""
CLOCK, BUSY = protocol.Clock(0.0, 0, 0.0, 0.0).to_json(), protocol.BUSY


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' clocks say that nothing took any time, on a machine that may be busy."""
    monkeypatch.setattr(protocol, "BUSY", 60.0)


POSED = {"refusal": None, "regime": {"kind": "cold", "copies": 1, "nbytes": 32}}


def answer(value: object, **more: object) -> dict[str, object]:
    return {"kind": "answer", "value": value, "resident": 1, "clock": CLOCK, **more}


def fake(folder: Path, **script: list[object]) -> Isolated:
    """A measurer whose worker follows a script."""
    told = {"first": [{"kind": "ready"}], "pose": [answer(POSED)], "attempt": [answer(OK)], "race": []} | script
    (folder / "script.json").write_text(json.dumps(told))
    program = folder / "fake"
    program.write_text(FAKE.format(python=sys.executable, script=str(folder / "script.json")))
    program.chmod(0o755)
    return Isolated("CPU.HOST", 1.0 if "sleep" in script.get("attempt", ()) else 60.0, python=str(program))


def frame(body: bytes) -> str:
    return (struct.pack("!I", len(body)) + body).hex()


def test_a_worker_that_behaves(tmp_path: Path) -> None:
    race = protocol.race_json(Race(((1.0, 2.0), (3.0, 4.0))))
    with fake(tmp_path, race=[{"kind": "alive"}, answer(race)]) as measurer:
        assert measurer.pose(PROBLEM) is None
        assert measurer.regime() == Regime("cold", 1, 32)
        assert measurer.attempt(CANDIDATE) == Attempt(Status.OK, samples=(1e-3, 2e-3, 3e-3))
        assert measurer.race([CANDIDATE, CANDIDATE], 2) == Race(((1.0, 2.0), (3.0, 4.0)))


@pytest.mark.parametrize(
    ("said", "status", "why"),
    [
        ([frame(b"this is not JSON")], Status.CRASHED, "not JSON"),
        ([frame(b"[" * 100_000)], Status.CRASHED, "not JSON"),
        ([frame(b"[1, 2]")], Status.CRASHED, "no object"),
        (["ffffffff"], Status.CRASHED, "a frame of 4294967295 bytes"),
        ([{"kind": "surprise"}], Status.CRASHED, "where an answer belongs"),
        ([{}], Status.CRASHED, "where an answer belongs"),
        ([answer(OK, number=0)], Status.CRASHED, "where an answer belongs"),
        ([answer(None)], Status.CRASHED, "where an object belongs"),
        ([answer({**OK, "more": 1})], Status.CRASHED, "where an object belongs"),
        ([answer({**OK, "status": "GREAT"})], Status.CRASHED, "status"),
        ([answer({**OK, "samples": "many"})], Status.CRASHED, "where a list belongs"),
        ([answer({**OK, "samples": ["1"]})], Status.CRASHED, "where a number belongs"),
        ([answer({**OK, "error": 10**400})], Status.CRASHED, "beyond all bounds"),
        ([answer(OK, resident=-1)], Status.CRASHED, "where a whole number belongs"),
        ([answer(OK, clock=[1, 2])], Status.CRASHED, "where a list belongs"),
        ([answer({**OK, "samples": []})], Status.WRONG, "impossible times"),
        ([answer({**OK, "samples": [1.0]})], Status.WRONG, "impossible times"),
        ([answer({**OK, "samples": [1.0, 0.0, 1.0]})], Status.WRONG, "impossible times"),
        ([answer({**OK, "samples": [1.0, -1.0, 1.0]})], Status.WRONG, "impossible times"),
        ([answer({**OK, "samples": [1.0, math.nan, 1.0]})], Status.WRONG, "impossible times"),
        ([answer({**OK, "samples": [1.0, math.inf, 1.0]})], Status.WRONG, "impossible times"),
        ([answer(OK, clock=[0.0, 5, 1.0, 0.1])], Status.WRONG, "its clock disagrees with ours: 0.1 s"),
        ([answer(OK, clock=[0.0, 5, 1.0, 1.1])], Status.WRONG, "its clock disagrees with ours: 1.1 s"),
        ([answer(OK, clock=[0.0, 5, 1.0, math.nan])], Status.WRONG, "its clock disagrees"),
        ([answer(OK, clock=[9.0, 5, 1.0, 1.0])], Status.WRONG, "a clock that disagrees with ours: 9 s"),
        (["exit"], Status.CRASHED, "exit status 7"),
        ([{"kind": "alive"}, "sleep"], Status.TIMEOUT, "longer than 1 s"),
        ([frame(b"{}")[:-2], "sleep"], Status.TIMEOUT, "longer than 1 s"),
    ],
)  # fmt: skip
def test_whatever_a_worker_says_the_parent_lives(tmp_path: Path, said: list[object], status: Status, why: str) -> None:
    with fake(tmp_path, attempt=said) as measurer:
        assert measurer.pose(PROBLEM) is None
        found = measurer.attempt(CANDIDATE)
        assert found.status is status and why in found.why and not found.samples, found
        assert measurer.regime() == Regime("cold", 1, 32)


def test_an_answer_too_many_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """It is that of another request: the worker is out of step, and is replaced."""
    with fake(tmp_path, attempt=[answer(OK), answer(OK)]) as measurer:
        measurer.pose(PROBLEM)
        assert measurer.attempt(CANDIDATE).status is Status.OK
        assert "where an answer belongs" in measurer.attempt(CANDIDATE).why
        assert measurer.attempt(CANDIDATE).status is Status.OK


def test_hanging_up_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "GONE", 0.1)
    with fake(tmp_path, attempt=["hang up"]) as measurer:
        measurer.pose(PROBLEM)
        assert measurer.attempt(CANDIDATE) == Attempt(Status.CRASHED, "its process hung up")


def test_signs_of_life_are_not_enough_for_ever(tmp_path: Path) -> None:
    with fake(tmp_path, attempt=[{"kind": "alive"}, "nap"] * 1000) as measurer:
        measurer.pose(PROBLEM)
        measurer.timeout = 1.0
        began = time.monotonic()
        assert measurer.attempt(CANDIDATE) == Attempt(Status.TIMEOUT, "took longer than 3 s in all")
        assert 2.9 < time.monotonic() - began < 30


@pytest.mark.parametrize(
    "value",
    [
        protocol.race_json(Race(((1.0, 2.0),))),
        {**protocol.race_json(Race(((1.0, 2.0), (1.0, 2.0)))), "fallen": [[2, OK]]},
        {**protocol.race_json(Race(((1.0, 2.0), (1.0, 2.0)))), "fallen": [0]},
        {"samples": 3, "fallen": []},
    ],
)
def test_a_race_that_makes_no_sense(tmp_path: Path, value: object) -> None:
    """Everyone is tried alone; who makes no sense even then is out."""
    with fake(tmp_path, race=[answer(value)]) as measurer:
        measurer.pose(PROBLEM)
        found = measurer.race([CANDIDATE, CANDIDATE], 2)
        assert set(found.fallen) == {0, 1} and not any(found.samples)


def test_samples_of_a_race_are_counted(tmp_path: Path) -> None:
    with fake(tmp_path, race=[answer(protocol.race_json(Race(((1.0, 2.0), (1.0, 0.0), (1.0,)))))]) as measurer:
        measurer.pose(PROBLEM)
        found = measurer.race([CANDIDATE] * 3, 2)
        assert {i: a.status for i, a in found.fallen.items()} == {1: Status.WRONG, 2: Status.WRONG}


def test_a_problem_that_cannot_be_posed(tmp_path: Path) -> None:
    with fake(tmp_path, pose=[answer({"refusal": "too large", "regime": None})]) as measurer:
        with pytest.raises(RuntimeError, match="no problem"):
            measurer.attempt(CANDIDATE)
        assert measurer.pose(PROBLEM) == "too large"
        assert measurer.attempt(CANDIDATE) == Attempt(Status.FAILED, "too large")
        assert set(measurer.race([CANDIDATE] * 2, 3).fallen) == {0, 1}
        open_ = replace(PROBLEM, inputs=(TensorType(DType.FLOAT32, (None,)),))
        assert "no static shape" in (measurer.pose(open_) or "")


def test_a_worker_that_cannot_pose(tmp_path: Path) -> None:
    """No candidate is at fault, and nobody tries for ever."""
    with fake(tmp_path, pose=["exit"]) as measurer:
        assert "exit status 7" in (measurer.pose(PROBLEM) or "")
        assert measurer.starts == 2
        with pytest.raises(DeviceError, match="cannot be made: its process ended with exit status 7"):
            measurer.attempt(CANDIDATE)
        assert measurer.starts == 4


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (["00"], "longer than 0.5 s"),
        ([{"kind": "failed", "why": "no such device"}], "no such device"),
        ([{"kind": "hello"}], "hello"),
        ([frame(b"nonsense")], "not JSON"),
    ],
)
def test_a_worker_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: list[object], why: str
) -> None:
    monkeypatch.setattr(isolated, "START_SECONDS", 0.5 if "0.5 s" in why else 60.0)
    with fake(tmp_path, first=first) as measurer:
        with pytest.raises(DeviceError, match=f"the worker of CPU.HOST: cannot start: .*{why}"):
            measurer.pose(PROBLEM)
        assert measurer.starts == 2


def test_no_such_interpreter() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match="No such file"):
        Isolated("CPU.HOST", 1.0, python="/nowhere/python").pose(PROBLEM)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_device_must_be_the_same(tmp_path: Path) -> None:
    other = Target("cpu", "another", "x", 1)
    with fake(tmp_path, first=[{"kind": "ready", "target": repr(other)}]) as measurer:
        measurer.target = other
        assert measurer.pose(PROBLEM) is None
        measurer.close()
        measurer.target = replace(other, units=2)
        with pytest.raises(DeviceError, match="opened another device"):
            measurer.pose(PROBLEM)


def test_no_such_device() -> None:
    """By the real worker, which also shows that it starts from any folder."""
    with Isolated("NOTHING.7", 1.0) as measurer, pytest.raises(DeviceError, match=r"no device 'NOTHING\.7'"):
        measurer.pose(PROBLEM)


def test_measurers_are_shared() -> None:
    given, device = Settings(), HostDevice("CPU.HOST")
    first = measurer_for(device, given)
    assert isinstance(first, Isolated) and first.timeout == given.tune_timeout and not first.starts
    assert measurer_for(device, Settings()) is first
    other = measurer_for(device, replace(given, tune_timeout=3.0))
    assert isinstance(other, Isolated) and other.timeout == 3.0
    assert isinstance(measurer_for(NullDevice(), given), LocalMeasurer)


def test_a_measurer_that_nobody_holds_takes_its_worker_along(tmp_path: Path) -> None:
    measurer = fake(tmp_path)
    measurer.pose(PROBLEM)
    child = measurer._workers[0].process
    del measurer
    assert not child.is_running


# ---- frames, and what is in them ----------------------------------------------------------------------------------


OBJECTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.none())


@settings(deadline=None)
@given(st.lists(OBJECTS, max_size=6), st.integers(1, 9))
def test_frames_survive_any_cut(messages: list[dict[str, object]], size: int) -> None:
    data = b"".join(protocol.pack(message) for message in messages)
    reader = protocol.Reader()
    found = [m for i in range(0, len(data), size) for m in reader.feed(data[i : i + size])]
    assert found == messages


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_broken(data: bytes) -> None:
    reader = protocol.Reader()
    try:
        found = list(reader.feed(data))
    except protocol.Broken:
        return
    assert all(isinstance(message, dict) for message in found)


def test_values_come_back() -> None:
    attempt = Attempt(Status.WRONG, "why", (1e-9, 2.5), math.inf, 0.25, 0.5, True)
    for value, there, back in (
        (attempt, protocol.attempt_json, protocol.attempt),
        (Race(((1.0,), ()), {1: attempt}), protocol.race_json, lambda data: protocol.race(data, 2)),
        (Regime("warm", 2, 3), protocol.regime_json, protocol.regime),
    ):
        assert back(json.loads(json.dumps(there(value)))) == value  # type: ignore[arg-type,operator]


def test_a_clock_is_judged_by_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine wakes who waits late; that must not look like a lie."""
    monkeypatch.setattr(protocol, "BUSY", BUSY)
    honest = protocol.Clock(whole=0.05, stretches=10, stamped=6e-3, claimed=5.9e-3)
    assert honest.objection(0.05) is None
    assert honest.objection(0.5) is None  # we were woken late
    assert protocol.Clock(0.05, 10, 9e-3, 5.9e-3).objection(0.05) is None  # it lost the processor at an unlucky moment
    assert protocol.Clock(0.05, 10, 6e-3, 0.6e-3).objection(0.05) is not None
    assert protocol.Clock(0.05, 10, 6e-3, 6.5e-3).objection(0.05) is not None
    assert protocol.Clock(0.05, 10, 6e-3, 5.9e-3).objection(2.0) is not None
    assert protocol.Clock(0.0, 0, 0.0, 0.0).objection(0.0) is None


# ---- what a worker inherits ---------------------------------------------------------------------------------------


def test_a_child_sees_the_same_settings_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEWRIGHT_TUNE_SEED", "7")
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", "/elsewhere")
    changed = Settings.make(
        {
            "PERF_COUNT": "YES", "HOST_FALLBACK": "NO", "TUNE_TIMEOUT": 2.5, "MAX_NODES": 3, "FIND_ENFORCE": "DB_CLEAN",
            "FIND_MODE": "2", "DISABLED_PASSES": "a,b", "TUNE_REGIME": "WARM", "USER_DB_PATH": "/some where",
        }
    )  # fmt: skip
    changed = replace(changed, cache_dir=None, tune_seed=0)
    (tmp_path / "mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import mine; from tunewright.settings import Settings; print(Settings.from_environment())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=child_environment(changed), capture_output=True, text=True, cwd="/"
    )
    assert done.stdout.strip() == str(changed), done.stderr

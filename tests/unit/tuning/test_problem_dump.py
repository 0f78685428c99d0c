"""ENABLE_TUNE_DUMP: every problem that an application meets, in a file; and reading such files, whatever is in them."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tunewright import Core
from tunewright.errors import InputError, SettingsError
from tunewright.ir.types import DType, SequenceType, TensorType
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem
from tunewright.testing import models
from tunewright.tuning.offline import command, dump


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing was met yet, no variable is set, and files of the working folder are the test's own."""
    for name in list(os.environ):
        if name.startswith("TUNEWRIGHT_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(dump, "_MET", {})
    monkeypatch.setattr(dump, "_CLOSED", {})
    monkeypatch.chdir(tmp_path)


def relu(n: int = 8, **changes) -> Problem:
    type = TensorType(DType.FLOAT32, (n,))
    return replace(Problem("Relu", (type,), (type,), {}, constant=(False,)), **changes)


def settings(**config) -> Settings:
    return Settings.make({"ENABLE_TUNE_DUMP": "YES", **config}, Settings())


def meet(problem: Problem, *, device: str = "NULL", **config) -> None:
    dump.record(problem, open_device(device), settings(**config))


def planned(compiled) -> set[str]:
    """Keys of the problems that a solver was chosen for."""
    steps = [step for plan in compiled.program.plans for step in plan.steps]
    return {Problem.of(step.node).key() for step in steps if step.choice is not None}


MODELS = {
    "resnet": (models.resnet(18, size=32, classes=8, width=8), (1, 3, 32, 32)),
    "transformer": (models.transformer(layers=1), (1, 16, 64)),
}


# ---- what an application leaves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["CPU", "CPU.HOST", "NULL"])
def test_what_an_application_meets_is_read_back(device, tmp_path, monkeypatch):
    """Ascend's spelling in the environment; the problems of the plan, and no others."""
    monkeypatch.setenv("TUNEWRIGHT_ENABLE_TUNE_DUMP", "True")
    expected = set()
    for model, shape in MODELS.values():
        compiled = Core().compile_model(model, device)
        compiled({"x": np.zeros(shape, np.float32)})
        compiled({"x": np.ones(shape, np.float32)})
        expected |= planned(compiled)
    (file,) = tmp_path.glob("*")
    assert file.name == f"tune_dump_pid{os.getpid()}.jsonl"
    problems, reasons = dump.read(file)
    assert not reasons
    assert {p.key() for p in problems} == expected and len(problems) == len(expected) > 10
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == len(expected), "each once"
    target = open_device(device).target
    assert {line["device"]["processor"] for line in lines} == {target.name}
    assert {line["device"]["name"] for line in lines} == {device}


def test_it_is_off_unless_it_is_asked_for(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(dump, "record", lambda *_: pytest.fail("it must cost nothing"))
    model, shape = MODELS["transformer"]
    Core().compile_model(model, "NULL")({"x": np.zeros(shape, np.float32)})
    assert not list(tmp_path.iterdir()) and capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["True", "TRUE", "YES", "1", "on"])
def test_spellings_of_yes_and_no(text):
    for key in ("ENABLE_TUNE_DUMP", "ENABLE_LOGGING_CMD"):
        assert Settings.make({key: text}).get(key) is True
        assert Settings.make({key: "False"}).get(key) is False
        with pytest.raises(SettingsError, match="is not YES or NO"):
            Settings.make({key: "maybe"})
    with pytest.raises(SettingsError, match="empty"):
        Settings.make({"TUNE_DUMP_PATH": ""})


def test_places(tmp_path):
    name = f"tune_dump_pid{os.getpid()}.jsonl"
    for given, made in {
        "some/folder": f"some/folder/{name}",
        "some/file.jsonl": "some/file.jsonl",
        str(tmp_path / "absolute"): f"absolute/{name}",
    }.items():
        meet(relu(), TUNE_DUMP_PATH=given)
        assert dump.read(tmp_path / made) == ([relu()], []), given
    assert len(dump._MET) == 3, "each place gets it once"


def test_each_problem_and_device_once(tmp_path):
    for _ in range(3):
        for device in ("NULL", "CPU.HOST"):
            meet(relu(), device=device, TUNE_DUMP_PATH="a.jsonl")
    lines = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert [line["device"]["name"] for line in lines] == ["NULL", "CPU.HOST"]
    assert dump.read("a.jsonl") == ([relu()], []), "of one problem there is one"


def test_what_cannot_be_tuned_is_left_out(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "tunewright"):
        meet(relu(inputs=(TensorType(DType.FLOAT32, ("n",)),)))
        meet(relu(attrs={"names": np.array(["a"], object)}))
        meet(relu(inputs=(SequenceType(),)))
        meet(relu(attrs={"long": np.zeros(1 << 18)}))
    assert not list(tmp_path.iterdir())
    assert [r.levelname for r in caplog.records] == ["INFO"] * 2


# ---- disks ---------------------------------------------------------------------------------------------------------


def is_told_once(caplog, place: str) -> None:
    model, shape = MODELS["transformer"]
    core = Core({"ENABLE_TUNE_DUMP": "YES", "TUNE_DUMP_PATH": place})
    plain = Core().compile_model(model, "NULL")({"x": np.zeros(shape, np.float32)})
    for _ in range(2):
        found = core.compile_model(model, "NULL")({"x": np.zeros(shape, np.float32)})
        assert found.keys() == plain.keys()
    (told,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert place in told.getMessage() and "not dumped any more" in told.getMessage()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_told_once(tmp_path, caplog):
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    is_told_once(caplog, "full.jsonl")


@pytest.mark.parametrize("place", ["file/folder", "file/x.jsonl", "a\0b.jsonl", "~nobody-of-this-name/x.jsonl"])
def test_a_place_that_cannot_be_written_is_told_once(tmp_path, caplog, place):
    (tmp_path / "file").write_text("")
    is_told_once(caplog, place)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_was_torn_off_stays_a_line_of_its_own(tmp_path):
    meet(relu(), TUNE_DUMP_PATH="a.jsonl")
    whole = Path("a.jsonl").read_bytes()
    Path("a.jsonl").write_bytes(whole[: len(whole) // 2])
    meet(relu(9), TUNE_DUMP_PATH="a.jsonl")
    problems, reasons = dump.read("a.jsonl")
    assert problems == [relu(9)]
    assert len(reasons) == 1 and reasons[0].startswith("a.jsonl, line 1: it is not JSON")


def test_it_is_bounded(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(dump, "MOST_FILE", 1500)
    for n in range(1, 9):
        meet(relu(n), TUNE_DUMP_PATH="a.jsonl")
    assert Path("a.jsonl").stat().st_size <= 1500 and 1 < len(dump.read("a.jsonl")[0]) < 8
    assert len([r for r in caplog.records if "1,500 bytes" in r.getMessage()]) == 1
    monkeypatch.setattr(dump, "MOST_PROBLEMS", len(dump._MET) + 2)
    for n in range(20, 30):
        meet(relu(n), TUNE_DUMP_PATH="b.jsonl")
    assert len(dump.read("b.jsonl")[0]) == 2


CHILD = """
import sys
from tunewright.ir.types import DType, TensorType
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning.offline import dump
settings = Settings.make({"ENABLE_TUNE_DUMP": "YES", "TUNE_DUMP_PATH": sys.argv[1]}, Settings())
for n in range(1, 201):
    type = TensorType(DType.FLOAT32, (n, int(sys.argv[2])) if n % 2 else (n,))
    dump.record(Problem("Relu", (type,), (type,), {}, constant=(False,)), open_device("NULL"), settings)
"""


@pytest.mark.parametrize("place", ["folder", "one.jsonl"])
def test_several_processes_write_at_once(place, tmp_path):
    children = [subprocess.Popen([sys.executable, "-c", CHILD, place, str(k)]) for k in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert len(list(tmp_path.glob("**/*.jsonl"))) == (3 if place == "folder" else 1)
    problems, reasons = dump.read(place)
    assert not reasons and len(problems) == 3 * 100 + 100, "those that all have met are one"


# ---- files, whatever is in them ------------------------------------------------------------------------------------


def line(posed: Problem | None = None, **changes) -> dict:
    posed = relu() if posed is None else posed
    device = {"name": "CPU", "kind": "cpu", "processor": "some", "runtime": "native"}
    return {
        "problem": problem_json.to_json(posed), "key": posed.key(), "device": device, "date": "2026-11-15T12:00:00Z",
        "tool": "0.1",
    } | changes  # fmt: skip


WRONG = {
    "not JSON": "{",
    "needed": {"problem": 1},
    "members": line(problem={}),
    "another problem": line(key=relu(9).key()),
    "key is not a text": line(key=None),
    "date is not a text": line(date=1e999),
    "device is not": line(device="CPU"),
    "processor is not": line(device={"name": "", "kind": "", "processor": 3, "runtime": ""}),
    "too deeply": line(problem=problem_json.to_json(relu()) | {"attrs": {"a": [[[[[[[[[[[1]]]]]]]]]]]}}),
    "it is not JSON (": '{"problem":' + "[" * 100_000,
    "Exceeds": '{"problem": ' + "9" * 10_000 + "}",
    "is not JSON": b"\xff\xfe{}",
    "its text cannot be decoded": line(
        problem=problem_json.to_json(relu()) | {"attrs": {"a": "\ud800"}}, key="Relu(\ud800)"
    ),
    "longer than": '{"problem": "' + "x" * (1 << 20) + '"}',
    "is not a type": line(problem=problem_json.to_json(relu()) | {"inputs": ["float32[-1]"]}),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_line_has_a_reason_and_the_others_count(why, tmp_path):
    text = WRONG[why] if isinstance(WRONG[why], str | bytes) else json.dumps(WRONG[why])
    wrong = text if isinstance(text, bytes) else text.encode()
    right = json.dumps(line(relu(9))).encode()
    Path("a.jsonl").write_bytes(b"\n".join([b"", right, wrong, b"  ", json.dumps(line()).encode(), right]))
    problems, reasons = dump.read("a.jsonl")
    assert problems == [relu(9), relu()]
    assert len(reasons) == 1 and reasons[0].startswith("a.jsonl, line 3: ") and why in reasons[0], reasons


def test_what_is_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.jsonl").mkdir()
    for path, why in (("nothing.jsonl", "no such file"), ("empty", "holds no"), ("folder.jsonl", "holds no")):
        with pytest.raises(InputError, match=why):
            dump.read(path)


def test_a_file_without_end_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(dump, "MOST_REASONS", 10)
    Path("a.jsonl").write_text("x\n" * 100 + json.dumps(line()) + "\n")
    problems, reasons = dump.read("a.jsonl")
    assert not problems and len(reasons) == 11 and reasons[-1] == "a.jsonl: nothing behind line 10 was read"


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, dropped, doubled or moved."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(found)), rng.randint(1, 12)
        match rng.randrange(5):
            case 0:
                found[at] = rng.randrange(256)
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = found[at : at + length] * rng.randint(1, 40)
            case 3:
                found[at:at] = rng.choice([b"null", b"-1", b"1e999", b"[", b"{}", b'"', b"9" * 20, b"\\ud8"])
            case _:
                other = rng.randrange(len(found))
                found[at : at + length] = found[other : other + length]
        found = found or bytearray(b"x")
    return bytes(found)


@pytest.mark.parametrize("count", [400, pytest.param(40_000, marks=pytest.mark.soak)])
def test_mutations_are_read_or_have_a_reason(count, tmp_path):
    """Nothing but problems and reasons comes out; what comes out can be told again."""
    model, shape = MODELS["transformer"]
    core = Core({"ENABLE_TUNE_DUMP": "YES", "TUNE_DUMP_PATH": "seed.jsonl"})
    core.compile_model(model, "NULL")({"x": np.zeros(shape, np.float32)})
    lines = Path("seed.jsonl").read_bytes().splitlines()
    rng = random.Random(7)
    read = 0
    for _ in range(count):
        data = mutated(rng, rng.choice(lines))
        Path("a.jsonl").write_bytes(data)
        problems, reasons = dump.read("a.jsonl")
        assert len(problems) + len(reasons) >= (1 if data.strip() else 0)
        read += len(problems)
        for problem in problems:
            assert problem_json.from_json(problem_json.to_json(problem)) == problem
            assert command.from_line(command.to_line(problem)) == problem
    assert read > 0, "some mutations are harmless: the test sees both"

"""TUNING_FILE: its form, what is checked on reading, and that extending it loses and overwrites nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from faults.tuning_files import fault, measurement, problem, target
from tunewright.devices.base import Target
from tunewright.errors import InputError, SettingsError
from tunewright.knowledge import json_file, tuning_file
from tunewright.knowledge.key import WHERE_FIELDS, Key, Where
from tunewright.knowledge.record import Measurement, parse, to_line
from tunewright.knowledge.tuning_file import KEYS, TuningFile, export, hash_of
from tunewright.search.space import Config, Space

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture
def file(tmp_path: Path) -> TuningFile:
    return TuningFile(tmp_path / "tuning.json")


def content(file: TuningFile) -> Any:
    return json.loads(file.path.read_text())


# ---- the index of a config ------------------------------------------------------------------------------------------


def test_every_combination_of_a_space_has_an_index() -> None:
    space = Space({"a": [1, 2, 3], "b": ["x", "y"], "c": [None, True]}, lambda c: c["a"] != 2)
    found = [space.at(i) for i in range(space.combinations)]
    assert [space.index(config) for config in found] == list(range(12))
    assert len(set(found)) == 12
    assert found[1] == {"a": 1, "b": "x", "c": True}  # the last parameter counts fastest
    assert [c for c in found if c in space] == list(space)


def test_a_space_without_parameters_has_one_index() -> None:
    assert Space({}).index({}) == 0 and Space({}).at(0) == {}


def test_an_index_beyond_what_an_array_holds() -> None:
    space = Space({f"p{i}": list(range(10)) for i in range(30)})
    config = space.sample(np.random.default_rng(1))
    assert config is not None
    assert space.at(space.index(config)) == config
    assert space.index(space.at(10**30 - 1)) == 10**30 - 1


@pytest.mark.parametrize("index", [-1, 6, 10**30])
def test_no_such_index(index: int) -> None:
    with pytest.raises(SettingsError, match="is not below 6"):
        Space({"a": [1, 2, 3], "b": [1, 2]}).at(index)


# ---- the form -----------------------------------------------------------------------------------------------------


def test_the_form_is_that_of_document_000(file: TuningFile) -> None:
    m = measurement("MatMul", 16, units=2, rank=5)
    assert file.extend([m]) == (1, [])
    made = content(file)
    name = hash_of(m.key)
    assert list(made) == ["2"] and set(made["2"]) == {name, KEYS}
    solver, index = made["2"][name]
    beside = made["2"][KEYS][name]
    assert solver == "opencl.matmul" and set(beside) == {"digest", "record", "space"}
    assert beside["digest"] == m.digest and parse(beside["record"]) == m
    assert beside["space"]["hash"] == m.key.space
    assert Space(beside["space"]["params"]).at(index) == m.config


def test_a_line_an_entry(file: TuningFile) -> None:
    file.extend([measurement("MatMul", n) for n in range(3, 6)])
    assert len(file.path.read_text().splitlines()) == 6 + 2 * 3


def test_the_hash_covers_problem_and_place_alone() -> None:
    where = Where("cpu", "A processor", 2, "arch", "runtime", "driver 1", "-w")
    key = Key("MatMul(a) -> b", where, "opencl.matmul", "1.0", "source", "space")
    assert hash_of(key) == "9f7f249745d47e217d0e2614e57b0a4e"  # entries of earlier versions are to be found
    for name in ("solver", "version", "source", "space"):
        assert hash_of(dataclasses.replace(key, **{name: "other"})) == hash_of(key)
    others = [dataclasses.replace(key, problem="MatMul(c) -> b")]
    for name in WHERE_FIELDS:
        changed = dataclasses.replace(where, **{name: 3 if name == "units" else "other"})
        others.append(dataclasses.replace(key, where=changed))
    assert len({hash_of(k) for k in [key, *others]}) == 1 + 1 + len(WHERE_FIELDS)


@pytest.mark.parametrize(
    "given",
    [
        target(),
        target(software=(("numpy", "2.0"),), language="", options=""),
        target(software=(), lacks=("fp64", "fp16"), registers=32, vector_bytes=64),
        target(software=(("runtime", "Two words"), ("version", "OpenCL 3.0 (Build: a-b)"))),
    ],
)
def test_a_place_tells_what_solvers_look_at(given: Target) -> None:
    found = tuning_file._target(Where.of(given))
    assert found is not None
    assert dataclasses.replace(found, software=()) == dataclasses.replace(given, software=())
    assert dict(found.software) == dict(given.software)


def test_a_place_that_cannot_be_told_is_none() -> None:
    assert tuning_file._target(Where.of(target(software=(("driver", "1; z"), ("b", "2"))))) is None


# ---- there and back -------------------------------------------------------------------------------------------------

MANY = [
    *[measurement("MatMul", n, units, 3 * n) for n in (8, 16) for units in (2, 16)],
    measurement("Conv", 14, rank=11),
    measurement("Softmax", 20, rank=2),
    measurement("Slice", 5, rank=1),
    measurement("Add", 9),
    measurement("Add", 9, place=target(software=(("driver", "4.0"), ("runtime", "A runtime")))),
]


def test_what_is_written_is_read(file: TuningFile) -> None:
    assert file.extend(MANY) == (len(MANY), [])
    found, ignored = file.read()
    assert sorted(m.digest for m in found) == sorted(m.digest for m in MANY) and ignored == []
    assert list(content(file)) == ["2", "16"] or list(content(file)) == ["16", "2"]


def test_an_export_is_the_same_in_any_order(tmp_path: Path) -> None:
    for name, records in (("a", MANY), ("b", MANY[::-1]), ("c", MANY * 2)):
        assert export(tmp_path / name, records) == (len(MANY), [])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    export(tmp_path / "a", MANY[:1])
    with pytest.raises(InputError, match="exists already"):
        export(tmp_path / "a", MANY)


def test_as_a_layer_it_answers_and_says_what_it_ignored(file: TuningFile) -> None:
    file.path.write_text('{"24": {"123": ["convolution_gpu_ref", 0]}}')
    file.extend(MANY)
    layer = file.as_database()
    assert layer.path == str(file.path)
    adds = [m for m in file.read()[0] if m.key.problem.startswith("Add(")]
    assert len(adds) == 2 and list(layer.family(problem("Add", 9).family())) == adds
    assert len(list(layer)) == len(MANY)
    assert len(layer.damage()) == 1 and "has no key, so its problem is unknown" in layer.damage()[0]


# ---- the best answer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "records",
    [  # the first is the one
        [measurement(rank=1, low=1.3), measurement(rank=2, low=1.2), measurement(rank=3, low=1.1)],
        [measurement(rank=1, low=1.0), measurement(rank=2, low=1.5, confirmed=False)],
        [measurement(rank=1, low=1.1), measurement(rank=2, low=1.4, regime="warm")],
        [measurement(rank=1, low=1.1), measurement(rank=2, low=1.4),
         measurement(rank=2, low=1.0, date="2026-12-01T00:00:00Z")],
        [measurement(rank=1, low=1.1), fault(measurement(rank=2))],
    ],
    ids=["gain", "confirmed", "cold", "newest", "no faults"],
)  # fmt: skip
def test_the_best_answer_is_written(records: list[Any], file: TuningFile) -> None:
    assert file.extend(records[::-1])[0] == 1
    assert file.read() == ([records[0]], [])


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: measurement(confirmed=False), "nothing is confirmed"),
        (lambda: measurement(low=0.9), "nothing is confirmed"),
        (lambda: _with_key(solver="nobody.knows"), "solver nobody.knows is not installed"),
        (lambda: _with_key(space="0" * 32), "the space of opencl.matmul has changed"),
        (lambda: _with_key(problem="MatMul(other)"), "its problem differs from"),
        (lambda: dataclasses.replace(measurement(), config=Config({"rows": 77})), "has changed"),
        (lambda: _with_key(where=dataclasses.replace(measurement().key.where, arch="of old")), "another version"),
        (lambda: _with_key(solver="opencl.softmax"), "opencl.softmax refuses it"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_has_no_index_is_left_out(made: Callable[[], Measurement], why: str, file: TuningFile) -> None:
    added, skipped = file.extend([made(), measurement("Softmax", 9)])
    assert added == 1 and len(skipped) == 1 and why in skipped[0] and skipped[0].startswith("MatMul(")
    assert file.read() == ([measurement("Softmax", 9)], [])


def test_nothing_to_write_makes_no_file(file: TuningFile) -> None:
    assert file.extend([])[0] == file.extend([fault(measurement())])[0] == 0
    assert not file.path.exists()


def _with_key(**changes: Any) -> Measurement:
    m = measurement()
    return dataclasses.replace(m, key=dataclasses.replace(m.key, **changes))


# ---- reading what is not as it should be ----------------------------------------------------------------------------


def _resign(beside: dict[str, Any]) -> None:
    beside["digest"] = parse(beside["record"]).digest


def _move_section(tree: Any, name: str) -> None:
    tree["3"] = tree.pop("2")


def _rename(tree: Any, name: str) -> None:
    tree["2"]["0" * 32], tree["2"][KEYS]["0" * 32] = tree["2"].pop(name), tree["2"][KEYS].pop(name)


def _other_content(tree: Any, name: str) -> None:
    tree["2"][KEYS][name]["record"]["evidence"]["seconds"] = 0.5


def _other_digest(tree: Any, name: str) -> None:
    tree["2"][KEYS][name]["digest"] = "0" * 64


def _other_name(tree: Any, name: str) -> None:
    tree["2"][name][0] = "opencl.conv_plain"


def _other_index(tree: Any, name: str) -> None:
    tree["2"][name][1] += 1


def _far_index(tree: Any, name: str) -> None:
    tree["2"][name][1] = 10**30


def _true_index(tree: Any, name: str) -> None:
    tree["2"][name][1] = True


def _no_list(tree: Any, name: str) -> None:
    tree["2"][name] = {"0": "opencl.matmul"}


def _other_space(tree: Any, name: str) -> None:
    tree["2"][KEYS][name]["space"]["hash"] = "0" * 32


def _other_params(tree: Any, name: str) -> None:
    tree["2"][KEYS][name]["space"]["params"]["rows"].reverse()


def _twice_a_value(tree: Any, name: str) -> None:
    params = tree["2"][KEYS][name]["space"]["params"]
    params["rows"].append(params["rows"][0])


def _params_of_lists(tree: Any, name: str) -> None:
    tree["2"][KEYS][name]["space"]["params"]["rows"] = [[1]]


def _no_params(tree: Any, name: str) -> None:
    del tree["2"][KEYS][name]["space"]["params"]


def _no_key(tree: Any, name: str) -> None:
    del tree["2"][KEYS][name]


def _no_keys(tree: Any, name: str) -> None:
    tree["2"][KEYS] = []


def _half_a_key(tree: Any, name: str) -> None:
    del tree["2"][KEYS][name]["digest"]


def _lone_key(tree: Any, name: str) -> None:
    del tree["2"][name]


def _a_fault(tree: Any, name: str) -> None:
    made = fault(measurement("MatMul", 16, rank=5))
    tree["2"][KEYS][name].update(record=made.body(), digest=made.digest)


def _other_problem(tree: Any, name: str) -> None:
    beside = tree["2"][KEYS][name]
    beside["record"]["problem"]["inputs"][0] = "float32[17,64]"
    _resign(beside)


def _other_sizes(tree: Any, name: str) -> None:
    beside = tree["2"][KEYS][name]
    beside["record"]["sizes"][0] += 1
    _resign(beside)


def _truth_for_one(tree: Any, name: str) -> None:
    """Python takes true for 1; another config it is nevertheless."""
    beside = tree["2"][KEYS][name]
    config = beside["record"]["config"]
    config.update({k: float(v) for k, v in config.items()})
    _resign(beside)


def _huge_number(tree: Any, name: str) -> None:
    tree["2"][KEYS][name]["record"]["evidence"]["error"] = 10**400


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_move_section, "was measured on 2 execution units"),
        (_rename, "its hash does not match the problem"),
        (_other_content, "does not fit the digest"),
        (_other_digest, "does not fit the digest"),
        (_other_name, "names the kernel 'opencl.conv_plain', its key 'opencl.matmul'"),
        (_other_index, "index belongs to another config"),
        (_far_index, "is not below"),
        (_true_index, "is not a list of a kernel's name and an index"),
        (_no_list, "is not a list of a kernel's name and an index"),
        (_other_space, "its space differs from"),
        (_other_params, "index belongs to another config"),
        (_twice_a_value, "distinct"),
        (_params_of_lists, "scalars"),
        (_no_params, "has no parameters"),
        (_no_key, "has no key, so its problem is unknown"),
        (_no_keys, "has no key, so its problem is unknown"),
        (_half_a_key, "lacks digest"),
        (_lone_key, "is a key without an entry"),
        (_a_fault, "is not a measurement"),
        (_other_problem, "its problem differs from"),
        (_other_sizes, "its problem differs from"),
        (_truth_for_one, "index belongs to another config"),
        (_huge_number, ""),
    ],
)
def test_an_entry_that_disagrees_is_ignored(damage: Callable[[Any, str], None], why: str, file: TuningFile) -> None:
    good, bad = measurement("Softmax", 9, units=16), measurement("MatMul", 16, rank=5)
    file.extend([good, bad])
    tree = content(file)
    damage(tree, hash_of(bad.key))
    file.path.write_text(json.dumps(tree))
    found, ignored = file.read()
    assert found == [good]
    assert len(ignored) == 1 and why in ignored[0]
    assert ignored[0].startswith(("2, ", "3, "))


OPENVINO = {"24": {"15830211365": ["convolution_gpu_bfyx_os_iyx_osv16", 3], "9": ["fully_connected_gpu_ref", -1]}}


def test_a_file_of_openvino_is_ignored_and_extended(file: TuningFile) -> None:
    file.path.write_text(json.dumps(OPENVINO))
    found, ignored = file.read()
    assert found == [] and len(ignored) == 2
    assert all("has no key, so its problem is unknown" in reason for reason in ignored)
    m = measurement(units=24)
    assert file.extend([m, measurement(units=2)]) == (2, [])
    made = content(file)
    assert {k: made["24"][k] for k in OPENVINO["24"]} == OPENVINO["24"]
    assert file.read() == ([m, measurement(units=2)], ignored)


@pytest.mark.parametrize(
    "text",
    ["", " \n", "{}", '{"2": {}}', '{"2": {"keys": {}}}'],
)
def test_a_file_without_entries(text: str, file: TuningFile) -> None:
    file.path.write_text(text)
    assert file.read() == ([], [])
    assert file.extend(MANY) == (len(MANY), [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[]", "is not a tuning file"),
        (b"3", "is not a tuning file"),
        (b'{"name": "a package", "version": 2}', "is not a tuning file"),
        (b'{"2": 3}', "is not a tuning file"),
        (b'{"02": {}}', "is not a tuning file"),
        (b'{"2": {}', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"\x00" * 100, "is not JSON"),
        (b'{"2": {"a": NaN}}', "is not JSON"),
        (b'{"2": {"a": 1e999}}', "is not JSON"),
        (b'{"2": {"a": 1, "a": 2}}', "two members 'a'"),
        (b'{"2": {"a": ' + b"9" * 5000 + b"}}", "is not JSON"),
        (b'{"2": ' + b"[" * 100_000, "is not JSON"),
        (b'{"2": {"keys": ' + b'{"a":' * 100_000, "is not JSON"),
    ],
    ids=lambda x: str(x)[:24],
)  # fmt: skip
def test_what_is_no_tuning_file_is_refused_and_left_alone(text: bytes, why: str, file: TuningFile) -> None:
    file.path.write_bytes(text)
    for act in (file.read, file.as_database, lambda: file.extend(MANY)):
        with pytest.raises(InputError, match=why) as caught:
            act()
        assert str(file.path) in str(caught.value)
    assert file.path.read_bytes() == text


def test_a_file_that_is_too_large(file: TuningFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.extend(MANY)
    before = file.path.read_bytes()
    monkeypatch.setattr(json_file, "MOST_FILE_BYTES", len(before) - 1)
    for act in (file.read, lambda: file.extend([measurement("Add", 77)])):
        with pytest.raises(InputError, match="bytes"):
            act()
    monkeypatch.setattr(json_file, "MOST_FILE_BYTES", len(before))
    assert len(file.read()[0]) == len(MANY)
    with pytest.raises(InputError, match="would have more than"):
        file.extend([measurement("Add", 77)])
    assert file.path.read_bytes() == before and os.listdir(file.path.parent) == ["tuning.json"]


def test_a_missing_file(file: TuningFile) -> None:
    with pytest.raises(InputError, match=r"there is no such file.*TUNING_CREATE"):
        file.read()
    assert file.read(new=True) == ([], []) and list(file.as_database(new=True)) == []
    assert not file.path.exists()


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "parent", "zero"])
def test_what_is_not_a_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = {"device": Path("/dev/zero"), "parent": path / "y", "zero": Path("a\0b")}[kind]
    for act in (TuningFile(path).read, lambda: TuningFile(path).extend(MANY)):
        with pytest.raises(InputError):
            act()


# ---- extending ------------------------------------------------------------------------------------------------------


def test_extending_never_overwrites(file: TuningFile) -> None:
    old, better = measurement(rank=1, low=1.1), measurement(rank=2, low=1.9, date="2027-01-01T00:00:00Z")
    file.extend([old])
    before = file.path.read_bytes()
    added, skipped = file.extend([better])
    assert added == 0 and "the file has an entry for it" in skipped[0]
    assert file.path.read_bytes() == before
    assert file.extend([better, measurement("Add")])[0] == 1
    assert old in file.read()[0] and better not in file.read()[0]


def test_what_nobody_knows_is_kept(file: TuningFile) -> None:
    odd = {
        "remark": "\u00e9 \ud800", "24": {"x": [1, 2.5, None, {"deep": [[]]}]}, "3": 7,
        "2": {"mine": True, "keys": {"other": {"a": -0.0}}, "later": 1 << 80},
    }  # fmt: skip
    file.path.write_text(json.dumps(odd))
    assert file.extend([measurement()]) == (1, [])
    made = content(file)
    name = hash_of(measurement().key)
    assert made["2"].pop(name) and made["2"]["keys"].pop(name)
    assert made == odd and list(made) == list(odd) and list(made["2"]) == list(odd["2"])


@pytest.mark.parametrize("section", [5, {"keys": []}, {"keys": {hash_of(measurement().key): 1}}])
def test_a_damaged_section_takes_nothing_and_loses_nothing(section: Any, file: TuningFile) -> None:
    file.path.write_text(json.dumps({"2": section, "16": {}}))
    added, skipped = file.extend([measurement(), measurement(units=16)])
    assert added == 1 and len(skipped) == 1
    assert content(file)["2"] == section
    assert file.read()[0] == [measurement(units=16)]


def test_a_link_stays_one_and_so_does_the_mode(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder" / "real.json", tmp_path / "link.json"
    real.write_text("{}")
    real.chmod(0o640)
    link.symlink_to(real)
    TuningFile(link).extend(MANY)
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert len(TuningFile(real).read()[0]) == len(MANY)
    assert os.listdir(real.parent) == ["real.json"]


def test_a_full_disk_leaves_the_file_as_it_was(file: TuningFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.extend(MANY[:2])
    before = file.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        file.extend(MANY)
    assert file.path.read_bytes() == before and os.listdir(file.path.parent) == ["tuning.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_file_that_may_not_be_written(file: TuningFile) -> None:
    file.extend(MANY[:1])
    file.path.chmod(0o400)
    with pytest.raises(InputError, match="cannot be opened: Permission denied"):
        file.extend(MANY)


def test_what_a_killed_writer_left_is_no_hindrance(file: TuningFile) -> None:
    file.path.write_text("")  # made, not yet written
    file.path.with_name(".tuning.json.new").write_text('{"2": {')
    assert file.read() == ([], [])
    assert file.extend(MANY) == (len(MANY), [])
    assert os.listdir(file.path.parent) == ["tuning.json"]


def test_somebody_who_never_lets_go(file: TuningFile, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    file.extend(MANY[:1])
    monkeypatch.setattr(json_file, "LOCK_SECONDS", 0.1)
    with open(file.path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process has been extending it"):
            file.extend(MANY)
        assert len(file.read()[0]) == 1  # readers wait for nobody
    assert file.extend(MANY)[0] == len(MANY) - 1


def test_threads_lose_nothing(file: TuningFile) -> None:
    records = [measurement("Add", n) for n in range(2, 26)]

    def add(part: list[Measurement]) -> None:
        for m in part:
            file.extend([m])

    threads = [Thread(target=add, args=(part,)) for part in (records[::2], records[1::2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(m.digest for m in file.read()[0]) == sorted(m.digest for m in records)


#: adds the records of a file of lines one by one, and says so each time
EXTENDER = """
import sys
from tunewright.knowledge.record import from_line
from tunewright.knowledge.tuning_file import TuningFile
records = [from_line(line) for line in open(sys.argv[2])]
TuningFile(sys.argv[1] + ".warm").extend(records[:1])
print("ready", flush=True)
sys.stdin.readline()
for record in records:
    TuningFile(sys.argv[1]).extend([record])
    print(record.digest, flush=True)
"""


def extender(file: TuningFile, records: list[Measurement]) -> subprocess.Popen[str]:
    lines = file.path.with_name(f"{records[0].digest[:16]}.jsonl")
    lines.write_text("".join(to_line(m) + "\n" for m in records))
    return subprocess.Popen(
        [sys.executable, "-c", EXTENDER, str(file.path), str(lines)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip


def start(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_processes_lose_nothing_and_readers_see_whole_files(file: TuningFile) -> None:
    records = [measurement("Add", n) for n in range(2, 62)]
    processes = [extender(file, records[i::3]) for i in range(3)]
    start(processes)
    seen = 0
    while any(process.poll() is None for process in processes):
        found, ignored = file.read(new=True)
        assert ignored == [] and len(found) >= seen
        seen = len(found)
        time.sleep(0.005)
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert sorted(m.digest for m in file.read()[0]) == sorted(m.digest for m in records)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_what_was_said_to_be_written_survives_a_kill(kills: int, file: TuningFile) -> None:
    rng = np.random.default_rng(kills)
    acknowledged: list[str] = []
    for turn in range(kills):
        records = [measurement("Add", n, rank=turn) for n in range(2 + 200 * turn, 202 + 200 * turn)]
        process = extender(file, records)
        start([process])
        assert process.stdout is not None
        acknowledged += [process.stdout.readline().strip() for _ in range(int(rng.integers(1, 20)))]
        time.sleep(float(rng.uniform(0.0, 0.01)))
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        acknowledged += out.split()
        found, ignored = file.read(new=True)
        assert ignored == [] and set(acknowledged) <= {m.digest for m in found}
    assert file.extend([measurement("Softmax", 9)])[0] == 1

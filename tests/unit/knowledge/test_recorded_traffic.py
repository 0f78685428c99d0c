"""Recorded traffic: what is counted, merging in any order, bounds, hostile files, and the commands."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pytest

from tunewright import Core, tools
from tunewright.errors import InputError
from tunewright.knowledge import traffic
from tunewright.knowledge.traffic import ModelTraffic, TrafficEntry, TrafficFile, merged, to_text, weighted
from tunewright.plugins.single import open_device
from tunewright.settings import Settings, child_environment
from tunewright.tools.kb.traffic import cases_of_traffic
from unit.model_tuning.test_background_tuning import model, values

kernels = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
DATES = [f"2026-11-{day:02}T10:00:00+00:00" for day in range(1, 29)]


def entry(count, date=DATES[0], rows=16):
    return TrafficEntry(date, {((1, rows),): (count, count * 0.5)})


def met(entries, name="m.onnx", inputs=("x",)):
    return ModelTraffic(name, inputs, entries)


def of(path, text):
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return TrafficFile(path).read()


# ---- merging --------------------------------------------------------------------------------------------------------


def test_merging_counts_nothing_twice_in_whatever_order():
    early, late = {"k": met({"a": entry(3)})}, {"k": met({"a": entry(7, DATES[1])})}
    others = {"k": met({"b": entry(2)}), "j": met({"a": entry(1)})}
    made = []
    for order in itertools.permutations([early, late, others, late]):
        found: dict[str, ModelTraffic] = {}
        for one in order:
            found = merged(found, one)
        made.append(to_text(found))
    assert len(set(made)) == 1
    assert weighted(found["k"])[0].count == 9 and weighted(found["j"])[0].count == 1


def test_weights_are_parts_of_the_time():
    rows = {((1,),): (10, 1.0), ((2,),): (1, 3.0), ((3,),): (5, 0.0)}
    found = weighted(met({"a": TrafficEntry(DATES[0], rows)}))
    assert [(one.shapes, one.weight) for one in found] == [({"x": (2,)}, 0.75), ({"x": (1,)}, 0.25), ({"x": (3,)}, 0)]
    assert math.isclose(sum(one.weight for one in weighted(met({"a": TrafficEntry(DATES[0], rows)}), 2)), 1)


def test_a_file_is_written_and_read_as_it_was(tmp_path):
    file = TrafficFile(tmp_path / "folder" / "traffic.json")
    assert file.read() == {}
    given = {"k": met({"a": TrafficEntry(DATES[0], {((1, 2), ()): (3, 0.25)})}, inputs=("x", "y"))}
    file.add(given)
    file.add(given)
    assert file.read() == given


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic, "MOST_MODELS", 3)
    monkeypatch.setattr(traffic, "MOST_ENTRIES", 2)
    file = TrafficFile(tmp_path / "traffic.json")
    for n in range(8):
        file.add({f"k{n}": met({f"w{n}": entry(1, DATES[n])})})
        file.add({"all": met({f"w{n}": entry(1, DATES[n])})})
    found = file.read()
    assert set(found) == {"all", "k6", "k7"} and set(found["all"].entries) == {"w6", "w7"}


# ---- hostile files --------------------------------------------------------------------------------------------------


def whole(**changes):
    """A file with one model, with changes by path."""
    row = changes.get("row", [[[1, 16]], 3, 1.5])
    written = {"date": changes.get("date", DATES[0]), "rows": changes.get("rows", [row])}
    one = {"name": changes.get("name", "m"), "inputs": changes.get("inputs", ["x"]),
           "entries": changes.get("entries", {"w": written})}  # fmt: skip
    return {"schema": traffic.SCHEMA, "models": {"k": changes.get("model", one)}}


def test_a_whole_file_is_read(tmp_path):
    assert of(tmp_path / "t.json", whole())["k"].entries["w"].rows == {((1, 16),): (3, 1.5)}


@pytest.mark.parametrize(
    "changes",
    [
        *({"row": row} for row in (
            None, [], [[[1]], 3], [[[1]], 3, 1.0, 4], [[[1], [2]], 3, 1.0], [[["1"]], 3, 1.0], [[[-1]], 3, 1.0],
            [[[True]], 3, 1.0], [[[1.5]], 3, 1.0], [[[1 << 60]], 3, 1.0], [[[1]], -3, 1.0], [[[1]], 3.5, 1.0],
            [[[1]], True, 1.0], [[[1]], 3, -1.0], [[[1]], 3, "1"], [[[1]], 3, 1e300], [[[1]], 3, None], ["x", 3, 1.0],
            [[[1] * 100], 3, 1.0], {"a": 1}, [[{}], 3, 1.0], [[[[1]]], 3, 1.0],
        )),
        {"rows": {}}, {"rows": [[[[n]], 1, 1.0] for n in range(300)]}, {"date": 5}, {"date": "yesterday"},
        {"date": "2026" * 100}, {"inputs": "x"}, {"inputs": [1]}, {"inputs": ["x", "x"]}, {"inputs": ["x" * 1000]},
        {"inputs": [f"x{n}" for n in range(1000)]}, {"entries": []}, {"entries": {"w": None}}, {"name": None},
        {"model": []}, {"model": None}, {"model": {}},
    ],
)  # fmt: skip
def test_what_is_damaged_in_a_file_is_left_out(tmp_path, changes):
    found = of(tmp_path / "t.json", whole(**changes))
    assert not any(one.rows for model in found.values() for one in model.entries.values())
    json.loads(to_text(found))


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", "[" * 100_000, '{"schema": "other/1"}', '{"schema": 1e999}', "\x00", '{"a":1,"a":2}']
)
def test_a_file_that_is_none_is_an_error_on_import_and_begun_anew_on_record(tmp_path, text):
    path = tmp_path / "t.json"
    if text != "null":
        with pytest.raises(InputError, match="recorded traffic"):
            of(path, text)
    path.write_text(text, encoding="utf-8")
    TrafficFile(path).add({"k": met({"a": entry(1)})})
    assert TrafficFile(path).read()["k"].entries["a"].count == 1


def test_long_names_of_an_import_are_cut(tmp_path):
    found = of(tmp_path / "t.json", whole(name="n" * 100_000))
    assert len(found["k"].name) == traffic.LONGEST


# ---- recording ------------------------------------------------------------------------------------------------------


SERVE = """
    import sys
    sys.path.insert(0, {tests!r})
    import numpy as np, tunewright
    from unit.model_tuning.test_background_tuning import values
    core = tunewright.Core({{"USER_DB_PATH": {kb!r}, "RECORD_TRAFFIC": "YES"}})
    compiled = core.compile_model({path!r})
    request = compiled.create_infer_request()
    for rows, count in ((16, 5), (24, 3), (16, 2)):
        for _ in range(count):
            request.infer(values(rows))
            compiled(values(rows))
    other = compiled.create_infer_request()
    other.infer(values(8))
    del other
"""


@kernels
def test_every_process_adds_what_it_met(tmp_path):
    path, tests = tmp_path / "m.onnx", str(Path(__file__).parents[2])
    onnx.save(model(2, "rows"), path)
    text = textwrap.dedent(SERVE.format(tests=tests, kb=str(tmp_path / "kb"), path=str(path)))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", text], check=True, env=child_environment(Settings()), timeout=120)
    core = Core({"USER_DB_PATH": str(tmp_path / "kb")})
    found = {one.shapes["v0"][2]: one.count for one in core.traffic(path)}
    assert found == {16: 28, 24: 12, 8: 2}
    assert len(core.traffic(path, most=1)) == 1 and core.traffic(path, most=1)[0].weight == 1
    assert b"0." not in (tmp_path / "kb" / "traffic.json").read_bytes()[:60]
    assert not (tmp_path / "kb" / "kb.sqlite").exists(), "nothing but shapes is written"


@kernels
def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path):
    made = Core({"USER_DB_PATH": str(tmp_path / "kb")}).compile_model(model())
    made(values())
    assert made.meter is None and not (tmp_path / "kb").exists()
    with pytest.raises(InputError, match="RECORD_TRAFFIC"):
        made.traffic()


@kernels
def test_a_model_tells_what_it_met(tmp_path):
    made = Core({"USER_DB_PATH": str(tmp_path / "kb"), "RECORD_TRAFFIC": "YES"}).compile_model(model(2, "rows"))
    for rows in (16, 16, 24):
        made(values(rows))
    found = {one.shapes["v0"]: one.count for one in made.traffic()}
    assert found == {(1, 8, 16, 16): 2, (1, 8, 24, 16): 1}
    assert all(np.isfinite(one.seconds) and one.seconds > 0 for one in made.traffic())


# ---- commands -------------------------------------------------------------------------------------------------------


def call(capsys, *arguments):
    code = tools.execute([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def recorded(tmp_path):
    """A model, and what was recorded of it."""
    path = tmp_path / "m.onnx"
    onnx.save(model(2, "rows"), path)
    core = Core({"USER_DB_PATH": str(tmp_path / "kb")})
    rows = {((1, 8, 16, 16),): (100, 3.0), ((1, 8, 40, 16),): (10, 1.0)}
    from tunewright.knowledge.streams import digest

    key = digest(core.read_model(path).graph)
    one = ModelTraffic(str(path), ("v0",), {"w": TrafficEntry(DATES[0], rows)})
    TrafficFile.of(core.settings).add({key: one})
    return core, path, ("-c", f"USER_DB_PATH={tmp_path / 'kb'}")


def test_the_command_lists_exports_imports_and_forgets(recorded, tmp_path, capsys):
    _, _, config = recorded
    code, out, _ = call(capsys, "kb", "traffic", *config)
    assert code == 0 and "v0=1x8x16x16 100 30.000 75%" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = call(capsys, "kb", "traffic", "m.onnx", "--json", *config)
    shapes = json.loads(out)["models"][0]["shapes"]
    assert [(one["count"], one["weight"]) for one in shapes] == [(100, 0.75), (10, 0.25)]
    assert call(capsys, "kb", "traffic", "--export", tmp_path / "out.json", *config)[0] == 0
    other = ("-c", f"USER_DB_PATH={tmp_path / 'other'}")
    for _ in range(2):
        assert call(capsys, "kb", "traffic", "--import", tmp_path / "out.json", *other)[0] == 0
    code, out, _ = call(capsys, "kb", "traffic", "--json", *other)
    assert json.loads(out)["models"][0]["shapes"] == shapes
    assert call(capsys, "kb", "traffic", "all", "--forget", *other)[0] == 0
    assert "nothing was recorded" in call(capsys, "kb", "traffic", *other)[1]


def test_mistakes_are_told(recorded, tmp_path, capsys):
    _, path, config = recorded
    (tmp_path / "bad.json").write_text("{")
    for arguments, words in (
        (("kb", "traffic", "nobody"), "no traffic of 'nobody'"),
        (("kb", "traffic", "--forget"), "needs a model"),
        (("kb", "traffic", "--import", tmp_path / "bad.json"), "is not JSON"),
        (("kb", "traffic", "--import", tmp_path / "none.json"), "there is no such file"),
        (("tune", path, "--from-traffic", "--shape", "rows=3"), "leave out --input, --shape"),
    ):
        code, _, err = call(capsys, *arguments, *config)
        assert code == 2 and words in err and "Traceback" not in err
    nobody = ("-c", f"USER_DB_PATH={tmp_path / 'empty'}")
    code, _, err = call(capsys, "tune", path, "--from-traffic", *nobody)
    assert code == 2 and "RECORD_TRAFFIC" in err


def test_the_time_of_tuning_goes_where_the_traffic_is(recorded):
    core, path, _ = recorded
    one, other = cases_of_traffic(core, path, 50.0)
    assert (one.shapes, other.shapes) == (("v0=1x8x16x16",), ("v0=1x8x40x16",))
    assert [one.weight, other.weight] == [found.count for found in core.traffic(path)]
    assert len(cases_of_traffic(core, path, 6.0)) == len(cases_of_traffic(core, path, 2.0)) == 1

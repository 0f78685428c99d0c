"""What `tunewright tune` shows while it works, on a terminal of 80 columns and in a pipe."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass, field, replace

import pytest
from rich.console import Console

from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.record import Ratio
from tunewright.measure.base import Regime
from tunewright.model_tuning.expected_gain import PRIOR, expected
from tunewright.model_tuning.layers import TunedLayer, TuningResult, TuningState
from tunewright.plugins.single import open_device
from tunewright.search.space import Config
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tools.tune import view
from tunewright.tuning import evidence, session
from tunewright.tuning.progress import Progress
from tunewright.tuning.tuner import Tuner


@dataclass
class Case:
    """Layers of a made-up network: one searched, one being searched, one to come, one left out."""

    layers: list[TunedLayer] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = open_device("CPU.HOST")
        for n, name in enumerate(("first", "a/very/long/name/of/a/node/that/ends/here", "third [red]x", "fourth")):
            type = TensorType(DType.FLOAT32, (4, n + 1))
            problem = Problem("Relu", (type,), (type,), {}, constant=(False,))
            layer = TunedLayer(problem, device, Tuner(Settings()).choose(problem, device), [name] * (n + 1))
            layer.seconds, layer.floor = (4 - n) * 1e-3, 1e-3
            self.layers.append(layer)
        first, _, _, last = self.layers
        other = first.choice.solver.id, Config({"n": 1})
        made = evidence.measurement(
            first.problem,
            device.target,
            first.choice.solver,
            other[1],
            evidence.ContestSamples([1e-3], 0.0, Ratio(2.0, 1.9, 2.1, 9), Ratio.one(), False, first.present),
            Regime("layer", 1, 1),
            {},
        )
        first.outcome = session.Outcome(first.present, False, "1 of 2 seem faster", records=(made,))
        last.skipped = "it takes next to no time"

    def state(self) -> TuningState:
        at = Progress("search", 7, 2, None, 1.5e-3, 3e-3, 2.0, 5.0)
        return TuningState("search", self.layers, self.layers[1], at, 12.3, 60.0)


def drawn(state: TuningState, width: int = 80, height: int = 24) -> list[str]:
    out = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    out.print(view.picture(state, height))
    return out.file.getvalue().splitlines()


def test_the_picture():
    lines = drawn(Case().state())
    assert lines[0] == "searching, 12 of 60 s, 48 s left"
    # 10 ms; the first twice as fast, the second for now; hopes of the second (2 ms) and of the third (1 ms)
    assert lines[1] == "10.00 ms -> 6.50 ms promised (1.54x)"
    assert lines[2] == "1.52 ms more expected of 2 layers to come, at most 3.00 ms"
    rows = {line.split()[0]: line for line in lines[5:]}
    assert rows["first"].split() == ["first", "40%", "4.00", "2.00", "2.00x", "by", "itself"]
    words = rows["...that/ends/here"].split(maxsplit=5)
    assert words[2:] == ["30%", "3.00", "1.50", "2.00x   search, 3 s: 7 tried, 2 …"]
    assert "third [red]x (+2)" in "\n".join(lines) and rows["third"].rstrip().endswith("waits")
    assert rows["fourth"].rstrip().endswith("it takes next to no time")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("height", [8, 24, 60])
def test_it_fits_and_shows_the_layer_that_is_searched(height):
    case = Case()
    case.layers = [*(replace(case.layers[2], nodes=[f"n{i}"]) for i in range(40)), *case.layers]
    lines = drawn(replace(case.state(), at=case.layers[41]), height=height)
    assert len(lines) <= height and any("search, 3 s: 7 tried" in line for line in lines)


def test_before_and_after_the_search():
    state = Case().state()
    assert drawn(TuningState("profile", (), None, None, 0.0, 60.0)) == ["measuring the layers, 0 of 60 s, 60 s left"]
    network = replace(state, phase="network", at=None, progress=None)
    assert drawn(network)[1] == "10.00 ms -> 8.00 ms promised (1.25x)"
    assert view.standing(replace(state, layers=[state.layers[3]], at=None)) == "1.00 ms"


def test_in_a_pipe_there_is_a_line_for_each_layer(capsys):
    case = Case()
    case.layers[1].outcome = session.Outcome(case.layers[1].present, False, "nothing is near")
    log = logging.getLogger("tunewright")
    with view.progress() as tell:
        tell(TuningState("profile", (), None, None, 0.0, 60.0))
        for _ in range(3):
            tell(case.state())
        tell(replace(case.state(), at=case.layers[1], progress=None))
        assert not log.filter(log.makeRecord("tunewright", logging.INFO, "", 0, "tuned %s", ("it",), None))
        assert log.filter(log.makeRecord("tunewright", logging.WARNING, "", 0, "tuned badly", (), None))
    assert log.filter(log.makeRecord("tunewright", logging.INFO, "", 0, "tuned %s", ("it",), None))
    assert capsys.readouterr().err.splitlines() == [
        "note: 0 of 60 s: measuring the layers",
        "note: 12 of 60 s: ...that/ends/here (+1): nothing is faster; 10.00 ms -> 8.00 ms promised (1.25x);"
        " 0.3527 ms more expected of 1 layer to come, at most 1.00 ms",
    ]


def test_what_is_expected_follows_what_similar_layers_gained():
    case = Case()
    first, second, third, _ = case.layers
    typical = sum(layer.hope for layer in case.layers) / 4
    assert first.hope == pytest.approx(3e-3) and typical == pytest.approx(1.55e-3)
    # the first one saved 2 of the 3 ms that could be hoped for
    found = expected(case.layers, [second, third])
    assert found == pytest.approx(3e-3 * (PRIOR * typical + 2e-3) / (typical + 3e-3))
    second.outcome = session.Outcome(second.present, False, "nothing is near")
    assert expected(case.layers, [third]) < found / 2, "what gained nothing counts, too"
    first.outcome = second.outcome = None
    assert expected(case.layers, [third]) == pytest.approx(PRIOR * third.hope), "nothing was searched yet"


def test_the_end_says_in_two_lines_what_was_gained_what_is_left_and_what_to_run():
    case = Case()
    case.layers[2].skipped = "no time was left for it"
    result = TuningResult(case.layers, 1e-2, 8e-3, Ratio(1.25, 1.2, 1.3, 9), 0.0, [], False, {})
    case.layers[1].skipped = "it takes next to no time"
    lines = view.closing([result], "tunewright tune m.onnx -d CPU", 60.0)
    assert lines == [
        "gained: 1.250x; left: 1 layer, 0.5077 ms expected, at most 1.00 ms",
        "next: tunewright tune m.onnx -d CPU --budget 120s",
    ]
    slight = TuningResult(case.layers, 1.0, 0.8, Ratio(1.25, 1.2, 1.3, 9), 0.0, [], False, {})
    assert view.closing([slight], "tunewright tune .", 60.0)[1].startswith("next: nothing ("), "1 of 1000 ms"
    for one in case.layers[1:3]:
        one.skipped = "it was tuned before"
    first, second = view.closing([result, result], "tunewright tune .", 60.0)
    assert first == "gained: 1.250x over 2 models or shapes; left: nothing, every layer that counts was searched"
    assert second == "next: nothing (tunewright tune . --again searches anew)"


def test_a_run_that_was_stopped_before_its_search_leaves_everything():
    """It once said that every layer that counts was searched, and that there was nothing to run next."""
    case = Case()
    for one in case.layers:
        one.outcome, one.skipped = None, ""
    result = TuningResult(case.layers, 1e-2, 1e-2, None, 0.0, [], True, {})
    first, second = view.closing([result], "tunewright tune .", 9)
    assert first.startswith("gained: 1.000x; left: 4 layers, ") and second == "next: tunewright tune . --budget 30s"


def ended(case: Case, gain: Ratio | None = None, stopped: bool = False) -> str:
    return view.summary(TuningResult(case.layers, 1e-2, 8e-3, gain, 0.0, [], stopped, {}))


def test_the_end_says_what_had_no_time():
    case = Case()
    for layer in case.layers[1:3]:
        layer.skipped = "no time was left for it"
    seems = "nothing was changed; 1 layer may have a faster kernel: more time would tell"
    assert ended(case) == f"{seems}; no time was left to search 2 layers"
    case.layers[0].outcome = session.Outcome(case.layers[0].present, False, "0 of 2 seem faster")
    assert ended(case) == "nothing is faster than what is used already; no time was left to search 2 layers"
    case.layers[0].outcome = None
    assert ended(case) == "nothing was searched; no time was left to search 2 layers"


def test_what_was_not_begun_is_named():
    case = Case()
    result = TuningResult(case.layers, 1e-2, 8e-3, None, 0.0, [], False, {})
    assert view.unsearched(result) == ""
    for one in case.layers:
        one.skipped = "no time was left for it"
    names = [view.title(one) for one in sorted(case.layers, key=lambda one: -one.hope)]
    assert view.unsearched(result) == f"not begun: {', '.join(names[:3])} and 1 more layer"
    case.layers[0].skipped = ""
    names.remove(view.title(case.layers[0]))
    assert view.unsearched(result) == f"not begun: {', '.join(names)}"


def test_a_search_that_compared_few_does_not_say_that_nothing_is_faster():
    case = Case()
    first = case.layers[0]
    first.outcome = session.Outcome(first.present, False, "open: 1 of 9 candidates were compared", is_open=True)
    assert view.outcome(first) == "open: few were compared"
    assert ended(case).startswith("nothing faster was found; 1 layer open, because time was short")
    first.outcome = session.Outcome(first.present, False, "nothing else is near: 9 of 9 candidates were compared")
    assert view.outcome(first) == "nothing is faster"
    assert ended(case) == "nothing is faster than what is used already"


def test_the_end_of_a_network_that_was_not_compared():
    case = Case()
    first = case.layers[0]
    first.chosen = first.choice.solver.id, Config({"n": 1})
    first.network = {first.present: Ratio.one(), first.chosen: Ratio(2.0, 1.9, 2.1, 9)}
    text = "1 layer changed, 10.00 -> 8.00 ms promised: whole networks were not compared; stopped early"
    assert ended(case, stopped=True) == text
    assert ended(case, Ratio(1.2, 1.1, 1.3, 20)).startswith("10.00 -> 8.00 ms, 1.200 times as fast (1.100 to 1.300")
    assert "(0.700 to 3.000 in 16 pairs, within noise)" in ended(case, Ratio(1.3, 0.7, 3.0, 16))


def test_a_long_config_leaves_the_layers_readable(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    case = Case()
    first = case.layers[0]
    config = {"band": 8, "form": "fused", "items": 1, "nb": 3, "tile": 4, "ur": 4, "another": 12345, "last": 7}
    first.chosen = "opencl.conv_winograd.shape", Config(config)
    first.network = {first.present: Ratio.one(), first.chosen: Ratio(3.6, 3.5, 3.7, 9)}
    view.show(TuningResult(case.layers, 1e-2, 8e-3, Ratio(1.2, 1.1, 1.3, 20), 0.0, [], False, {}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "share", "ms", "gain", "kernel"]
    assert lines[2].split()[:4] == ["first", "40%", "4.00", "3.60x"]
    assert "last=7" in " ".join(lines) and max(map(len, lines[:-1])) <= 80

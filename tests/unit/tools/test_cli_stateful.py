"""``--stateful`` of `run` and `benchmark`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tunewright
from device.runtime.test_stateful_requests import DECODER, PAIRS, decoding
from tunewright import tools


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "decoder.onnx").write_bytes(DECODER)
    return str(tmp_path / "decoder.onnx")


def test_run_goes_on_for_some_steps_and_from_what_was_saved(model, tmp_path, capsys) -> None:
    theirs, ids = decoding(), {"ids": np.array([[7], [3]])}
    options = ["-i", "ids=[[7],[3]]", "--stateful", "auto", "-o", str(tmp_path / "out")]
    assert tools.execute(["run", model, *options, "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert "past_k0   float32[2,4,4,8]   k0" in shown
    for _ in range(3):
        theirs.step(ids)
    np.testing.assert_allclose(np.load(tmp_path / "out" / "logits.npy"), theirs.step(ids)["logits"], atol=1e-4)
    saved = [f"{name}={tmp_path / 'out' / output}.npy" for name, output in PAIRS.items()]
    more = [part for text in saved for part in ("-i", text)]
    assert tools.execute(["run", model, *options, *more]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "out" / "logits.npy"), theirs.step(ids)["logits"], atol=1e-4)
    named = ",".join(f"{name}={output}" for name, output in PAIRS.items())
    assert tools.execute(["run", model, "--stateful", named, "--no-save"]) == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["run", "--stateful", "past=k0"], "there is no input 'past'"),
        (["run", "--stateful", "past_k0"], "'past_k0' is not INPUT=OUTPUT"),
        (["run", "--stateful", "a=b,a=c"], "input 'a' is named twice"),
        (["run", "--stateful", ","], "no states are named"),
        (["run", "--steps", "3"], "--steps: needs --stateful"),
        (["run", "--stateful", "auto", "-d", "BATCH:CPU.HOST(2)"], "runs requests together"),
        (["benchmark", "--sequence", "3"], "--sequence: needs --stateful"),
        (["benchmark", "--stateful", "auto", "--sweep"], "--stateful: does not apply to --sweep"),
        (["benchmark", "--stateful", "auto", "--api", "async", "-n", "2"], "make a request for each sequence"),
    ],
)
def test_mistakes_exit_with_2_and_say_what_is_wrong(options, what, model, capsys) -> None:
    assert tools.execute([options[0], model, *options[1:]]) == 2
    told = capsys.readouterr()
    assert what in told.err and "Traceback" not in told.err


def test_benchmark_begins_sequences_anew(model, tmp_path, capsys, monkeypatch) -> None:
    from tunewright.runtime.requests.stateful import StatefulRequest

    lengths = []
    run = StatefulRequest.run

    def counted(self, *given):
        made = run(self, *given)
        lengths.append(self.query_state()[0].state.shape[2])
        return made

    monkeypatch.setattr(StatefulRequest, "run", counted)
    report = tmp_path / "report.json"
    options = ["--stateful", "auto", "--sequence", "3", "-n", "8", "-w", "2", "-i", "ids=[[1]]"]
    assert tools.execute(["benchmark", model, *options, "--report", str(report)]) == 0
    assert lengths == [1, 1, 2, 1, 2, 3, 1, 2, 3, 1, 2]
    found = json.loads(report.read_text())
    assert found["states"] == PAIRS and found["sequence"] == 3 and found["inferences"] == 8
    assert found["data"]["past_k0"] == "a state, zeros at first"


def test_python_has_the_same() -> None:
    request = tunewright.Core().compile_model(DECODER, stateful=PAIRS).create_infer_request()
    assert isinstance(request.query_state()[0], tunewright.VariableState)

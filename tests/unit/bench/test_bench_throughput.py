"""`bench/throughput.py`: its ratios are what they are called, and it says which ways there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


def test_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import throughput

    def row(rates: list[float], cores: float) -> dict[str, list[float]]:
        return {"rates": rates, "rates_by_processor_time": [rate / cores for rate in rates]}

    rows = {
        "one": row([10.0, 20.0, 40.0], 1.0), "streams": row([16.0, 40.0, 72.0], 1.6), "openvino": {"failed": "no"},
        "onnxruntime": row([8.0, 20.0, 36.0], 0.5),
    }  # fmt: skip
    found = throughput.ratios(rows)
    assert found == {
        "streams / one": 1.8, "streams / the best other": 2.0,
        "streams / the best other, by processor time": pytest.approx(2.0 * 0.5 / 1.6),
    }  # fmt: skip
    rows["openvino"] = row([16.0, 40.0, 72.0], 4.0)
    found = throughput.ratios(rows)
    assert found["streams / the best other"] == 1.0, "each by itself: turns of two ways belong together"
    assert found["streams / the best other, by processor time"] == pytest.approx(0.625)
    del rows["onnxruntime"], rows["openvino"], rows["one"]
    assert throughput.ratios(rows) == {}


def test_an_unknown_way() -> None:
    command = [sys.executable, str(BENCH / "throughput.py"), "silero", "--ways", "one,fast"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "there is no way 'fast'; they are one, streams" in done.stderr

"""`bench/hetero.py`: its branches are cut as it says, and its figures are what they are called."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from tunewright import Core

FILE = Path(__file__).parents[3] / "bench" / "hetero.py"


def test_branches_on_two_devices(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_hetero", FILE)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    core = Core({"USER_DB_PATH": str(tmp_path), "CPU_THREADS_NUM": 1, "JOIN_LAUNCHES": "NO"})
    proto = bench.two_branches(16, 28, 2)
    made = bench.by_hand(core, proto)
    convolutions = {name: made.affinity[name] for name, op in made.nodes if op == "Conv"}
    assert list(convolutions.values()) == ["CPU"] * 3 + ["CPU.NATIVE"] * 2
    x = np.random.default_rng(0).standard_normal((1, 3, 28, 28)).astype(np.float32)
    expected = core.compile_model(proto, "CPU")({"x": x})["y"]
    np.testing.assert_allclose(made({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)
    assert bench.ratio(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0])) == {
        "median": 2.0, "low": 2.0, "high": 2.0, "minima": 2.0
    }  # fmt: skip

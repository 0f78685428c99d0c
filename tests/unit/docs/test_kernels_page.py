"""The example in docs/kernels.md is a kernel that works."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Problem

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    device = open_device("CPU")
    for size in (1, 5000, 12288):
        type = TensorType(DType.FLOAT32, (size,))
        problem = Problem("example::Twice", (type,), (type,), {}, constant=(False,))
        x = np.arange(size, dtype=np.float32)
        for solver in names["SOLVERS"]:
            assert solver.why_not(problem, device.target) is None
            fused = replace(problem, epilogue=(Fused("Relu", (~0,)),))
            assert solver.why_not(fused, device.target) == "it computes no fused steps"
            queue = device.queue()
            (y,) = solver.compile(problem, {}, device).run(queue, [x], [None])
            queue.finish()
            np.testing.assert_array_equal(y, 2 * x)

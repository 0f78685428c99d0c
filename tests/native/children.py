"""Processes of their own, for what would harm the one that runs the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]

#: a network of some steps, and what it makes of `x`; in children and here
NETWORK = """
import numpy as np
from onnx import parser
import tunewright
rng = np.random.default_rng(0)
text = '''<ir_version: 10, opset_import: ["" : 21]> g (float[64, 256] x, float[256, 256] w) => (float[64, 256] y) {
    a = MatMul(x, w) b = Softmax(a) c = MatMul(b, w) d = Tanh(c) y = Add(d, x) }'''
x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 256), (256, 256)))
def expected():
    a = x @ w
    e = np.exp(a - a.max(1, keepdims=True))
    return np.tanh(e / e.sum(1, keepdims=True) @ w) + x
def load(**config):
    return tunewright.Core(config).compile_model(parser.parse_model(text), "CPU").create_infer_request()
def right(request):
    return bool(np.allclose(request.infer({"x": x, "w": w})["y"], expected(), rtol=1e-3, atol=1e-3))
"""


def python(
    code: str, *arguments: object, within: Sequence[str] = (), timeout: float = 300, **environment: str | None
) -> Any:
    """What a child prints last, as JSON. It must end well; ``within``: a command that runs it."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)]), "OPENBLAS_NUM_THREADS": "1"}
    for name, value in environment.items():
        given.pop(name, None)
        if value is not None:
            given[name] = value
    done = subprocess.run(
        [*within, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], env=given, capture_output=True,
        text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert not done.returncode, f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])

"""Every kernel of Triton that other tests interpret, compiled for sm_90: the interpreter takes more than Triton does.

A shape that is launched with nothing to do launches nothing; so does a call of a vendor's library alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

TESTS = Path(__file__).parents[1]
#: its own process: in this one Triton may interpret
SCRIPT = """
import importlib, json, os, sys
import triton.language  # compiled, whatever the modules below ask for
from gpus import Crossed
from tunewright.devices import kernel_cache
from tunewright.errors import ExecutionError
from tunewright.solvers.base import solvers
from tunewright.solvers.triton.source.compile_many import build_all
from tunewright.testing.kernelcheck import Case, candidates

cases = {}
for name in sys.argv[2:]:
    module = importlib.import_module(f"conformance.{name}")
    tables = [table for table in vars(module).values() if isinstance(table, dict)]
    cases |= {f"{name} {key}": case for table in tables for key, case in table.items() if isinstance(case, Case)}
os.environ.pop("TRITON_INTERPRET", None)
device, wanted, silent = Crossed("GPU.80"), {}, set()
for name, case in cases.items():
    problem = case.problem()
    for solver in solvers():
        if solver.language == "cuda" and solver.why_not(problem, device.target) is None:
            for config in candidates(solver, problem, device, int(sys.argv[1])):
                with kernel_cache.using(None):
                    found = solver.compile(problem, config, device).programs(90)
                wanted.update((one, f"{name}: {solver.id} {dict(config)}") for _, one in found)
                if not found and solver.id.startswith("triton.") and all(t.size for t in problem.outputs):
                    silent.add(f"{name}: {solver.id}")
made, error = {}, ""
try:
    build_all(list(wanted), made.__setitem__)
except ExecutionError as first:
    error = str(first)
failed = [about for one, about in wanted.items() if one not in made]
print(json.dumps({"cases": len(cases), "made": len(made), "failed": failed, "error": error, "silent": sorted(silent)}))
"""


@pytest.mark.soak
def test_every_kernel_compiles() -> None:
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_kernels_cuda*.py") if path != Path(__file__))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(TESTS / "faults" / "gpus"), str(TESTS), *(path or os.getcwd() for path in sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "2", *names], env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == [] and found["silent"] == [], found["error"]
    assert found["cases"] > 100 and found["made"] > 100

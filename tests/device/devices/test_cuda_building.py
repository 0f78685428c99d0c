"""COMPILATION_NUM_THREADS, GPU_HOST_TASK_PRIORITY and SOURCES_DUMPS_DIR where Triton compiles, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

CODE = """
import json, os, sys
from tunewright.devices import build_options as building
from tunewright.settings import Settings
from tunewright.solvers.triton.source import compile, compile_many as pool
from tunewright.solvers.triton.source.text import HEAD
text = HEAD + "@triton.jit\\ndef kernel(x, y):\\n    at = tl.arange(0, 64)\\n    tl.store(y + at, tl.load(x + at) + "
wanted = [
    compile.Wanted(f"{text}{k})\\n", "kernel", ("*fp32 16", "*fp32 16"), (), (), 90) for k in range(3)
]
seen, settle = [], pool._Side.settle
def noted(self, priority):
    settle(self, priority)
    seen.append(os.getpriority(os.PRIO_PROCESS, self._child.pid))
pool._Side.settle = noted
owner = compile.Compiled.__new__(compile.Compiled)
owner.kept = {}
with building.using(Settings.make(json.loads(sys.argv[1]))):
    compile.obtain([(owner, one) for one in wanted], None, pool.build_all)
print(json.dumps({"seen": seen, "kept": len(owner.kept)}))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("config", "processes", "nice"),
    [({"GPU_MAX_NUM_THREADS": 1}, 0, 0), ({"GPU_MAX_NUM_THREADS": 1, "GPU_HOST_TASK_PRIORITY": "LOW"}, 1, 10),
     ({"GPU_MAX_NUM_THREADS": 2, "MODEL_PRIORITY": "LOW"}, 2, 10), ({"GPU_MAX_NUM_THREADS": 2}, 2, 0)],
)  # fmt: skip
def test_kernels_are_built_as_settings_say(tmp_path: Path, config, processes, nice) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "TRITON_CACHE_DIR": str(tmp_path / "triton")
    }  # fmt: skip
    sources = tmp_path / "sources"
    given = json.dumps(config | {"SOURCES_DUMPS_DIR": str(sources)})
    child = subprocess.run(
        [sys.executable, "-c", CODE, given], env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == {"seen": [min(19, mine + nice)] * processes, "kept": 3}
    texts = [path.read_text() for path in sorted(sources.iterdir())]
    assert len(texts) == 3 and all("def kernel" in text for text in texts)

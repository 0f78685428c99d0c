"""Every example runs as it is, in a process of its own, and says what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
#: what must be in their output; one that nobody expects anything of has to say something
SAID = {
    "hetero.py": [r"found +runs on CPU\.HOST", r"drawn: hetero_affinity\.dot, hetero_subgraphs\.dot", "by measurement"],
    "sync.py": [r"x: float32\[1,3,64,64\]", r"picture 2: class \d"],
    "pictures.py": [r"red picture: \[ 2\.249 +-2\.036 +-1\.804\]", r"a part of it: \[ 2\.249"],
    "async_queue.py": [r"100 results, all as numpy has them"],
    "overlap.py": [r"overlapped +\d+ frames per second", "the same results: True"],
    "throughput_multi.py": [
        r"requests keep CPU and CPU\.HOST busy",
        "300 right results, now from CPU\n",
        "AUTO: 256 numbers from CPU",
        "BATCH: 300 right results, 8 requests",
    ],
    "generate.py": [
        r"ids: int64\[batch,n\] -> logits",
        r"\d tokens per second",
        r"past_k0: 203 rows in use",
        r"the same text after reset_state: True",
        r"another: .{40}",
    ],
    "throughput.py": [r"as measured +\d+ streams, \d+ requests: +\d+ inferences per second"],
}


def test_there_are_examples():
    assert set(SAID) <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    environment = {
        **os.environ,
        "TUNEWRIGHT_USER_DB_PATH": str(tmp_path / "kb"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(FOLDER / name)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for text in SAID.get(name, [r"\w"]):
        assert re.search(text, done.stdout), done.stdout

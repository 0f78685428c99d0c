"""What `tunewright kb` prints, to the letter, at 80 columns. ``ACCEPT=1`` writes the files anew."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from helpers.kb_records import fault, measurement, problem
from tunewright import tools
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.key import Where
from tunewright.knowledge.open_databases import open_user
from tunewright.knowledge.system import write_lines
from tunewright.search.base import Status
from tunewright.settings import Settings
from tunewright.solvers.base import Problem

FOLDER = Path(__file__).parent
CPU = Where(
    "cpu", "Example CPU", 32, "x86-64-v4; 32 registers of 64 bytes; c", "native", "compiler zig 0.17.0",
    "-O3 -std=gnu17",
)  # fmt: skip
OLDER = dataclasses.replace(CPU, software="compiler zig 0.16.0")
GPU = Where("gpu", "Example GPU", 132, "example; 64 registers of 4 bytes; c", "Example OpenCL", "driver 1.0", "-w")
CASES = {
    "kb_list": ["list"],
    "kb_list_filtered": ["list", "--op", "Softmax", "--layer", "user"],
    "kb_faults": ["list", "--faults"],
    "kb_stats": ["stats"],
    "kb_show": ["show", "f32[1,64,56,56] | Relu", "--device", "NULL"],
    "kb_path": ["path"],
    "kb_diff": ["diff", "user", "colleague.jsonl"],
    "kb_export": ["export", "team.jsonl", "--op", "Conv"],
    "kb_merge": ["merge", "colleague.jsonl", "--any-processor", "--dry-run"],
    "kb_damaged": ["import", "damaged.jsonl", "--any-processor", "--dry-run"],
    "kb_prune": ["prune", "--superseded", "--faults", "--dry-run"],
    "kb_log": ["log"],
}


def conv(channels: int, size: int, *fused: str) -> Problem:
    x = TensorType(DType.FLOAT32, (1, channels, size, size))
    w = TensorType(DType.FLOAT32, (channels, channels, 3, 3))
    steps = tuple(Fused(op, (~0,)) for op in fused)
    return Problem("Conv", (x, w), (x,), {"pads": [1, 1, 1, 1]}, steps, 0, (False, True))


@pytest.fixture
def bases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.setenv("TUNEWRIGHT_SYSTEM_DB_PATH", str(tmp_path / "system"))
    relu, blocked = conv(64, 56, "Relu"), "opencl.conv_blocked"
    default = (blocked, {"nb": 2, "ur": 6, "run": 16})
    records = [
        measurement(relu, CPU, blocked, {"nb": 4, "ur": 7, "run": 28}, (1.42, 1.38, 1.47), default=default),
        measurement(relu, CPU, blocked, {"nb": 4, "ur": 6, "run": 28}, (1.21, 1.17, 1.24), default=default),
        measurement(
            relu, CPU, blocked, {"nb": 4, "ur": 7, "run": 28}, (1.55, 1.5, 1.6), default=default,
            date="2026-09-01T08:00:00Z",
        ),
        measurement(conv(128, 28), OLDER, blocked, {"nb": 2, "ur": 4, "run": 28}, (1.18, 1.1, 1.25), default=default),
        measurement(
            problem("Softmax", (8, 1000)), CPU, "opencl.softmax", {"lanes": 16, "slab": 256}, (1.01, 0.97, 1.04)
        ),
        fault(relu, CPU, blocked, {"nb": 8, "ur": 7, "run": 56}, Status.WRONG, "an element was never written"),
        fault(conv(128, 28), CPU, blocked, {"nb": 8, "ur": 4, "run": 28}, Status.CRASHED, "signal 11"),
    ]  # fmt: skip
    user = open_user(Settings.from_environment())
    user.add(records)
    (tmp_path / "system").mkdir()
    write_lines(
        tmp_path / "system" / "system.jsonl",
        [
            measurement(conv(256, 14), GPU, "opencl.conv_plain", {"tile": 64, "slab": 32}, (2.31, 2.2, 2.4)),
            measurement(conv(256, 14), CPU, blocked, {"nb": 4, "ur": 7, "run": 14}, (1.3, 1.25, 1.36), default=default),
        ],
    )
    colleague = measurement(relu, CPU, blocked, {"nb": 2, "ur": 7, "run": 28}, (1.61, 1.55, 1.66), default=default)
    write_lines(
        tmp_path / "colleague.jsonl", [*records[:2], colleague, measurement(conv(512, 7), GPU, "opencl.conv_plain")]
    )
    lines = (tmp_path / "colleague.jsonl").read_text().splitlines()
    (bad,) = (line for line in lines if records[1].digest in line[:80])
    lines.remove(bad)
    (tmp_path / "damaged.jsonl").write_text("\n".join([*lines[:2], bad.replace("1.", "2."), "{", lines[2]]))
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_output(case, bases, capsys):
    if case == "kb_log":
        tools.execute(["kb", "merge", "system", "--any-processor"])
        tools.execute(["kb", "prune", "--superseded"])
        capsys.readouterr()
    code = tools.execute(["kb", *CASES[case]])
    captured = capsys.readouterr()
    shown = [f"'{word}'" if " " in word else word for word in CASES[case]]
    lines = [f"$ tunewright kb {' '.join(shown)}", *captured.out.splitlines(), *captured.err.splitlines()]
    text = "\n".join(line.rstrip() for line in [*lines, f"exit code {code}"]) + "\n"
    text = text.replace(str(bases), "~")
    if case == "kb_log":  # the time of the test
        text = re.sub(r"(?m)^\d{4}-\S+", "2026-11-15T12:00:00Z", text)
    if case == "kb_path":  # how large SQLite makes a file
        text = re.sub(r"[\d.]+ KiB", "... KiB", text)
    file = FOLDER / f"{case}.txt"
    if os.environ.get("ACCEPT"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "run with ACCEPT=1 if the change is meant"


@pytest.mark.parametrize("case", ["kb_list", "kb_faults", "kb_diff"])
def test_the_page_shows_what_is_printed(case):
    page = FOLDER.parents[2] / "docs" / "knowledge-base.md"
    text = (FOLDER / f"{case}.txt").read_text(encoding="utf-8").rpartition("exit code")[0]
    assert text in page.read_text(encoding="utf-8")

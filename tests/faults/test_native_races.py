"""The thread pool under ThreadSanitizer: zig's clang has no runtime for it, so a clang of the system compiles it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from native.harness import native, stress_text

pytestmark = [native, pytest.mark.soak]
CLANGS = [name for name in ("clang", *(f"clang-{n}" for n in range(40, 14, -1))) if shutil.which(name)]


def compiled(text: str, seeds: int, folder: Path) -> Path:
    """The program; skips where no clang can make one."""
    source, program = folder / "stress.c", folder / "stress"
    source.write_text(text, encoding="utf-8")
    said = "there is no clang on PATH"
    for name in CLANGS:
        flags = ["-O1", "-g", "-std=gnu17", "-fsanitize=thread", f"-DMAIN={seeds}"]
        command = [name, *flags, source, "-o", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if not done.returncode:
            return program
        said = done.stderr[-300:]
    pytest.skip(f"ThreadSanitizer needs clang and its runtime (apt install clang libclang-rt-dev): {said}")


def races(program: Path) -> tuple[int, set[str], str]:
    done = subprocess.run([program], capture_output=True, text=True, timeout=900, check=False)
    found = set(re.findall(r"SUMMARY: ThreadSanitizer: (\w[\w -]*\w)", done.stderr))
    return done.returncode, found, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("slots", [64, 2])
def test_nothing_races(tmp_path: Path, slots: int) -> None:
    code, found, said = races(compiled(stress_text(slots), 100, tmp_path))
    assert not code and not found and "wrong 0" in said, said


def test_a_race_would_be_found(tmp_path: Path) -> None:
    """Without the order that a report of items makes, a step may not see the one before."""
    text = stress_text()
    assert "__atomic_add_fetch(p, v, __ATOMIC_SEQ_CST)" in text
    broken = text.replace("__atomic_add_fetch(p, v, __ATOMIC_SEQ_CST)", "__atomic_add_fetch(p, v, __ATOMIC_RELAXED)")
    code, found, _ = races(compiled(broken, 8, tmp_path))
    assert code and "data race" in found

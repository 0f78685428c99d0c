"""The Python of the README and the tutorial runs as it is written, and prints what the pages show."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_example_of_the_page_prints_what_it_shows(page: str, folder, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (shown,) = {tuple(map(float, pair)) for pair in re.findall(r"\[\[ *(-?[\d.]+) +(-?[\d.]+)\]\]", text)}
    (copied,) = re.findall(r"cp ~/\.cache/tunewright-models/(\S+) table\.onnx", text)
    package = folder("table-cls")
    assert copied.startswith(f"{package.name}/")
    shutil.copy(package.parent / copied, tmp_path / "table.onnx")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = [float(number) for number in re.findall(r"-?\d+\.\d+", done.stdout)]
    assert printed == pytest.approx(shown, rel=1e-3)

"""The wheel holds the whole package, and works outside of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel's contents, built without the network."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; it is in the test extra")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def python(unpacked, folder, *arguments):
    """A Python that sees the unpacked wheel, and no checkout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"PYTHONPATH": str(unpacked)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=True
    )


def test_every_file_of_the_package_is_in_it(unpacked):
    source = ROOT / "src" / "tunewright"
    files = {
        f.relative_to(source)
        for f in source.rglob("*")
        if f.is_file() and "__pycache__" not in f.parts and f.suffix != ".pyc"
    }
    packed = {f.relative_to(unpacked / "tunewright") for f in (unpacked / "tunewright").rglob("*") if f.is_file()}
    assert files == packed
    (info,) = unpacked.glob("*.dist-info")
    assert list(info.rglob("LICENSE"))
    assert "tunewright = tunewright.tools:main" in (info / "entry_points.txt").read_text(encoding="utf-8")


def test_it_runs_a_model_outside_of_the_checkout(unpacked, tmp_path):
    script = """
import numpy as np, tunewright, onnx
from tunewright.testing.models import transformer
onnx.save(transformer(layers=1), "m.onnx")
x = np.ones((1, 16, 64), np.float32)
print(tunewright.__file__)
print(tunewright.Core().compile_model("m.onnx")({"x": x})["y"].shape)
"""
    done = python(unpacked, tmp_path, "-c", script)
    where, shape = done.stdout.split("\n")[:2]
    assert Path(where).is_relative_to(unpacked) and shape == "(1, 8)"
    done = python(unpacked, tmp_path, "-m", "tunewright", "run", "m.onnx")
    assert (tmp_path / "m.outputs" / "y.npy").exists() and "float32[1,8]" in done.stdout

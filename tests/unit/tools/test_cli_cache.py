"""`tunewright cache`: where compiled kernels are, what is there, away with them; and what `benchmark` says of it."""

from __future__ import annotations

import json
import os

import pytest
from onnx import parser, save

from tunewright.devices import kernel_cache
from tunewright.devices.kernel_cache import KernelCache


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("TUNEWRIGHT_CACHE_DIR", "TUNEWRIGHT_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kernel_cache, "_caches", {})


@pytest.fixture
def filled(tmp_path):
    """Three entries for two devices, a day between the first and the last use."""
    cache = KernelCache(tmp_path / "user" / "tunewright" / "kernels", 1 << 20)
    for k, label in enumerate(("CPU: x86-64-v3", "CPU: x86-64-v3", "Intel: [bold]y")):
        cache.put(f"key {k}", {"program": bytes(1000)}, label)
        os.utime(cache._path(f"key {k}"), (1e9 + k * 43200,) * 2)
    return cache


def test_the_folder(call, tmp_path):
    assert call("cache", "path") == (0, f"{tmp_path}/user/tunewright/kernels\n", "")
    assert call("cache", "path", "--config", f"CACHE_DIR={tmp_path}/x") == (0, f"{tmp_path}/x\n", "")
    assert not (tmp_path / "user").exists() and not (tmp_path / "x").exists(), "asking writes nothing"


def test_what_is_there(call, filled):
    code, out, err = call("cache", "stats")
    assert (code, err) == (0, "")
    assert str(filled.folder) in out.replace("\n", "")
    assert "3 programs" in out and "of at most 512 MiB" in out and "last used between 2001-09-0" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["CPU:", "x86-64-v3", "2"] in [row[:3] for row in rows]
    assert ["Intel:", "[bold]y", "1"] in [row[:3] for row in rows], "brackets are brackets"


def test_what_is_there_as_json(call, filled):
    code, out, err = call("cache", "stats", "--json", "--config", "CACHE_BYTES=5000000")
    report = json.loads(out)
    assert (code, err) == (0, "") and report["schema"] == "tunewright.cache/1"
    assert report["folder"] == str(filled.folder) and report["limit_bytes"] == 5_000_000
    assert report["entries"] == 3 and report["bytes"] == sum(p.stat().st_size for p in filled.folder.iterdir())
    assert report["oldest"] < report["newest"]
    assert {name: about["entries"] for name, about in report["devices"].items()} == {
        "CPU: x86-64-v3": 2, "Intel: [bold]y": 1
    }  # fmt: skip


def test_nothing_is_there(call, tmp_path):
    code, out, err = call("cache", "stats")
    assert code == 0 and "0 programs, 0 B of at most 512 MiB" in out and err == ""
    assert json.loads(call("cache", "stats", "--json")[1])["oldest"] is None
    code, out, err = call("cache", "clear")
    assert code == 0 and out.startswith("removed 0 programs (0 B)") and not (tmp_path / "user").exists()


def test_all_is_removed(call, filled):
    (filled.folder / "letter.txt").write_text("mine")
    code, out, err = call("cache", "clear")
    assert (code, err) == (0, "") and out.startswith("removed 3 programs (3.") and "are left" not in out
    assert os.listdir(filled.folder) == ["letter.txt"]


def test_what_is_there_for_a_device_is_removed(call, filled):
    code, out, _ = call("cache", "clear", "--device", "X86-64")
    assert code == 0 and out.startswith("removed 2 programs") and "1 are left" in out.replace("\n", " ")
    assert [entry.label for entry in filled.entries()] == ["Intel: [bold]y"]


@pytest.mark.parametrize("command", ["path", "stats", "clear"])
def test_a_cache_that_is_off_is_told(call, monkeypatch, command):
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", "")
    code, out, err = call("cache", command)
    assert (code, out) == (2, "") and "there is no kernel cache: CACHE_DIR is empty" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["path", "stats", "clear"])
def test_help_has_an_example(call, command):
    code, out, _ = call("cache", command, "--help")
    assert code == 0 and "Example: " in out
    assert command in call("cache", "--help")[1] and "cache" in call("--help")[1]


def test_benchmark_tells_hits_and_misses(call, tmp_path):
    model = tmp_path / "model.onnx"
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[4] x) => (float[4] y) { a = Exp(x) y = Tan(a) }'
    save(parser.parse_model(text), model)
    code, out, _ = call("benchmark", model, "-n", 1, "--json", tmp_path / "report.json")
    counters = json.loads((tmp_path / "report.json").read_text())["kernel_cache"]
    hits, misses = counters["hits"], counters["misses"]
    told = f"{hits} {'hit' if hits == 1 else 'hits'}, {misses} {'miss' if misses == 1 else 'misses'}"
    assert code == 0 and f"kernel cache: {told}" in out
    assert set(counters) == {"hits", "misses", "stores", "evictions", "rejected", "errors"}
    code, out, _ = call("benchmark", model, "-n", 1, "--config", "CACHE_DIR=", "--json", "-")
    assert code == 0 and json.loads(out)["kernel_cache"] is None
    assert "kernel cache: off" in call("benchmark", model, "-n", 1, "--config", "CACHE_DIR=")[1]

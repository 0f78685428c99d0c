"""Shell completion: what Tab offers, through the machinery that shells call."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys

import pytest

from tunewright import settings, tools
from tunewright.plugins.single import visible
from tunewright.settings import Settings
from tunewright.tools.shared import complete


@pytest.fixture
def tab(monkeypatch, capsys):
    """What bash would offer for the last of these words, which it takes apart at ``:`` and ``=``."""

    log = logging.getLogger("tunewright")
    monkeypatch.setattr(log, "handlers", list(log.handlers))  # it adds its own, for the rest of the process
    monkeypatch.setattr(log, "level", log.level)

    def run(*words):
        monkeypatch.setenv("_TUNEWRIGHT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("tunewright", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as end:
            tools.main([])
        assert end.value.code == 0
        return capsys.readouterr().out.split()

    return run


def test_commands_options_and_their_values(tab):
    assert tab("bench") == ["benchmark"]
    assert tab("benchmark", "--lat") == ["--latency-bound"]
    assert tab("benchmark", "--hint", "") == ["latency", "throughput", "cumulative_throughput", "none"]


def test_devices(tab):
    assert set(visible(alternatives=True)) | {"AUTO", "HETERO:", "MULTI:"} <= set(tab("benchmark", "-d", ""))
    assert "CPU" in tab("benchmark", "-d", "CP")
    assert tab("benchmark", "-d", "HETERO", ":", "CP") == ["CPU"]
    assert complete.devices("MULTI:CPU,") == [f"MULTI:CPU,{name}" for name in visible() if name != "CPU"]


def test_settings_and_their_values(tab):
    assert set(tab("benchmark", "m.onnx", "-c", "")) == {f"{row['key']}=" for row in Settings.describe()}
    assert tab("benchmark", "m.onnx", "-c", "PERF_C") == ["PERF_COUNT="]
    assert tab("benchmark", "m.onnx", "-c", "PERF_COUNT", "=") == ["YES", "NO"]
    assert tab("run", "m.onnx", "--config", "PERFORMANCE_HINT", "=", "THR") == ["THROUGHPUT"]
    assert "AUTO" in complete._values("NUM_STREAMS")
    assert complete.settings("NO_SUCH=") == []


def test_models(tab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for name in ("one.onnx", "two.onnx", "notes.txt", "more/three.onnx", ".hidden.onnx"):
        (tmp_path / name).touch()
    assert tab("benchmark", "") == ["one.onnx", "two.onnx", "more/"]
    assert tab("benchmark", "t") == ["two.onnx"]
    assert tab("benchmark", "more/") == ["more/three.onnx"]
    assert tab("benchmark", f"{tmp_path}/o") == [f"{tmp_path}/one.onnx"]
    assert tab("benchmark", "mo") == []  # only a folder: the shell goes into it
    assert tab("benchmark", "absent/x") == []


def test_words_are_put_together_as_they_were(monkeypatch):
    def words(line, at):
        monkeypatch.setenv("COMP_WORDS", line.replace(" ", "\n"))
        monkeypatch.setenv("COMP_CWORD", str(at))
        head = settings.rejoin_words()
        return head, os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])

    monkeypatch.setenv("_TUNEWRIGHT_COMPLETE", "complete_bash")
    assert words("t run -d HETERO : CPU,G", 5) == ("HETERO:", ["t", "run", "-d", "HETERO:CPU,G"], 3)
    assert words("t run -c A = B -d C", 7) == ("", ["t", "run", "-c", "A=B", "-d", "C"], 5)
    assert words("t run -c A =", 4) == ("A=", ["t", "run", "-c", "A="], 3)
    monkeypatch.setenv("_TUNEWRIGHT_COMPLETE", "source_bash")
    assert words("t run -c A =", 4) == ("", ["t", "run", "-c", "A", "="], 4)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_in_bash(tmp_path):
    """The script that --show-completion prints, in a real shell, for a command of that name."""
    command = tmp_path / "tunewright"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tunewright "$@"\n')
    command.chmod(0o755)
    script = (
        f'PATH="{tmp_path}:$PATH"\n'
        'eval "$(_TUNEWRIGHT_COMPLETE=source_bash tunewright)"\n'
        "COMP_WORDS=(tunewright benchmark m.onnx -c PERF_COUNT = Y) COMP_CWORD=6\n"
        '_tunewright_completion tunewright\necho "${COMPREPLY[*]}"\n'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "YES\n", done.stderr

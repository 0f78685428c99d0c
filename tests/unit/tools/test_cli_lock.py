"""`tunewright lock`, `tune --lock` and `--frozen` as a user meets them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tunewright import tools
from tunewright.tuning import knowledge_layers
from unit.package.test_extensions import FILES, MODEL, install, python
from unit.tuning.test_lockfile import network

Call = Callable[..., tuple[int, str, str]]
LOCK = "model.onnx.lock.json"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    knowledge_layers.warn.cache_clear()
    onnx.save(network(), "model.onnx")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = tools.execute(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def kernels(path: str = LOCK) -> dict[str, dict[str, object]]:
    (place,) = json.loads(Path(path).read_text())["places"]
    return dict(place["kernels"])


def test_lock_then_run_frozen(call: Call) -> None:
    code, out, _ = call("lock", "model.onnx")
    count = len(kernels())
    assert code == 0 and out == f"{count} kernels in {LOCK}: {count} new\n"
    before = Path(LOCK).read_bytes()
    assert call("lock", "model.onnx")[1] == f"{count} kernels in {LOCK}: {count} as before\n"
    assert Path(LOCK).read_bytes() == before
    for command in (["run", "--no-save"], ["benchmark", "-n", "1", "-w", "0"], ["explain", "--no-time"]):
        code, out, err = call(command[0], "model.onnx", "--frozen", *command[1:])
        assert code == 0, err
    assert "Layers by origin" in out and " lockfile" in out and " default" not in out
    code, out, err = call("run", "model.onnx", "--frozen", "--no-save", "--shape", "n=3")
    assert code == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"tunewright: node 'conv' (Conv): the model is frozen, and lockfile {LOCK} does not fit: it")
    assert "lock the model again with `tunewright lock`" in err
    code, out, _ = call("lock", "model.onnx", "--shape", "n=3")
    assert code == 0 and f"kernels in {LOCK}: " in out and " new" in out
    assert call("run", "model.onnx", "--frozen", "--no-save", "--shape", "n=3")[0] == 0
    assert call("run", "model.onnx", "--frozen", "--no-save")[0] == 0


def test_what_was_edited_by_hand(call: Call) -> None:
    call("lock", "model.onnx")
    text = Path(LOCK).read_text()
    data = json.loads(text)
    (conv,) = (e for e in data["places"][0]["kernels"].values() if "conv" in e["nodes"])
    conv["version"] = "0.5"
    Path(LOCK).write_text(json.dumps(data))
    code, _, err = call("run", "model.onnx", "--frozen", "--no-save")
    assert code == 2 and f"version '0.5' of solver {conv['solver']} is locked, and 1." in err
    code, _, err = call("run", "model.onnx", "--no-save", "-c", f"LOCK_FILE={LOCK}")
    assert code == 0  # the warning goes to the log, which `main` shows
    assert call("lock", "model.onnx")[1].endswith(f": 1 replaced, {len(kernels()) - 1} as before\n")
    assert Path(LOCK).read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "model.onnx", "--frozen"], f"lockfile {LOCK}: there is no such file (`tunewright lock MODEL` writes"),
        (["run", "model.onnx", "-c", "LOCK_FILE=model.onnx"], "lockfile model.onnx: is not JSON"),
        (["tune", "model.onnx", "-c", "FROZEN=YES"], "settings: FROZEN = YES: nothing is tuned"),
        (["tune", "dump.jsonl", "--lock"], "--lock: applies to models, not to dumps of problems"),
        (["lock", "model.onnx", "-c", "LOCK_FILE=nowhere/x.json"], "nowhere/x.json: cannot be written: there is no"),
        (["lock", "model.onnx", "-c", "LOCK_FILE=model.onnx"], "lockfile model.onnx: is not JSON"),
        (["lock", "gone.onnx"], "gone.onnx"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(call: Call, arguments: list[str], message: str) -> None:
    Path("dump.jsonl").write_text("")
    before = Path("model.onnx").read_bytes()
    code, out, err = call(*arguments)
    assert code == 2 and not out and message in err and err.count("\n") == err.count("note: ") + 1
    assert Path("model.onnx").read_bytes() == before and not Path(LOCK).exists()


def test_tune_locks_what_it_leaves_behind(call: Call) -> None:
    code, out, err = call(
        "tune", "model.onnx", "--budget", "1s", "--lock", "-c", "LOCK_FILE=other.json", "-c", "TUNE_RESULT_PATH="
    )
    assert code == 0, err
    assert f"{len(kernels('other.json'))} kernels in other.json: " in out and not Path(LOCK).exists()
    assert call("run", "model.onnx", "--no-save", "--frozen", "-c", "LOCK_FILE=other.json")[0] == 0


def test_lock_tunes_nothing(call: Call) -> None:
    code, _, err = call("lock", "model.onnx", "-c", "TUNING_MODE=TUNING_CREATE")
    assert code == 0 and "nothing is tuned or deleted here" in err and not Path("user").exists()


def test_an_extension_that_is_not_reproducible(tmp_path: Path) -> None:
    """Its solver is locked, with a note; a frozen model refuses it."""
    wild = FILES["solvers"].replace("    host = True\n", "    host = True\n    reproducible = False\n")
    install(tmp_path, "example", {"ops": FILES["ops"], "solvers": wild})
    made = python(tmp_path, "-c", MODEL + "onnx.save(model(), 'square.onnx')")
    assert made.returncode == 0, made.stderr
    locked = python(tmp_path, "-m", "tunewright", "lock", "square.onnx", "-d", "CPU.HOST")
    assert locked.returncode == 0 and "1 kernel in square.onnx.lock.json: 1 new" in locked.stdout
    assert "not reproducible, --frozen refuses it: 'it': example.square" in locked.stderr
    used = python(tmp_path, "-m", "tunewright", "run", "square.onnx", "-d", "CPU.HOST", "--no-save",
                  "-c", "LOCK_FILE=square.onnx.lock.json")  # fmt: skip
    assert used.returncode == 0, used.stderr
    frozen = python(tmp_path, "-m", "tunewright", "run", "square.onnx", "-d", "CPU.HOST", "--no-save", "--frozen")
    assert frozen.returncode == 2 and "solver example.square is not reproducible" in frozen.stderr
    assert "Traceback" not in frozen.stderr and frozen.stderr.startswith("tunewright: node 'it'")

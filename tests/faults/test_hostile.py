"""Every hostile model: an error of ours that names the culprit, or success, in time, and no look outside the folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from faults import hostile_control, hostile_files, hostile_values  # noqa: F401  (they register their cases)
from faults.hostile import CASES, SECRET, Case, external, model_of, weight
from faults.sandbox import SOURCE, Worker
from tunewright import Core, LimitError, ModelError
from tunewright.devices.kernel_cache import KernelCache
from tunewright.settings import Settings

#: what the interpreter, numpy, the kernel cache (whose names are digests) and the compiler may open for any model
KERNELS = KernelCache.of(Settings.from_environment())
ELSEWHERE = (sys.prefix, sys.base_prefix, str(SOURCE), "/proc/", "/sys/", "/dev/null",
             f"{tempfile.gettempdir()}/tunewright-",
             *([f"{KERNELS.folder}/"] if KERNELS else []))  # fmt: skip


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    one = Worker("-m", "faults.sandbox")
    yield one
    one.close()


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The model's folder, and a file outside of it."""
    folder, secret = tmp_path / "model", tmp_path / "outside" / "secret"
    folder.mkdir()
    secret.parent.mkdir()
    secret.write_bytes(SECRET)
    return folder, secret


def judge(case: Case, answer: dict[str, Any]) -> None:
    """Success where it is wanted, else one of our errors with the name in it."""
    if case.says:
        assert answer["outcome"] == "refused", answer
        assert case.says in answer["message"], answer["message"]
    else:
        assert answer["outcome"] == "ok", answer


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_hostile_model(case: Case, worker: Worker, places: tuple[Path, Path]) -> None:
    folder, secret = places
    path = folder / "model.onnx"
    path.write_bytes(case.build(folder, secret))
    answer = worker.call(path=str(path))
    judge(case, answer)
    if answer["seconds"] > case.seconds:  # once more: a processor that others share is slower
        answer = worker.call(path=str(path))
    assert answer["seconds"] <= case.seconds
    for opened in answer["opened"]:
        inside = os.path.dirname(opened) in ("", str(folder)) and os.path.basename(opened) not in (
            "",
            "..",
            secret.name,
        )
        assert inside or opened == str(folder) or opened.startswith(ELSEWHERE), f"opened {opened}"


def test_the_record_of_opened_files_is_one(worker: Worker, places: tuple[Path, Path]) -> None:
    """The test above would see a read outside of the folder: it sees those inside."""
    case = next(c for c in CASES if c.name == "honest_external_data")
    path = places[0] / "model.onnx"
    path.write_bytes(case.build(*places))
    assert {str(path), "sub", "data"} <= set(worker.call(path=str(path))["opened"])


CLI = ["path_traversal", "hard_link", "function_bomb", "cycle", "truncated", "conv_group_zero", "loop_that_never_ends",
       "constant_of_shape_2_40", "expand_2_40_at_run_time", "empty_file"]  # fmt: skip


@pytest.mark.parametrize("name", CLI)
def test_command_line_says_it_in_one_line(name: str, places: tuple[Path, Path]) -> None:
    folder, secret = places
    case = next(c for c in CASES if c.name == name)
    path = folder / "model.onnx"
    path.write_bytes(case.build(folder, secret))
    done = subprocess.run(
        [sys.executable, "-m", "tunewright", "run", str(path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr
    assert case.says in done.stderr


def test_nesting_beyond_what_a_file_can_hold() -> None:
    """A ModelProto made in memory may be deeper than protobuf would read."""
    with pytest.raises(LimitError, match="MAX_NESTING"):
        Core().read_model(hostile_control.if_model(300))


def test_bytes_have_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(bytes(24))
    monkeypatch.chdir(tmp_path)
    model = external("data")
    for source in (model, model.SerializeToString()):
        with pytest.raises(ModelError, match=r"'w'.*folder"):
            Core().read_model(source)


def test_limits_are_settings() -> None:
    """Each limit can be lowered, and the error names it."""
    chain = model_of([helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(5)], ["v0"], ["v5"])
    grow = helper.make_node("Expand", ["x", "s"], ["y"], name="grow")
    big = model_of([grow], ["x"], ["y"], [weight("s", [100, 2, 3])])
    for model, key, value in (
        (chain, "MAX_NODES", 4),
        (chain, "MAX_FILE_BYTES", 10),
        (big, "MAX_TENSOR_BYTES", 1000),
        (big, "MAX_MEMORY_BYTES", 8),
        (hostile_control.if_model(5), "MAX_NESTING", 4),
    ):
        with pytest.raises(LimitError, match=key):
            Core({key: value}).compile_model(model.SerializeToString())


@pytest.mark.parametrize("source", [None, 3, 2.5, ["model.onnx"]])
def test_what_is_no_model_at_all(source: Any) -> None:
    with pytest.raises(ModelError, match="is needed"):
        Core().read_model(source)


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "nul"])
def test_path_that_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(ModelError, match=r"model\.onnx"):
        Core().read_model(f"{path}\0" if kind == "nul" else path)

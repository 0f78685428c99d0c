"""The shape of the code: who may import whom, how large a module may be, what is public, what an import may cost."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "tunewright"
#: from the top down; what stands in one row are siblings, which never import each other
LAYERS = (
    ("__main__", "backend", "api"),
    ("tools", "testing"),
    ("core",),
    ("plugins",),
    ("runtime",),
    ("tuning",),
    ("solvers",),
    ("passes", "devices", "search", "frontend"),
    ("ops",),
    ("ir",),
    ("settings", "discovery"),
    ("errors", "_version"),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 600


def names(path: Path, root: Path = PACKAGE) -> tuple[str, ...]:
    """The parts of a module's name below the package; none for the package itself."""
    parts = path.relative_to(root).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path, root: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """(line, first part of the name inside the package) of everything that a module imports from the package."""
    here = ("tunewright", *names(path, root))
    package = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets: list[tuple[str, ...]] = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            targets = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        for target in targets:
            if target[0] == "tunewright" and len(target) > 1:
                yield node.lineno, target[1]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(names(p)) or "tunewright")
def test_a_layer_imports_only_what_stands_below_it(path: Path) -> None:
    if not names(path):
        return  # the package's own __init__ offers names of every layer, lazily
    mine = names(path)[0]
    assert mine in LEVEL, f"{mine} has no place in the layers"
    for line, target in imports(path):
        if target == mine or target not in LEVEL:
            continue
        assert LEVEL[target] > LEVEL[mine], f"{path.name}:{line} imports {target}, which does not stand below {mine}"


def test_the_rule_can_fail(tmp_path: Path) -> None:
    """The scan sees relative, absolute, nested and package imports."""
    path = tmp_path / "ops" / "base.py"
    path.parent.mkdir()
    path.write_text("from ..core import Core\nimport tunewright.runtime.plan\ndef f():\n    from .. import tools\n")
    assert [target for _, target in imports(path, tmp_path)] == ["core", "runtime", "tools"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(names(p)) or "tunewright")
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(names(p)) or "tunewright")
def test_what_all_names_is_there(path: Path) -> None:
    if "__all__" not in path.read_text(encoding="utf-8"):
        return
    module = importlib.import_module(".".join(("tunewright", *names(path))))
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None, name


#: modules that may call what settings.py alone may otherwise: reading the environment
ENVIRONMENT_READERS = {"settings"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(names(p)) or "tunewright")
def test_only_settings_reads_the_environment(path: Path) -> None:
    if names(path)[:1] and names(path)[0] in ENVIRONMENT_READERS:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in ("environ", "getenv"), f"line {node.lineno} reads the environment"


#: A kernel of Triton is a function of Python. This module makes it from a text that consists of numbers and of our own
#: table of expressions; nothing of a model's text is in it.
WRITES_KERNELS = ("solvers", "triton", "text")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(names(p)) or "tunewright")
def test_nothing_runs_code_from_data(path: Path) -> None:
    """No pickle, marshal, shelve, eval or exec anywhere: what is read is data."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            forbidden = {"eval", "exec", "__import__"} - ({"exec"} if names(path) == WRITES_KERNELS else set())
            assert node.func.id not in forbidden, f"line {node.lineno}"
        if isinstance(node, ast.Import):
            assert not {"pickle", "marshal", "shelve", "dill"} & {a.name for a in node.names}, f"line {node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant) and node.value.value is False, f"line {node.lineno}"


#: too slow, or not there without an extra: nothing that every user imports may load them
HEAVY = ("pyopencl", "torch", "triton", "onnxruntime", "openvino", "onnx", "typer", "rich", "matplotlib", "sklearn")


def loaded_after(statement: str) -> dict[str, float]:
    """The heavy modules that a fresh interpreter has after a statement, and the seconds that the statement took."""
    code = (
        f"import time, sys, json; t = time.perf_counter(); {statement}; t = time.perf_counter() - t;"
        f" print(json.dumps({{'seconds': t, **{{m: 1.0 for m in {HEAVY!r} if m in sys.modules}},"
        " **({'onnx.reference': 1.0} if 'onnx.reference' in sys.modules else {})}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_import_is_quick_and_light() -> None:
    found = loaded_after("import tunewright")
    seconds = min(found.pop("seconds"), *(loaded_after("import tunewright")["seconds"] for _ in range(3)))
    assert not found
    assert seconds <= 0.3


def test_core_does_not_load_the_reference_or_devices() -> None:
    """`Core` itself is light too: an application may hold one and never compile."""
    found = loaded_after("from tunewright import Core; Core()")
    assert not {"pyopencl", "torch", "onnx.reference"} & set(found)

"""The shape of the code: who may import whom, how large a module may be, what is public, what an import may cost."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "tunewright"
#: from the top down; what stands in one row are siblings, which never import each other
LAYERS = (
    ("__main__", "backend", "api"),
    ("tools", "testing"),
    ("core",),
    ("model_tuning",),
    ("plugins",),
    ("runtime",),
    ("tuning",),
    ("heuristic",),
    ("measure",),
    ("knowledge",),
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


def place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """What a module imports, calls and uses: every test looks at all modules, since one for each takes far longer."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.keyword)
    return tuple(node for node in ast.walk(ast.parse(text(path))) if isinstance(node, kinds))


def imports(path: Path, root: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """(line, first part of the name inside the package) of everything that a module imports from the package."""
    here = ("tunewright", *names(path, root))
    package = here if path.name == "__init__.py" else here[:-1]
    for node in nodes(path):
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


def test_a_layer_imports_only_what_stands_below_it() -> None:
    wrong = []
    for path in MODULES:
        if not names(path):
            continue  # the package's own __init__ offers names of every layer, lazily
        mine = names(path)[0]
        assert mine in LEVEL, f"{mine} has no place in the layers"
        for line, target in imports(path):
            if target != mine and target in LEVEL and LEVEL[target] <= LEVEL[mine]:
                wrong.append(f"{place(path)}:{line} imports {target}, which does not stand below {mine}")
    assert not wrong


def test_the_rule_can_fail(tmp_path: Path) -> None:
    """The scan sees relative, absolute, nested and package imports."""
    path = tmp_path / "ops" / "base.py"
    path.parent.mkdir()
    path.write_text(
        "from ..core import Core\nimport tunewright.runtime.plans.plan\ndef f():\n    from .. import tools\n"
    )
    assert [target for _, target in imports(path, tmp_path)] == ["core", "runtime", "tools"]


def test_modules_stay_small() -> None:
    lines = {place(path): len(text(path).splitlines()) for path in MODULES}
    assert not {path: count for path, count in lines.items() if count > MOST_LINES}


def test_what_all_names_is_there() -> None:
    for path in MODULES:
        if "__all__" in text(path):
            module = importlib.import_module(".".join(("tunewright", *names(path))))
            assert len(set(module.__all__)) == len(module.__all__), place(path)
            for name in module.__all__:
                assert getattr(module, name) is not None, f"{name} of {place(path)}"


#: modules that may call what settings.py alone may otherwise: reading the environment
ENVIRONMENT_READERS = {"settings"}


def test_only_settings_reads_the_environment() -> None:
    wrong = []
    for path in MODULES:
        if names(path)[:1] and names(path)[0] in ENVIRONMENT_READERS:
            continue
        for node in nodes(path):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if reads and isinstance(node.value, ast.Name) and node.value.id == "os":
                wrong.append(f"{place(path)}:{node.lineno} reads the environment")
    assert not wrong


#: A kernel of Triton is a function of Python. This module makes it from a text that consists of numbers and of our own
#: table of expressions; nothing of a model's text is in it.
WRITES_KERNELS = ("solvers", "triton", "source", "text")


def test_nothing_runs_code_from_data() -> None:
    """No pickle, marshal, shelve, eval or exec anywhere: what is read is data."""
    for path in MODULES:
        forbidden = {"eval", "exec", "__import__"} - ({"exec"} if names(path) == WRITES_KERNELS else set())
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden, f"{place(path)}:{node.lineno}"
            if isinstance(node, ast.Import):
                forbidden_modules = {"pickle", "marshal", "shelve", "dill"} & {a.name for a in node.names}
                assert not forbidden_modules, f"{place(path)}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                allowed = isinstance(node.value, ast.Constant) and node.value.value is False
                assert allowed, f"{place(path)}:{node.lineno}"


def branches_on_a_device(path: Path) -> list[int]:
    """The lines that compare a device's kind or family with a fixed text: traits of devices answer such questions."""
    lines = []
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(isinstance(side, ast.Attribute) and side.attr in ("device", "family") for side in sides)
            parts = [
                part
                for side in sides
                for part in (side.elts if isinstance(side, ast.Tuple | ast.Set | ast.List) else [side])
            ]
            if asks and any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts):
                lines.append(node.lineno)
    return lines


def test_only_devices_tell_kinds_of_devices_apart() -> None:
    """A new device then needs no edit elsewhere: it has other `Traits`."""
    found = {place(path): branches_on_a_device(path) for path in MODULES if names(path)[:1] != ("devices",)}
    assert not {path: lines for path, lines in found.items() if lines}


def test_a_branch_on_a_device_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("a = target.device == 'cpu'\nb = d.family in ('null', 'host')\nc = r.family == family\n")
    assert branches_on_a_device(path) == [1, 2]


#: too slow, or not there without an extra: nothing that every user imports may load them
HEAVY = ("pyopencl", "torch", "triton", "onnxruntime", "openvino", "onnx", "typer", "rich", "matplotlib", "sklearn")


def loaded_after(statement: str) -> dict[str, float]:
    """The heavy modules that a fresh interpreter has after a statement, and the processor time of that, in seconds."""
    code = (
        f"import time, sys, json; t = time.process_time(); {statement}; t = time.process_time() - t;"
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

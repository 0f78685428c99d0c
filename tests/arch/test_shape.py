"""The size and the names of things: modules in a folder, parameters of a function, classes of the same name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "tunewright"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: a folder has at most this number of modules, without its `__init__`
MOST_MODULES = 16
#: folders that may have more, with the reason
LARGE_FOLDERS: dict[str, str] = {}
#: a function has at most this number of parameters, without `self` and `cls`
MOST_PARAMETERS = 10
#: functions that may have more, with the reason; parameters of a sub-command (tools/) are its options
LONG_SIGNATURES = {
    "tunewright/api.py:tune": "keyword options of the public API",
    "tunewright/api.py:tune_many": "keyword options of the public API",
    "tunewright/ir/graph.py:add": "what a node may have, by keyword; most calls give two or three",
}
#: a statement stands in at most this number of others; an `elif` stands in its `if`
MOST_NESTING = 4
#: functions that may be deeper, with the reason
_KINDS = "one branch for each kind of row or argument"
DEEP_FUNCTIONS = {
    "tunewright/devices/control_rows.py:settle": _KINDS,
    "tunewright/devices/control_rows.py:walk": _KINDS,
    "tunewright/devices/native/table_writer.py:_argument": _KINDS,
    "tunewright/devices/native/table_writer.py:launches": _KINDS,
    "tunewright/devices/opencl/enqueued.py:__init__": _KINDS,
    "tunewright/devices/opencl/enqueued.py:_made": _KINDS,
    "tunewright/runtime/requests/frame.py:_place": "one branch for each place that a slot may have",
    "tunewright/runtime/control/counted_rows.py:made": "tries each stage with each number of rows",
}


def place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def public_classes(module: ast.Module) -> list[str]:
    return [node.name for node in module.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def nesting(node: ast.AST) -> int:
    """The number of statements inside of each other at the deepest place."""
    kinds = ast.For | ast.If | ast.While | ast.With | ast.Try | ast.Match
    return max((nesting(child) + isinstance(child, kinds) for child in ast.iter_child_nodes(node)), default=0)


def test_a_public_class_name_has_one_meaning() -> None:
    found = defaultdict(list)
    for path in MODULES:
        for name in public_classes(tree(path)):
            found[name].append(place(path))
    assert not {name: where for name, where in found.items() if len(where) > 1}


def test_a_folder_has_few_modules() -> None:
    counts = Counter(place(path.parent) for path in MODULES if path.stem != "__init__")
    assert {folder: n for folder, n in counts.items() if n > MOST_MODULES}.keys() == LARGE_FOLDERS.keys()


def test_a_function_has_few_parameters() -> None:
    found = set()
    for path in MODULES:
        if not path.is_relative_to(PACKAGE / "tools"):
            long = (f for f in functions(tree(path)) if parameters(f) > MOST_PARAMETERS)
            found |= {f"{place(path)}:{f.name}" for f in long}
    assert found == LONG_SIGNATURES.keys()


def test_a_function_is_not_deep() -> None:
    deep = ((path, f) for path in MODULES for f in functions(tree(path)) if nesting(f) > MOST_NESTING)
    assert {f"{place(path)}:{f.name}" for path, f in deep} == DEEP_FUNCTIONS.keys()


def test_the_rules_can_fail() -> None:
    module = ast.parse("class A:\n    def f(self, a, /, b, *c, d, **e): ...\nclass _B: ...\n")
    assert public_classes(module) == ["A"]
    assert [parameters(f) for f in functions(module)] == [3]
    inside = ast.parse("def f():\n for a in b:\n  if a: pass\n  elif b: pass\n")
    assert [nesting(f) for f in functions(inside)] == [3]

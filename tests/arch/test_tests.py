"""The shape of the tests: rooms that mirror the source, and data that do not depend on which tests ran before."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "tunewright"
#: rooms without a folder of that name in the package
OTHER_ROOMS = {"bench", "docs", "package"}
MOST_MODULES = 25
GENERATORS = ("np.random.default_rng", "np.random.RandomState", "random.Random")


def test_every_room_mirrors_a_folder_of_the_package() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir()} | OTHER_ROOMS
    modules = [path.relative_to(TESTS) for kind in ("unit", "device") for path in (TESTS / kind).rglob("*.py")]
    assert not [str(path) for path in modules if len(path.parts) < 3 or path.parts[1] not in folders]
    crowded = {room: n for room, n in Counter(path.parent for path in modules).items() if n > MOST_MODULES}
    assert not crowded, "divide these rooms"


def _shared_generators(path: Path) -> list[str]:
    """Functions that draw from a generator of their module, with the line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    shared = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).split("(")[0] in GENERATORS
        for target in node.targets
        if isinstance(target, ast.Name) and ast.unparse(node.value).count("(") == 1
    }
    return [
        f"{path.relative_to(TESTS)}:{name.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        for statement in (node.body if isinstance(node, ast.FunctionDef) else [node.body])
        for name in ast.walk(statement)
        if isinstance(name, ast.Name) and name.id in shared
    ]


def test_no_test_draws_from_a_generator_of_its_module() -> None:
    """A generator at the top of a module may make its tables. Tests take the fixture ``rng``."""
    found = [place for path in sorted(TESTS.rglob("*.py")) for place in _shared_generators(path)]
    assert not found, "use the fixture rng"

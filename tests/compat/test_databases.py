"""Knowledge bases that earlier versions wrote are read for ever, and written to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tunewright.knowledge.open_databases import open_path
from tunewright.testing.database import answers, random_records

FORMATS = sorted(path.parent for path in Path(__file__).parent.glob("*/expected.json"))


def test_there_is_something_to_open() -> None:
    assert {"format1", "format1-surveys"} <= {folder.name for folder in FORMATS}


@pytest.mark.parametrize("kind", ["sqlite", "shared", "system"])
@pytest.mark.parametrize("kept", FORMATS, ids=lambda folder: folder.name)
def test_an_old_knowledge_base_is_read(kept: Path, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    shutil.copytree(kept / kind, folder)  # a test may leave nothing behind in what is kept
    expected = json.loads((kept / "expected.json").read_text())
    database = open_path(folder)
    assert {record.digest: record.text for record in database} == expected["records"]
    assert answers(database) == expected["answers"]
    assert not database.damage()
    if kind == "system":
        return
    assert [[event.action, event.what] for event in database.events()] == expected["events"]
    more = random_records(1, 5)
    assert database.add(more) == 5
    assert {record.digest for record in database} == {*expected["records"], *(record.digest for record in more)}
    assert not list(folder.rglob("*damaged*"))

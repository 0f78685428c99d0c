"""Writes knowledge bases of the current format into a folder, to be kept: ``python tests/compat/make.py FORMAT``.

Run once when a format changes, never to make a test pass: what is here already is what users have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.shared import SharedDatabase
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.knowledge.system import write_lines
from tunewright.testing.database import answers, random_records


def main() -> None:
    folder = Path(__file__).parent / sys.argv[1]
    folder.mkdir()
    records = random_records(2026, 14)
    assert {record.kind for record in records} == {"measurement", "fault", "survey"}
    kept = records[2:]
    for database in (SqliteDatabase(folder / "sqlite"), SharedDatabase(folder / "shared", "host")):
        database.add(records)
        database.note("tuned", "14 records")
        database.remove([record.digest for record in records[:3]])
        database.add([records[2]])
        database.note("pruned", "3 records, and one came back")
    (writer,) = (folder / "shared" / "writers").iterdir()
    writer.rename(writer.with_name("host-1-0.jsonl"))
    (folder / "system").mkdir()
    write_lines(folder / "system" / "system.jsonl", kept)
    expected = {
        "records": {record.digest: record.text for record in kept},
        "answers": answers(MemoryDatabase(kept)),
        "events": [["tuned", "14 records"], ["pruned", "3 records, and one came back"]],
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

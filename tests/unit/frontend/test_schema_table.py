"""The table of schemas says what onnx says. ACCEPT=1 writes it anew."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from typing import Any

import onnx.defs
import pytest

from tunewright.frontend import schema


def rows() -> dict[str, Any]:
    """The table, made from onnx."""
    versions: dict[str, int] = {"": onnx.defs.onnx_opset_version()}
    changes: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for one in onnx.defs.get_all_schemas_with_history():
        versions[one.domain] = max(versions.get(one.domain, 0), one.since_version)
        changes[one.domain][one.name].add(one.since_version)
    rules = {
        domain: {op: [[at, _json(op, domain, at)] for at in sorted(since, reverse=True)] for op, since in ops.items()}
        for domain, ops in changes.items()
    }
    return {"versions": versions, "rules": rules}


def _json(op: str, domain: str, version: int) -> Any:
    rules = schema.rules_of_onnx(op, domain, version)
    if rules is None:
        return None
    bounds = [[least, min(most, schema.UNBOUNDED)] for least, most in (rules.inputs, rules.outputs)]
    return [dict(rules.kinds), list(rules.required), *bounds, {str(i): name for i, name in rules.single.items()}]


def test_the_table_is_what_onnx_says():
    if os.environ.get("ACCEPT"):
        schema.TABLE.write_text(json.dumps(rows(), separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
        schema._table.cache_clear()
    for domain, ops in rows()["rules"].items():
        newest = schema._table()["versions"][domain]
        for op, changes in ops.items():
            for at in {v for since, _ in changes for v in (since - 1, since, since + 1)} - {0}:
                if at <= newest:
                    assert schema._rules(op, domain, at) == schema.rules_of_onnx(op, domain, at), (op, at)
    assert schema._rules("Nothing", "", 13) is None and schema._rules("Relu", "com.example", 1) is None


def test_onnx_is_not_imported_for_domains_of_others(monkeypatch):
    monkeypatch.delitem(sys.modules, "onnx")
    monkeypatch.setattr(schema, "rules_of_onnx", lambda *given: pytest.fail(f"{given}"))
    schema.check_node("Relu", "com.example", 1, [], [], {}, "node 'a' (Relu)")

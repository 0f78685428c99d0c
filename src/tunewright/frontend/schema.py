"""Checks nodes against ONNX's schemas: kind and number of attributes, inputs, outputs and bodies.

Code behind the front end may rely on these checks: ``axis`` is an int, required attributes are present, and an `If` has
two branches with the right number of outputs. Type inference checks whether the values make sense.

The rules come from a table (``data/schemas.json``), which a test compares with onnx. Onnx itself would build all
schemas on the first query, which takes 7 MB. Versions newer than the table are looked up in onnx. Domains outside the
table are looked up only if onnx is already imported: onnx knows only the schemas registered in this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..errors import LimitError, ModelError
from . import protobuf_messages

#: upper limits of attributes that control loop counts in onnx's reference, whatever the size of the inputs
MOST = {
    "TfIdfVectorizer": {"min_gram_length": 1024, "max_gram_length": 1024, "max_skip_count": 65536},
}


@dataclass(frozen=True)
class _Rules:
    """What a schema requires of a node."""

    kinds: Mapping[str, int]
    required: tuple[str, ...]
    inputs: tuple[int, float]
    outputs: tuple[int, float]
    #: names of required inputs, by position
    single: Mapping[int, str]


#: the number with which a schema says "any number"
UNBOUNDED = 1 << 30
TABLE = Path(__file__).parents[1] / "data" / "schemas.json"


@cache
def _table() -> Mapping[str, Any]:
    """Load the table.

    ``versions``: the newest version of each domain. ``rules``: by domain and operator, the rules (or None) with the
    version in which they begin, newest first.
    """
    table: Mapping[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@lru_cache(maxsize=1 << 12)  # bounded, because models choose the names and versions
def _rules(op: str, domain: str, version: int) -> _Rules | None:
    """Return the rules for an operator, or None if onnx defines no such operator."""
    if version > _table()["versions"].get(domain, 0):
        return rules_of_onnx(op, domain, version)
    for since, rules in _table()["rules"][domain].get(op, ()):
        if since <= version:
            return None if rules is None else _from_json(*rules)
    return None


def _from_json(
    kinds: Mapping[str, int], required: Sequence[str], inputs: Sequence[int], outputs: Sequence[int],
    single: Mapping[str, str],
) -> _Rules:  # fmt: skip
    least = {int(i): name for i, name in single.items()}
    return _Rules(kinds, tuple(required), _bounds(*inputs), _bounds(*outputs), least)


def _bounds(least: int, most: int) -> tuple[int, float]:
    return least, most if most < UNBOUNDED else float("inf")


def newest_opset(version: int) -> int:
    """Return the newest opset of ONNX's own domain. Asks onnx only if the table does not reach ``version``."""
    newest = int(_table()["versions"][""])
    if version <= newest:
        return newest
    import onnx.defs

    return max(newest, int(onnx.defs.onnx_opset_version()))


def rules_of_onnx(op: str, domain: str, version: int) -> _Rules | None:
    """Return the rules of onnx itself."""
    import onnx.defs

    try:
        schema = onnx.defs.get_schema(op, version, domain)
        if schema.deprecated:  # use the last valid form: exporters keep using some operators after their deprecation
            schema = onnx.defs.get_schema(op, schema.since_version - 1, domain)
    except onnx.defs.SchemaError:
        return None
    if schema.deprecated:
        return None
    option = onnx.defs.OpSchema.FormalParameterOption
    return _Rules(
        kinds={name: int(a.type.value) for name, a in schema.attributes.items()},
        required=tuple(name for name, a in schema.attributes.items() if a.required),
        inputs=_bounds(schema.min_input, schema.max_input),
        outputs=_bounds(schema.min_output, schema.max_output),
        single={i: p.name for i, p in enumerate(schema.inputs) if p.option == option.Single},
    )


def check_node(
    op: str,
    domain: str,
    version: int,
    inputs: Sequence[Any],
    outputs: Sequence[str],
    kinds: Mapping[str, int],
    where: str,
) -> None:
    """Raise ModelError if a node does not fit its schema. ``kinds``: the type of each attribute given."""
    rules = _rules(op, domain, version) if domain in _table()["versions"] or "onnx" in sys.modules else None
    if rules is None:
        return
    for name, kind in kinds.items():
        want = rules.kinds.get(name, kind)
        if kind != want:
            raise ModelError(f"is {_kind(kind)}, but {op} takes {_kind(want)}", where=f"{where}, attribute {name!r}")
    for name in rules.required:
        if name not in kinds:
            raise ModelError(f"attribute {name!r} is missing", where=where)
    for what, names, (least, most) in (("inputs", inputs, rules.inputs), ("outputs", outputs, rules.outputs)):
        if not least <= len(names) <= most:
            wanted = (
                f"{least}" if least == most else f"at least {least}" if most == float("inf") else f"{least} to {most}"
            )
            raise ModelError(f"has {len(names)} {what}, but {op} takes {wanted}", where=where)
    for i, name in rules.single.items():
        if i >= len(inputs) or inputs[i] is None:
            raise ModelError(f"input {i} ({name}) is missing", where=where)


def _kind(kind: int) -> str:
    try:
        return str(protobuf_messages.onnx.AttributeProto.AttributeType.Name(kind))
    except ValueError:
        return f"of unknown type {kind}"


def check_bodies(
    op: str, formal: int, outputs: int, attrs: Mapping[str, Any], bodies: Mapping[str, tuple[int, int]], where: str
) -> None:
    """Raise ModelError if the bodies of a control-flow node do not fit it. ``bodies``: inputs and outputs of each."""
    #: inputs and outputs that the bodies of each operation must have
    wanted = {
        "If": (0, outputs), "Loop": (max(2, formal), outputs + 1), "Scan": (formal, outputs),
        "SequenceMap": (formal, outputs),
    }  # fmt: skip
    for name, (takes, makes) in bodies.items():
        if op == "Loop" and outputs < formal - 2:
            raise ModelError(f"carries {formal - 2} values, but has {outputs} outputs", where=where)
        if op == "Scan":
            _check_scan(formal, outputs, attrs, where)
        want_in, want_out = wanted.get(op, (takes, makes))
        if (takes, makes) != (want_in, want_out):
            raise ModelError(
                f"takes {takes} inputs and makes {makes} outputs, but the node gives {want_in} and takes {want_out}",
                where=f"{where}, body {name!r}",
            )


def check_values(op: str, attrs: Mapping[str, Any], where: str) -> None:
    """Raise LimitError if an attribute would make the reference of an operator run practically forever."""
    for name, most in MOST.get(op, {}).items():
        if attrs.get(name, 0) > most:
            raise LimitError(f"{attrs[name]:,} is more than {most:,}", where=f"{where}, attribute {name!r}")


def _check_scan(formal: int, outputs: int, attrs: Mapping[str, Any], where: str) -> None:
    """Raise ModelError if the attributes of a Scan do not fit its numbers of inputs and outputs."""
    scanned = attrs["num_scan_inputs"]
    if not 0 < scanned <= formal or outputs < formal - scanned:
        raise ModelError(f"scans {scanned} of {formal} inputs into {outputs} outputs", where=where)
    made = outputs - (formal - scanned)
    for key, length in (
        ("scan_input_axes", scanned), ("scan_input_directions", scanned),
        ("scan_output_axes", made), ("scan_output_directions", made),
    ):  # fmt: skip
        if len(attrs.get(key) or [0] * length) != length:
            raise ModelError(f"attribute {key!r} has {len(attrs[key])} entries instead of {length}", where=where)

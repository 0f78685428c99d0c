"""Replaces Reshape + Transpose + Reshape that exchange groups of channels by one operation that keeps the layout."""

from __future__ import annotations

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE

from .. import value_facts
from ..pattern import Match, Op, Rule

SHUFFLE = "org.openvinotoolkit::ShuffleChannels"


def _swaps_groups(node: Node) -> bool:
    perm = [int(k) for k in node.attrs.get("perm", ())]
    return perm == [0, 2, 1, *range(3, len(perm))] and len(perm) > 3


def _check(match: Match) -> str | None:
    x, split, out = (value_facts.shape(v) for v in (match["x"], match["split"], match.root.output))
    if x is None or split is None or out is None:
        return "the shapes are not known"
    if out != x or None in x or len(split) != len(x) + 1 or split[0] != x[0] or split[3:] != x[2:]:
        return f"{x} to {split} to {out} does more than split channels into groups"
    groups, each = split[1:3]
    return None if isinstance(groups, WHOLE) and isinstance(each, WHOLE) else "the number of channels is not known"


def _build(graph: Graph, match: Match) -> Value:
    split = value_facts.shape(match["split"])
    assert split is not None and isinstance(split[1], WHOLE)
    return graph.add(SHUFFLE, [match["x"]], {"axis": 1, "group": split[1]}).output


RULES = (
    Rule(
        "channel-shuffle",
        Op("Reshape", Op("Transpose", Op("Reshape", "x", rest=True, name="split"), where=_swaps_groups), rest=True),
        _build, _check,
    ),
)  # fmt: skip

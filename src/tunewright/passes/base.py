"""A pass, and what it is told: settings, what may be fused, and a log that keeps every refusal with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ..ir.graph import Fused, Graph, Node, Value
from ..ir.verify import verify
from ..settings import Settings

#: (node, its inputs after fusion, its epilogue after fusion, the value it would then make) -> None for yes, or the reason
#: why not. Fusion asks, it does not know: the plugin answers from what its solvers accept.
CanFuse: TypeAlias = Callable[[Node, Sequence[Value | None], tuple[Fused, ...], Value], str | None]


def anything(node: Node, inputs: Sequence[Value | None], epilogue: tuple[Fused, ...], output: Value) -> str | None:
    """The host's answer: the reference runs any epilogue."""
    return None


@dataclass(frozen=True)
class Entry:
    """One decision of a rule: what it looked at, and why it did nothing (``reason`` empty: it was applied)."""

    rule: str
    node: str
    reason: str = ""


@dataclass
class Log:
    """What the passes did and did not do; `tunewright graph --why` and `explain` print it."""

    entries: list[Entry] = field(default_factory=list)

    def applied(self, rule: str, node: Node) -> None:
        self.entries.append(Entry(rule, node.name))

    def refused(self, rule: str, node: Node, reason: str) -> None:
        self.entries.append(Entry(rule, node.name, reason))


@dataclass
class Context:
    """What a pass may ask."""

    settings: Settings
    can_fuse: CanFuse = anything
    log: Log = field(default_factory=Log)

    def enabled(self, name: str) -> bool:
        return name not in {n.strip() for n in self.settings.disabled_passes.split(",")}


class Pass(Protocol):
    """One rewriting of a graph; bodies are visited by `run_passes`, so a pass sees one graph at a time."""

    name: str

    def run(self, graph: Graph, context: Context) -> bool:
        """Rewrite; True when something changed. The graph comes sorted and may be left unsorted."""
        ...


def run_passes(graph: Graph, passes: Iterable[Pass], context: Context) -> bool:
    """Run passes in order over a graph and its bodies, innermost first."""
    changed = False
    for one in passes:
        if not context.enabled(one.name):
            continue
        for g in reversed(list(graph.walk())):
            if one.run(g, context):
                g.sort()
                changed = True
        if context.settings.verify_passes:
            verify(graph, one.name)
    return changed

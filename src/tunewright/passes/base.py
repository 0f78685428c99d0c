"""The interface of a pass, and its context: settings, questions to the device, and a log of refusals with their
reasons."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias
from weakref import ReferenceType

from ..ir.graph import Fused, Graph, Node, Value
from ..ir.graph_text import to_dot, to_text
from ..ir.types import DType, Layout, TensorType
from ..ir.verify import verify
from ..ops.base import Array
from ..ops.infer import Budget
from ..settings import Settings, write_dump

#: (node, operands of its epilogue besides the main inputs, its epilogue after fusion, the value that it would then
#: make) -> None for yes, or the reason against it. Fusion does not decide this: the plugin answers from what its
#: solvers accept.
CanFuse: TypeAlias = Callable[[Node, Sequence[Value], tuple[Fused, ...], Value], str | None]

#: (node, layout, inputs that would have it) -> None when the device can run it with these inputs and its output in that
#: layout, or the reason against it.
WorksIn: TypeAlias = Callable[[Node, Layout, Sequence[int]], str | None]

#: Converts an array to another element type; a device may have a faster way than numpy.
Convert: TypeAlias = Callable[[Array, DType], Array]


def convert(array: Array, to: DType) -> Array:
    """Convert an array with numpy."""
    return array.astype(to.numpy, order="C")


def anything(node: Node, operands: Sequence[Value], epilogue: tuple[Fused, ...], output: Value) -> str | None:
    """The host's answer to `CanFuse`: the reference runs any epilogue."""
    return None


def any_layout(node: Node, layout: Layout, inputs: Sequence[int]) -> str | None:
    """The host's answer to `WorksIn`: it converts arrays to the plain layout and results back."""
    return None


@dataclass(frozen=True)
class LayoutChoice:
    """One way to run a node: the layouts of its first input and of its results, and its time."""

    first: Layout
    #: also the layout of the operands of its element-wise part
    result: Layout
    seconds: float
    #: whether this problem was measured; else the time is an estimate
    measured: bool = False


class Layouts(Protocol):
    """A device's answers about layouts. The device has one layout besides the plain one."""

    def preferred(self, node: Node) -> tuple[Layout, Layout] | None:
        """The layouts of first input and result that its kernels prefer; None: they have no preference."""
        ...

    def ways(
        self, node: Node, preferred: tuple[Layout, Layout] | None, layout: Layout, data: Sequence[int]
    ) -> Sequence[LayoutChoice]:
        """Every way to run a plain node with its ``data`` (inputs by number) and its results in either layout."""
        ...

    def reorder(self, type: TensorType, layout: Layout) -> float:
        """The seconds that a conversion of a plain tensor into a layout, or back, takes."""
        ...

    def why_apart(self, first: Node, second: Node, whole: Node) -> str | None:
        """Why a convolution and the depthwise one behind it would not be faster as one node, as far as is known."""
        ...


@dataclass(frozen=True)
class LogEntry:
    """One decision of a rule: its node, and why the rule was not applied (``reason`` is empty if it was)."""

    rule: str
    node: str
    reason: str = ""


@dataclass
class Log:
    """The decisions of the passes, each one once; `tunewright graph --why` prints them.

    Any thread that compiles or meets new shapes adds to it. It ends at ``MOST`` entries: a model that serves ever new
    shapes for a long time must not fill the memory with reasons.
    """

    MOST: ClassVar[int] = 100_000

    entries: list[LogEntry] = field(default_factory=list)
    _seen: set[LogEntry] = field(default_factory=set, repr=False)

    def applied(self, rule: str, node: Node) -> None:
        self._add(LogEntry(rule, node.name))

    def refused(self, rule: str, node: Node, reason: str) -> None:
        self._add(LogEntry(rule, node.name, reason))

    def _add(self, entry: LogEntry) -> None:
        # A rule meets the same node again in later rounds and for every new shape; one entry suffices.
        if entry not in self._seen and len(self.entries) < self.MOST:
            self._seen.add(entry)
            self.entries.append(entry)


@dataclass(frozen=True)
class Joined:
    """Constants joined side by side in one array. It does not keep the parts alive, so that their ids may be reused."""

    parts: tuple[ReferenceType[Array], ...]
    whole: Array


@dataclass
class Context:
    """The settings, questions and limits that a pass may use."""

    settings: Settings
    can_fuse: CanFuse = anything
    #: None: the device, like the host, works on plain arrays.
    layouts: Layouts | None = None
    works_in: WorksIn = any_layout
    #: Whether the device has kernels for an operation, even if they may refuse a problem.
    knows: Callable[[str], bool] = field(default=lambda op: True)
    #: the element type in which networks of single-precision numbers are computed
    precision: DType = DType.FLOAT32
    #: Whether the device computes halves in single precision: then networks of halves become single-precision ones
    #: (`widen`).
    widens: bool = False
    convert: Convert = convert
    log: Log = field(default_factory=Log)
    #: Constants that passes joined, by the ids of their parts: plans for other shapes share them.
    joined: dict[tuple[int, ...], Joined] = field(default_factory=dict)
    #: Whether the graph is a body. A body may never run, so that a mistake in it is not an error yet.
    in_body: bool = False
    #: numbers of graph dumps, over all runs of the passes
    drawn: Iterator[int] = field(default_factory=itertools.count, repr=False)
    #: the remaining limits of constant folding
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        s = self.settings
        self.budget = Budget(s.fold_bytes, s.fold_seconds, s.max_tensor_bytes)

    @cached_property
    def _disabled(self) -> frozenset[str]:
        return frozenset(n.strip() for n in self.settings.disabled_passes.split(","))

    def enabled(self, name: str) -> bool:
        """True unless DISABLED_PASSES names this pass or rule."""
        return name not in self._disabled

    def draw(self, graph: Graph, after: str) -> None:
        """Write the current graph to GRAPH_DUMPS_DIR, for Graphviz and as text, numbered in the order of the passes."""
        if self.settings.graph_dumps_dir:
            folder = Path(self.settings.graph_dumps_dir)
            model = re.sub(r"[^\w.-]+", "_", graph.name) or "graph"
            name = f"{model}.{next(self.drawn):03d}.{after}"
            write_dump("GRAPH_DUMPS_DIR", folder / f"{name}.dot", to_dot(graph) + "\n")
            write_dump("GRAPH_DUMPS_DIR", folder / f"{name}.txt", to_text(graph) + "\n")


class Pass(Protocol):
    """One rewriting of a graph. `run_passes` visits bodies, so that a pass sees one graph at a time."""

    name: str

    def run(self, graph: Graph, context: Context) -> bool:
        """Rewrite the graph; True when something changed. The graph is sorted before and may be unsorted after."""
        ...


@dataclass(frozen=True)
class RepeatedPasses:
    """Passes that depend on each other: they run in order, repeatedly, until none changes anything."""

    passes: tuple[Pass, ...]
    rounds: int = 10


def run_passes(graph: Graph, passes: Iterable[Pass | RepeatedPasses], context: Context) -> bool:
    """Run passes in order over a graph and its bodies, innermost first; True when one of them changed something."""
    return _Runner(graph, context).run(passes)


class _Runner:
    """Runs passes over one graph. It runs a pass again only after another one has changed something."""

    def __init__(self, graph: Graph, context: Context) -> None:
        # The runner has a separate budget, for all passes and bodies.
        self.graph, self.context = graph, replace(context)
        self.inner = replace(context, in_body=True)
        self.inner.budget = self.context.budget
        self.changes = 0
        self.done: dict[int, int] = {}  # pass -> changes at the end of its last run
        self.context.draw(graph, "given")

    def run(self, passes: Iterable[Pass | RepeatedPasses]) -> bool:
        before = self.changes
        for one in passes:
            if isinstance(one, RepeatedPasses):
                for _ in range(one.rounds):
                    if not self.run(one.passes):
                        break
            elif self.context.enabled(one.name) and self.done.get(id(one)) != self.changes:
                self.run_one(one)
                self.done[id(one)] = self.changes
        return self.changes != before

    def run_one(self, one: Pass) -> None:
        changed = False
        for g in reversed(list(self.graph.walk())):
            if one.run(g, self.context if g is self.graph else self.inner):
                g.sort()
                self.changes += 1
                changed = True
        if changed:
            self.context.draw(self.graph, one.name)
        if self.context.settings.verify_passes:
            verify(self.graph, one.name)

"""A pass, and what it is told: settings, what may be fused, and a log that keeps every refusal with its reason."""

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
from ..ir.text import to_dot, to_text
from ..ir.types import DType, Layout, TensorType
from ..ir.verify import verify
from ..ops.base import Array
from ..ops.infer import Budget
from ..settings import Settings, write_dump

#: (node, operands its epilogue would take beside the main inputs, its epilogue after fusion, the value it would then
#: make) -> None for yes, or the reason why not. Fusion asks, it does not know: the plugin answers from what its solvers
#: accept.
CanFuse: TypeAlias = Callable[[Node, Sequence[Value], tuple[Fused, ...], Value], str | None]

#: (node, layout, inputs that would have it) -> None when the device can work with them and the output in that layout,
#: or the reason why not
WorksIn: TypeAlias = Callable[[Node, Layout, Sequence[int]], str | None]

#: an array in another element type: a device may know a faster way than numpy
Convert: TypeAlias = Callable[[Array, DType], Array]


def convert(array: Array, to: DType) -> Array:
    """The host's way."""
    return array.astype(to.numpy, order="C")


def anything(node: Node, operands: Sequence[Value], epilogue: tuple[Fused, ...], output: Value) -> str | None:
    """The host's answer: the reference runs any epilogue."""
    return None


def any_layout(node: Node, layout: Layout, inputs: Sequence[int]) -> str | None:
    """The host's answer: it takes arrays out of their layout and puts results back."""
    return None


@dataclass(frozen=True)
class Way:
    """One way to run a node: the layouts of its first input and of its results, and what it costs."""

    first: Layout
    #: also of whatever its element-wise part reads along
    result: Layout
    seconds: float
    #: that very problem was measured; else it is estimated
    measured: bool = False


class Layouts(Protocol):
    """What a device says of layouts. It has one beside the plain one."""

    def preferred(self, node: Node) -> tuple[Layout, Layout] | None:
        """The layouts of first input and result that its kernels would rather have; None: they do not care."""
        ...

    def ways(
        self, node: Node, preferred: tuple[Layout, Layout] | None, layout: Layout, data: Sequence[int]
    ) -> Sequence[Way]:
        """Every way to run a plain node in which its ``data``, inputs by number, and its results are plain or not."""
        ...

    def reorder(self, type: TensorType, layout: Layout) -> float:
        """Seconds that it takes to bring a plain tensor into a layout, or back."""
        ...

    def why_apart(self, first: Node, second: Node, whole: Node) -> str | None:
        """Why a convolution and the depthwise one behind it would not be faster as one node, by what is known."""
        ...


@dataclass(frozen=True)
class Entry:
    """One decision of a rule: what it looked at, and why it did nothing (``reason`` empty: it was applied)."""

    rule: str
    node: str
    reason: str = ""


@dataclass
class Log:
    """What the passes did and did not do, each decision once; `tunewright graph --why` prints it.

    Compiling and every new set of shapes add to it, from whichever thread meets them first. It ends at ``MOST``: a
    model that is served for long, with ever new shapes, must not fill the memory with reasons.
    """

    MOST: ClassVar[int] = 100_000

    entries: list[Entry] = field(default_factory=list)
    _seen: set[Entry] = field(default_factory=set, repr=False)

    def applied(self, rule: str, node: Node) -> None:
        self._add(Entry(rule, node.name))

    def refused(self, rule: str, node: Node, reason: str) -> None:
        self._add(Entry(rule, node.name, reason))

    def _add(self, entry: Entry) -> None:
        # A rule meets the same node again in later rounds and for every new shape: say it once.
        if entry not in self._seen and len(self.entries) < self.MOST:
            self._seen.add(entry)
            self.entries.append(entry)


@dataclass(frozen=True)
class Joined:
    """Constants side by side in one. It does not keep the parts, whose ids may go to others then."""

    parts: tuple[ReferenceType[Array], ...]
    whole: Array


@dataclass
class Context:
    """What a pass may ask."""

    settings: Settings
    can_fuse: CanFuse = anything
    #: None: the device, as the host, works on plain arrays
    layouts: Layouts | None = None
    works_in: WorksIn = any_layout
    #: the device has kernels of its own for an operation, whatever they say to a problem
    knows: Callable[[str], bool] = field(default=lambda op: True)
    #: what networks of single-precision numbers are computed in
    precision: DType = DType.FLOAT32
    #: the device computes halves in single precision: networks of halves become networks of such numbers (`widen`)
    widens: bool = False
    convert: Convert = convert
    log: Log = field(default_factory=Log)
    #: constants that passes joined, by their parts' ids: plans for other shapes share them
    joined: dict[tuple[int, ...], Joined] = field(default_factory=dict)
    #: the graph at hand is a body: it may never run, so what is wrong in it is no mistake yet
    in_body: bool = False
    #: numbers of drawings, of all runs of the passes
    drawn: Iterator[int] = field(default_factory=itertools.count, repr=False)
    #: what constant folding may still take
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
        """GRAPH_DUMPS_DIR: the graph as it is now, for Graphviz and as text, numbered in the order of the passes."""
        if self.settings.graph_dumps_dir:
            folder = Path(self.settings.graph_dumps_dir)
            model = re.sub(r"[^\w.-]+", "_", graph.name) or "graph"
            name = f"{model}.{next(self.drawn):03d}.{after}"
            write_dump("GRAPH_DUMPS_DIR", folder / f"{name}.dot", to_dot(graph) + "\n")
            write_dump("GRAPH_DUMPS_DIR", folder / f"{name}.txt", to_text(graph) + "\n")


class Pass(Protocol):
    """One rewriting of a graph; bodies are visited by `run_passes`, so a pass sees one graph at a time."""

    name: str

    def run(self, graph: Graph, context: Context) -> bool:
        """Rewrite; True when something changed. The graph comes sorted and may be left unsorted."""
        ...


@dataclass(frozen=True)
class Repeat:
    """Passes that feed each other: run in order, again and again until none changes anything."""

    passes: tuple[Pass, ...]
    rounds: int = 10


def run_passes(graph: Graph, passes: Iterable[Pass | Repeat], context: Context) -> bool:
    """Run passes in order over a graph and its bodies, innermost first; True when one of them changed something."""
    return _Runner(graph, context).run(passes)


class _Runner:
    """A pass runs to its own fixed point, so it need not run again until another one has changed something."""

    def __init__(self, graph: Graph, context: Context) -> None:
        self.graph, self.context = graph, replace(context)  # with a budget of its own, for all passes and bodies
        self.inner = replace(context, in_body=True)
        self.inner.budget = self.context.budget
        self.changes = 0
        self.done: dict[int, int] = {}  # pass -> changes at the end of its last run
        self.context.draw(graph, "given")

    def run(self, passes: Iterable[Pass | Repeat]) -> bool:
        before = self.changes
        for one in passes:
            if isinstance(one, Repeat):
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

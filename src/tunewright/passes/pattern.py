"""Rewrite rules as data: a pattern, a check that may refuse with a reason, and a builder.

A pattern is written as the expression it matches, from its output inwards::

    Op("Mul", "x", Op("Sigmoid", "x"))                      # x * sigmoid(x)
    Op("Log", Op("Add", Op("Exp", "x"), 1.0))               # log(exp(x) + 1)

An argument is an `Op`; a name (any value; the same name is the same value everywhere); a number (a constant of one
element that equals it); a `Const` (any constant); a `OneOf`; an `Each`; or None (an absent optional input). Operands of
commutative operations match in either order. Values inside a match must have no other users, unless their `Op` is
``shared``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from typing import TypeAlias

from ..errors import TunewrightError
from ..ir.graph import Graph, Node, Value
from ..ops import lookup
from ..ops.base import Array
from ..ops.infer import infer_node
from .base import Context

#: The most origins that one node keeps. Only chains of thousands of nodes that become one node have more.
ORIGINS = 256

COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "Sum", "Mean", "And", "Or", "Xor", "Equal"})


@dataclass(frozen=True, init=False)
class Op:
    """Matches a node without epilogue: one of the operations ``op`` ("A|B"), with these arguments.

    ``name`` captures its output; ``where`` tests the node; ``rest`` allows further inputs; ``shared`` allows other
    users; ``output`` is the number of the matched output (None: any).
    """

    ops: frozenset[str]
    args: tuple[Pattern, ...]
    name: str
    where: Callable[[Node], bool] | None
    rest: bool
    shared: bool
    output: int | None

    def __init__(
        self,
        op: str | Iterable[str],
        *args: Pattern,
        name: str = "",
        where: Callable[[Node], bool] | None = None,
        rest: bool = False,
        shared: bool = False,
        output: int | None = 0,
    ) -> None:
        ops = frozenset(op.split("|") if isinstance(op, str) else op)
        vars(self).update(ops=ops, args=args, name=name, where=where, rest=rest, shared=shared, output=output)


@dataclass(frozen=True)
class Const:
    """Matches a constant; ``test`` checks its array."""

    name: str = ""
    test: Callable[[Array], bool] | None = None


@dataclass(frozen=True, init=False)
class OneOf:
    """Matches any of the alternatives, in order."""

    alternatives: tuple[Pattern, ...]

    def __init__(self, *alternatives: Pattern) -> None:
        vars(self).update(alternatives=alternatives)


@dataclass(frozen=True)
class Each:
    """Matches every remaining input with the pattern; it must be the last argument.

    Captures are numbered (``w.0``, ``w.1``) unless they are ``common`` to all inputs.
    """

    pattern: Pattern
    common: tuple[str, ...] = ()
    #: The most inputs: matching more at once gains nothing, and a hostile model may have very many.
    MOST = 256

    def expand(self, count: int) -> list[Pattern]:
        return [_numbered(self.pattern, f".{i}", self.common) for i in range(count)]


Pattern: TypeAlias = "Op | Const | OneOf | Each | str | float | None"


def is_float_scalar(array: Array) -> bool:
    return array.size == 1 and "float" in array.dtype.name


def scalar(name: str) -> Const:
    """Any constant of one floating-point element."""
    return Const(name, is_float_scalar)


def _numbered(pattern: Pattern, suffix: str, common: tuple[str, ...]) -> Pattern:
    if isinstance(pattern, str):
        return pattern if pattern in common else pattern + suffix
    if isinstance(pattern, OneOf):
        return OneOf(*(_numbered(p, suffix, common) for p in pattern.alternatives))
    if not isinstance(pattern, (Op, Const)):
        return pattern
    name = pattern.name + suffix if pattern.name and pattern.name not in common else pattern.name
    if isinstance(pattern, Const):
        return replace(pattern, name=name)
    args = (_numbered(p, suffix, common) for p in pattern.args)
    return Op(
        pattern.ops,
        *args,
        name=name,
        where=pattern.where,
        rest=pattern.rest,
        shared=pattern.shared,
        output=pattern.output,
    )


def product(*factors: Pattern, op: str = "Mul") -> OneOf:
    """A product (or sum) of three factors, with any brackets."""
    return OneOf(*(Op(op, Op(op, a, b), c) for a, b, c in permutations(factors) if factors.index(a) < factors.index(b)))


@dataclass(frozen=True)
class Match:
    """Where a pattern matches: captures by name, and the covered nodes, operands before their users."""

    graph: Graph
    root: Node
    values: dict[str, Value] = field(default_factory=dict)
    nodes: dict[Node, bool] = field(default_factory=dict)  # node -> may have users outside

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def node(self, name: str) -> Node:
        """The node whose output was captured."""
        node = self.values[name].producer
        assert node is not None, name
        return node

    def const(self, name: str) -> Array:
        """The array of a captured constant."""
        array = self.values[name].const
        assert array is not None, name
        return array

    def bind(self, name: str, value: Value) -> Match | None:
        """This match with one more capture; None when the name already stands for another value."""
        if not name:
            return self
        known = self.values.get(name)
        if known is not None:
            return self if known is value else None
        return Match(self.graph, self.root, {**self.values, name: value}, self.nodes)

    def cover(self, node: Node, shared: bool) -> Match:
        return self if node in self.nodes else Match(self.graph, self.root, self.values, {**self.nodes, node: shared})

    def leak(self) -> str | None:
        """Why the covered nodes cannot be removed, or None: another node may read one of them."""
        for node, shared in self.nodes.items():
            if node is self.root or shared:
                continue
            for value in node.outputs:
                if self.graph.is_output(value):
                    return f"%{value.name} is an output of the graph"
                other = next((user for user, _ in value.uses if user not in self.nodes), None)
                if other is not None:
                    return f"%{value.name} is also read by {other.name!r}"
        return None


def matches(pattern: Pattern, value: Value | None, found: Match) -> Iterator[Match]:
    """Every way in which the pattern matches the expression that makes ``value``."""
    if isinstance(pattern, Op):
        yield from _match_op(pattern, value, found)
    elif isinstance(pattern, OneOf):
        for alternative in pattern.alternatives:
            yield from matches(alternative, value, found)
    elif (bound := _match_value(pattern, value, found)) is not None:
        yield bound


def _match_value(pattern: Pattern, value: Value | None, found: Match) -> Match | None:
    """The match with a value that is matched by itself, whatever makes it; None if it does not fit."""
    if pattern is None or value is None:
        return found if pattern is None and value is None else None
    if isinstance(pattern, str):
        return found.bind(pattern, value)
    if isinstance(pattern, Const):
        fits = value.const is not None and (pattern.test is None or pattern.test(value.const))
        return found.bind(pattern.name, value) if fits else None
    if isinstance(pattern, Op | OneOf | Each) or value.const is None:
        return None
    return found if is_number(value.const, pattern) else None


def _match_op(pattern: Op, value: Value | None, found: Match) -> Iterator[Match]:
    node = value.producer if value is not None else None
    if value is None or node is None or node.op not in pattern.ops or node.epilogue or node.bodies:
        return
    if pattern.output is not None and value.index != pattern.output:
        return
    args: Sequence[Pattern] = pattern.args
    if args and isinstance(args[-1], Each):
        if len(node.inputs) > Each.MOST:
            return
        args = [*args[:-1], *args[-1].expand(len(node.inputs) - len(args) + 1)]
    inputs = [*node.inputs, *[None] * (len(args) - len(node.inputs))]
    beyond = inputs[len(args) :]
    if not pattern.rest and any(v is not None for v in beyond):
        return
    if pattern.where is not None and not pattern.where(node):
        return
    start = found.bind(pattern.name, value)
    if start is None:
        return
    orders = [args]
    if len(args) == 2 and node.op in COMMUTATIVE:
        orders.append(args[::-1])
    for order in orders:
        for inner in _match_all(order, inputs, start):
            yield inner.cover(node, pattern.shared)


def _match_all(patterns: Sequence[Pattern], values: Sequence[Value | None], found: Match) -> Iterator[Match]:
    if not patterns:
        yield found
        return
    for first in matches(patterns[0], values[0], found):
        yield from _match_all(patterns[1:], values[1:], first)


def is_number(array: Array, number: float) -> bool:
    """Whether the only element equals the number, as exactly as its type can represent it."""
    kind = array.dtype.name
    if array.size != 1 or not ("int" in kind or "float" in kind):
        return False
    digits = 0.0 if "int" in kind else {"bfloat16": 1e-2, "float16": 2e-3}.get(kind, 1e-6)
    return bool(abs(float(array.reshape(())) - number) <= digits * abs(number))


def root_ops(pattern: Pattern) -> frozenset[str]:
    """The operations with which a match of the pattern may end."""
    if isinstance(pattern, Op):
        return pattern.ops
    if isinstance(pattern, OneOf):
        return frozenset().union(*(root_ops(a) for a in pattern.alternatives))
    raise ValueError(f"a rule's pattern must be an operation, not {pattern!r}")


def always(match: Match) -> str | None:
    return None


@dataclass(frozen=True)
class Rule:
    """``build`` returns the value that replaces the root's output; ``check`` returns why the rule cannot be applied, or
    None."""

    name: str
    pattern: Pattern
    build: Callable[[Graph, Match], Value]
    check: Callable[[Match], str | None] = always


class RewritePass:
    """Applies rules until none matches. Each node is tried only by the rules whose patterns end in its operation."""

    def __init__(self, name: str, rules: Sequence[Rule]) -> None:
        self.name, self.rules = name, tuple(rules)

    def run(self, graph: Graph, context: Context) -> bool:
        index: dict[str, list[Rule]] = {}
        for rule in self.rules:
            if context.enabled(rule.name):
                for op in sorted(root_ops(rule.pattern)):
                    index.setdefault(op, []).append(rule)
        # Rules that undo each other would never end; sound rules need far fewer rewrites.
        left = limit = 100 + 20 * len(graph)
        while (applied := self._sweep(graph, index, context, left)) > 0:
            left -= applied
            graph.sort()
        return left < limit

    def _sweep(self, graph: Graph, index: dict[str, list[Rule]], context: Context, most: int) -> int:
        """Tries every node once in topological order, then nodes near rewrites. Returns the number of rewrites."""
        queue = deque(node for node in graph.nodes if node.op in index)
        applied = 0
        while queue:
            node = queue.popleft()
            for rule in index[node.op] if node in graph else ():
                match = find(rule, graph, node, context)
                if match is None:
                    continue
                applied += 1
                if applied > most:
                    raise TunewrightError(
                        f"rule {rule.name} and others undo each other",
                        where=f"node {node.name!r} ({node.op})",
                        hint=f"this is a defect of {self.name}; DISABLED_PASSES={rule.name} works around it",
                    )
                readers = dict.fromkeys(n for n, _ in islice(node.output.uses, 16))
                new = rewrite(rule, graph, match)
                context.log.applied(rule.name, node)
                near = [*([new.producer] if new.producer is not None else []), *readers]
                queue.extendleft(n for n in reversed(near) if n.op in index)
                break
        return applied


def find(rule: Rule, graph: Graph, node: Node, context: Context) -> Match | None:
    """The first permitted match at a node, or None; a refusal is logged."""
    reason: str | None = None
    for match in matches(rule.pattern, node.output, Match(graph, node)):
        extra = next((v for v in node.outputs[1:] if graph.is_read(v)), None)
        if extra is not None:
            refusal: str | None = f"its output %{extra.name} is used too"
        else:
            refusal = match.leak() or rule.check(match)
        if refusal is None:
            return match
        reason = reason or refusal
    if reason is not None:
        context.log.refused(rule.name, node, reason)
    return None


def rewrite(rule: Rule, graph: Graph, match: Match) -> Value:
    """Build the replacement with the types, names and origin of the replaced nodes, and remove dead nodes."""
    root, old = match.root, match.root.output
    with graph.recording() as added:
        new = rule.build(graph, match)
    origin = tuple(dict.fromkeys(name for node in match.nodes for name in node.origin))[:ORIGINS]
    for node in added:
        node.name = node.name or root.name
        node.origin = origin
        spec = lookup(node.op)
        if spec is not None:
            infer_node(node, spec)
    graph.replace(old, new)
    if new.producer in added:
        new.type = new.type or old.type
        new.name, old.name = old.name, new.name
    remove_dead(graph, reversed(match.nodes))
    return new


def remove_dead(graph: Graph, nodes: Iterable[Node]) -> None:
    """Remove those of the nodes that are not read; users come before their operands."""
    for node in nodes:
        if node in graph and not any(graph.is_read(v) for v in node.outputs):
            graph.remove(node)

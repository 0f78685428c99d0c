"""Replaces Einsum with operations that have fast kernels: Transpose, MatMul, element-wise products and sums.

The pass first sums over letters of only one operand that the result lacks, and extracts diagonals. Then it joins
operands in pairs. Letters of both that are not needed any more are the sum of a MatMul; letters of both that are needed
are its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunewright.errors import ModelError
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE, same, sym_array
from tunewright.ir.types import Dim
from tunewright.ops.infer import MISTAKES
from tunewright.ops.onnx.matmul import einsum_terms

from .. import value_facts
from ..attention.attention_masks import Maker
from ..base import Context

#: letters that stand for axes of an ellipsis, counted from its end
_DOTS = "αβγδεζηθικλμνξοπρστυφχψω"


class _Refused(Exception):
    """Why an Einsum stays as it is."""


@dataclass(frozen=True)
class _Term:
    """A tensor and the letters of its axes."""

    value: Value
    letters: str


class LowerEinsum:
    name = "einsum"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op != "Einsum" or node.epilogue:
                continue
            with graph.recording() as added:
                try:
                    made = _Lowering(graph, node).result()
                # in a branch, a mistake is not an error before the branch runs
                except (_Refused, ModelError, *MISTAKES) as refusal:
                    context.log.refused(self.name, node, str(refusal))
                    _drop(graph, added)
                    continue
            for new in added:
                new.name, new.origin = new.name or node.name, node.origin
            if made in added_values(added):
                made.name, node.output.name = node.output.name, made.name
            graph.replace(node.output, made)
            graph.remove(node)
            context.log.applied(self.name, node)
            changed = True
        return changed


def added_values(nodes: Sequence[Node]) -> set[Value]:
    return {value for node in nodes for value in node.outputs}


def _drop(graph: Graph, nodes: Sequence[Node]) -> None:
    for node in reversed(nodes):
        if node in graph:
            graph.remove(node)


class _Lowering:
    """The rewriting of one Einsum. Sizes of letters may have names, as long as no Reshape has to merge two of those."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.made = graph, Maker(graph)
        self.sizes: dict[str, Dim] = {}
        self.terms, self.wanted = self._read(node)

    def _read(self, node: Node) -> tuple[list[_Term], str]:
        given = [v for v in node.inputs if v is not None]
        terms, output = einsum_terms(str(node.attrs["equation"]), len(given))
        read, widest = [], 0
        for term, value in zip(terms, given, strict=True):
            dims = value_facts.shape(value)
            if dims is None or None in dims:
                raise _Refused(f"the shape of {value!r} is not known")
            spread = len(dims) - len(term.replace("...", ""))
            widest = max(widest, spread)
            read.append((_Term(value, term.replace("...", _DOTS[:spread][::-1])), dims))
        for one, dims in read:
            for letter, size in zip(one.letters, dims, strict=True):
                known = self.sizes.setdefault(letter, size)
                if not same([known], [size]):
                    if 1 not in (known, size):
                        raise _Refused(f"sizes {known} and {size} of {letter!r} may differ")
                    self.sizes[letter] = size if known == 1 else known
        dots = _DOTS[:widest][::-1]
        if output is None:
            letters = "".join(terms).replace(".", "")
            output = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
        return [self._without_ones(one) for one, _ in read], output.replace("...", dots)

    def _without_ones(self, term: _Term) -> _Term:
        """Drops axes of one element whose letters have more elsewhere: products broadcast over them."""
        dims = value_facts.shape(term.value) or ()
        gone = [i for i, c in enumerate(term.letters) if dims[i] == 1 and not same([self.sizes[c]], [1])]
        if not gone:
            return term
        kept = [i for i in range(len(dims)) if i not in gone]
        return _Term(self._shaped(term.value, [dims[i] for i in kept]), "".join(term.letters[i] for i in kept))

    def result(self) -> Value:
        terms = self.terms
        terms = [self._alone(t, [o for o in terms if o is not t]) for t in terms]
        while len(terms) > 1:
            a, b = self._next(terms)
            others = [t for t in terms if t is not a and t is not b]
            needed = {c for t in others for c in t.letters} | set(self.wanted)
            terms = [*others, self._joined(a, b, needed, self.wanted if not others else None)]
        return self._spread(self._turned(terms[0], "".join(c for c in self.wanted if c in terms[0].letters)))

    # -- one operand ---------------------------------------------------------------------------------------------------

    def _alone(self, term: _Term, others: Sequence[_Term]) -> _Term:
        for letter in dict.fromkeys(term.letters):
            while term.letters.count(letter) > 1:
                term = self._diagonal(term, letter)
        needed = {c for t in others for c in t.letters} | set(self.wanted)
        gone = [i for i, c in enumerate(term.letters) if c not in needed]
        if not gone:
            return term
        axes = self.graph.constant(np.asarray(gone, np.int64), "axes")
        value = self.made.node("ReduceSum", [term.value, axes], {"keepdims": 0})
        return _Term(value, "".join(c for c in term.letters if c in needed))

    def _diagonal(self, term: _Term, letter: str) -> _Term:
        """Two equal axes as one: every (n + 1)-th element of both together."""
        first, second = [i for i, c in enumerate(term.letters) if c == letter][:2]
        rest = [i for i in range(len(term.letters)) if i not in (first, second)]
        size, dims = self.sizes[letter], value_facts.shape(term.value) or ()
        if not isinstance(size, WHOLE):
            raise _Refused(f"the size of the diagonal {letter!r} is not known")
        value = self._transposed(term.value, [*rest, first, second])
        value = self._shaped(value, [*(dims[i] for i in rest), size * size])
        ends = [self.graph.constant(sym_array([n]), "end") for n in (0, size * size, len(rest), size + 1)]
        value = self.made.node("Slice", [value, *ends])
        return _Term(value, "".join(term.letters[i] for i in rest) + letter)

    # -- two operands --------------------------------------------------------------------------------------------------

    def _next(self, terms: Sequence[_Term]) -> tuple[_Term, _Term]:
        """The two operands whose product is smallest; the first two where sizes are unknown."""
        pairs = [(a, b) for i, a in enumerate(terms) for b in terms[i + 1 :]]

        def size(pair: tuple[_Term, _Term]) -> float:
            others = {c for t in terms if t not in pair for c in t.letters} | set(self.wanted)
            left = [self.sizes[c] for c in set(pair[0].letters + pair[1].letters) & others]
            return math.prod(d for d in left if isinstance(d, int)) if all(isinstance(d, int) for d in left) else 0.0

        return min(pairs, key=size)

    def _joined(self, a: _Term, b: _Term, needed: set[str], order: str | None) -> _Term:
        batch = [c for c in a.letters if c in b.letters and c in needed]
        summed = [c for c in a.letters if c in b.letters and c not in needed]
        if not summed:
            return self._multiplied(a, b, order or "".join(dict.fromkeys(a.letters + b.letters)))
        right_first = (
            order is not None
            and [c for c in order if c in b.letters and c not in batch]
            == [c for c in order if c not in batch][: len([c for c in b.letters if c not in (*batch, *summed)])]
        )
        constant = (a.value.const is not None, b.value.const is not None)
        if constant == (True, False) or (constant[0] == constant[1] and right_first and len(b.letters) > len(batch)):
            a, b = b, a
        if order is not None:
            batch.sort(key=order.index)
        return self._product(a, b, batch, summed, order)

    def _multiplied(self, a: _Term, b: _Term, order: str) -> _Term:
        letters = "".join(c for c in order if c in a.letters or c in b.letters)
        return _Term(self.made.node("Mul", [self._aligned(t, letters) for t in (a, b)]), letters)

    def _aligned(self, term: _Term, letters: str) -> Value:
        value = self._turned(term, "".join(c for c in letters if c in term.letters))
        new = [i for i, c in enumerate(letters) if c not in term.letters]
        new = [i for i in new if any(c in term.letters for c in letters[:i])]  # leading axes broadcast without help
        first = sum(c not in term.letters for c in letters[: letters.index(_first(term, letters))]) if new else 0
        if not new:
            return value
        axes = self.graph.constant(np.asarray([i - first for i in new], np.int64), "axes")
        return self.made.node("Unsqueeze", [value, axes])

    def _product(self, a: _Term, b: _Term, batch: list[str], summed: list[str], order: str | None) -> _Term:
        left = [c for c in a.letters if c not in (*batch, *summed)]
        right = [c for c in b.letters if c not in (*batch, *summed)]
        if order is not None:
            left, right = sorted(left, key=order.index), sorted(right, key=order.index)
        summed = [c for c in b.letters if c in summed] if b.value.const is not None else summed
        # Rows of a product with one shared matrix keep their axes.
        rows = left if not batch and left else None
        first = self._matrix(self._turned(a, "".join((*batch, *left, *summed))), batch, rows or [left], [summed])
        second = self._matrix(self._turned(b, "".join((*batch, *summed, *right))), batch, [summed], [right])
        value = self.made.node("MatMul", [first, second])
        letters = (*batch, *left, *right)
        dims = value_facts.shape(value)
        if dims is None or len(dims) != len(letters) or len(left) != 1 or len(right) != 1:
            value = self._shaped(value, [self.sizes[c] for c in letters])
        return _Term(value, "".join(letters))

    def _matrix(
        self, value: Value, batch: Sequence[str], rows: Sequence[str | list[str]], columns: Sequence[list[str]]
    ) -> Value:
        """A tensor as a batch of matrices: letters of an axis are merged; without letters the axis has one element."""
        groups = [*batch, *rows, *columns]
        if all(len(g) == 1 for g in groups):
            return value
        return self._shaped(value, [self._size(g) for g in groups])

    def _size(self, letters: Sequence[str]) -> Dim:
        sizes = [self.sizes[c] for c in letters]
        if len(sizes) == 1:
            return sizes[0]
        if not all(isinstance(d, WHOLE) for d in sizes):
            raise _Refused(f"the sizes of {', '.join(letters)} are not known, which a product has to merge")
        return math.prod(d for d in sizes if isinstance(d, WHOLE))

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _turned(self, term: _Term, letters: str) -> Value:
        return self._transposed(term.value, [term.letters.index(c) for c in letters])

    def _transposed(self, value: Value, perm: list[int]) -> Value:
        if perm == sorted(perm):
            return value
        return self.made.node("Transpose", [value], {"perm": tuple(perm)})

    def _shaped(self, value: Value, dims: Sequence[Dim]) -> Value:
        """The value in another shape. One size may have a name: the Reshape computes it."""
        known = value_facts.shape(value)
        if known is not None and same(known, dims):
            return value
        named = [i for i, d in enumerate(dims) if not isinstance(d, WHOLE)]
        kept = [i for i in named if known is not None and i < len(known) and known[i] == dims[i]]
        if len(named) - len(kept) > 1 or (kept and any(isinstance(d, int) and d == 0 for d in dims)):
            raise _Refused("more than one size of a Reshape is not known")
        target = [0 if i in kept else -1 if i in named else d for i, d in enumerate(dims)]
        shape = self.graph.constant(sym_array(target), "shape")
        return self.made.node("Reshape", [value, shape], {} if kept else {"allowzero": int(-1 not in target)})

    def _spread(self, value: Value) -> Value:
        """Refuses letters that only axes of one element have: no other operand broadcasts them."""
        dims = value_facts.shape(value)
        if dims is None or len(dims) == len(self.wanted):
            return value
        raise _Refused("the result has an axis that no operand has")


def _first(term: _Term, letters: str) -> str:
    return next(c for c in letters if c in term.letters)

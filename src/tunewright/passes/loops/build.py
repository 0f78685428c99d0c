"""Builds the recurrent layers to which a loop was proved equal, and replaces the loop with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.ir.graph import Graph, Value
from tunewright.ops import lookup
from tunewright.ops.base import Array
from tunewright.ops.infer import infer_node

from .. import value_facts
from .cell_match import Linear, RecurrentLayer
from .proof import Every, Last, LoopProof, Start
from .rows import DEFAULTS, Monomial, Pick, Polynomial, RowFactor, RowGate, RowProduct


def replace_loop(graph: Graph, proof: LoopProof) -> None:
    """Replace a loop with its layers."""
    node = proof.reading.node
    with graph.recording() as added:
        builder = _Builder(graph, proof)
        replaced = [*proof.reading.unchanged, *builder.results()]
    for new in added:
        new.name, new.origin = new.name or node.name, node.origin
        spec = lookup(new.op)
        if spec is not None:
            infer_node(new, spec)
    for old, value in replaced:
        value.type = value.type or old.type
        graph.replace(old, value)
    readers = {collected.result.producer for collected in proof.reading.collected}
    for reader in readers:
        if reader is not None and reader is not node:
            graph.remove(reader)
    graph.remove(node)


class _Builder:
    """Builds layers over [time, batch, features]. ``ends`` has, for each layer, all its states and the last ones."""

    def __init__(self, graph: Graph, proof: LoopProof) -> None:
        self.graph, self.proof = graph, proof
        self.backwards = next(iter(proof.reading.scanned.values()))[0].backwards
        self.inputs: dict[int, Value] = {}
        self.ends: list[list[Value]] = []
        self.factors: dict[RowFactor, Value] = {}
        for i, layer in enumerate(proof.layers):
            self.ends.append(self._layer(layer, proof.starts[i]))

    def results(self) -> list[tuple[Value, Value]]:
        last = [(one.result, self._last(one)) for one in self.proof.last]
        return [*last, *((one.collected.result, self._every(one)) for one in self.proof.every)]

    # -- small steps --------------------------------------------------------------------------------------------------
    def _add(self, op: str, inputs: Sequence[Value | None], **attrs: Any) -> Value:
        return self.graph.add(op, inputs, attrs).output

    def _ints(self, *numbers: int) -> Value:
        return self.graph.constant(np.asarray(numbers, np.int64), "axes")

    def _transposed(self, value: Value, perm: Sequence[int]) -> Value:
        return value if list(perm) == sorted(perm) else self._add("Transpose", [value], perm=tuple(perm))

    def _joined(self, values: Sequence[Value], axis: int) -> Value:
        return values[0] if len(values) == 1 else self._add("Concat", values, axis=axis)

    # -- a layer ------------------------------------------------------------------------------------------------------
    def _layer(self, layer: RecurrentLayer, starts: Sequence[Start]) -> list[Value]:
        gates, sources = list(layer.gates), sorted({k for gate in layer.gates for k in gate.inputs})
        values = []
        for k in sources:
            product = self._product(k, gates)
            values.append(self._input(k) if product is None else self._turned(k, product.x))
            gates = gates if product is None else [product.before(gate, k) for gate in gates]
        x = self._joined(values, 2)
        weights = [np.concatenate([_input_weights(g, sources, gates) for g in gates])[None]]
        weights += [np.concatenate([gate.recurrent.T for gate in gates])[None], _bias(gates, layer)[None]]
        names = zip(weights, ("W", "R", "B"), strict=True)
        constants = [self.graph.constant(np.ascontiguousarray(array), name) for array, name in names]
        initial = [self._start(s, x) for s in starts]
        attrs = {**_attrs(layer), **({"direction": "reverse"} if self.backwards else {})}
        holes = [] if layer.peepholes is None else [self.graph.constant(layer.peepholes[None], "P")]
        node = self.graph.add(layer.op, [x, *constants, None, *initial, *holes], attrs, outputs=1 + len(starts))
        return node.outputs

    def _input(self, source: int) -> Value:
        """A source as [time, batch, features]."""
        if source not in self.inputs:
            if source < len(self.proof.sources):
                steady = self.proof.sources[source].axis is None
                tensor = self.proof.sources[source].tensor
                value = self._repeated(tensor) if steady else self._turned(source, tensor)
            else:
                value = self._add("Squeeze", [self.ends[source - self.proof.first_layer][0], self._ints(1)])
            self.inputs[source] = value
        return self.inputs[source]

    def _repeated(self, tensor: Value) -> Value:
        """A tensor that is the same in each step, as [time, batch, features]."""
        used = sorted({k for gate in self.proof.layers[0].gates for k in gate.inputs})
        source = next(k for k in used if self.proof.sources[k].axis is not None)
        like = self._turned(source, self.proof.sources[source].tensor)
        shape = self.graph.add("Shape", [like], {"start": 0, "end": 2}).output
        target = self._add("Concat", [shape, self._ints(1)], axis=0)
        return self._add("Expand", [tensor, target])

    def _turned(self, source: int, tensor: Value) -> Value:
        return self._transposed(tensor, (1, 0, 2) if self.proof.sources[source].axis else (0, 1, 2))

    def _product(self, source: int, gates: Sequence[Linear]) -> _Outside | None:
        """The product in front of the loop that made a source, if the gates only pick its columns; else None."""
        if source >= len(self.proof.sources) or self.proof.sources[source].axis is None:
            return None
        picks = all((np.count_nonzero(w, 0) <= 1).all() for g in gates for k, w in g.inputs.items() if k == source)
        return _outside(self.proof.sources[source].tensor) if picks else None

    def _start(self, start: Start, x: Value) -> Value | None:
        """The initial state as [1, batch, units], or None for zeros."""
        value = start.value
        if value is None or value.tensor is None or value.tensor.shape is None:
            return None
        if (start.start, start.stop) != (0, start.width):
            value = self._add("Slice", [value, self._ints(start.start), self._ints(start.stop), self._ints(-1)])
        if len(start.value.tensor.shape) == 2:  # type: ignore[union-attr,arg-type]
            value = self._add("Unsqueeze", [value, self._ints(0)])
        if start.spread:
            one = self._ints(1)
            batch = self.graph.add("Shape", [x], {"start": 1, "end": 2}).output
            value = self._add("Expand", [value, self._add("Concat", [one, batch, one], axis=0)])
        return value

    # -- results ------------------------------------------------------------------------------------------------------
    def _last(self, one: Last) -> Value:
        parts = [self.ends[layer][2 if cell else 1] for layer, cell in one.parts]
        value = self._joined(parts, 2)
        return value if one.axes == "ub" else self._add("Squeeze", [value, self._ints(0)])

    def _every(self, one: Every) -> Value:
        """A collected result, with the axes that it has behind the loop."""
        value = self._joined([self._polynomial(part) for part in one.parts], 2)
        if self.backwards != one.collected.backwards:
            ends = [self._ints(n) for n in (-1, -(1 << 62), 0, -1)]
            value = self._add("Slice", [value, *ends])
        axes, axis = one.axes, one.collected.axis
        if one.collected.joined:
            axis %= len(axes) + 1
            axes = axes[:axis] + axes[axis + 1 :]
        else:
            axis %= len(axes) + 2
        units = [i + 1 for i, c in enumerate(axes) if c == "u"]
        if units:
            value = self._add("Unsqueeze", [value, self._ints(*units)])
        perm = list(range(1, len(axes) + 2))
        return self._transposed(value, [*perm[:axis], 0, *perm[axis:]])

    # -- all steps at once --------------------------------------------------------------------------------------------
    def _polynomial(self, polynomial: Polynomial) -> Value:
        """[time, batch, columns] of a polynomial of the hidden states and inputs of each step."""
        for i, layer in enumerate(self.proof.layers):
            if layer.hidden.new.equals(polynomial):
                return self._input(self.proof.first_layer + i)
        constant, total = polynomial.terms.get(()), None
        for monomial, c in polynomial.terms.items():
            if monomial:
                value = self._monomial(monomial, c)
                total = value if total is None else self._add("Add", [total, value])
        assert total is not None
        return total if constant is None else self._add("Add", [total, self._constant(constant)])

    def _monomial(self, monomial: Monomial, coefficient: Array) -> Value:
        value = self._factor(monomial[0])
        for factor in monomial[1:]:
            value = self._add("Mul", [value, self._factor(factor)])
        return value if (coefficient == 1).all() else self._add("Mul", [value, self._constant(coefficient)])

    def _constant(self, array: Array) -> Value:
        return self.graph.constant(array.astype(self.proof.dtype), "c")

    def _factor(self, factor: RowFactor) -> Value:
        if factor in self.factors:
            return self.factors[factor]
        if isinstance(factor, Pick):
            ends = [self._ints(n) for n in (factor.start, factor.stop, 2)]
            value = self._add("Slice", [self._input(factor.source), *ends])
        elif isinstance(factor, RowProduct):
            matrix = self.graph.constant(np.ascontiguousarray(factor.matrix), "W")
            value = self._add("MatMul", [self._polynomial(factor.rows), matrix])
        else:
            assert isinstance(factor, RowGate)
            a = factor.activation
            attrs = {k: v for k, v in (("alpha", a.alpha), ("beta", a.beta)) if v is not None}
            value = self._add(a.name, [self._polynomial(factor.argument)], **attrs)
        self.factors[factor] = value
        return value


# -- weights -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Outside:
    """A product x W + b in front of the loop."""

    x: Value
    weights: Array
    bias: Array | None

    def before(self, gate: Linear, source: int) -> Linear:
        """The gate with weights for x itself."""
        if source not in gate.inputs:
            return gate
        bias = gate.bias if self.bias is None else gate.bias + self.bias @ gate.inputs[source]
        return Linear({**gate.inputs, source: self.weights @ gate.inputs[source]}, gate.recurrent, bias)


def _outside(value: Value) -> _Outside | None:
    node, bias = value.producer, None
    if node is not None and node.op == "Add" and not node.epilogue:
        known = [v for v in node.inputs if v is not None and v.const is not None and v.const.ndim == 1]
        made = next((v for v in node.inputs if v is not None and v.const is None), None)
        if len(known) != 1 or made is None or known[0].const is None:
            return None
        bias, node = known[0].const, made.producer
    if node is None or node.op != "MatMul" or node.epilogue:
        return None
    if node.inputs[0] is None or value_facts.rank(node.inputs[0]) != 3:
        return None
    weights = node.inputs[1].const if node.inputs[1] is not None else None
    if weights is None or weights.ndim != 2 or (bias is not None and bias.shape != weights.shape[1:]):
        return None
    return _Outside(node.inputs[0], weights, bias)


def _input_weights(gate: Linear, sources: Sequence[int], gates: Sequence[Linear]) -> Array:
    """The weights [units, features] of all sources side by side."""
    widths = {k: len(w) for g in gates for k, w in g.inputs.items()}
    units = gate.bias.size
    nothing = {k: np.zeros((widths[k], units), gate.bias.dtype) for k in sources if k not in gate.inputs}
    return np.concatenate([(gate.inputs[k] if k in gate.inputs else nothing[k]).T for k in sources], axis=1)


def _bias(gates: Sequence[Linear], layer: RecurrentLayer) -> Array:
    """Biases of the input's and the state's part. The latter is zero except in a GRU that resets after the product."""
    mine = np.concatenate([gate.bias for gate in gates])
    state = np.zeros_like(mine)
    if layer.inner is not None and layer.linear:
        state[-layer.inner.size :] = layer.inner
    return np.concatenate([mine, state])


def _attrs(layer: RecurrentLayer) -> dict[str, Any]:
    attrs: dict[str, Any] = {"hidden_size": layer.hidden.width}
    if tuple(a.name for a in layer.activations) != DEFAULTS[layer.op]:
        attrs["activations"] = tuple(a.name for a in layer.activations)
        alphas = tuple(a.alpha for a in layer.activations if a.alpha is not None)
        betas = tuple(a.beta for a in layer.activations if a.beta is not None)
        attrs.update({"activation_alpha": alphas} if alphas else {})
        attrs.update({"activation_beta": betas} if betas else {})
    if layer.linear:
        attrs["linear_before_reset"] = 1
    return attrs

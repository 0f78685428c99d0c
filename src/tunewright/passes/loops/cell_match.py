"""Recognises LSTM, GRU and RNN cells among polynomials, and extracts the weights of the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tunewright.ops.base import Array

from .rows import Activation, Monomial, NotRowsError, Pick, Polynomial, RowFactor, RowGate, RowProduct

SIGMOID = "Sigmoid"


@dataclass(frozen=True, eq=False)
class CarriedState:
    """Columns of a carried value: ``pick`` is their previous value, ``new`` the next one."""

    carried: int
    pick: Pick
    new: Polynomial

    @property
    def width(self) -> int:
        return self.new.width


@dataclass
class Linear:
    """Weights of one gate: [features, units] for each input, [units, units] for the hidden state, and a bias."""

    inputs: dict[int, Array]
    recurrent: Array
    bias: Array

    def negated(self) -> Linear:
        return Linear({k: -w for k, w in self.inputs.items()}, -self.recurrent, -self.bias)


@dataclass(frozen=True, eq=False)
class RecurrentLayer:
    """A recurrent layer over states: gates in ONNX's order. ``inner``: bias inside a GRU's reset gate."""

    op: str
    hidden: CarriedState
    cell: CarriedState | None
    gates: tuple[Linear, ...]
    activations: tuple[Activation, ...]
    inner: Array | None = None
    #: whether a GRU resets after the product
    linear: bool = False
    #: an LSTM's weights from its cell to input, output and forget gate
    peepholes: Array | None = None


@dataclass
class Cells:
    """Finds layers among states.

    ``widths`` are the columns of each source of slices. Each layer may be a source of the next; layers have the numbers
    from ``first_layer`` on, in the order in which they are found.
    """

    dtype: np.dtype
    widths: dict[int, int]
    first_layer: int
    layers: list[RecurrentLayer] = field(default_factory=list)

    def find(self, states: Sequence[CarriedState]) -> list[CarriedState]:
        """Find every layer; returns the remaining states."""
        left = list(states)
        while True:
            found = next((layer for s in left for layer in [self._match(s, left)] if layer is not None), None)
            if found is None:
                return left
            self.widths[self.first_layer + len(self.layers)] = found.hidden.width
            self.layers.append(found)
            left = [s for s in left if s is not found.hidden and s is not found.cell]

    def _match(self, state: CarriedState, others: Sequence[CarriedState]) -> RecurrentLayer | None:
        for match in (self._lstm, self._gru, self._rnn):
            try:
                return match(state, others)
            except NotRowsError:
                continue
        return None

    def why_not(self, state: CarriedState, others: Sequence[CarriedState]) -> str:
        """Why a state belongs to no layer, for each kind of layer."""
        reasons = []
        for name, match in (("LSTM", self._lstm), ("GRU", self._gru), ("RNN", self._rnn)):
            try:
                match(state, others)
            except NotRowsError as error:
                reasons.append(f"no {name}: {error}")
        return "; ".join(reasons)

    # -- the three cells ----------------------------------------------------------------------------------------------
    def _lstm(self, hidden: CarriedState, others: Sequence[CarriedState]) -> RecurrentLayer:
        factors = hidden.new.only()
        if factors is None or len(factors) != 2 or not all(isinstance(f, RowGate) for f in factors):
            raise NotRowsError("the state is no product of two activations")
        for out, squashed in (factors, factors[::-1]):
            assert isinstance(out, RowGate) and isinstance(squashed, RowGate)
            cell = next((s for s in others if s is not hidden and s.new.equals(squashed.argument)), None)
            if cell is not None:
                return self._lstm_of(hidden, cell, out, squashed)
        raise NotRowsError("neither activation is one of another state")

    def _lstm_of(self, hidden: CarriedState, cell: CarriedState, out: RowGate, squashed: RowGate) -> RecurrentLayer:
        (forget, negate), f = _kept(cell), out.activation
        added = [m for m in cell.new.terms if cell.pick not in m]
        if len(added) != 1 or len(added[0]) != 2 or not _is(cell.new.terms[added[0]], 1):
            raise NotRowsError("what comes to the cell's state is not one product")
        for enter, fresh in (added[0], added[0][::-1]):
            if isinstance(enter, RowGate) and isinstance(fresh, RowGate) and enter.activation == forget.activation == f:
                before = Polynomial.of(cell.pick)
                seen = [_seen(g.argument, p) for g, p in ((enter, before), (out, cell.new), (forget, before))]
                linear = [self._linear(p, hidden) for p in (*(rest for rest, _ in seen), fresh.argument)]
                holes = np.stack([weights for _, weights in seen]).astype(self.dtype)
                if negate:
                    linear[2], holes[2] = linear[2].negated(), -holes[2]
                activations = (f, fresh.activation, squashed.activation)
                peepholes = holes.reshape(-1) if holes.any() else None
                return RecurrentLayer("LSTM", hidden, cell, tuple(linear), activations, peepholes=peepholes)
        raise NotRowsError("the gates have different activations")

    def _gru(self, hidden: CarriedState, others: Sequence[CarriedState]) -> RecurrentLayer:
        update, fresh, negate = _mixed(hidden)
        linear = self._linear(update.argument, hidden)
        reset, new, inner, behind = self._fresh(fresh.argument, hidden)
        if reset.activation != update.activation:
            raise NotRowsError("the gates have different activations")
        gates = (linear.negated() if negate else linear, self._linear(reset.argument, hidden), new)
        return RecurrentLayer("GRU", hidden, None, gates, (update.activation, fresh.activation), inner, behind)

    def _fresh(self, argument: Polynomial, hidden: CarriedState) -> tuple[RowGate, Linear, Array, bool]:
        """A GRU's new state before its activation.

        Returns the reset gate, the weights, the inner bias, and whether it resets after the product.
        """
        resets: set[RowGate] = set()
        plain, behind = {}, {}
        before = np.zeros((hidden.width, hidden.width), self.dtype)
        for monomial, c in argument.terms.items():
            gate = next((f for f in monomial if isinstance(f, RowGate)), None)
            reset = _reset_before(monomial, hidden)
            if gate is not None:
                resets.add(gate)
                behind[tuple(f for f in monomial if f is not gate)] = c
            elif reset is not None:
                resets.add(reset[0])
                before += self._scaled(reset[1], c)
            else:
                plain[monomial] = c
        new, inside = (self._linear(Polynomial(argument.width, terms), hidden) for terms in (plain, behind))
        if len(resets) != 1 or (behind and before.any()):
            raise NotRowsError("the new state has not one reset gate")
        if inside.inputs or new.recurrent.any():
            raise NotRowsError("the reset gate is applied to something else than the state's product")
        new.recurrent += before + inside.recurrent
        return resets.pop(), new, inside.bias, bool(behind)

    def _rnn(self, hidden: CarriedState, others: Sequence[CarriedState]) -> RecurrentLayer:
        factors = hidden.new.only() or ()
        gate = factors[0] if len(factors) == 1 else None
        if not isinstance(gate, RowGate):
            raise NotRowsError("the state is not one activation")
        return RecurrentLayer("RNN", hidden, None, (self._linear(gate.argument, hidden),), (gate.activation,))

    # -- weights ------------------------------------------------------------------------------------------------------
    def _linear(self, polynomial: Polynomial, hidden: CarriedState) -> Linear:
        units = polynomial.width
        found = Linear({}, np.zeros((hidden.width, units), self.dtype), np.zeros(units, self.dtype))
        for monomial, c in polynomial.terms.items():
            if not monomial:
                found.bias += c.astype(self.dtype)
            elif len(monomial) == 1 and isinstance(monomial[0], RowProduct):
                self._add_product(found, monomial[0], c, hidden)
            elif len(monomial) == 1 and isinstance(monomial[0], Pick):
                self._add(found, monomial[0], np.diag(np.broadcast_to(c, (units,))).astype(self.dtype), hidden)
            else:
                raise NotRowsError("a gate is no sum of products with weights")
        return found

    def _add_product(self, to: Linear, product: RowProduct, c: Array, hidden: CarriedState) -> None:
        matrix, rows = self._scaled(product.matrix, c), product.rows
        for k, layer in enumerate(self.layers):
            if layer.hidden.new.equals(rows):
                self._weights(to, self.first_layer + k)[:] += matrix
                return
        for monomial, r in rows.terms.items():
            scaled = matrix if bool((r == 1).all()) else (np.reshape(r, (-1, 1)) * matrix).astype(self.dtype)
            if not monomial:
                to.bias += np.broadcast_to(scaled, matrix.shape).sum(0, dtype=np.float64).astype(self.dtype)
            elif len(monomial) == 1 and isinstance(monomial[0], Pick):
                self._add(to, monomial[0], scaled, hidden)
            else:
                raise NotRowsError("a gate's product is of something else than inputs and state")

    def _add(self, to: Linear, pick: Pick, matrix: Array, hidden: CarriedState) -> None:
        if pick.source == hidden.pick.source:
            first = pick.start - hidden.pick.start
            if first < 0 or pick.stop > hidden.pick.stop:
                raise NotRowsError("a gate reads another state")
            to.recurrent[first : first + len(matrix)] += matrix
        elif pick.source in self.widths:
            self._weights(to, pick.source)[pick.start : pick.stop] += matrix
        else:
            raise NotRowsError("a gate reads another state")

    def _weights(self, to: Linear, source: int) -> Array:
        if source not in to.inputs:
            to.inputs[source] = np.zeros((self.widths[source], to.bias.size), self.dtype)
        return to.inputs[source]

    def _scaled(self, matrix: Array, c: Array) -> Array:
        return matrix if bool((c == 1).all()) else (matrix * c).astype(self.dtype)


def _other(monomial: Monomial, factor: RowFactor) -> RowFactor | None:
    """The second of two factors, or None."""
    if len(monomial) != 2 or factor not in monomial:
        return None
    return monomial[1] if monomial[0] == factor else monomial[0]


def _is(coefficient: Array, number: float) -> bool:
    return bool((coefficient == number).all())


def _kept(state: CarriedState) -> tuple[RowGate, bool]:
    """The gate that keeps the old state.

    With True, the factor is 1 minus the returned gate, which is the sigmoid of the negative argument.
    """
    kept = {m: c for m, c in state.new.terms.items() if state.pick in m}
    if len(kept) == 2 and (state.pick,) in kept and _is(kept.pop((state.pick,)), 1):
        ((monomial, c),) = kept.items()
        gate = _other(monomial, state.pick)
        if isinstance(gate, RowGate) and _is(c, -1) and gate.activation.name == SIGMOID:
            return gate, True
    elif len(kept) == 1:
        ((monomial, c),) = kept.items()
        gate = _other(monomial, state.pick)
        if isinstance(gate, RowGate) and _is(c, 1):
            return gate, False
    raise NotRowsError("the old state is not kept by a gate")


def _seen(argument: Polynomial, memory: Polynomial) -> tuple[Polynomial, Array]:
    """A gate's argument without the cell's state, and the weights of that state."""
    first = next((m for m in memory.terms if m in argument.terms), None)
    if first is None:
        return argument, np.zeros(argument.width)
    weights = np.broadcast_to(argument.terms[first] / memory.terms[first], (argument.width,))
    rest = argument.plus(memory.times(Polynomial.constant(-weights)))
    if any(m in rest.terms for m in memory.terms):
        raise NotRowsError("a gate sees part of the cell's state")
    return rest, weights


def _mixed(hidden: CarriedState) -> tuple[RowGate, RowGate, bool]:
    """Update gate, new state, and whether the update gate is the share of the new state."""
    update, negate = _kept(hidden)
    rest = {m: c for m, c in hidden.new.terms.items() if hidden.pick not in m}
    for monomial, c in rest.items():
        fresh = _other(monomial, update)
        if not isinstance(fresh, RowGate):
            continue
        if negate and len(rest) == 1 and _is(c, 1):
            return update, fresh, True
        if not negate and len(rest) == 2 and _is(c, -1) and (fresh,) in rest and _is(rest[fresh,], 1):
            return update, fresh, False
    raise NotRowsError("the state is no mixture of the old and a new one")


def _reset_before(monomial: Monomial, hidden: CarriedState) -> tuple[RowGate, Array] | None:
    """The reset gate and the weights, if this is a product of the reset state; else None."""
    if len(monomial) != 1 or not isinstance(monomial[0], RowProduct):
        return None
    factors = monomial[0].rows.only()
    gate = None if factors is None else _other(factors, hidden.pick)
    return (gate, monomial[0].matrix) if isinstance(gate, RowGate) else None

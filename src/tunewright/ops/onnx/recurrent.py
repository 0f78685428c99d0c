"""LSTM, GRU and RNN: one product for the inputs of all gates, then one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tunewright.ir.types import Dim, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec, Reference
from ..input_errors import check_lengths
from ..numeric import narrow, sigmoid, softplus, wide
from ..samples import model as samples_model
from ..samples.base import with_samples

Function: TypeAlias = Callable[[Array], Array]
#: (gate inputs of a step, state) -> state; the first array of a state is the hidden state
Cell: TypeAlias = Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]

#: name -> (function of x, alpha, beta; default alpha; default beta); None where the parameter is unused
_ACTIVATIONS: dict[str, tuple[Callable[[Array, Any, Any], Any], float | None, float | None]] = {
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "elu": (lambda x, a, b: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))), 1.0, None),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "leakyrelu": (lambda x, a, b: np.where(x < 0, a * x, x), 0.01, None),
    "relu": (lambda x, a, b: np.maximum(x, 0), None, None),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
    "sigmoid": (lambda x, a, b: sigmoid(x), None, None),
    "softplus": (lambda x, a, b: softplus(x), None, None),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), None, None),
    "tanh": (lambda x, a, b: np.tanh(x), None, None),
    "thresholdedrelu": (lambda x, a, b: np.where(x > a, x, 0), 1.0, None),
}


def _activations(attrs: Attrs, default: Sequence[str], directions: int, dtype: np.dtype[Any]) -> list[list[Function]]:
    """The functions of each direction. Alphas and betas are assigned in order to the functions that take one."""
    names = list(attrs.get("activations") or list(default) * directions)
    if len(names) != len(default) * directions:
        raise ValueError(f"{len(names)} activations where {len(default) * directions} are needed")
    alphas, betas = list(attrs.get("activation_alpha") or ()), list(attrs.get("activation_beta") or ())
    found: list[Function] = []
    for name in names:
        entry = _ACTIVATIONS.get(name.lower())
        if entry is None:
            raise ValueError(f"activation {name!r} is not one of {', '.join(sorted(_ACTIVATIONS))}")
        function, alpha, beta = entry
        if alpha is not None and alphas:
            alpha = alphas.pop(0)
        if beta is not None and betas:
            beta = betas.pop(0)
        found.append(_bind(function, alpha, beta, dtype))
    return [found[d * len(default) : (d + 1) * len(default)] for d in range(directions)]


def _bind(function: Callable[[Array, Any, Any], Any], alpha: Any, beta: Any, dtype: np.dtype[Any]) -> Function:
    a, b = (None if v is None else dtype.type(v) for v in (alpha, beta))
    return lambda x: np.asarray(function(x, a, b), dtype)


def _clipper(attrs: Attrs) -> Function:
    clip = attrs.get("clip")
    if not clip or clip <= 0:
        return lambda x: x
    return lambda x: np.clip(x, -x.dtype.type(clip), x.dtype.type(clip))


def _directions(attrs: Attrs) -> list[bool]:
    """Whether each direction runs backwards."""
    direction = attrs.get("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ValueError(f"direction {direction!r} is not forward, reverse or bidirectional")
    return {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]


def _run(
    x: Array, w: Array, bias: Array, lengths: Array | None, backwards: bool, state: tuple[Array, ...], cell: Cell
) -> tuple[Array, tuple[Array, ...]]:
    """Run one direction over [time, batch, features]; (all hidden states, the last state)."""
    steps, batch = x.shape[:2]
    order = None
    if backwards:
        # Each sequence is reversed within its own length.
        times = np.arange(steps)[:, None]
        ends = np.full((1, batch), steps) if lengths is None else lengths.reshape(1, -1)
        order = (np.where(times < ends, ends - 1 - times, times), np.arange(batch)[None])
        x = x[order]
    gates = np.matmul(x.reshape(steps * batch, x.shape[-1]), w.T).reshape(steps, batch, len(w)) + bias
    y = np.zeros((steps, batch, state[0].shape[-1]), x.dtype)
    for t in range(steps):
        new = cell(gates[t], state)
        if lengths is None:
            state = new
            y[t] = new[0]
        else:
            alive = (t < lengths).reshape(-1, 1)
            state = tuple(np.where(alive, a, b) for a, b in zip(new, state, strict=True))
            y[t] = np.where(alive, new[0], 0)
    if order is not None:
        y = y[order]
    return y, state


def _recur(
    inputs: Sequence[Any],
    attrs: Attrs,
    initial: Sequence[int],
    make_cell: Callable[[int, Array, Array | None], tuple[Array, Cell]],
) -> list[Array]:
    """Run all directions. ``initial``: inputs with initial states; ``make_cell``: (direction, R, B) -> (bias, cell)."""
    layout, dtype = int(attrs.get("layout", 0)), inputs[0].dtype
    x, w, r, b = (None if v is None else wide(v) for v in (*inputs[:3], shapes.optional(inputs, 3)))
    assert x is not None and w is not None and r is not None
    lengths = shapes.optional(inputs, 4)
    x = x.swapaxes(0, 1) if layout else x
    backwards = _directions(attrs)
    if w.shape[0] != len(backwards):
        raise ValueError(f"weights for {w.shape[0]} directions where {len(backwards)} are needed")
    if lengths is not None:
        if lengths.size != x.shape[1]:
            raise ValueError(f"{lengths.size} sequence lengths for {x.shape[1]} sequences")
        check_lengths(lengths, x.shape[0])
    states: list[tuple[Array, ...]] = []
    outputs = []
    for d, back in enumerate(backwards):
        start = []
        for i in initial:
            given = shapes.optional(inputs, i)
            if given is None:
                start.append(np.zeros((x.shape[1], r.shape[-1]), x.dtype))
            else:
                start.append(wide(given[:, d] if layout else given[d]))
        bias, cell = make_cell(d, r[d], None if b is None else b[d])
        y, state = _run(x, w[d], bias, lengths, back, tuple(start), cell)
        outputs.append(y)
        states.append(state)
    result = np.stack(outputs, 1)
    last = [np.stack([s[k] for s in states], 0) for k in range(len(initial))]
    if layout:
        result, last = result.transpose(2, 0, 1, 3), [s.swapaxes(0, 1) for s in last]
    return [narrow(a, dtype) for a in (result, *last)]


def _lstm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    hidden, dtype = inputs[2].shape[-1], wide(inputs[0]).dtype
    functions = _activations(attrs, ("Sigmoid", "Tanh", "Tanh"), inputs[1].shape[0], dtype)
    clip, peepholes = _clipper(attrs), shapes.optional(inputs, 7)
    coupled = bool(attrs.get("input_forget", 0))

    def make(d: int, r: Array, b: Array | None) -> tuple[Array, Cell]:
        f, g, h = functions[d]
        turned = np.ascontiguousarray(r.T)
        bias = np.zeros(4 * hidden, dtype) if b is None else b[: 4 * hidden] + b[4 * hidden :]
        peep = None if peepholes is None else wide(peepholes[d]).reshape(3, hidden)

        def cell(gates: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            last, memory = state
            i, o, forget, c = np.split(gates + last @ turned, 4, -1)
            if peep is not None:
                i, forget = i + peep[0] * memory, forget + peep[2] * memory
            i = f(clip(i))
            forget = 1 - i if coupled else f(clip(forget))
            memory = forget * memory + i * g(clip(c))
            if peep is not None:
                o = o + peep[1] * memory
            return f(clip(o)) * h(memory), memory

        return bias, cell

    return _recur(inputs, attrs, (5, 6), make)


def _gru(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    hidden, dtype = inputs[2].shape[-1], wide(inputs[0]).dtype
    functions = _activations(attrs, ("Sigmoid", "Tanh"), inputs[1].shape[0], dtype)
    clip, linear = _clipper(attrs), bool(attrs.get("linear_before_reset", 0))

    def make(d: int, r: Array, b: Array | None) -> tuple[Array, Cell]:
        f, g = functions[d]
        turned = np.ascontiguousarray(r.T)
        both = np.zeros(6 * hidden, dtype) if b is None else b
        bias, inner = both[: 3 * hidden].copy(), both[5 * hidden :]
        bias[: 2 * hidden] += both[3 * hidden : 5 * hidden]
        if not linear:
            bias[2 * hidden :] += inner

        def cell(gates: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            (last,) = state
            z, reset, candidate = np.split(gates, 3, -1)
            if linear:
                mine = last @ turned
                z, reset = f(clip(z + mine[:, :hidden])), f(clip(reset + mine[:, hidden : 2 * hidden]))
                candidate = candidate + reset * (mine[:, 2 * hidden :] + inner)
            else:
                mine = last @ turned[:, : 2 * hidden]
                z, reset = f(clip(z + mine[:, :hidden])), f(clip(reset + mine[:, hidden:]))
                candidate = candidate + (reset * last) @ turned[:, 2 * hidden :]
            return ((1 - z) * g(clip(candidate)) + z * last,)

        return bias, cell

    return _recur(inputs, attrs, (5,), make)


def _rnn(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    hidden, dtype = inputs[2].shape[-1], wide(inputs[0]).dtype
    directions = inputs[1].shape[0]
    names = (attrs.get("activations") or ("Tanh", "Tanh"))[:directions]  # the default covers both directions
    functions = _activations({**attrs, "activations": names}, ("Tanh",), directions, dtype)
    clip = _clipper(attrs)

    def make(d: int, r: Array, b: Array | None) -> tuple[Array, Cell]:
        (f,) = functions[d]
        turned = np.ascontiguousarray(r.T)
        bias = np.zeros(hidden, dtype) if b is None else b[:hidden] + b[hidden:]

        def cell(gates: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            return (f(clip(gates + state[0] @ turned)),)

        return bias, cell

    return _recur(inputs, attrs, (5,), make)


# -- types and work ---------------------------------------------------------------------------------------------------
def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, w, r = (shapes.tensor(operands, i) for i in range(3))
    xs, ws, rs = (shapes.need_rank(t, 3, what) for t, what in ((x, "X"), (w, "W"), (r, "R")))
    layout, directions = int(attrs.get("layout", 0)), len(_directions(attrs))
    batch, steps = (xs[0], xs[1]) if layout else (xs[1], xs[0])
    shapes.same_dim(directions, ws[0], "directions of W")
    shapes.same_dim(directions, rs[0], "directions of R")
    shapes.same_dim(xs[2], ws[2], "X and W differ in features")
    hidden: Dim = shapes.same_dim(attrs.get("hidden_size"), rs[2], "hidden_size and R differ")
    y = (batch, steps, directions, hidden) if layout else (steps, directions, batch, hidden)
    state = (batch, directions, hidden) if layout else (directions, batch, hidden)
    return [TensorType(x.dtype, y), TensorType(x.dtype, state), TensorType(x.dtype, state)][:n]


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    """Flops of the products: every weight is used at each time step of each sequence."""
    x, w, r = inputs[:3]
    assert x is not None and w is not None and r is not None
    return 2.0 * x.dims[0] * x.dims[1] * (w.size + r.size)


#: the names of the inputs
_ROLES = ("input", "weights", "recurrence", "bias", "lengths", "initial-h", "initial-c", "peepholes")


def _spec(name: str, reference: Reference) -> OpSpec:
    return OpSpec(
        name, reference, _infer, flops=_flops, heavy=True, batch=batch_rules.recurrent, steep=True, roles=_ROLES
    )  # fmt: skip


OPS = with_samples(
    (
        _spec("LSTM", _lstm),
        _spec("GRU", _gru),
        _spec("RNN", _rnn),
    ),
    samples_model.RECURRENT,
)

"""The element-wise part of LSTM, GRU and RNN in C: activations, and one step of a cell for one hidden unit.

Inside a step the text can use ``j`` (the unit) and ``d`` (the direction). ``gate(g)`` is the contribution of the hidden
state to gate g, ``input(g)`` that of the input and both biases. ``hidden[j]`` and ``cell[j]`` are the states. The text
ends with ``value``, the new hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.solvers.base import Problem

#: name -> (C from x with {a}, {b} and {real}; default alpha; default beta); None: the parameter is not used
_ACTIVATIONS: dict[str, tuple[str, float | None, float | None]] = {
    "affine": ("return {a} * x + {b};", 1.0, 0.0),
    "elu": ("return x > 0 ? x : {a} * {real}_expm1(x);", 1.0, None),
    "hardsigmoid": ("REAL v = {a} * x + {b}; return v < 0 ? 0 : v > 1 ? 1 : v;", 0.2, 0.5),
    "leakyrelu": ("return x < 0 ? {a} * x : x;", 0.01, None),
    "relu": ("return x < 0 ? 0 : x;", None, None),
    "scaledtanh": ("return {a} * {real}_tanh({b} * x);", 1.0, 1.0),
    "sigmoid": ("return {real}_sigmoid(x);", None, None),
    "softplus": ("return {real}_softplus(x);", None, None),
    "softsign": ("return x / (1 + {real}_fabs(x));", None, None),
    "tanh": ("return {real}_tanh(x);", None, None),
    "thresholdedrelu": ("return x > {a} ? x : 0;", 1.0, None),
}


@dataclass(frozen=True)
class RecurrentCell:
    """The properties in which the operations differ."""

    #: the gates of the weights
    gates: int
    #: default activations of one direction
    activations: tuple[str, ...]
    #: the inputs with initial states
    states: tuple[int, ...] = (5,)


_LSTM = RecurrentCell(4, ("Sigmoid", "Tanh", "Tanh"), (5, 6))
CELLS = {
    "LSTM": _LSTM,
    "com.microsoft::DynamicQuantizeLSTM": _LSTM,
    "GRU": RecurrentCell(3, ("Sigmoid", "Tanh")),
    "RNN": RecurrentCell(1, ("Tanh",)),
}


#: direction -> (their number, those that run backwards: bit d)
DIRECTIONS = {"forward": (1, 0), "reverse": (1, 1), "bidirectional": (2, 2)}


def directions(problem: Problem) -> tuple[int, int]:
    """The directions of a problem that `why_not` has accepted."""
    return DIRECTIONS[problem.attrs.get("direction", "forward")]


def _activations(problem: Problem) -> list[tuple[str, float | None, float | None]] | str:
    """(C, alpha, beta) of each function of each direction, or why they are refused.

    Parameters are assigned to the functions in order.
    """
    cell = CELLS[problem.op]
    count, _ = directions(problem)
    names = list(problem.attrs.get("activations") or cell.activations * count)
    if problem.op == "RNN":
        names = names[:count]  # The default names the activations of both directions.
    if len(names) != len(cell.activations) * count:
        return f"{len(names)} activations where {len(cell.activations) * count} are needed"
    alphas, betas = (list(problem.attrs.get(f"activation_{p}") or ()) for p in ("alpha", "beta"))
    found = []
    for name in names:
        entry = _ACTIVATIONS.get(name.lower())
        if entry is None:
            return f"no activation {name}"
        text, alpha, beta = entry
        if alpha is not None and alphas:
            alpha = alphas.pop(0)
        if beta is not None and betas:
            beta = betas.pop(0)
        found.append((text, alpha, beta))
    return found


def why_not(problem: Problem) -> str | None:
    """None when `functions` can be written for the problem, else the reason."""
    direction = problem.attrs.get("direction", "forward")
    if direction not in DIRECTIONS:
        return f"no direction {direction}"
    found = _activations(problem)
    return found if isinstance(found, str) else None


def functions(problem: Problem, real: str) -> str:
    """C functions activate0, activate1, ... of (direction, x), and `cut`, which applies the attribute clip."""
    found = _activations(problem)
    assert not isinstance(found, str), found
    per = len(CELLS[problem.op].activations)
    lines = []
    for i in range(per):
        texts = [
            text.format(a=f"(REAL){alpha!r}", b=f"(REAL){beta!r}", real=real) for text, alpha, beta in found[i::per]
        ]
        for d, text in enumerate(texts):
            lines.append(f"INLINE REAL activate{i}_{d}(REAL x) {{ {text} }}")
        value = f"activate{i}_0(x)" if len(set(texts)) == 1 else f"d ? activate{i}_1(x) : activate{i}_0(x)"
        lines.append(f"INLINE REAL activate{i}(int d UNUSED, REAL x) {{ return {value}; }}")
    clip = problem.attrs.get("clip")
    if clip and clip > 0:
        bound = f"(REAL){float(clip)!r}"
        lines.append(f"INLINE REAL cut(REAL x) {{ return x < -{bound} ? -{bound} : x > {bound} ? {bound} : x; }}")
    else:
        lines.append("#define cut(x) (x)")
    return "\n".join(lines)


def lstm(coupled: bool, peephole: Sequence[str]) -> str:
    """The cell of an LSTM. ``peephole``: C of the weights from the cell to input, output and forget gate, or none."""
    into, out, keep = (f" + {p} * memory" for p in peephole) if peephole else ("", "", "")
    forget = "1 - i" if coupled else f"activate0(d, cut(gate(2) + input(2){keep}))"
    return f"""REAL memory = cell[j];
REAL i = activate0(d, cut(gate(0) + input(0){into}));
REAL forget = {forget};
memory = forget * memory + i * activate1(d, cut(gate(3) + input(3)));
cell[j] = memory;
REAL value = activate0(d, cut(gate(1) + input(1){out})) * activate2(d, memory);"""


def gru_linear(inner: str) -> str:
    """The cell of a GRU that applies the reset gate after the product.

    ``inner`` is the C text of the bias to which the reset gate also applies.
    """
    return f"""REAL update = activate0(d, cut(gate(0) + input(0)));
REAL reset = activate0(d, cut(gate(1) + input(1)));
REAL fresh = activate1(d, cut(input(2) + reset * (gate(2){inner})));
REAL value = (1 - update) * fresh + update * hidden[j];"""


#: The reset gate is applied to the hidden state, which goes through a second product.
GRU_FIRST = """gate(0) = activate0(d, cut(gate(0) + input(0)));
reset[j] = activate0(d, cut(gate(1) + input(1))) * hidden[j];"""
GRU_SECOND = """REAL update = gate(0);
REAL fresh = activate1(d, cut(gate(2) + input(2)));
REAL value = (1 - update) * fresh + update * hidden[j];"""
RNN = "REAL value = activate0(d, cut(gate(0) + input(0)));"

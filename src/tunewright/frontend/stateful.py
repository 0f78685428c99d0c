"""States of a model: inputs that the result of one inference continues in the next.

Which they are is declared (`{"past": "present"}`), or found where names, types or operators leave no doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..errors import InputError
from ..ir.graph import Graph, Node, Value
from ..ir.types import Dim, TensorType, Type

#: instead of a mapping: find them
AUTO = "auto"
#: how exporters name an input and the result that continues it; the types must fit besides
_NAMES = (
    (r"past_key_values?", "present"),
    (r"past", "present"),
    (r"(.*)[._]in", r"\1_out"),
    (r"(.*)[._]in", r"\1.out"),
)
#: the same for states of a fixed shape, whose types must be equal unless the name says that it is a state
_FIXED_NAMES = ((r"^(.+?)_?0?$", r"\1n"), (r"^(.+?)_?0?$", r"\1N"), (r"^(.+?)_?0?$", r"\1_n"), (r"^(.+)$", r"\1_out"))
_STATE = re.compile(r"state|hidden|cell|memory", re.IGNORECASE)
#: inputs of operators that a result of the same operator continues, and the axis along which it grows
_PAIRS: Mapping[str, tuple[tuple[int, int, int | None], ...]] = {
    "Attention": ((4, 1, 2), (5, 2, 2)),
    "com.microsoft::Attention": ((4, 1, 3),),
    "com.microsoft::MultiHeadAttention": ((6, 1, 2), (7, 2, 2)),
    "com.microsoft::GroupQueryAttention": ((3, 1, 2), (4, 2, 2)),
    "TensorScatter": ((0, 0, None),),
    "LSTM": ((5, 1, None), (6, 2, None)),
    "GRU": ((5, 1, None),),
    "RNN": ((5, 1, None),),
}


def parse_states(text: str) -> dict[str, str] | str:
    """``auto``, or ``past_k=present_k,past_v=present_v`` as a command line gives it."""
    if text.strip().lower() == AUTO:
        return AUTO
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        input, equals, output = (part.strip() for part in pair.partition("="))
        if not (input and equals and output):
            hint = "auto, or for example past_k=present_k,past_v=present_v"
            raise InputError(f"{pair!r} is not INPUT=OUTPUT", where="--stateful", hint=hint)
        if input in found:
            raise InputError(f"input {input!r} is named twice", where="--stateful")
        found[input] = output
    if not found:
        raise InputError("no states are named", where="--stateful", hint="auto, or INPUT=OUTPUT,...")
    return found


def checked_states(
    inputs: Mapping[str, Type | None], outputs: Mapping[str, Type | None], states: Mapping[str, str]
) -> dict[str, str]:
    """The same in the order of the inputs; InputError where a name is unknown or types do not fit."""
    taken: dict[str, str] = {}
    for input, output in states.items():
        where = f"state {input!r} -> {output!r}"
        if input not in inputs:
            raise InputError(f"there is no input {input!r}", where=where, hint=f"the inputs are {', '.join(inputs)}")
        if output not in outputs:
            hint = f"the outputs are {', '.join(outputs)}"
            raise InputError(f"there is no output {output!r}", where=where, hint=hint)
        if output in taken:
            raise InputError(f"output {output!r} continues {taken[output]!r} already", where=where)
        taken[output] = input
        reason = _why_not(inputs[input], outputs[output])
        if reason:
            raise InputError(reason, where=where)
    return {name: states[name] for name in inputs if name in states}


def _why_not(input: Type | None, output: Type | None) -> str:
    """What speaks against an output as the next value of an input; empty: nothing that is known."""
    if not isinstance(input, TensorType):
        return f"the input is {input}, and only tensors can be states"
    if output is None:
        return ""
    if not isinstance(output, TensorType) or input.dtype is not output.dtype:
        return f"the input is {input}, the output {output}"
    if input.shape is None or output.shape is None:
        return ""
    pairs = list(zip(input.shape, output.shape, strict=False))
    differs = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
    if differs or len(input.shape) != len(output.shape):
        return f"the input is {input}, the output {output}"
    return ""


def find_states(graph: Graph, outputs: Mapping[str, Type | None]) -> dict[str, str]:
    """Inputs that results continue, as far as names, types or operators tell."""
    found: dict[str, str] = {}
    for value in graph.inputs:
        free = [name for name in outputs if name not in found.values()]
        candidates = [*_by_operator(graph, value), *_by_name(value, outputs)]
        for name in candidates:
            if name in free and not _why_not(value.type, outputs[name]):
                found[value.name] = name
                break
    return found


def _by_operator(graph: Graph, value: Value) -> Iterator[str]:
    """Outputs that a node makes out of this input and new rows."""
    for node, at in _uses(value):
        for output, _ in _continued(node, at):
            if graph.is_output(node.outputs[output]):
                yield graph.output_names[graph.outputs.index(node.outputs[output])]


def _uses(value: Value) -> Iterator[tuple[Node, int]]:
    """Who reads an input as it is, in another order of beams (a Gather along the batch), or in another type."""
    for node, at in value.uses:
        yield node, at
        reorders = node.op == "Gather" and at == 0 and int(node.attrs.get("axis", 0)) == 0
        if reorders or node.op in ("Identity", "Cast"):
            yield from node.output.uses


def _continued(node: Node, at: int) -> Iterator[tuple[int, int | None]]:
    """Results of a node that continue its input, and the axis along which they grow."""
    if node.op == "Concat" and at == 0 and len(node.inputs) == 2:
        yield 0, int(node.attrs.get("axis", 0))
    for input, output, axis in _PAIRS.get(node.op, ()):
        if input == at and output < len(node.outputs):
            yield output, axis


def _by_name(value: Value, outputs: Mapping[str, Type | None]) -> Iterator[str]:
    for pattern, becomes in _NAMES:
        name, count = re.subn(pattern, becomes, value.name, count=1)
        if count and name in outputs:
            yield name
    for pattern, becomes in _FIXED_NAMES:
        name = re.sub(pattern, becomes, value.name, count=1)
        is_equal = name in outputs and value.type == outputs[name] and value.tensor is not None
        if name in outputs and name != value.name and (is_equal or _STATE.search(value.name)):
            yield name


def growing_axes(graph: Graph, outputs: Mapping[str, Type | None], states: Mapping[str, str]) -> dict[str, int]:
    """The axis along which each state grows, of those that do: an operator says so, or the types of both ends."""
    found = {}
    for value in graph.inputs:
        if value.name not in states:
            continue
        axes = {axis for node, at in _uses(value) for _, axis in _continued(node, at) if axis is not None}
        axes = axes or _differing(value.type, outputs[states[value.name]])
        if len(axes) == 1 and isinstance(value.type, TensorType) and value.type.shape is not None:
            found[value.name] = axes.pop() % len(value.type.shape)
    return found


def _differing(input: Type | None, output: Type | None) -> set[int]:
    """Axes that are open in both, and called otherwise."""
    if not isinstance(input, TensorType) or not isinstance(output, TensorType):
        return set()
    pairs: list[tuple[Dim, Dim]] = list(zip(input.shape or (), output.shape or (), strict=False))
    return {axis for axis, (a, b) in enumerate(pairs) if isinstance(a, str) and not isinstance(b, int) and a != b}

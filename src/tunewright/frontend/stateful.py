"""States of a model: inputs that receive a result of the previous inference.

They are declared (`{"past": "present"}`), or found if names, types or operators identify them clearly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..errors import InputError
from ..ir.graph import Graph, Node, Value
from ..ir.types import Dim, TensorType, Type

#: in place of a mapping: find the states
AUTO = "auto"
#: how exporters name an input and the result that continues it; the types must also fit
_NAMES = (
    (r"past_key_values?", "present"),
    (r"past", "present"),
    (r"(.*)[._]in", r"\1_out"),
    (r"(.*)[._]in", r"\1.out"),
)
#: the same for states of a fixed shape; their types must be equal unless the name contains a word for a state
_FIXED_NAMES = ((r"^(.+?)_?0?$", r"\1n"), (r"^(.+?)_?0?$", r"\1N"), (r"^(.+?)_?0?$", r"\1_n"), (r"^(.+)$", r"\1_out"))
_STATE = re.compile(r"state|hidden|cell|memory", re.IGNORECASE)
#: operator -> (input, the result that continues it, the axis along which it grows)
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
    """Parse ``auto`` or ``past_k=present_k,past_v=present_v`` from the command line."""
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
    """Return the states in the order of the inputs. Raises InputError for an unknown name or types that do not fit."""
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
    """Return why an output cannot be the next value of an input, or an empty text."""
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
    """Find inputs that results continue, as far as names, types or operators identify them."""
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
    """Yield outputs that a node makes from this input and new rows."""
    for node, at in _uses(value):
        for output, _ in _continued(node, at):
            if graph.is_output(node.outputs[output]):
                yield graph.output_names[graph.outputs.index(node.outputs[output])]


def _uses(value: Value) -> Iterator[tuple[Node, int]]:
    """Yield readers of an input, also behind an Identity, a Cast or a reordering of beams (Gather along the batch)."""
    for node, at in value.uses:
        yield node, at
        reorders = node.op == "Gather" and at == 0 and int(node.attrs.get("axis", 0)) == 0
        if reorders or node.op in ("Identity", "Cast"):
            yield from node.output.uses


def _continued(node: Node, at: int) -> Iterator[tuple[int, int | None]]:
    """Yield the results of a node that continue its input, with the axis along which they grow."""
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
    """Return the axis along which each growing state grows, from its operator or from the types of input and output."""
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
    """Return the axes that are open in both types and have different names."""
    if not isinstance(input, TensorType) or not isinstance(output, TensorType):
        return set()
    pairs: list[tuple[Dim, Dim]] = list(zip(input.shape or (), output.shape or (), strict=False))
    return {axis for axis, (a, b) in enumerate(pairs) if isinstance(a, str) and not isinstance(b, int) and a != b}

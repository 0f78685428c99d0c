"""Seeded mutations of models. ``mutation(n)`` is always the same bytes for the same n.

Run as a script it is a worker (see `sandbox`) that makes a mutation and does everything with it that a user would.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import onnx

from faults import sandbox
from faults.seeds import seeds

INTEGERS = (0, 1, -1, 2, 3, 7, -7, 64, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 62, -(1 << 63), (1 << 63) - 1)
NUMBERS = (0.0, -1.0, 0.5, 1e-30, 1e30, -1e30, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "NOTSET", "SAME_LOWER", "nearest", "\u00e9", "a" * 1000, "../..", "ij,jk->ik")
#: what a worker allows: small, so that large and legal requests end quickly too
LIMITS = {"MAX_ITERATIONS": 500, "MAX_TENSOR_BYTES": 64 << 20, "MAX_MEMORY_BYTES": 256 << 20, "FOLD_BYTES": 8 << 20}


Seeds: TypeAlias = Sequence[tuple[str, bytes]]


def own_seeds() -> Seeds:
    """The small models of `seeds`."""
    return [(name, model.SerializeToString(deterministic=True)) for name, model in seeds()]


def write_operator_seeds(path: Path) -> None:
    """One model for every operator, out of ONNX's own tests, into a file: reading is quicker than making them."""
    from onnx.backend.test.loader import load_model_tests

    chosen: dict[str, list[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tests overflow on purpose
        cases = load_model_tests(kind="node")
    for case in sorted(cases, key=lambda c: c.name):
        if case.model is not None and len(data := case.model.SerializeToString(deterministic=True)) < 20_000:
            chosen.setdefault(case.model.graph.node[0].op_type, [case.name, data.hex()])
    path.write_text(json.dumps(list(chosen.values())))


def read_operator_seeds(path: Path) -> Seeds:
    return [(name, bytes.fromhex(data)) for name, data in json.loads(path.read_text())]


def mutation(seed: int, own: Seeds, operators: Seeds) -> tuple[str, bytes]:
    """Name and bytes of mutation number ``seed``."""
    rng = random.Random(seed)
    name, data = rng.choice(own if rng.random() < 0.6 else operators)
    if rng.random() < 0.2:
        steps = [rng.choice(BYTES) for _ in range(rng.choice((1, 1, 2, 4)))]
        for step in steps:
            data = step(rng, data, rng.choice(own)[1])
    else:
        model = onnx.ModelProto.FromString(data)
        steps = [rng.choice(PROTOS) for _ in range(rng.choice((1, 1, 2, 3)))]
        for step in steps:
            step(rng, model)
        data = model.SerializeToString(deterministic=True)
    return f"{seed}: {name} {' '.join(s.__name__ for s in steps)}", data


# ---- bytes ---------------------------------------------------------------------------------------------------------


def flip_bits(rng: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 16))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    begin, at, length = rng.randrange(len(other)), rng.randrange(len(data) + 1), rng.randrange(200)
    return data[:at] + other[begin : begin + length] + data[at + rng.choice((0, length)) :]


def cut_out(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.randrange(60) :]


def extreme_number(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return (
        data[:at]
        + rng.choice((b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\x80" * 9 + b"\x01", b"\0"))
        + data[at + 1 :]
    )


BYTES = (flip_bits, flip_bits, flip_bits, flip_bits, truncate, splice, cut_out, extreme_number)

# ---- protos --------------------------------------------------------------------------------------------------------


def _copy(message: Any) -> Any:
    """A message of its own: protobuf does not allow a copy into a list that holds the original."""
    return type(message).FromString(message.SerializeToString())


def graphs_of(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    found = [model.graph]
    for graph in found:
        found += [a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    return found


def a_node(rng: random.Random, model: onnx.ModelProto) -> onnx.NodeProto:
    lists = [g.node for g in graphs_of(model)] + [f.node for f in model.functions]
    return rng.choice([n for nodes in lists for n in nodes] or [onnx.NodeProto()])


def a_name(rng: random.Random, model: onnx.ModelProto) -> str:
    names = [o for g in graphs_of(model) for n in g.node for o in n.output] + [t.name for t in model.graph.initializer]
    return rng.choice([*names, *(i.name for i in model.graph.input), "", "nothing"])


def rename_input(rng: random.Random, model: onnx.ModelProto) -> None:
    node = a_node(rng, model)
    if node.input:
        node.input[rng.randrange(len(node.input))] = a_name(rng, model)


def rename_output(rng: random.Random, model: onnx.ModelProto) -> None:
    node = a_node(rng, model)
    if node.output:
        node.output[rng.randrange(len(node.output))] = a_name(rng, model)


def more_inputs(rng: random.Random, model: onnx.ModelProto) -> None:
    a_node(rng, model).input.extend([a_name(rng, model)] * rng.choice((1, 2, 20)))


def fewer_inputs(rng: random.Random, model: onnx.ModelProto) -> None:
    node = a_node(rng, model)
    del node.input[rng.randrange(len(node.input) + 1) :]


def more_outputs(rng: random.Random, model: onnx.ModelProto) -> None:
    node = a_node(rng, model)
    node.output.extend(f"{node.name}_{k}" for k in range(rng.choice((1, 5))))


def fewer_outputs(rng: random.Random, model: onnx.ModelProto) -> None:
    node = a_node(rng, model)
    del node.output[rng.randrange(len(node.output) + 1) :]


def drop_node(rng: random.Random, model: onnx.ModelProto) -> None:
    graph = rng.choice(graphs_of(model))
    if graph.node:
        del graph.node[rng.randrange(len(graph.node))]


def repeat_node(rng: random.Random, model: onnx.ModelProto) -> None:
    graph = rng.choice(graphs_of(model))
    if graph.node:
        graph.node.append(_copy(rng.choice(graph.node)))


def shuffle_nodes(rng: random.Random, model: onnx.ModelProto) -> None:
    graph = rng.choice(graphs_of(model))
    nodes = list(graph.node)
    rng.shuffle(nodes)
    copies = [_copy(n) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def other_operator(rng: random.Random, model: onnx.ModelProto) -> None:
    node = a_node(rng, model)
    if rng.random() < 0.2:
        node.op_type = rng.choice(_operators())
    else:  # one that takes as many inputs and makes as many outputs
        node.op_type = rng.choice(_operators(len(node.input), len(node.output)) or [node.op_type])
    if rng.random() < 0.7:
        del node.attribute[:]


@cache
def _operators(inputs: int | None = None, outputs: int = 1) -> tuple[str, ...]:
    schemas = [s for s in onnx.defs.get_all_schemas() if s.domain == ""]
    if inputs is not None:
        schemas = [
            s for s in schemas if s.min_input <= inputs <= s.max_input and s.min_output <= outputs <= s.max_output
        ]
    return tuple(sorted({s.name for s in schemas}))


def other_domain(rng: random.Random, model: onnx.ModelProto) -> None:
    a_node(rng, model).domain = rng.choice(
        ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "org.openvinotoolkit", "f", "?")
    )


def other_value(rng: random.Random, model: onnx.ModelProto) -> None:
    """An attribute of the same type with another value."""
    node = a_node(rng, model)
    if not node.attribute:
        return
    a = rng.choice(node.attribute)
    kinds = onnx.AttributeProto
    if a.type == kinds.INT:
        a.i = rng.choice(INTEGERS)
    elif a.type == kinds.FLOAT:
        a.f = rng.choice(NUMBERS)
    elif a.type == kinds.STRING:
        a.s = rng.choice(TEXTS).encode()
    elif a.type == kinds.INTS:
        _change_list(rng, a.ints, INTEGERS)
    elif a.type == kinds.FLOATS:
        _change_list(rng, a.floats, NUMBERS)
    elif a.type == kinds.STRINGS:
        _change_list(rng, a.strings, [t.encode() for t in TEXTS])
    elif a.type == kinds.TENSOR:
        _change_tensor(rng, a.t)


def _change_list(rng: random.Random, values: Any, choices: Any) -> None:
    what = rng.randrange(4)
    if what == 0 and values:
        values[rng.randrange(len(values))] = rng.choice(choices)
    elif what == 1:
        values.extend([rng.choice(choices)] * rng.choice((1, 3)))
    elif what == 2:
        del values[rng.randrange(len(values) + 1) :]
    elif values:
        for k in range(len(values)):
            values[k] = rng.choice(choices)


def other_kind(rng: random.Random, model: onnx.ModelProto) -> None:
    """An attribute of another type."""
    node = a_node(rng, model)
    if node.attribute:
        k = rng.randrange(len(node.attribute))
        value = rng.choice((3, 1.5, "text", [1, 2], [0.5], ["a", "b"], onnx.TensorProto(), onnx.GraphProto()))
        node.attribute[k].CopyFrom(onnx.helper.make_attribute(node.attribute[k].name, value))


def drop_attribute(rng: random.Random, model: onnx.ModelProto) -> None:
    node = a_node(rng, model)
    if node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]


def take_attribute(rng: random.Random, model: onnx.ModelProto) -> None:
    """An attribute of another node, or one that the schema knows and the node does not use."""
    node, other = a_node(rng, model), a_node(rng, model)
    if other.attribute and rng.random() < 0.5:
        node.attribute.append(_copy(rng.choice(other.attribute)))
    elif onnx.defs.has(node.op_type, ""):
        schema = onnx.defs.get_schema(node.op_type)
        if schema.attributes:
            name = rng.choice(sorted(schema.attributes))
            kind = int(schema.attributes[name].type.value)
            for k in reversed(range(len(node.attribute))):
                if node.attribute[k].name == name:
                    del node.attribute[k]
            a = node.attribute.add(name=name, type=kind)
            a.i, a.f, a.s = rng.choice(INTEGERS), rng.choice(NUMBERS), rng.choice(TEXTS).encode()
            a.ints.extend(rng.choices(INTEGERS, k=rng.randrange(4)))


def _change_tensor(rng: random.Random, tensor: onnx.TensorProto) -> None:
    what = rng.randrange(5)
    if what == 0:
        _change_list(rng, tensor.dims, INTEGERS)
    elif what == 1:
        tensor.data_type = rng.choice((*range(29), 99))
    elif what == 2:
        tensor.raw_data = rng.randbytes(rng.choice((0, 1, 3, len(tensor.raw_data), len(tensor.raw_data) + 4)))
    elif what == 3:  # the same shape, other numbers: what shapes, axes and indices are made of
        size = len(tensor.raw_data) // 8
        if tensor.data_type == onnx.TensorProto.INT64:
            values = [rng.choice(INTEGERS) if rng.random() < 0.5 else rng.randrange(-3, 4) for _ in range(size)]
            tensor.raw_data = b"".join(v.to_bytes(8, "little", signed=True) for v in values)
        else:
            tensor.raw_data = rng.randbytes(len(tensor.raw_data))
    else:
        del tensor.dims[:]
        tensor.dims.extend(rng.choice(((), (1,), (0,), (2, 2), (1, 1, 1, 1))))


def other_weight(rng: random.Random, model: onnx.ModelProto) -> None:
    if model.graph.initializer:
        _change_tensor(rng, rng.choice(model.graph.initializer))


def drop_weight(rng: random.Random, model: onnx.ModelProto) -> None:
    if model.graph.initializer:
        del model.graph.initializer[rng.randrange(len(model.graph.initializer))]


def weight_as_input(rng: random.Random, model: onnx.ModelProto) -> None:
    """What was constant comes from outside: nothing can be folded any more."""
    if model.graph.initializer:
        k = rng.randrange(len(model.graph.initializer))
        t = model.graph.initializer[k]
        dims = list(t.dims) if rng.random() < 0.5 else None
        model.graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, dims))
        del model.graph.initializer[k]


def other_input_type(rng: random.Random, model: onnx.ModelProto) -> None:
    graph = rng.choice(graphs_of(model))
    if not graph.input:
        return
    declared = rng.choice(graph.input)
    what = rng.randrange(4)
    if what == 0:
        declared.ClearField("type")
    elif what == 1:
        declared.type.tensor_type.elem_type = rng.choice((*range(29), 99))
    elif what == 2:
        declared.type.tensor_type.ClearField("shape")
    elif declared.type.tensor_type.shape.dim:
        dim = rng.choice(declared.type.tensor_type.shape.dim)
        dim.dim_value = rng.choice((*INTEGERS, 1, 2, 3, 4, 5))


def other_graph_names(rng: random.Random, model: onnx.ModelProto) -> None:
    graph = rng.choice(graphs_of(model))
    values = graph.input if rng.random() < 0.5 else graph.output
    if values and rng.random() < 0.5:
        del values[rng.randrange(len(values))]
    elif values and rng.random() < 0.5:
        rng.choice(values).name = a_name(rng, model)
    else:
        values.add(name=a_name(rng, model))


def other_opset(rng: random.Random, model: onnx.ModelProto) -> None:
    if model.opset_import:
        rng.choice(model.opset_import).version = rng.choice((*range(30), -1, 1 << 40))


def drop_opset(rng: random.Random, model: onnx.ModelProto) -> None:
    if model.opset_import:
        del model.opset_import[rng.randrange(len(model.opset_import))]


def other_function(rng: random.Random, model: onnx.ModelProto) -> None:
    if model.functions:
        function = rng.choice(model.functions)
        rng.choice((function.input, function.output)).append(a_name(rng, model))
        if rng.random() < 0.3:
            function.name = rng.choice(_operators())


def exchange_graphs(rng: random.Random, model: onnx.ModelProto) -> None:
    bodies = graphs_of(model)[1:]
    if bodies:
        copy = _copy(rng.choice(bodies))
        rng.choice(bodies).CopyFrom(copy)


#: renamed and missing things are refused at once; the others get further, so they are tried more often
PROTOS: tuple[Callable[[random.Random, onnx.ModelProto], None], ...] = (
    *(rename_input, rename_output, more_inputs, fewer_inputs, more_outputs, fewer_outputs),
    *(drop_node, repeat_node, shuffle_nodes, other_domain, drop_weight, drop_opset, drop_attribute),
    *(other_kind, other_graph_names, other_function, exchange_graphs),
    *(other_operator, other_value, take_attribute, other_weight, weight_as_input, other_input_type, other_opset) * 4,
    *(other_value, other_weight) * 4,
)


def main() -> None:
    handler = sandbox.Handler(LIMITS)
    own, operators = own_seeds(), read_operator_seeds(Path(sys.argv[1]))
    print(json.dumps({"outcome": "ready"}), flush=True)
    for line in sys.stdin:
        name, data = mutation(json.loads(line)["seed"], own, operators)
        answer = handler.handle(data)
        print(json.dumps({**answer, "name": name, "opened": []}), flush=True)


if __name__ == "__main__":
    main()

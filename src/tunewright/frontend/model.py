"""`Model`, the result of `read_model`: a graph whose dimensions may still be symbolic, and its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import InputError
from ..ir.graph import Graph
from ..ir.types import Shape, TensorType, Type, signature
from .preprocess_inputs import Preprocess, preprocessed
from .stateful import AUTO, checked_states, find_states


@dataclass
class Model:
    """A loaded model. ``compile_model`` never changes it, so one model may be compiled many times."""

    graph: Graph
    name: str = ""
    producer: str = ""
    opsets: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: declared types of the outputs, by name
    declared: Mapping[str, Type | None] = field(default_factory=dict)
    #: the file that the model was read from; empty for a model from bytes or from an object
    path: str = ""
    #: device of each node by name, for HETERO (docs/hetero.md); other nodes are placed automatically
    affinity: dict[str, str] = field(default_factory=dict)
    #: inputs that a request keeps, each with the output that provides its next value (docs/stateful.md)
    states: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Type | None]:
        """Input types by name."""
        return {v.name: v.type for v in self.graph.inputs}

    @property
    def outputs(self) -> dict[str, Type | None]:
        """Output types by name, as far as they are known without the input shapes."""
        return {
            name: value.type or self.declared.get(name)
            for name, value in zip(self.graph.output_names, self.graph.outputs, strict=True)
        }

    def __repr__(self) -> str:
        return f"<Model {self.name!r}: {signature(self.inputs, self.outputs)}>"

    def reshape(self, shapes: Mapping[str, Sequence[int | str | None]] | Sequence[int | str | None]) -> Model:
        """Return a model with other input shapes. Numbers fix a dimension; a name or None leaves it open.

        ``shapes`` maps input names to shapes. For a single input the shape alone is enough.
        """
        graph = self.graph.clone()
        by_name = {v.name: v for v in graph.inputs}
        if not isinstance(shapes, Mapping):
            if len(by_name) != 1:
                raise InputError(
                    f"the model has {len(by_name)} inputs", hint=f"name them: {{{next(iter(by_name), 'x')!r}: [...]}}"
                )
            shapes = {next(iter(by_name)): shapes}
        for name, dims in shapes.items():
            if name not in by_name:
                raise InputError(f"there is no input {name!r}", hint=f"the inputs are {', '.join(by_name)}")
            type = by_name[name].type
            if not isinstance(type, TensorType):
                raise InputError(f"{type} has no shape", where=f"input {name!r}")
            shape = _shape(dims, name)
            if type.shape is not None and len(type.shape) != len(shape):
                raise InputError(f"shape {list(shape)} does not fit {type}", where=f"input {name!r}")
            by_name[name].type = type.with_shape(shape)
        # All types except those of the inputs are inferred again, because the old ones may not hold for the new shapes.
        for node in graph.nodes:
            for value in node.outputs:
                value.type = None
        return replace(self, graph=graph)

    def preprocess(self, given: Mapping[str, Preprocess] | Preprocess) -> Model:
        """Return a model whose inputs come in another form, such as bytes, channels last or another size.

        ``given`` maps input names to their form. For a single input the form alone is enough. See docs/async.md.

        >>> model.preprocess(Preprocess(dtype="u8", layout="NHWC", scale=255))
        """
        if isinstance(given, Preprocess):
            names = list(self.inputs)
            if len(names) != 1:
                raise InputError(f"the model has {len(names)} inputs", hint=f"name them: {', '.join(names)}")
            given = {names[0]: given}
        for name in given:
            if name in self.states:
                raise InputError("is a state that requests keep, so it has no preprocessing", where=f"input {name!r}")
        return replace(self, graph=preprocessed(self.graph, given))

    def make_stateful(self, states: Mapping[str, str] | str = AUTO) -> Model:
        """Return a model whose requests keep states: each named input receives its output of the previous inference.

        ``"auto"`` finds states by operators (past and new rows in a Concat or an attention, LSTM) and by names
        (past_key_values.0.key and present.0.key). `states` of the result lists them (docs/stateful.md).

        >>> model = core.read_model("decoder.onnx").make_stateful({"past_k": "present_k", "past_v": "present_v"})
        >>> request = core.compile_model(model).create_infer_request()
        """
        outputs = self.outputs
        if isinstance(states, str):
            if states.lower() != AUTO:
                raise InputError(f"{states!r} is neither 'auto' nor a mapping", where="states")
            states = find_states(self.graph, outputs)
            if not states:
                known = f"the inputs are {', '.join(self.inputs)}, the outputs {', '.join(outputs)}"
                hint = f"name them, as in {{'past': 'present'}}; {known}"
                raise InputError("no states were found in the model", hint=hint)
        return replace(self, states=checked_states(self.inputs, outputs, states))


def _shape(dims: Sequence[int | str | None], name: str) -> Shape:
    """Convert dimensions as a user gives them: -1 and None are open."""
    known = isinstance(dims, (list, tuple)) and all(
        d is None or isinstance(d, str) or (isinstance(d, (int, np.integer)) and not isinstance(d, bool) and d >= -1)
        for d in dims
    )
    if not known:
        raise InputError(
            f"{dims!r} is not a shape",
            where=f"input {name!r}",
            hint="a list of sizes, names and None (open), such as [1, 3, 'h', None]",
        )
    return tuple(d if isinstance(d, str) or d is None else None if d == -1 else int(d) for d in dims)

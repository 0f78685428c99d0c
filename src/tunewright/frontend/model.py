"""`Model`: what `read_model` returns. A graph whose dimensions may still be symbolic, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import InputError
from ..ir.graph import Graph
from ..ir.types import Shape, TensorType, Type, signature
from .pictures import Preprocess, preprocessed
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
    #: the file that it was read from; empty: it came as bytes or as an object
    path: str = ""
    #: devices of nodes by name, for HETERO (docs/hetero.md); what is not named is placed automatically
    affinity: dict[str, str] = field(default_factory=dict)
    #: inputs that a request keeps, each with the output that is its value in the next inference (docs/stateful.md)
    states: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Type | None]:
        """Input types by name."""
        return {v.name: v.type for v in self.graph.inputs}

    @property
    def outputs(self) -> dict[str, Type | None]:
        """Output types by name, as far as they are known before shapes are."""
        return {
            name: value.type or self.declared.get(name)
            for name, value in zip(self.graph.output_names, self.graph.outputs, strict=True)
        }

    def __repr__(self) -> str:
        return f"<Model {self.name!r}: {signature(self.inputs, self.outputs)}>"

    def reshape(self, shapes: Mapping[str, Sequence[int | str | None]] | Sequence[int | str | None]) -> Model:
        """A model with other input shapes (numbers fix a dimension; a name or None leaves it open).

        By input name; the shape alone will do where there is one input.
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
        # Types behind the inputs are inferred anew: what held for the old shapes need not hold for these.
        for node in graph.nodes:
            for value in node.outputs:
                value.type = None
        return replace(self, graph=graph)

    def preprocess(self, given: Mapping[str, Preprocess] | Preprocess) -> Model:
        """A model whose inputs come in another way: as bytes, with channels last, of another size (docs/async.md).

        By input name; what holds for the only input will do alone.

        >>> model.preprocess(Preprocess(dtype="u8", layout="NHWC", scale=255))
        """
        if isinstance(given, Preprocess):
            names = list(self.inputs)
            if len(names) != 1:
                raise InputError(f"the model has {len(names)} inputs", hint=f"name them: {', '.join(names)}")
            given = {names[0]: given}
        for name in given:
            if name in self.states:
                raise InputError("is a state, which nobody gives", where=f"input {name!r}")
        return replace(self, graph=preprocessed(self.graph, given))

    def make_stateful(self, states: Mapping[str, str] | str = AUTO) -> Model:
        """A model whose requests keep states: each input named here takes the value that its output had before.

        ``"auto"`` finds them by operators (past rows and new ones in a Concat or an attention, LSTM), and by names
        (past_key_values.0.key and present.0.key). `states` of the result has what was found (docs/stateful.md).

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
    """Dimensions as a user gives them: -1 and None are open."""
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

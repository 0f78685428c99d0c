"""Models with states: a request keeps what one inference made for the next (docs/stateful.md).

A stateful model wraps a model on any device. A request feeds its states to the inputs that they belong to, and takes
the outputs that continue them. Caches grow in place if the device's plans support it (`states`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from tunewright.devices.base import in_order
from tunewright.devices.remote import RemoteContext, RemoteTensor
from tunewright.errors import InputError
from tunewright.ir.types import OptionalType, TensorType, Type

from ..insight.counters import CounterRow, Totals
from ..plans.growing_buffers import is_view, keep, let_go
from .compiled import CompiledModel, InferRequest
from .request import check_tensor


class StatefulModel(CompiledModel):
    """A model whose requests keep some inputs and outputs to themselves."""

    def __init__(self, inner: CompiledModel, states: Mapping[str, str], growing: Mapping[str, int]) -> None:
        """``states``: the output that continues each input. ``growing``: the axis along which each growing state grows.
        """
        super().__init__()
        self.inner, self.growing = inner, dict(growing)
        self.device_name, self.streams, self.nodes = inner.device_name, inner.streams, inner.nodes
        self.best_requests, self.streams_origin = inner.best_requests, inner.streams_origin
        self.settings, self.changeable = inner.settings, inner.changeable
        self._states = dict(states)
        self._all_inputs = inner.inputs
        continuing = set(states.values())
        self._inputs = {name: type for name, type in self._all_inputs.items() if name not in states}
        self._outputs = {name: type for name, type in inner.outputs.items() if name not in continuing}

    @property
    def states(self) -> dict[str, str]:
        return dict(self._states)

    @property
    def inputs(self) -> dict[str, Type | None]:
        return dict(self._inputs)

    @property
    def outputs(self) -> dict[str, Type | None]:
        return dict(self._outputs)

    def type_of(self, state: str) -> TensorType:
        found = self._all_inputs[state]
        assert isinstance(found, TensorType)
        return found

    @property
    def context(self) -> RemoteContext:
        return self.inner.context

    @property
    def alone(self) -> CompiledModel:
        return self.inner.alone

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def execution_devices(self) -> list[str]:
        return self.inner.execution_devices

    @property
    def served(self) -> dict[str, int]:
        return self.inner.served

    @property
    def phases(self) -> dict[str, float]:
        return self.inner.phases

    @property
    def optimal_requests(self) -> int:
        return self.inner.optimal_requests

    def memory_statistics(self) -> dict[str, int]:
        return self.inner.memory_statistics()

    def set_property(self, config: Mapping[str, Any]) -> None:
        self.inner.set_property(config)
        self.settings = self.inner.settings

    def create_infer_request(self) -> StatefulRequest:
        return StatefulRequest(self)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            "a model with states runs on a request, which keeps them",
            hint="request = compiled.create_infer_request(), then request.infer(...)",
        )

    infer = __call__


class VariableState:
    """One state of a request. It has the name of its input."""

    def __init__(self, request: StatefulRequest, name: str) -> None:
        self._request, self.name = request, name

    @property
    def type(self) -> TensorType:
        """Element type and shape as the model declares them."""
        return self._request.model.type_of(self.name)

    @property
    def state(self) -> np.ndarray[Any, Any] | None:
        """The read-only value that the next inference begins with. None: zeros, with sizes taken from that inference's
        inputs."""
        self._request.check_idle()
        return self._request.value_of(self.name)

    @state.setter
    def state(self, value: Any) -> None:
        self._request.check_idle()
        self._request.set_value(self.name, value)

    def reset(self) -> None:
        """Reset the state to zeros, with no rows along the axis that grows."""
        self._request.check_idle()
        self._request.set_value(self.name, None)

    def __repr__(self) -> str:
        value = self.state
        return f"<VariableState {self.name!r}: {self.type if value is None else TensorType.of(value)}>"


class StatefulRequest(InferRequest):
    """A request that keeps states. They change when an inference ends without an error."""

    model: StatefulModel

    def __init__(self, model: StatefulModel) -> None:
        super().__init__(model)
        self.inner = model.inner.create_infer_request()
        self.inner.continue_on_device(model.states)
        #: values by name; a state without a value begins with zeros
        self._values: dict[str, Any] = {}
        self._variables = [VariableState(self, name) for name in model.states]
        #: copies, because the model's properties make new objects each time
        self._states, self._inputs, self._outputs = model.states, list(model.inputs), list(model.outputs)
        #: states of one shape, which an inference may write into
        self._fixed = [name for name in self._states if _is_fixed(model.type_of(name), model.growing.get(name))]

    def query_state(self) -> list[VariableState]:
        return list(self._variables)

    def reset_state(self) -> None:
        self.check_idle()
        self._values.clear()

    def value_of(self, name: str) -> np.ndarray[Any, Any] | None:
        value = self._values.get(name)
        if value is None:
            type = self.model.type_of(name)
            sizes = self._initial(name, {}, complete=False)
            return None if sizes is None else _frozen(np.zeros(sizes, type.dtype.numpy))
        keep(value)
        return _frozen(value.numpy() if isinstance(value, RemoteTensor) else value)

    def set_value(self, name: str, value: Any) -> None:
        """Set a state to a copy of a value, or to the value itself if it is immutable. None resets the state."""
        if value is None:
            self._values.pop(name, None)
            return
        type, where = self.model.type_of(name), f"state {name!r}"
        if isinstance(value, RemoteTensor):
            value = value.numpy()
        try:
            array = value if isinstance(value, np.ndarray) else np.asarray(value, type.dtype.numpy)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"takes {type}, and this is no array of it: {error}", where=where) from None
        check_tensor(array, type, where, {})
        self._values[name] = array if is_view(array) else _frozen(in_order(array).copy())

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        inputs, outputs = self.completed(inputs, outputs)
        feeds = self._named(inputs)
        values = self._values
        if len(values) < len(self._states):
            values = self._completed(feeds)
        for name in outputs or ():
            if name not in self._outputs:
                known = ", ".join(self._outputs)
                raise InputError(f"there is no output {name!r}", hint=f"the outputs are {known}; states are kept")
        feeds.update(values)
        results = self.inner.run(feeds, remote, outputs)
        self.inner.results = {}  # the inner request must not keep arrays that the next inference continues
        made = {name: results.pop(output) for name, output in self._states.items()}
        self._values, self.results = made, results
        for name in self._fixed:
            let_go(made[name])
        return results

    def _named(self, inputs: Any) -> dict[str, Any]:
        """Return the given inputs by name, in a new dictionary."""
        names = self._inputs
        if not isinstance(inputs, Mapping):
            given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(given) > len(names):
                hint = f"they are {', '.join(names)}; states are not given"
                raise InputError(f"{len(given)} inputs are given, the model takes {len(names)}", hint=hint)
            return dict(zip(names, given, strict=False))
        for name in inputs:
            if name in self._states:
                hint = "request.query_state() has it: its `state` can be set"
                raise InputError(f"{name!r} is a state, which the request keeps", hint=hint)
            if name not in names:
                raise InputError(f"there is no input {name!r}", hint=f"the inputs are {', '.join(names)}")
        return dict(inputs)

    def _completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states for an inference with these inputs, with zeros for states without a value."""
        types = self.model.inputs
        for name, type in types.items():
            if given.get(name) is None and not isinstance(type, OptionalType):
                raise InputError("is missing", where=f"input {name!r}", hint=f"it takes {type}")
        sizes = _sizes(types, given)
        for name, value in self._values.items():
            sizes |= _sizes({name: self.model.type_of(name)}, {name: value}, self.model.growing.get(name))
        found = {}
        for name in self._states:
            value = self._values.get(name)
            if value is None:
                shape = self._initial(name, sizes, complete=True)
                assert shape is not None
                value = np.zeros(shape, self.model.type_of(name).dtype.numpy)
            found[name] = value
        return found

    def _initial(self, name: str, sizes: Mapping[str, int], complete: bool) -> tuple[int, ...] | None:
        """Return the shape of the initial zeros.

        If a size is unknown, raise an error when ``complete``, else return None.
        """
        type, growing = self.model.type_of(name), self.model.growing.get(name)
        where, hint = f"state {name!r}", "set it (`query_state`), or the sizes of the input (Model.reshape, --shape)"
        if type.shape is None:
            if not complete:
                return None
            raise InputError("not even its rank is known, so it cannot begin with zeros", where=where, hint=hint)
        shape = []
        for axis, size in enumerate(type.shape):
            known = size if isinstance(size, int) else sizes.get(size or "")
            if known is None and axis == growing:
                known = 0
            if known is None and not complete:
                return None
            if known is None:
                what = f"size {size!r}" if size else f"its size along axis {axis}"
                raise InputError(f"{what} is not known, so it cannot begin with zeros", where=where, hint=hint)
            shape.append(known)
        return tuple(shape)

    def get_totals(self) -> Totals:
        return self.inner.get_totals()

    def get_profiling_info(self) -> list[CounterRow]:
        return self.inner.get_profiling_info()


def _sizes(types: Mapping[str, Type | None], values: Mapping[str, Any], but: int | None = None) -> dict[str, int]:
    """Return the named sizes of the given values, except those along the axis ``but``."""
    found: dict[str, int] = {}
    for name, type in types.items():
        value: Any = values.get(name)
        shape = value.shape if isinstance(value, RemoteTensor) else np.shape(value)
        wanted = type.shape if isinstance(type, TensorType) else None
        for axis, (got, want) in enumerate(zip(shape, wanted or (), strict=False)):
            if isinstance(want, str) and axis != but and len(shape) == len(wanted or ()):
                found[want] = int(got)
    return found


def _is_fixed(type: TensorType, growing: int | None) -> bool:
    """Whether the state does not grow, or has room for all rows from the beginning."""
    return growing is None or type.shape is None or isinstance(type.shape[growing], int)


def _frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array

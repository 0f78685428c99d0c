"""`CompiledModel` and `InferRequest`: what a user holds."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ExecutionError, InputError
from ..ir.graph import Graph
from ..ir.types import DType, MapType, OptionalType, SequenceType, TensorType, Type, signature
from ..settings import Settings
from .counters import Counters, Row, Totals
from .executor import Executor
from .program import Environment, Program


class CompiledModel:
    """A model ready to run on a device. Use it from as many threads as you like; a request serves one at a time."""

    def __init__(self, graph: Graph, env: Environment, nodes: Sequence[tuple[str, str]] = ()) -> None:
        self.graph, self.env = graph, env
        #: (name, op) of every node of the model as it was read
        self.nodes = list(nodes)
        self.program = Program(graph, env)
        self._idle: queue.SimpleQueue[InferRequest] = queue.SimpleQueue()
        types = [v.type for v in graph.inputs]
        if all(isinstance(t, TensorType) and t.is_static for t in types):
            self.program.plan(tuple(types))

    @property
    def settings(self) -> Settings:
        return self.env.settings

    @property
    def inputs(self) -> dict[str, Type | None]:
        return {v.name: v.type for v in self.graph.inputs}

    @property
    def outputs(self) -> dict[str, Type | None]:
        return dict(zip(self.graph.output_names, (v.type for v in self.graph.outputs), strict=True))

    def __repr__(self) -> str:
        return f"<CompiledModel on {self.env.device.name}: {signature(self.inputs, self.outputs)}>"

    def create_infer_request(self) -> InferRequest:
        """A request with memory of its own."""
        return InferRequest(self)

    def __call__(self, inputs: Mapping[str, Any] | Sequence[Any] | Any) -> dict[str, Any]:
        """Run once, on a request that is kept for the next call."""
        try:
            request = self._idle.get_nowait()
        except queue.Empty:
            request = self.create_infer_request()
        try:
            return request.infer(inputs)
        finally:
            self._idle.put(request)

    infer = __call__


class InferRequest:
    """One inference at a time, with its own memory and counters."""

    def __init__(self, model: CompiledModel) -> None:
        self.model = model
        self.counters = Counters() if model.settings.perf_count else None
        self.executor = Executor(model.env.device, self.counters, model.settings.max_tensor_bytes)
        #: before and after the last inference: the time, how long was waited for the device, how much was launched
        self._spent = ((0.0, 0.0, 0),) * 2
        #: what the last inputs were like: others like them need no further check
        self._like: dict[str, tuple[Any, ...]] = {}

    def infer(self, inputs: Mapping[str, Any] | Sequence[Any] | Any) -> dict[str, Any]:
        """Outputs by name for inputs by name (or in order). The arrays returned are yours."""
        before = self._now()
        values = self._same(inputs)
        if values is None:
            values = bind(self.model.graph, inputs)
            self._like = {}
            if all(type(v) is np.ndarray and v.dtype != object for v in values):
                self._like = {i.name: (v.shape, v.dtype) for i, v in zip(self.model.graph.inputs, values, strict=True)}
        if self.counters is not None:
            self.counters.clear()
        self.executor.iterations = 0
        try:
            results = self.executor.run(self.model.program, values)
        except MemoryError as error:  # of the plan as a whole; a node that asks for too much is named where it runs
            raise ExecutionError("not enough memory for the model's plan") from error
        self._spent = before, self._now()
        return dict(zip(self.model.graph.output_names, results, strict=True))

    def _same(self, inputs: Any) -> list[Any] | None:
        """The values in order, when they are arrays just like the last ones."""
        like = self._like
        if not like or type(inputs) is not dict or len(inputs) != len(like):
            return None
        values = [inputs.get(name) for name in like]
        for value, (shape, dtype) in zip(values, like.values(), strict=True):
            if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
                return None
            if not value.flags.c_contiguous:
                return None
        return values

    def _now(self) -> tuple[float, float, int]:
        return time.perf_counter(), self.executor.waited, self.executor.launches

    def get_totals(self) -> Totals:
        """Of the last inference: its time, how much of it was the host's, and launches. Needs no PERF_COUNT.

        >>> request.infer(inputs)
        >>> request.get_totals().host_seconds
        """
        seconds, waited, launches = (b - a for a, b in zip(*self._spent, strict=True))
        return Totals(seconds, max(seconds - waited, 0.0), int(launches))

    def get_profiling_info(self) -> list[Row]:
        """Counters of the last inference; needs PERF_COUNT = YES."""
        return [] if self.counters is None else self.counters.table(self.model.nodes)


def bind(graph: Graph, inputs: Mapping[str, Any] | Sequence[Any] | Any) -> list[Any]:
    """The values in the graph's order, checked against the declared types."""
    names = [v.name for v in graph.inputs]
    if not isinstance(inputs, Mapping):
        given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        if len(given) > len(names):
            raise InputError(
                f"{len(given)} inputs are given, the model takes {len(names)}", hint=f"they are {', '.join(names)}"
            )
        inputs = dict(zip(names, given, strict=False))
    unknown = [str(k) for k in inputs if k not in names]
    if unknown:
        raise InputError(f"there is no input {unknown[0]!r}", hint=f"the inputs are {', '.join(names)}")
    symbols: dict[str, tuple[int, str]] = {}
    values = []
    for value in graph.inputs:
        if value.name not in inputs and not isinstance(value.type, OptionalType):
            raise InputError("is missing", where=f"input {value.name!r}", hint=f"it takes {value.type}")
        values.append(_check(inputs.get(value.name), value.type, value.name, symbols))
    return values


def _check(given: Any, type: Type | None, name: str, symbols: dict[str, tuple[int, str]]) -> Any:
    where = f"input {name!r}"
    if isinstance(type, OptionalType):
        return None if given is None else _check(given, type.elem, name, symbols)
    if isinstance(type, SequenceType):
        if not isinstance(given, (list, tuple)):
            raise InputError(f"takes a list ({type}), not {given.__class__.__name__}", where=where)
        # A list may come back as a whole, so what it holds must be ours; a tensor is copied when it comes back itself.
        return [_copy(_check(item, type.elem, name, {})) for item in given]
    if isinstance(type, MapType):
        return _check_map(given, type, where)
    if not isinstance(type, TensorType):
        return given
    if given is None:
        raise InputError("is missing", where=where, hint=f"it takes {type}")
    try:
        wanted = None if type.dtype is DType.STRING else type.dtype.numpy
        array = given if isinstance(given, np.ndarray) else np.asarray(given, wanted)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"takes {type}, and this is no array of it: {error}", where=where) from None
    if array.dtype.kind in "USTO":
        array = array.astype(object)
    if array.dtype != type.dtype.numpy:
        raise InputError(
            f"takes {type.dtype}, not {array.dtype}", where=where, hint=f"convert it: x.astype({type.dtype.value!r})"
        )
    if type.shape is not None:
        _check_shape(array.shape, type, where, symbols)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _check_map(given: Any, type: MapType, where: str) -> dict[Any, Any]:
    """A dictionary whose values are of the declared element type: what reads it has nothing else to tell it."""
    if not isinstance(given, Mapping):
        raise InputError(f"takes a dictionary ({type}), not {given.__class__.__name__}", where=where)
    if not isinstance(type.value, TensorType) or type.value.dtype is DType.STRING:
        return dict(given)
    try:
        return {key: type.value.dtype.numpy.type(item) for key, item in given.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"takes {type}, and this is none: {error}", where=where) from None


def _check_shape(shape: tuple[int, ...], type: TensorType, where: str, symbols: dict[str, tuple[int, str]]) -> None:
    assert type.shape is not None
    if len(shape) != len(type.shape):
        raise InputError(f"takes {type}, not shape {list(shape)}", where=where)
    for got, want in zip(shape, type.shape, strict=True):
        if isinstance(want, int) and got != want:
            raise InputError(
                f"takes {type}, not shape {list(shape)}", where=where, hint="Model.reshape changes input shapes"
            )
        if isinstance(want, str):
            size, first = symbols.setdefault(want, (got, where))
            if size != got:
                raise InputError(f"has {want} = {got}, but {first} has {want} = {size}", where=where)

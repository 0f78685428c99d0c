"""A model on one device, and its requests."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from tunewright.devices.base import Hints, Queue, in_order
from tunewright.devices.remote import RemoteContext
from tunewright.errors import DeviceError, ExecutionError, InputError
from tunewright.ir.graph import Graph
from tunewright.ir.types import DType, MapType, OptionalType, SequenceType, TensorType, Type

from ..insight import profiler_ranges, timeline
from ..insight.background import BackgroundTuning, Report
from ..insight.counters import CounterRow, Counters, Totals
from ..plans.growing_buffers import is_view
from ..plans.plan import Plan
from ..plans.program import ArraySignature, Environment, Program, like
from ..plans.template import SPARE
from .compiled import CompiledModel, InferRequest
from .executor import Executor
from .frame import IN_ORDER, is_plain
from .plan_trial import PlanTrial
from .remote_tensors import Stay, adopt, is_lent, on_host
from .request_meter import Met, ModelMeter, RequestMeter
from .streams import Streams


class DeviceModel(CompiledModel):
    """A model on one device."""

    #: all instances that are alive
    live: ClassVar[WeakSet[DeviceModel]] = WeakSet()

    def __init__(
        self,
        graph: Graph,
        env: Environment,
        nodes: Sequence[tuple[str, str]] = (),
        streams: int = 1,
        consume: bool = False,
    ) -> None:
        """``consume``: nobody else uses the weights of the graph."""
        super().__init__()
        self.graph, self.env = graph, env
        self.streams = exclusive(env.device.name) if env.settings.exclusive_async_requests else Streams(streams)
        self.settings, self.device_name = env.settings, env.device.name
        self.nodes = list(nodes)
        self.requests: WeakSet[DeviceRequest] = WeakSet()
        #: records traffic and activity of the requests; None: nothing is recorded
        self.meter: ModelMeter | None = None
        #: the trial of two plans that is going on, if any
        self.trial: PlanTrial | None = None
        #: starts tuning beside the model; `Core` sets it
        self.background_starter: Callable[..., BackgroundTuning] | None = None
        self.live.add(self)
        self.program = Program(graph, env)
        types = [v.type for v in graph.inputs]
        if all(isinstance(t, TensorType) and t.is_static for t in types):
            self.program.plan(tuple(types), only=consume)

    @property
    def inputs(self) -> dict[str, Type | None]:
        return {v.name: v.type for v in self.graph.inputs}

    @property
    def outputs(self) -> dict[str, Type | None]:
        return dict(zip(self.graph.output_names, (v.type for v in self.graph.outputs), strict=True))

    def tune_in_background(
        self,
        *,
        budget: float | None = None,
        duty: float | None = None,
        until: float | None = None,
        again: bool = False,
        report: Report | None = None,
    ) -> BackgroundTuning:
        if self.background_starter is None:
            raise DeviceError("is not tuned in the background", where=self.device_name)
        return self.background_starter(self, budget=budget, duty=duty, until=until, again=again, report=report)

    def traffic(self) -> list[Met]:
        if self.meter is None:
            hint = "compile it with RECORD_TRAFFIC = YES"
            raise InputError("no traffic was recorded", where=f"model {self.name!r}", hint=hint)
        return self.meter.met()

    def create_infer_request(self) -> DeviceRequest:
        made = DeviceRequest(self)
        self.requests.add(made)
        return made

    @property
    def name(self) -> str:
        return self.graph.name

    def memory_statistics(self) -> dict[str, int]:
        from ..insight.memory_usage import usage

        return usage([self])

    @property
    def context(self) -> RemoteContext:
        return RemoteContext(self.env.device)

    @property
    def phases(self) -> dict[str, float]:
        return dict(self.env.phases.seconds)


_EXCLUSIVE: WeakValueDictionary[str, Streams] = WeakValueDictionary()
_LOCK = threading.Lock()


def exclusive(device: str) -> Streams:
    """Return the one stream that all models of a device with EXCLUSIVE_ASYNC_REQUESTS share."""
    with _LOCK:
        found = _EXCLUSIVE.get(device)
        if found is None:
            found = _EXCLUSIVE[device] = Streams(1)
        return found


def of_one_device(compiled: CompiledModel) -> DeviceModel:
    """Return the model that runs single requests. Raise DeviceError if several devices run it."""
    compiled = compiled.alone
    if isinstance(compiled, DeviceModel):
        return compiled
    raise DeviceError(f"the model is on {compiled.device_name}, which is several", hint="name one, CPU for example")


#: a time, and totals up to then: seconds of waiting for kernels, launches, seconds of copies
_Moment: TypeAlias = tuple[float, float, int, float]


def _nothing() -> None:
    """Stands in for a dead weak reference."""


class DeviceRequest(InferRequest):
    """A request on one device."""

    model: DeviceModel

    def __init__(self, model: DeviceModel) -> None:
        super().__init__(model)
        self.counters = Counters(model.device_name) if model.settings.perf_count else None
        hints = Hints(model.settings.gpu_queue_priority, model.settings.gpu_queue_throttle)
        self.executor = Executor(model.env.device, self.counters, model.settings.max_tensor_bytes, hints)
        #: the moments before and after the last inference
        self._spent: tuple[_Moment, _Moment] = ((0.0, 0.0, 0, 0.0),) * 2
        #: names, shapes and types of the last inputs: others like them need no further check
        self._like: tuple[list[str], ArraySignature] = [], []
        #: DYN_BATCH_ENABLED bounds what a size may be
        shapes = [v.type.shape or () for v in model.graph.inputs if isinstance(v.type, TensorType)]
        self._is_bounded = any("<=" in str(size) for shape in shapes for size in shape)
        #: a weak reference to the last plan, and the `Program.generation` that it belongs to
        self._plan: Callable[[], Plan | None] = _nothing
        self._generation = 0
        #: the values of that plan's symbols, if they are known
        self._sizes: tuple[int, ...] | None = None
        #: the model's meter, and this request's part of it
        self._meter: tuple[ModelMeter, RequestMeter] | None = None

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        meter = self.model.meter
        if meter is None:
            return self.unmetered(inputs, remote, outputs)
        if self._meter is None or self._meter[0] is not meter:
            self._meter = meter, meter.of_request()
        return self._meter[1].measured(self.unmetered, self._looks, inputs, remote, outputs)

    def continue_on_device(self, states: Mapping[str, str]) -> None:
        if not self.model.env.device.shares_memory:
            inputs, outputs = [v.name for v in self.model.graph.inputs], self.model.graph.output_names
            self.executor.continued = [(inputs.index(a), outputs.index(b)) for a, b in states.items()]

    def _looks(self) -> ArraySignature:
        """Shapes and types of the last inputs, if they were plain arrays."""
        return self._like[1]

    def unmetered(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run without recording traffic or activity."""
        before = self._now()
        if self._generation != self.model.program.generation:
            self._renew()
        inputs, outputs = self.completed(inputs, outputs)
        values = self._same(inputs)
        if values is None:
            values = self._of_class(inputs)
        kept = self.executor.continued
        if values is not None and not remote and outputs is None and not kept:
            plan = self._plan()
            results = self._run(values, None, plan, self._sizes)
            if plan is None:
                self._know_plan(values)
            self._spent = before, self._now()
            self.results = dict(zip(self.model.graph.output_names, results, strict=True))
            return self.results
        queue = self.executor.queue
        try:
            if values is None:
                values = bind(self.model.graph, inputs, queue)
                self._remember(values)
            stay = None
            if remote or outputs is not None or kept:
                stay = Stay.of(outputs, self.model.outputs, remote, queue)
                stay.kept = frozenset(output for _, output in kept)
            results = self._run(values, stay)
            names = self.model.graph.output_names
            if stay is None:
                found = dict(zip(names, results, strict=True))
            else:
                found = stay.results(results, names, outputs or {}, self.model.context, queue)
        finally:
            queue.release()
        self._spent = before, self._now()
        self.results = found
        if self._like[0]:
            self._know_plan(values)
        return found

    def _run(
        self, values: list[Any], stay: Stay | None, plan: Plan | None = None, sizes: tuple[int, ...] | None = None
    ) -> list[Any]:
        if self.counters is not None:
            self.counters.clear()
        self.executor.iterations = 0
        try:
            trial = self.model.trial
            if trial is not None:
                return self._tried(trial, values, stay, plan)
            if timeline.active is not None or profiler_ranges.active is not None:
                return self._watched(values, stay)
            return self.executor.run(self.model.program, values, stay, plan, sizes if plan is not None else None)
        except MemoryError as error:  # of the plan as a whole; a node that asks for too much is named where it runs
            raise ExecutionError("not enough memory for the model's plan") from error

    def _tried(self, trial: PlanTrial, values: list[Any], stay: Stay | None, plan: Plan | None) -> list[Any]:
        """Run an inference during a trial. The trial chooses the plan and learns the time if the inference concerns it.
        """
        program = self.model.program
        plan = plan or program.plan_for(values)
        if not trial.concerns(plan, values):
            return self.executor.run(program, values, stay, plan)
        number, plan = trial.turn()
        begin = time.perf_counter()
        found = self.executor.run(program, values, stay, plan)
        trial.tell(number, time.perf_counter() - begin)
        return found

    def _renew(self) -> None:
        """Forget plans that others have replaced, and give up their memory."""
        self._generation, self._plan, self._sizes = self.model.program.generation, _nothing, None
        for one in self.model.program.retired:
            plan = one()
            if plan is not None:
                self.executor.forget(plan)

    def _watched(self, values: list[Any], stay: Stay | None) -> list[Any]:
        """Run an inference that a time line or a profiler records."""
        begin, name, recorder, watched = (
            time.perf_counter(),
            self.model.device_name,
            timeline.active,
            profiler_ranges.active,
        )
        with nullcontext() if watched is None else watched(f"inference on {name}"):
            found = self.executor.run(self.model.program, values, stay)
        if recorder is not None:
            recorder.inference(name, begin, time.perf_counter())
        return found

    def _remember(self, values: Sequence[Any]) -> None:
        """Remember the shapes and types of these inputs, if they are plain arrays."""
        self._like, self._plan, self._sizes = ([], []), _nothing, None
        if all(type(v) is np.ndarray and v.dtype != object for v in values):
            self._like = [v.name for v in self.model.graph.inputs], [(v.shape, v.dtype) for v in values]

    def _know_plan(self, values: Sequence[Any]) -> None:
        """Remember which plan runs inputs like these."""
        plan = self.model.program.plan_for(values)
        self._plan = weakref.ref(plan)
        self._sizes = None if plan.template is None else plan.template.pattern.sizes(values)

    def _same(self, inputs: Any) -> list[Any] | None:
        """Return the values in order, if they are arrays just like the last ones."""
        names, looks = self._like
        if not looks or type(inputs) is not dict or len(inputs) != len(names):
            return None
        values: list[Any] = [inputs.get(name) for name in names]
        if not like(values, looks):
            return None
        for value in values:
            if value.flags.num & IN_ORDER != IN_ORDER:
                return None
        return values

    def _of_class(self, inputs: Any) -> list[Any] | None:
        """Return the values in order, if they are arrays of the class of shapes that the last plan serves.

        Later inputs are then compared with these.
        """
        names, plan = self._like[0], self._plan()
        if not names or plan is None or plan.template is None or self._is_bounded:
            return None
        if type(inputs) is not dict or len(inputs) != len(names):
            return None
        values: list[Any] = [inputs.get(name) for name in names]
        frame = self.executor.frame(plan)
        if frame is not None:
            frame.expect()
        following = None if frame is None or self.model.meter is not None else frame.following(values)
        if following is not None:
            (sizes, spare), looks = following, []
        else:
            if not all(is_plain(value) or is_view(value) for value in values):
                return None
            found, spare = plan.template.pattern.sizes(values), SPARE
            if found is None:
                return None
            sizes, looks = found, [(value.shape, value.dtype) for value in values]
        self._like, self._sizes = (names, looks), sizes
        if not self.model.program.serves(plan, sizes, spare):
            self._plan, self._sizes = _nothing, None
        return values

    def _now(self) -> _Moment:
        executor = self.executor
        queue = executor.queue
        return time.perf_counter(), queue.waited, queue.launches, executor.copied

    def get_totals(self) -> Totals:
        (begin, waited, launches, copied), (end, waits, launched, copies) = self._spent
        return Totals(end - begin, max(end - begin - waits + waited, 0.0), launched - launches, copies - copied)

    def get_profiling_info(self) -> list[CounterRow]:
        return [] if self.counters is None else self.counters.table(self.model.nodes)


def bind(graph: Graph, inputs: Mapping[str, Any] | Sequence[Any] | Any, queue: Queue) -> list[Any]:
    """Return the values in the graph's order, checked against the declared types. ``queue`` adopts lent tensors."""
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
    values: list[Any] = []
    for value in graph.inputs:
        if value.name not in inputs and not isinstance(value.type, OptionalType):
            raise InputError("is missing", where=f"input {value.name!r}", hint=f"it takes {value.type}")
        one: Any = inputs.get(value.name)
        type = value.type.elem if isinstance(value.type, OptionalType) else value.type
        if isinstance(type, TensorType) and is_lent(one):
            where = f"input {value.name!r}"
            one = adopt(queue, one, where)
            if not isinstance(one, np.ndarray):  # in the device's memory
                check_tensor(one, type, where, symbols)
                values.append(one)
                continue
        values.append(_check(one, value.type, value.name, symbols))
    return values


def _check(given: Any, type: Type | None, name: str, symbols: dict[str, tuple[int, str]]) -> Any:
    where = f"input {name!r}"
    if isinstance(type, OptionalType):
        return None if given is None else _check(given, type.elem, name, symbols)
    if isinstance(type, SequenceType):
        if not isinstance(given, (list, tuple)):
            raise InputError(f"takes a list ({type}), not {given.__class__.__name__}", where=where)
        # The request may return the whole list, so its arrays are copies. A tensor is copied only when it is returned.
        here = [on_host(item) if is_lent(item) else item for item in given]
        return [_copy(_check(item, type.elem, name, {})) for item in here]
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
    check_tensor(array, type, where, symbols)
    return array if is_view(array) else in_order(array)


def check_tensor(array: Any, type: TensorType, where: str, symbols: dict[str, tuple[int, str]]) -> None:
    """Check the element type and shape of an array on the host or on a device."""
    if array.dtype != type.dtype.numpy:
        raise InputError(
            f"takes {type.dtype}, not {array.dtype}", where=where, hint=f"convert it: x.astype({type.dtype.value!r})"
        )
    if type.shape is not None:
        _check_shape(array.shape, type, where, symbols)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _check_map(given: Any, type: MapType, where: str) -> dict[Any, Any]:
    """Return the dictionary with values of the declared element type, which its readers rely on."""
    if not isinstance(given, Mapping):
        raise InputError(f"takes a dictionary ({type}), not {given.__class__.__name__}", where=where)
    if not isinstance(type.value, TensorType) or type.value.dtype is DType.STRING:
        return dict(given)
    try:
        return {key: type.value.dtype.numpy.type(item) for key, item in given.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"takes {type}, and the value given is not one: {error}", where=where) from None


def _check_shape(shape: tuple[int, ...], type: TensorType, where: str, symbols: dict[str, tuple[int, str]]) -> None:
    assert type.shape is not None
    if len(shape) != len(type.shape):
        raise InputError(f"takes {type}, not shape {list(shape)}", where=where)
    for got, want in zip(shape, type.shape, strict=True):
        if isinstance(want, int) and got != want:
            hint = "Model.reshape, or --shape on the command line, changes input shapes"
            raise InputError(f"takes {type}, not shape {list(shape)}", where=where, hint=hint)
        if isinstance(want, str):
            most = want.rpartition("<=")[2]  # DYN_BATCH_ENABLED
            if want != most and most.isdigit() and got > int(most):
                raise InputError(f"takes {type}, not shape {list(shape)}", where=where)
            size, first = symbols.setdefault(want, (got, where))
            if size != got:
                raise InputError(f"has {want} = {got}, but {first} has {want} = {size}", where=where)

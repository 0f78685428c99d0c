"""`CompiledModel` and `InferRequest`: the user interfaces, the same for every device."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunewright.devices.base import aligned
from tunewright.devices.remote import RemoteContext
from tunewright.errors import DeviceError, InputError
from tunewright.ir.types import DType, TensorType, Type, signature
from tunewright.settings import Settings

from ..insight.background import BackgroundTuning, Report
from ..insight.counters import CounterRow, Totals
from ..insight.properties import CHANGEABLE, check_changeable, get
from .asynchronous import Startable
from .request_meter import Met
from .streams import Streams

if TYPE_CHECKING:
    from .stateful import VariableState


class CompiledModel(ABC):
    """A model ready to run. Any number of threads may use it; a request serves one inference at a time."""

    #: the device string that it was compiled for
    device_name: str
    settings: Settings
    #: the threads that run started inferences
    streams: Streams
    #: (name, op) of every node of the model as it was read
    nodes: list[tuple[str, str]]
    #: the number of requests that measured best; 0: not measured
    best_requests: int = 0
    #: where the numbers of streams, requests and examples of a batch come from; empty: settings give that of streams
    streams_origin: str = ""
    #: requests that run together, as one inference
    size: int = 1

    #: background tuning of this model, running or ended
    background: BackgroundTuning | None = None

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[InferRequest] = queue.SimpleQueue()

    @property
    @abstractmethod
    def inputs(self) -> dict[str, Type | None]: ...

    @property
    @abstractmethod
    def outputs(self) -> dict[str, Type | None]: ...

    @property
    def states(self) -> dict[str, str]:
        """The states that each request keeps: the model's input, and its output that continues it (docs/stateful.md).

        They are neither `inputs` nor `outputs` of the compiled model.
        """
        return {}

    @abstractmethod
    def create_infer_request(self) -> InferRequest:
        """Make a request with memory of its own."""

    @property
    @abstractmethod
    def context(self) -> RemoteContext:
        """The context of the device's memory, in which tensors may stay (docs/remote-tensors.md)."""

    @property
    def alone(self) -> CompiledModel:
        """The model that runs single requests, if requests run together; otherwise this model."""
        return self

    @property
    def name(self) -> str:
        """The name of the model's graph."""
        return ""

    @property
    def execution_devices(self) -> list[str]:
        """The devices that run the model."""
        return [self.device_name]

    @property
    def served(self) -> dict[str, int]:
        """How many inferences each device has run, if several share them; otherwise empty."""
        return {}

    #: settings that may still be changed
    changeable: frozenset[str] = CHANGEABLE

    def memory_statistics(self) -> dict[str, int]:
        """Bytes that the model and its requests hold, by purpose."""
        return {}

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of compilation by phase, including plans for further shapes; empty if several devices run the model.
        """
        return {}

    def get_property(self, name: str) -> Any:
        """Return a property of the model, or a setting that it was compiled with (docs/settings.md).

        >>> compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        """
        return get(self, name)

    def set_property(self, config: Mapping[str, Any]) -> None:
        """Change priorities for requests that are made from now on. Other settings are fixed at compile time.

        >>> compiled.set_property({"MODEL_PRIORITY": "HIGH"})
        """
        self.settings = check_changeable(self, config)

    def tune_in_background(
        self,
        *,
        budget: float | None = None,
        duty: float | None = None,
        until: float | None = None,
        again: bool = False,
        report: Report | None = None,
    ) -> BackgroundTuning:
        """Tune the kernels of this model while it serves (docs/background.md).

        ``budget``: the total seconds of work; None: until nothing is left to do. ``duty``: the share of time to spend
        on work, in per cent (BACKGROUND_DUTY). ``until``: stop when the model has this speed-up over now. ``again``:
        also tune layers with known answers. ``report``: another thread calls it with news.

        >>> tuning = compiled.tune_in_background(duty=10, until=1.2)
        >>> tuning.status().gain
        """
        raise DeviceError("several devices, and requests that run together, are not tuned in the background",
                          where=self.device_name, hint="tune them beforehand: tunewright tune")  # fmt: skip

    def traffic(self) -> list[Met]:
        """Return the shapes that the model met so far, with counts and times; needs RECORD_TRAFFIC = YES.

        They are in the order of their total time. The model records only shapes, never data.

        >>> compiled.traffic()[0].shapes
        """
        raise DeviceError("traffic of several devices, or of requests that run together, is not recorded here",
                          where=self.device_name)  # fmt: skip

    def __repr__(self) -> str:
        return f"<CompiledModel on {self.device_name}: {signature(self.inputs, self.outputs)}>"

    @property
    def optimal_requests(self) -> int:
        """How many requests keep all streams busy (OPTIMAL_NUMBER_OF_INFER_REQUESTS)."""
        count = self.best_requests or self.streams.count
        return min(count, self.settings.performance_hint_num_requests or count)

    def __call__(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any,
        *,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run once, on a request that the model keeps for the next call. The arguments are those of
        `InferRequest.infer`."""
        try:
            request = self._idle.get_nowait()
        except queue.Empty:
            request = self.create_infer_request()
        try:
            return request.infer(inputs, remote=remote, outputs=outputs)
        finally:
            request.results = {}  # the results belong to the caller: no user can reach this request
            self._idle.put(request)

    infer = __call__


class InferRequest(Startable):
    """A request: runs one inference at a time, with its own memory and counters."""

    def __init__(self, model: CompiledModel) -> None:
        super().__init__(model.streams)
        self.model = model
        #: tensors from `set_tensor`, for inputs and for outputs
        self._given: dict[str, Any] = {}
        self._into: dict[str, Any] = {}

    def continue_on_device(self, states: Mapping[str, str]) -> None:
        """Keep some outputs in the device's memory, as RemoteTensors, for the next inference to take as inputs.

        ``states``: the output for each input. An output stays valid until the inference after the next one begins.
        """

    def set_tensor(self, name: str, tensor: Any) -> None:
        """Use a tensor for an input in all later inferences, or write an output to it. None undoes that.

        The tensor is used in place: change an input only between two inferences.

        >>> request.set_tensor("x", frame)
        >>> request.infer()
        """
        known = self._given if name in self.model.inputs else self._into if name in self.model.outputs else None
        if known is None:
            there = ", ".join([*self.model.inputs, *self.model.outputs])
            raise InputError(f"there is no tensor {name!r}", hint=f"inputs and outputs are {there}")
        self.check_idle()
        known.pop(name, None)
        if tensor is not None:
            known[name] = tensor

    def get_tensor(self, name: str) -> Any:
        """Return an input's tensor (from `set_tensor`, or new memory to fill), or an output's last result.

        >>> request.get_tensor("x")[:] = frame
        >>> request.infer()
        """
        if name not in self.model.inputs:
            if name not in self.results:
                raise InputError(f"there is no result {name!r}", hint="name an output, and run an inference first")
            return self.results[name]
        if name not in self._given:
            type = self.model.inputs[name]
            if not isinstance(type, TensorType) or not type.is_static or type.dtype is DType.STRING:
                hint = "set_tensor takes one of any size"
                raise InputError(f"no tensor can be made for {type}", where=f"input {name!r}", hint=hint)
            made = np.ndarray(type.dims, type.dtype.numpy, aligned(type.nbytes))
            made[...] = 0
            self.set_tensor(name, made)
        return self._given[name]

    def infer(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any = None,
        *,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run an inference. Return outputs by name for inputs by name (or in order). The caller owns the returned
        arrays.

        Tensors from `set_tensor` replace missing inputs. Inputs may be `RemoteTensor`s, or tensors of any library that
        speaks DLPack, in the device's memory or the host's. All are used in place. With ``remote`` the results are
        `RemoteTensor`s, which stay on the device. ``outputs`` names tensors to write results to. See
        docs/remote-tensors.md and docs/async.md.

        >>> y = torch.from_dlpack(request.infer({"x": torch.ones(1, 3, device="cuda")}, remote=True)["y"])
        """
        self.check_idle()
        return self.run(inputs, remote, outputs)

    def query_state(self) -> list[VariableState]:
        """The states that this request keeps, each with `name`, `state` (to get and set) and `reset()`.

        Empty unless the model was made stateful (`Model.make_stateful`, docs/stateful.md).

        >>> for state in request.query_state():
        ...     print(state.name, state.state.shape)
        """
        return []

    def reset_state(self) -> None:
        """Set all states back to zeros, for the next sequence."""
        self.check_idle()

    @abstractmethod
    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Do what `infer` does. Implementations call `completed` to get the tensors of `set_tensor`."""

    def completed(self, inputs: Any, outputs: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any] | None]:
        """Fill missing inputs and outputs with the tensors of `set_tensor`."""
        if inputs is None:
            inputs = self._given
        elif self._given and isinstance(inputs, Mapping):
            inputs = {**self._given, **inputs}
        return inputs, {**self._into, **(outputs or {})} if self._into else outputs

    @abstractmethod
    def get_totals(self) -> Totals:
        """Totals of the last inference: its time, the host's part, and launches. Needs no PERF_COUNT.

        >>> request.infer(inputs)
        >>> request.get_totals().host_seconds
        """

    @abstractmethod
    def get_profiling_info(self) -> list[CounterRow]:
        """Counters of the last inference; needs PERF_COUNT = YES."""

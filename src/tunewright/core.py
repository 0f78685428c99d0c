"""`Core`: the entry point. Reads models, compiles them for devices, and says what a device can do."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .devices.remote import RemoteContext
from .errors import DeviceError, InputError, SettingsError, TunewrightError
from .frontend.input_settings import adapted
from .frontend.model import Model
from .frontend.preprocess_inputs import Preprocess
from .plugins.base import Plugin, ServingChoice, Support
from .plugins.find import find, is_several
from .plugins.single import SingleDevice, expect, measured_streams, of_device, open_device, visible
from .runtime.plans.load_phases import uncollected
from .runtime.requests.compiled import CompiledModel
from .settings import Settings

if TYPE_CHECKING:
    import onnx

    from .knowledge.record import Measurement
    from .knowledge.traffic import Weighted
    from .model_tuning.layers import TuningResult, TuningState
    from .model_tuning.several_models import Maker, Workload
    from .plugins.members import CompiledPart, MemberDevice
    from .plugins.placement.measure import Measured
    from .runtime.insight.background import BackgroundTuning
    from .tuning.lockfile import Written

LOG = logging.getLogger("tunewright")


class Core:
    """Devices and settings of one application.

    >>> core = Core()
    >>> model = core.read_model("model.onnx")
    >>> compiled = core.compile_model(model, "CPU", {"PERF_COUNT": "YES"})
    >>> outputs = compiled({"x": x})
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.settings = _make(config)

    @property
    def available_devices(self) -> list[str]:
        return visible()

    def set_property(self, config: Mapping[str, Any]) -> None:
        """Set settings for every model compiled from now on."""
        self.settings = _make(config, self.settings)

    def set_tuning_policy(
        self,
        enforce: int | str | None = None,
        *,
        mode: str | None = None,
        find: str | int | None = None,
        how: str | None = None,
    ) -> None:
        """Set how models compiled from now on are tuned: FIND_ENFORCE, TUNING_MODE, FIND_MODE and AUTO_TUNE_MODE.

        What is not given stays unchanged. See docs/tuning-policy.md.

        >>> core.set_tuning_policy(3)  # tune what is missing in the knowledge bases
        >>> core.set_tuning_policy(mode="TUNING_CREATE", how="GA")
        """
        given = {"FIND_ENFORCE": enforce, "TUNING_MODE": mode, "FIND_MODE": find, "AUTO_TUNE_MODE": how}
        self.set_property({key: value for key, value in given.items() if value is not None})

    def get_property(self, device: str, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Return a property of a device, or the value of a setting (docs/settings.md).

        >>> core.get_property("CPU", "FULL_DEVICE_NAME")
        >>> core.get_property("GPU", "MAX_BATCH_SIZE", {"MODEL_PTR": model})
        """
        from .plugins import metrics

        if is_several(device):
            return metrics.of_several(device, name, self.settings)
        named = f"{device}.{self.settings.device_id}" if self.settings.device_id and "." not in device else device
        return metrics.get(open_device(named, self.settings), name, self.settings, options)

    def read_model(self, model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> Model:
        """Read a model from a file, from bytes or from a ModelProto."""
        from .frontend.onnx import load  # this import is slow, and a process may only ask for devices

        return load(model, self.settings)

    def compile_model(
        self,
        model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
        device: str | RemoteContext = "CPU",
        config: Mapping[str, Any] | None = None,
        *,
        preprocess: Mapping[str, Preprocess] | Preprocess | None = None,
        stateful: Mapping[str, str] | str | None = None,
    ) -> CompiledModel:
        """Compile a model for a device, or for a caller's context there (`create_context`).

        Passing a path instead of a `Model` saves memory, because the compiler may then release the weights as read.
        ``preprocess`` describes inputs that differ from those of the model: see `Model.preprocess`. ``stateful`` maps
        inputs that each request keeps to the outputs that produce their next values, or is "auto": see
        `Model.make_stateful`.
        """
        with uncollected():
            if isinstance(device, str) and not is_several(device):
                expect(device)
                import_module(".frontend.onnx", __package__)  # this import is slow; the device starts up meanwhile
                # Find the plugin first, so that an unknown device is reported before a large file is read.
                self._plugin(device, _make(config, self.settings))
            loaded = model if isinstance(model, Model) else self.read_model(model)
            if preprocess is not None:
                loaded = loaded.preprocess(preprocess)
            if stateful is not None:
                loaded = loaded.make_stateful(stateful)
            settings = self._settings(loaded, config)
            loaded = adapted(loaded, settings)
            # background tuning makes plans again from the weights, so they must stay
            beside = settings.tuning_mode == "TUNING_BACKGROUND"
            consume = loaded is not model and not beside
            digest = _digest(loaded) if settings.record_traffic else ""
            if loaded.states:
                compiled = _stateful(self._plugin(device, _one_by_one(settings)), loaded, settings, consume)
            else:
                compiled = self._plugin(device, settings).compile(loaded, settings, consume=consume)
        _allow_background_tuning(compiled)
        if digest:
            _record_traffic(compiled, digest, str(loaded.path or loaded.name))
        if beside:
            _tune_beside(compiled, settings)
        return compiled

    def create_context(self, device: str = "CPU", *, context: Any = None, queue: Any = None) -> RemoteContext:
        """Return a context in which models use a caller's pyopencl ``context`` and ``queue``, or its CUDA stream.

        >>> context = core.create_context("CPU.INTEL", context=cl_context, queue=cl_queue)
        >>> context = core.create_context("GPU.0", queue=torch.cuda.current_stream())
        >>> compiled = core.compile_model("model.onnx", context)
        """
        if context is None and queue is None:
            return RemoteContext(open_device(device, self.settings))
        lent = open_device(device, self.settings).lent(context, queue)
        return RemoteContext(lent.configured(self.settings))

    def lock(self, compiled: CompiledModel, path: str | os.PathLike[str]) -> Written:
        """Add the kernels that a model uses to a lockfile (docs/lockfile.md).

        This covers every shape that the model has run with.

        >>> core.lock(compiled, "model.onnx.lock.json")
        >>> core.compile_model("model.onnx", config={"FROZEN": "YES"})  # with exactly these kernels, or an error
        """
        from .runtime.insight.lock import lock
        from .runtime.requests.request import of_one_device

        return lock(of_one_device(compiled), path)

    def embed(
        self,
        compiled: CompiledModel,
        path: str | os.PathLike[str],
        output: str | os.PathLike[str] | None = None,
    ) -> int:
        """Write the measurements of a compiled model's layers into its file ``path``, or a copy; return their number.

        This covers every shape that the model has run with. Other engines ignore the measurements; Tunewright uses them
        at load when USE_EMBEDDED = YES (docs/knowledge-base.md).

        >>> core.embed(compiled, "model.onnx", output="tuned.onnx")
        """
        from .knowledge.open_databases import open_user
        from .model_tuning.embed import answers, problems_of, put
        from .runtime.requests.request import of_one_device

        found = answers([open_user(self.settings)], problems_of(of_one_device(compiled)))
        if not found:
            hint = "tune the model first"
            raise InputError("the knowledge base has no measurements of its layers", where=str(path), hint=hint)
        left_out, _ = put(Path(path), Path(output or path), found)
        return len(found) - sum(m in left_out for m in found)

    def extract(self, path: str | os.PathLike[str]) -> list[Measurement]:
        """Copy the measurements in a model file into the user's knowledge base. Each is checked separately.

        >>> core.extract("tuned.onnx")
        """
        from .knowledge.embedded import EmbeddedDatabase
        from .knowledge.open_databases import open_user
        from .model_tuning.embed import measurements

        carried = EmbeddedDatabase(Path(path))
        for text in carried.damage():
            LOG.warning("left out: %s", text)
        found = measurements([carried])
        open_user(self.settings).merge(found)
        return found

    def query_model(
        self,
        model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
        device: str = "CPU",
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, Support]:
        """Return for each node, by name, the solver that would run it on the device, or why no solver can.

        The nodes are those of the file: `compile_model` may fold, fuse or drop a node first. With several devices
        (HETERO) `Support.device` names the device.
        """
        loaded = model if isinstance(model, Model) else self.read_model(model)
        settings = self._settings(loaded, config)
        return self._plugin(device, settings).query(loaded, settings)

    def query_requests(
        self,
        model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
        device: str = "CPU",
        config: Mapping[str, Any] | None = None,
    ) -> ServingChoice | None:
        """Return the streams, requests and batches with which `compile_model` would serve a model, and why.

        Nothing is compiled or measured: NUM_STREAMS = AUTO measures at the first load (docs/async.md). Returns None if
        several devices serve the model, because each has its own numbers.

        >>> core.query_requests("model.onnx", "GPU.0", {"PERFORMANCE_HINT": "THROUGHPUT"}).batch
        """
        loaded = model if isinstance(model, Model) else self.read_model(model)
        # a query must not delete records, whatever FIND_ENFORCE says
        settings = replace(self._settings(loaded, config), find_enforce="1")
        return self._plugin(device, settings).choice(adapted(loaded, settings), settings)

    def apart(
        self,
        device: str,
        config: Mapping[str, Any] | None = None,
        *,
        model: Model | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> list[MemberDevice]:
        """Split a device string into single devices with their settings, to tune, explain or lock each of them.

        With a model and its inputs, HETERO yields one entry for each subgraph.

        >>> for one in core.apart("HETERO:GPU.0,CPU", model=model, inputs=inputs):
        ...     core.tune(one.model(model), one.inputs(inputs), one.device, config=one.config)
        """
        from .plugins.members import apart

        return apart(device, _make(config, self.settings), model, inputs)

    def pieces(
        self, model: Model, inputs: Mapping[str, Any], device: str, config: Mapping[str, Any] | None = None
    ) -> Iterator[CompiledPart]:
        """Compile the parts of a model that the devices of a string run, one after the other. Yield each with inputs.

        >>> for piece in core.pieces(model, inputs, "HETERO:GPU,CPU"):
        ...     layers = explain(piece.compiled, piece.inputs)
        """
        from .plugins.members import pieces

        def compile(model: Model, device: str, own: Mapping[str, Any]) -> CompiledModel:
            return self.compile_model(model, device, {**(config or {}), **own})

        return pieces(model, inputs, device, self._settings(model, config), compile)

    def tune(
        self,
        model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
        inputs: Mapping[str, Any],
        device: str = "CPU",
        budget: float = 60.0,
        *,
        config: Mapping[str, Any] | None = None,
        again: bool = False,
        report: Callable[[TuningState], None] | None = None,
        stop: Callable[[], bool] | None = None,
        command: str | None = None,
    ) -> TuningResult:
        """Tune a model for such inputs within ``budget`` seconds. The results go into the user's knowledge base.

        Layers with a known answer are skipped, unless ``again``. ``report`` is called with the progress. ``stop`` is
        called to ask whether to end early; the results found so far are kept. ``command``: the command line that
        continues the tuning, for the result file. By default it is made from the model's file, the shapes and the
        settings.
        """
        from .model_tuning.layers import TuningOptions
        from .model_tuning.model import tune
        from .model_tuning.result import ResultRecorder, tune_command

        settings, budget = _unlocked(Settings.make(config, self.settings)), _seconds(budget)
        loaded = model if isinstance(model, Model) else self.read_model(model)
        plugin, settings = self._single(loaded, device, settings)
        command = command or tune_command(loaded, inputs, device, settings)
        recorder = ResultRecorder(
            "model", str(loaded.path or loaded.name), plugin.device, settings, budget, report, command
        )
        return recorder.finish(tune(plugin, loaded, inputs, TuningOptions(settings, budget, again, recorder, stop)))

    def tune_many(
        self,
        works: Sequence[Workload],
        device: str = "CPU",
        budget: float = 60.0,
        *,
        objective: str = "latency",
        until: str | None = None,
        config: Mapping[str, Any] | None = None,
        again: bool = False,
        report: Callable[[TuningState], None] | None = None,
        stop: Callable[[], bool] | None = None,
        command: str | None = None,
    ) -> list[TuningResult]:
        """Tune several models, or one for several shapes, within ``budget`` seconds. Returns a result for each work.

        Layers that several works share are searched once. The next search goes to the layer with the largest weighted
        expected gain (docs/tune.md). ``objective``: latency, throughput (with the streams of NUM_STREAMS or
        PERFORMANCE_HINT) or energy. ``until``: "1.2x" ends once that speed-up is reached, "stalls" once searching stops
        paying. The other arguments are as for `tune`.

        >>> works = [Work(name, lambda name=name: (core.read_model(name), inputs[name])) for name in names]
        >>> core.tune_many(works, budget=600)
        """
        from .model_tuning.objective import Objective, maker
        from .model_tuning.several_models import Goal, SeveralTuningOptions, tune_many

        try:
            wanted = Objective(objective)
        except ValueError:
            hint = f"one of: {', '.join(Objective)}"
            raise InputError(f"{objective!r} is unknown", where="objective", hint=hint) from None
        settings = _unlocked(Settings.make(config, self.settings))
        serving = wanted is Objective.THROUGHPUT and settings.performance_hint == "LATENCY" and not settings.num_streams
        if serving:  # one stream on each thread, as a load with PERFORMANCE_HINT = THROUGHPUT has
            settings = replace(settings, performance_hint="THROUGHPUT")
        goal = Goal() if until is None else Goal.parse(until, "until")
        how = SeveralTuningOptions(settings, _seconds(budget), again, report, stop, goal, command)

        def make(model: Model) -> tuple[SingleDevice, Maker]:
            plugin, _ = self._single(model, device, settings)
            return plugin, maker(wanted, plugin, how)

        plugin, _ = self._single(None, device, settings)
        # Fail before the work starts if the device cannot be opened or has no energy meter.
        maker(wanted, plugin, how)
        return tune_many(works, how, make)

    def _single(self, model: Model | None, device: str, settings: Settings) -> tuple[SingleDevice, Settings]:
        """Return the plugin of one device, with the streams that a load of the model would use."""
        plugin = self._plugin(device, replace(settings, allow_auto_batching=False))
        if not isinstance(plugin, SingleDevice):
            names = ", ".join(one.device for one in self.apart(device))
            hint = f"tune {names} one by one; `Core.apart` returns them"
            raise DeviceError(f"{device} stands for several devices", hint=hint)
        # the best kernels depend on the number of threads per stream
        if model is not None and measured_streams(settings):
            count = plugin.choice(adapted(model, settings), replace(settings, find_enforce="1")).streams
            settings = replace(settings, num_streams=count)
            plugin = of_device(plugin.whole, settings)
        return plugin, settings

    def place_model(
        self,
        model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
        inputs: Mapping[str, Any],
        device: str,
        budget: float = 10.0,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> Measured:
        """Measure for ``budget`` seconds which placement of the model's nodes on HETERO's devices is fastest.

        ``inputs`` are those that the model is run with. The fastest placement is stored, and `compile_model` uses it
        from now on (docs/hetero.md).

        >>> core.place_model("model.onnx", {"x": x}, "HETERO:GPU,CPU").best.name
        """
        from .plugins.hetero import Hetero
        from .plugins.placement.measure import measure

        loaded = model if isinstance(model, Model) else self.read_model(model)
        settings = self._settings(loaded, config)
        plugin = self._plugin(device, settings)
        if not isinstance(plugin, Hetero):
            hint = "name several devices: HETERO:GPU,CPU"
            raise DeviceError(f"{device} is not a HETERO device, so there are no nodes to place", hint=hint)
        return measure(plugin, loaded, inputs, settings, _seconds(budget))

    def traffic(
        self, model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto, most: int | None = None
    ) -> list[Weighted]:
        """Return the shapes that processes with RECORD_TRAFFIC ran a model with, largest total time first.

        Weights are shares of that time; they add up to 1 over the ``most`` shapes that are returned (None: all). Raises
        InputError if nothing was recorded.

        >>> [(one.shapes, one.weight) for one in core.traffic("model.onnx", most=4)]
        """
        from .knowledge.traffic import find, weighted

        loaded = model if isinstance(model, Model) else self.read_model(model)
        return weighted(find(self.settings, _digest(loaded), str(loaded.path or loaded.name)), most)

    def tune_problems(
        self,
        dumps: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        device: str = "CPU",
        budget: float = 60.0,
        *,
        config: Mapping[str, Any] | None = None,
        again: bool = False,
        report: Callable[[TuningState], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> TuningResult:
        """Tune the problems that applications recorded (ENABLE_TUNE_DUMP), from any number of dumps.

        There is no network to decide in: kernels are compared alone, and times are those of single executions. The
        other arguments are as for `tune`.
        """
        from .model_tuning.layers import TuningOptions
        from .model_tuning.problems import read, tune_problems
        from .model_tuning.result import ResultRecorder
        from .tuning.offline import suggested_commands

        settings, budget = _unlocked(Settings.make(config, self.settings)), _seconds(budget)
        paths = [dumps] if isinstance(dumps, str | os.PathLike) else list(dumps)
        problems, reasons = read(paths)
        for text in reasons:
            LOG.warning("left out: %s", text)
        opened = open_device(device, settings)
        again_with = suggested_commands.command("tune", *map(str, paths), device=device, settings=settings)
        recorder = ResultRecorder("problems", ", ".join(map(str, paths)), opened, settings, budget, report, again_with)
        return recorder.finish(tune_problems(opened, problems, TuningOptions(settings, budget, again, recorder, stop)))

    def _settings(self, model: Model, config: Mapping[str, Any] | None) -> Settings:
        """Return the settings for a model. A frozen model uses the lockfile beside its file unless LOCK_FILE is set."""
        settings = _make(config, self.settings)
        if settings.frozen and not settings.lock_file and model.path:
            from .tuning.lockfile import default_path

            return Settings.make({"LOCK_FILE": default_path(model.path)}, settings)
        return settings

    def _plugin(self, device: str | RemoteContext, settings: Settings) -> Plugin:
        if isinstance(device, RemoteContext):
            return of_device(device.device, settings)
        return find(device, settings)


def _make(config: Mapping[str, Any] | None, base: Settings | None = None) -> Settings:
    """Make settings. A key that is a read-only property gets an error that says so."""
    try:
        return Settings.make(config, base)
    except SettingsError:
        from .plugins.metrics import check_settable

        for name in config or ():
            check_settable(str(name))
        raise


def _one_by_one(settings: Settings) -> Settings:
    """Switch off automatic batching: requests whose states differ in size cannot run together."""
    return replace(settings, allow_auto_batching=False)


def _stateful(plugin: Plugin, model: Model, settings: Settings, consume: bool) -> CompiledModel:
    """Compile a model whose requests keep its states."""
    from .frontend.stateful import checked_states, growing_axes
    from .plugins.batch import Batch
    from .runtime.requests.stateful import StatefulModel

    if isinstance(plugin, Batch):
        why = f"{plugin.name} runs requests together, and their states may differ in size"
        raise DeviceError(why, hint=f"{plugin.single.name} runs a model with states")
    growing = growing_axes(model.graph, model.outputs, model.states)
    compiled = plugin.compile(model, _one_by_one(settings), consume=consume)
    # types that only compilation infers are known now
    states = checked_states(compiled.inputs, compiled.outputs, model.states)
    return StatefulModel(compiled, states, growing)


def _digest(model: Model) -> str:
    """Digest of a model's structure; recorded traffic is stored under it."""
    from .knowledge.streams import digest

    return digest(model.graph)


def _allow_background_tuning(compiled: CompiledModel) -> None:
    """Give a model of one device what starts tuning beside it."""
    from .runtime.requests.request import DeviceModel

    def start(model: DeviceModel, **wishes: Any) -> BackgroundTuning:
        from .model_tuning.background import start  # few are tuned so

        return start(model, **wishes)

    if isinstance(compiled.alone, DeviceModel):
        compiled.alone.background_starter = start


def _record_traffic(compiled: CompiledModel, digest: str, name: str) -> None:
    """Start recording the shapes that a model runs with (RECORD_TRAFFIC)."""
    from .runtime.insight.traffic import TrafficRecorder
    from .runtime.requests.request import DeviceModel

    alone = compiled.alone
    if isinstance(alone, DeviceModel):
        TrafficRecorder(alone, digest, name)
    else:
        LOG.warning("RECORD_TRAFFIC: nothing is recorded, because %s stands for several devices", compiled.device_name)


def _tune_beside(compiled: CompiledModel, settings: Settings) -> None:
    """Start background tuning (TUNING_BACKGROUND). On a device that cannot tune, log a warning and serve untuned."""
    from .tuning.policy import decide

    if settings.frozen or decide(settings).delete or decide(settings).how == "NO_TUNE":
        return  # the policy logs its own warning
    try:
        compiled.alone.tune_in_background()
    except TunewrightError as error:
        LOG.warning("nothing is tuned in the background: %s", error)


def _seconds(budget: float) -> float:
    """Return a tuning budget as a float. Raises InputError unless it is positive and finite."""
    if not isinstance(budget, int | float) or not 0 < budget < math.inf:
        why = f"{budget!r} is not a number of seconds above 0"
        raise InputError(why, where="budget", hint="60 seconds are a good start")
    return float(budget)


def _unlocked(settings: Settings) -> Settings:
    """Return the settings for tuning: without a lockfile, whose fixed choices would bypass the search."""
    from .tuning.policy import decide

    if settings.frozen:
        raise SettingsError("FROZEN = YES: nothing is tuned", where="settings", hint="tune without it, then lock again")
    if decide(settings).how == "NO_TUNE":
        raise SettingsError("AUTO_TUNE_MODE = NO_TUNE: nothing is tuned", where="settings", hint="name a strategy")
    return Settings.make({"LOCK_FILE": ""}, settings)

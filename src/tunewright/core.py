"""`Core`: the way in. Reads models, compiles them for devices, answers what a device can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import SettingsError
from .frontend.model import Model
from .plugins.base import Plugin, Support
from .plugins.single import SingleDevice, open_device, visible
from .runtime.request import CompiledModel
from .settings import Settings

if TYPE_CHECKING:
    import onnx

    from .plugins.tune import Result, State


class Core:
    """Devices and settings of one application.

    >>> core = Core()
    >>> model = core.read_model("model.onnx")
    >>> compiled = core.compile_model(model, "CPU", {"PERF_COUNT": "YES"})
    >>> outputs = compiled({"x": x})
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.settings = Settings.make(config)

    @property
    def available_devices(self) -> list[str]:
        return visible()

    def set_property(self, config: Mapping[str, Any]) -> None:
        """Settings for every model compiled from now on."""
        self.settings = Settings.make(config, self.settings)

    def set_tuning_policy(
        self,
        enforce: int | str | None = None,
        *,
        mode: str | None = None,
        find: str | int | None = None,
        how: str | None = None,
    ) -> None:
        """How models compiled from now on are tuned: FIND_ENFORCE, TUNING_MODE, FIND_MODE and AUTO_TUNE_MODE.

        What is not given stays as it is. See docs/tuning-policy.md.

        >>> core.set_tuning_policy(3)  # tune what is missing in the knowledge bases
        >>> core.set_tuning_policy(mode="TUNING_CREATE", how="GA")
        """
        given = {"FIND_ENFORCE": enforce, "TUNING_MODE": mode, "FIND_MODE": find, "AUTO_TUNE_MODE": how}
        self.set_property({key: value for key, value in given.items() if value is not None})

    def get_property(self, device: str, name: str) -> Any:
        """A device's property or the value of a setting."""
        opened = open_device(device)
        key = name.upper()
        if key == "FULL_DEVICE_NAME":
            return opened.target.name
        if key == "AVAILABLE_DEVICES":
            return self.available_devices
        if key == "SUPPORTED_PROPERTIES":
            return [*("FULL_DEVICE_NAME", "AVAILABLE_DEVICES"), *(row["key"] for row in Settings.describe())]
        return self.settings.get(name)

    def read_model(self, model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> Model:
        """A model from a file, from bytes or from a ModelProto."""
        from .frontend.onnx import load  # onnx takes long to import, and a process may only ask for devices

        return load(model, self.settings)

    def compile_model(
        self,
        model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
        device: str = "CPU",
        config: Mapping[str, Any] | None = None,
    ) -> CompiledModel:
        """A model ready to run on a device."""
        settings = Settings.make(config, self.settings)
        loaded = model if isinstance(model, Model) else self.read_model(model)
        return self._plugin(device).compile(loaded, settings)

    def query_model(
        self,
        model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
        device: str = "CPU",
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, Support]:
        """Per node, by name: the solver that would run it on the device, or why there is none.

        Of the model as it is read: `compile_model` may fold, fuse or drop a node first.
        """
        settings = Settings.make(config, self.settings)
        loaded = model if isinstance(model, Model) else self.read_model(model)
        return self._plugin(device).query(loaded, settings)

    def tune(
        self,
        model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
        inputs: Mapping[str, Any],
        device: str = "CPU",
        budget: float = 60.0,
        *,
        config: Mapping[str, Any] | None = None,
        again: bool = False,
        report: Callable[[State], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Result:
        """Tune a model for inputs like these within ``budget`` seconds; what is found is in the user's knowledge base.

        Layers whose answer is known already are left alone, unless ``again``. ``report`` is told how far it is,
        ``stop`` asked whether to end early: nothing that was found is lost.
        """
        from .plugins.tune import tune

        settings = Settings.make(config, self.settings)
        loaded = model if isinstance(model, Model) else self.read_model(model)
        plugin = self._plugin(device)
        assert isinstance(plugin, SingleDevice)
        return tune(plugin, loaded, inputs, settings, budget, again=again, report=report, stop=stop)

    def _plugin(self, device: str) -> Plugin:
        if not isinstance(device, str) or not device:
            raise SettingsError(
                f"device {device!r} is not a name", hint=f"the devices are {', '.join(self.available_devices)}"
            )
        return SingleDevice(open_device(device))

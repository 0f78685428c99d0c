"""The plugin of a device string: a device's name, or several behind ``HETERO:``, ``MULTI:`` or ``AUTO:``."""

from __future__ import annotations

from importlib import import_module

from ..errors import SettingsError
from ..settings import Settings
from .base import Plugin
from .single import SingleDevice, open_device, streams, visible

#: plugins over several devices: (module, class), made from the names behind the colon and the settings
_OVER_SEVERAL: dict[str, tuple[str, str]] = {}


def find(device: str, settings: Settings) -> Plugin:
    """The plugin that serves a device string; SettingsError or DeviceError when there is none."""
    if not isinstance(device, str) or not device.strip():
        raise SettingsError(f"device {device!r} is not a name", hint=f"the devices are {', '.join(visible())}")
    kind, _, names = device.partition(":")
    if kind.strip().upper() not in _OVER_SEVERAL:
        return single(device.strip(), settings)
    module, name = _OVER_SEVERAL[kind.strip().upper()]
    made = getattr(import_module(f".{module}", __package__), name)(
        [n.strip() for n in names.split(",") if n.strip()], settings
    )
    assert isinstance(made, Plugin)
    return made


def single(device: str, settings: Settings) -> SingleDevice:
    """The plugin of one device, with its streams."""
    opened = open_device(device, settings.cpu_threads_num)
    count = streams(opened, settings)
    return SingleDevice(opened.with_threads(max(1, opened.target.units // count)), count)

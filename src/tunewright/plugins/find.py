"""Find the plugin of a device string: a device's name, or several after ``HETERO:``, ``MULTI:``, ``AUTO:`` or
``BATCH``."""

from __future__ import annotations

from importlib import import_module

from ..errors import SettingsError
from ..settings import Settings
from .base import Plugin
from .single import SEVERAL, SingleDevice, of_device, open_device, visible


def is_several(device: str) -> bool:
    """Whether the string names a plugin over several devices."""
    return device.partition(":")[0].strip().upper() in SEVERAL


def find(device: str, settings: Settings) -> Plugin:
    """Return the plugin that serves a device string. Raises `SettingsError` or `DeviceError` if there is none."""
    if not isinstance(device, str) or not device.strip():
        raise SettingsError(f"device {device!r} is not a name", hint=f"the devices are {', '.join(visible())}")
    kind, _, names = device.partition(":")
    if not is_several(device):
        plugin = single(device.strip(), settings)
        if not plugin.device.target.traits.batches_pay:
            return plugin
        from .batch import with_batches

        return with_batches(plugin, settings)
    kind = kind.strip().lower()
    made = getattr(import_module(f".{kind}", __package__), kind.title())(
        [n.strip() for n in names.split(",") if n.strip()], settings
    )
    assert isinstance(made, Plugin)
    return made


def single(device: str, settings: Settings) -> SingleDevice:
    """Return the plugin of one device, with its streams. DEVICE_ID selects the device if the name does not."""
    if settings.device_id and "." not in device:
        device = f"{device}.{settings.device_id}"
    return of_device(open_device(device, settings), settings)

"""Properties of a device: its hardware, its capabilities, recommended values, and the use of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ..devices.base import Device
from ..devices.host import cpu_count
from ..errors import SettingsError
from ..ir.types import DType, Layout, TensorType
from ..runtime.insight.memory_usage import live, usage
from ..runtime.insight.properties import Metric, described, is_setting, unknown
from ..settings import Settings, plain
from ..solvers.base import Problem
from ..tuning.tuner import Tuner
from .batching.batch_tune import MOST
from .single import available, open_device, visible

#: Requests in flight per stream: while one runs, the next is prepared.
REQUESTS_EACH = 2
#: Properties that need a model.
WITH_MODEL = {"MAX_BATCH_SIZE": "MODEL_PTR", "OPTIMAL_BATCH_SIZE": "MODEL_PTR"}


def _conv(dtype: DType) -> Problem:
    x, w = TensorType(dtype, (1, 32, 28, 28)), TensorType(dtype, (32, 32, 3, 3))
    return Problem("Conv", (x, w), (x,), {"pads": (1, 1, 1, 1), "kernel_shape": (3, 3)}, constant=(False, True))


def _product(dtype: DType) -> Problem:
    x, w = TensorType(dtype, (32, 64)), TensorType(dtype, (64, 64))
    return Problem("MatMul", (x, w), (x,), {}, constant=(False, True))


def _bytes() -> Problem:
    x, w, y = (TensorType(t, s) for t, s in ((DType.UINT8, (32, 64)), (DType.INT8, (64, 64)), (DType.INT32, (32, 64))))
    return Problem("MatMulInteger", (x, w), (y,), {}, constant=(False, True))


#: Capability -> problems; a device has it if its own kernels solve all of them.
_ASKED = {
    "FP32": (_conv(DType.FLOAT32), _product(DType.FLOAT32)),
    "FP16": (_conv(DType.FLOAT16), _product(DType.FLOAT16)),
    "BF16": (_conv(DType.BFLOAT16), _product(DType.BFLOAT16)),
    "INT8": (_bytes(),),
}


@cache
def capabilities(device: Device) -> tuple[str, ...]:
    """OPTIMIZATION_CAPABILITIES: the types for which solvers have kernels."""
    tuner = Tuner(Settings())

    def solvers(problem: Problem) -> list[str]:
        accepting, _ = tuner.ask(problem, device)
        return [s.id for s in accepting if not s.host or device.runs_references]

    found = [name for name, problems in _ASKED.items() if all(solvers(problem) for problem in problems)]
    conv = _conv(DType.FLOAT32)
    blocked = [conv.in_layout(Layout.parse(f"blocked{n}"), [0]) for n in (4, 8, 16)]
    if any("winograd" in solver for problem in (conv, *blocked) for solver in solvers(problem)):
        found.append("WINOGRAD")
    return tuple(found)


def streams_range(device: Device) -> tuple[int, int]:
    """RANGE_FOR_STREAMS: from, to."""
    return 1, device.target.most_streams


def requests_range(device: Device) -> tuple[int, int, int]:
    """RANGE_FOR_ASYNC_INFER_REQUESTS: from, to, step.

    More requests would only wait. On a GPU requests may run together.
    """
    together = MOST if device.target.traits.batches_pay else 1
    return 1, REQUESTS_EACH * streams_range(device)[1] * together, 1


def memory_statistics(device: Device) -> dict[str, int]:
    """Return the bytes that models hold on a device, by purpose. Figures from the device itself take precedence."""
    found = usage(live(device.name))
    return found | device.held()


#: properties of every device
_COMMON: dict[str, Metric[Device]] = {
    "AVAILABLE_DEVICES": Metric("list", "the devices of this machine", lambda d: visible()),
    "SUPPORTED_PROPERTIES": Metric(
        "dict", "every property: type, values, default, description", lambda d: supported(d)
    ),
    "SUPPORTED_METRICS": Metric("list", "properties that are not settings", lambda d: list(metrics(d))),
    "SUPPORTED_CONFIG_KEYS": Metric(
        "list", "properties that are settings", lambda d: [row["key"] for row in Settings.describe()]
    ),
    "FULL_DEVICE_NAME": Metric("str", "what the hardware calls itself", lambda d: d.target.name),
    "DEVICE_ARCHITECTURE": Metric("str", "what kernels are compiled for", lambda d: d.target.arch),
    "DEVICE_TYPE": Metric(
        "str",
        "integrated, or discrete: its memory is its own",
        lambda d: "discrete" if d.is_discrete else "integrated",
    ),
    "OPTIMIZATION_CAPABILITIES": Metric("list", "what it has kernels for", lambda d: list(capabilities(d))),
    "RANGE_FOR_STREAMS": Metric("tuple", "streams that may be of use: from, to", streams_range),
    "RANGE_FOR_ASYNC_INFER_REQUESTS": Metric(
        "tuple", "requests in flight that may be of use: from, to, step", requests_range
    ),
    "MEMORY_STATISTICS": Metric("dict", "bytes that models hold there, by purpose", memory_statistics),
    "MAX_BATCH_SIZE": Metric("int", "the largest batch that fits and loses no speed, measured", lambda d: _asked(d)),
    "OPTIMAL_BATCH_SIZE": Metric("int", "the smallest batch that is as fast as any, measured", lambda d: _asked(d)),
}
#: properties that only some devices know
_SOME: dict[str, Metric[Device]] = {
    "DEVICE_TOTAL_MEM_SIZE": Metric("int", "its memory in bytes", lambda d: d.memory_bytes),
    "DEVICE_UUID": Metric("str", "tells it from every other device", lambda d: d.uuid),
    "DEVICE_PCI_INFO": Metric("str", "where it is plugged in", lambda d: d.pci),
}
_GPU: dict[str, Metric[Device]] = {
    "GPU_EXECUTION_UNITS_COUNT": Metric("int", "its multiprocessors or compute units", lambda d: d.target.units),
    "GPU_DEVICE_TOTAL_MEM_SIZE": Metric("int", "its memory in bytes", lambda d: d.memory_bytes),
    "GPU_MEMORY_STATISTICS": Metric("dict", "bytes that models hold there, by purpose", memory_statistics),
}


def metrics(device: Device) -> dict[str, Metric[Device]]:
    """Return the properties of a device that are not settings."""
    found = dict(_COMMON)
    some = _SOME | (_GPU if device.target.traits.has_gpu_properties else {})
    return found | {name: metric for name, metric in some.items() if metric.find(device) is not None}


def supported(device: Device) -> dict[str, dict[str, Any]]:
    """SUPPORTED_PROPERTIES: a JSON description of each property by name."""
    found = described(metrics(device), needs=WITH_MODEL)
    ids = [name.partition(".")[2] for name in available()[0] if name.partition(".")[0] == device.name.partition(".")[0]]
    found["DEVICE_ID"]["values"] = [number for number in ids if number]
    found["CPU_THREADS_NUM"]["values"] = [str(n) for n in range(cpu_count() + 1)]
    return found


def get(device: Device, name: str, settings: Settings, options: Mapping[str, Any] | None = None) -> Any:
    """Return a property of a device, or the value of a setting.

    ``options``: arguments of some properties (`batch_size`).
    """
    key = plain(name)
    known = metrics(device)
    if key in WITH_MODEL and options:
        from .batching.batch_size import measure_batches

        found = measure_batches(device, settings, options)
        return found.largest if key == "MAX_BATCH_SIZE" else found.optimal
    if options:
        hint = f"only {' and '.join(WITH_MODEL)} take options"
        raise SettingsError(f"{key} is asked without options", where="property", hint=hint)
    if key in known:
        return known[key].find(device)
    if is_setting(key):
        return settings.get(key)
    raise unknown(name, device.name, known)


def of_several(devices: str, name: str, settings: Settings) -> Any:
    """Return a property of MULTI, AUTO, HETERO or BATCH for all its devices, or the value of a setting."""
    key, (kind, _, listed) = plain(name), devices.partition(":")
    hetero = kind.strip().upper() == "HETERO"
    listed = listed or (settings.target_fallback if hetero else settings.multi_device_priorities)
    names = [one.partition("(")[0].strip() for one in listed.split(",") if one.strip()] or visible()
    known: dict[str, Metric[str]] = {
        "AVAILABLE_DEVICES": Metric("list", _COMMON["AVAILABLE_DEVICES"].description, lambda d: visible()),
        "FULL_DEVICE_NAME": Metric("str", "the devices", lambda d: f"{kind.strip().upper()}:{','.join(names)}"),
        "OPTIMIZATION_CAPABILITIES": Metric(
            "list", "what one of its devices has kernels for",
            lambda d: list(dict.fromkeys(c for n in names for c in capabilities(open_device(n)))),
        ),
        "SUPPORTED_METRICS": Metric("list", _COMMON["SUPPORTED_METRICS"].description, lambda d: list(known)),
        "SUPPORTED_CONFIG_KEYS": Metric(
            "list", "properties that are settings", lambda d: [row["key"] for row in Settings.describe()]
        ),
        "SUPPORTED_PROPERTIES": Metric(
            "dict", _COMMON["SUPPORTED_PROPERTIES"].description, lambda d: described(known)
        ),
    }  # fmt: skip
    if key in known:
        return known[key].find(devices)
    if is_setting(key):
        return settings.get(key)
    raise unknown(name, devices, known)


def check_settable(name: str) -> None:
    """Raise `SettingsError` for the name of a read-only property."""
    if plain(name) in {*_COMMON, *_SOME, *_GPU}:
        hint = "`tunewright settings` lists what can be set"
        raise SettingsError(f"{plain(name)} can only be read", where="property", hint=hint)


def _asked(device: Device) -> int:
    raise SettingsError(
        "it depends on the model", where=f"property of {device.name}",
        hint='get_property(device, "MAX_BATCH_SIZE", {"MODEL_PTR": model})',
    )  # fmt: skip


__all__ = ["capabilities", "check_settable", "get", "memory_statistics", "metrics", "supported"]

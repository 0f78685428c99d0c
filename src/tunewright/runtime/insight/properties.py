"""Properties of a compiled model: what it is, how many requests it wants, what it holds, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tunewright.errors import SettingsError
from tunewright.settings import Settings, closest, plain

if TYPE_CHECKING:
    from ..requests.compiled import CompiledModel

Of = TypeVar("Of")
#: settings that a request reads when it is made; all other settings are fixed when a model is compiled
CHANGEABLE = frozenset({"MODEL_PRIORITY", "GPU_QUEUE_PRIORITY", "GPU_QUEUE_THROTTLE", "GPU_HOST_TASK_PRIORITY"})


@dataclass(frozen=True)
class Metric(Generic[Of]):
    """A read-only property, and how to find its value."""

    type: str
    description: str
    find: Callable[[Of], Any]


@dataclass(frozen=True)
class Described:
    """The entry of a property in SUPPORTED_PROPERTIES."""

    type: str
    #: the permitted values; None: any value of the type
    values: list[str] | None
    default: Any
    read_only: bool
    description: str
    #: other names of it
    aliases: tuple[str, ...] = ()
    #: an option that the property needs
    needs: str = ""


def described(
    metrics: Mapping[str, Metric[Any]], changeable: frozenset[str] | None = None, needs: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """SUPPORTED_PROPERTIES: metrics, then settings; ``changeable``: those that may still be set (None: all)."""
    found = {
        name: Described(m.type, None, None, True, m.description, needs=(needs or {}).get(name, ""))
        for name, m in metrics.items()
    }
    for row in Settings.describe():
        fixed = changeable is not None and row["key"] not in changeable
        found[row["key"]] = Described(
            row["type"], row["values"], row["default"], fixed, row["help"], tuple(row["aliases"])
        )
    return {name: asdict(about) for name, about in found.items()}


def unknown(name: str, whose: str, metrics: Mapping[str, Metric[Any]]) -> SettingsError:
    """Return the error for an unknown property."""
    keys = [row["key"] for row in Settings.describe()]
    close = closest(name, [*metrics, *keys])
    hint = f"did you mean {close}?" if close else "SUPPORTED_PROPERTIES lists them"
    return SettingsError(f"{whose} has no property {name}", where="property", hint=hint)


def is_setting(name: str) -> bool:
    """Whether a name is a setting's key, or another name of one."""
    rows = Settings.describe()
    return any(plain(name) in (row["key"], *row["aliases"]) for row in rows)


def _metrics() -> dict[str, Metric[CompiledModel]]:
    return {
        "SUPPORTED_PROPERTIES": Metric(
            "dict", "every property: type, values, default, description", lambda m: described(METRICS, m.changeable)
        ),
        "SUPPORTED_METRICS": Metric("list", "properties that are not settings", lambda m: list(METRICS)),
        "SUPPORTED_CONFIG_KEYS": Metric(
            "list", "properties that are settings", lambda m: [row["key"] for row in Settings.describe()]
        ),
        "MODEL_NAME": Metric("str", "the name of the model's graph", lambda m: m.name),
        "NETWORK_NAME": Metric("str", "the same: its name of before", lambda m: m.name),
        "OPTIMAL_NUMBER_OF_INFER_REQUESTS": Metric(
            "int", "how many requests keep the device busy", lambda m: m.optimal_requests
        ),
        "OPTIMAL_BATCH_SIZE": Metric("int", "how many requests run together, as one inference", lambda m: m.size),
        "STREAMS_ORIGIN": Metric(
            "str",
            "where the numbers of streams, requests and examples in a batch come from; empty: settings say it",
            lambda m: m.streams_origin,
        ),
        "EXECUTION_DEVICES": Metric("list", "the devices that run it", lambda m: m.execution_devices),
        "MEMORY_STATISTICS": Metric(
            "dict", "bytes that it and its requests hold, by purpose", lambda m: m.memory_statistics()
        ),
    }


METRICS = _metrics()


def get(model: CompiledModel, name: str) -> Any:
    """Return a property of a compiled model."""
    key = plain(name)
    if key in METRICS:
        return METRICS[key].find(model)
    if is_setting(key):
        return model.settings.get(key)
    raise unknown(name, "a compiled model", METRICS)


def check_changeable(model: CompiledModel, config: Mapping[str, Any]) -> Settings:
    """Return the model's settings with changes. Raise SettingsError for settings that are fixed."""
    for name in config:
        key = plain(str(name))
        if key in METRICS:
            raise SettingsError(f"{key} can only be read", where="property")
        if not is_setting(key):
            raise unknown(str(name), "a compiled model", METRICS)
        if Settings.key(key) not in model.changeable:
            hint = f"give it to compile_model; here {', '.join(sorted(model.changeable))} may be set"
            raise SettingsError(f"{key} of a compiled model can only be read", where="property", hint=hint)
    return Settings.make(config, model.settings)

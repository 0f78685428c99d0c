"""Tunewright: an inference engine for ONNX models that tunes its own kernels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":  # file locks and worker processes use Unix calls
    raise ImportError("Tunewright does not run on Windows: use the Windows Subsystem for Linux (wsl --install)")

from ._version import __version__
from .errors import (
    DatabaseError,
    DeviceError,
    ExecutionError,
    ExtensionError,
    InputError,
    LimitError,
    LockError,
    ModelError,
    RequestCancelled,
    SettingsError,
    TunewrightError,
    UnsupportedError,
)
from .settings import Settings

if TYPE_CHECKING:
    from .api import benchmark, explain, tune, tune_many
    from .core import Core
    from .devices.remote import RemoteContext, RemoteTensor
    from .frontend.model import Model
    from .frontend.preprocess_inputs import Preprocess
    from .runtime.insight.timeline import Trace
    from .runtime.requests.asynchronous import AsyncInferQueue
    from .runtime.requests.compiled import CompiledModel, InferRequest

__all__ = [
    "AsyncInferQueue",
    "CompiledModel",
    "Core",
    "DatabaseError",
    "DeviceError",
    "ExecutionError",
    "ExtensionError",
    "InferRequest",
    "InputError",
    "LimitError",
    "LockError",
    "Model",
    "ModelError",
    "Preprocess",
    "RemoteContext",
    "RemoteTensor",
    "RequestCancelled",
    "Settings",
    "SettingsError",
    "Trace",
    "TunewrightError",
    "UnsupportedError",
    "VariableState",
    "__version__",
    "benchmark",
    "explain",
    "tune",
    "tune_many",
]

#: Public names and the modules that define them. They are imported on first use to keep `import tunewright` fast.
_LAZY = {
    "Core": ".core",
    "Model": ".frontend.model",
    "Preprocess": ".frontend.preprocess_inputs",
    "CompiledModel": ".runtime.requests.compiled",
    "InferRequest": ".runtime.requests.compiled",
    "VariableState": ".runtime.requests.stateful",
    "AsyncInferQueue": ".runtime.requests.asynchronous",
    "Trace": ".runtime.insight.timeline",
    "RemoteContext": ".devices.remote",
    "RemoteTensor": ".devices.remote",
    "benchmark": ".api",
    "explain": ".api",
    "tune": ".api",
    "tune_many": ".api",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

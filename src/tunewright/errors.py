"""Every exception that Tunewright raises on purpose.

::

    TunewrightError
    ├── ModelError            the model is not a legal ONNX model
    │   ├── LimitError        the model asks for more than a guard setting allows
    │   └── UnsupportedError  the model is legal, but no solver can run a part of it
    ├── InputError            a request's inputs do not fit the model
    ├── SettingsError         an unknown or ill-typed setting
    ├── DatabaseError         a knowledge base cannot be written
    ├── LockError             a frozen model needs a kernel that its lockfile does not name exactly
    ├── DeviceError           a device is unknown, unusable or failed
    ├── ExecutionError        an operator refused its inputs while the model ran
    ├── RequestCancelled      a request was cancelled before it finished
    └── ExtensionError        an extension is broken or registered twice

A message says what is wrong, where, and what to do next. The command line prints it without a traceback and exits with
status 2.
"""

from __future__ import annotations


class TunewrightError(Exception):
    """Root of the tree. ``where`` names the node, tensor, file or setting; ``hint`` says what to do next."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text} ({hint})" if hint else text)


class ModelError(TunewrightError):
    """The model is not a legal ONNX model."""


class LimitError(ModelError):
    """The model asks for more than a guard setting allows."""


class UnsupportedError(ModelError):
    """The model is legal, but no solver can run a part of it."""


class InputError(TunewrightError):
    """The inputs of a request do not fit the model."""


class SettingsError(TunewrightError):
    """An unknown or ill-typed setting."""


class DatabaseError(TunewrightError):
    """A knowledge base cannot be written."""


class LockError(TunewrightError):
    """A frozen model needs a kernel that its lockfile does not name exactly."""


class DeviceError(TunewrightError):
    """A device is unknown, unusable or failed."""


class ExecutionError(TunewrightError):
    """An operator refused its inputs while the model ran."""


class RequestCancelled(TunewrightError):
    """A request was cancelled before it finished."""


class ExtensionError(TunewrightError):
    """An extension is broken or registered twice."""

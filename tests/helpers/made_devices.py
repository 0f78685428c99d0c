"""Devices that do as they are told: they compute like the host, fail on demand, and compile when they may."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import parser

from tunewright.devices.base import Device, Queue
from tunewright.devices.host import HostDevice, HostQueue
from tunewright.errors import DeviceError
from tunewright.plugins import single

NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 8] x, float[8, 8] w) => (float[n, 8] y)
{
    a = MatMul(x, w)
    y = Add(a, x)
}
"""
W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def network() -> Any:
    return parser.parse_model(NETWORK)


def feed(number: float, rows: int = 3) -> dict[str, Any]:
    return {"x": np.full((rows, 8), number, np.float32), "w": W}


def check(y: Any, number: float, rows: int = 3) -> None:
    x = np.full((rows, 8), number, np.float32)
    np.testing.assert_allclose(y, x @ W + x, rtol=1e-4, atol=1e-4)


class MadeQueue(HostQueue):
    def __init__(self, device: MadeDevice) -> None:
        self.device = device

    def fetch(self, values: Sequence[Any]) -> Sequence[Any]:
        self.device.work()
        return super().fetch(values)


class MadeDevice(HostDevice):
    """What an inference does here is decided as it ends."""

    def __init__(self, name: str, kind: str = "gpu") -> None:
        super().__init__(name)
        self.target = replace(self.target, device=kind)
        #: raised by each inference
        self.error: Exception | None = None
        #: what `broken` says
        self.ill = ""
        #: inferences that it does before ``error`` is raised
        self.good = 0
        #: seconds of an inference
        self.seconds = 0.0
        #: holds back inferences, and compiling, while it is not set
        self.open, self.may_compile = threading.Event(), threading.Event()
        self.open.set()
        self.may_compile.set()
        #: inferences that began, and that run now
        self.begun = self.running = self.most = 0
        self.lock = threading.Lock()

    def queue(self) -> Queue:
        assert self.may_compile.wait(60)
        return MadeQueue(self)

    def broken(self) -> str:
        return self.ill

    def work(self) -> None:
        with self.lock:
            self.begun += 1
            self.running += 1
            self.most = max(self.most, self.running)
            fails = self.error is not None and self.begun > self.good
        try:
            assert self.open.wait(60)
            if self.seconds:
                time.sleep(self.seconds)
            if fails:
                assert self.error is not None
                raise self.error
        finally:
            with self.lock:
                self.running -= 1

    def fail(self, error: Exception | None = None, after: int = 0) -> None:
        with self.lock:
            self.good = self.begun + after
            self.error = error or DeviceError(f"{self.name} is on fire")


@contextmanager
def made(monkeypatch: pytest.MonkeyPatch, *names: str, kind: str = "gpu") -> Iterator[list[MadeDevice]]:
    """Devices with these names, beside the real ones, in this process and for this test."""
    devices = {name: MadeDevice(name, kind) for name in names}
    known, reasons = single.available()
    real = single._opened
    with monkeypatch.context() as patch:
        both: dict[str, type[Device]] = {**known, **dict.fromkeys(names, MadeDevice)}
        patch.setattr(single, "available", lambda: (both, reasons))
        patch.setattr(single, "serving", both.get)
        patch.setattr(single, "_opened", lambda key: devices[key] if key in devices else real(key))
        yield list(devices.values())
        for device in devices.values():  # whoever still waits goes on
            device.open.set()
            device.may_compile.set()

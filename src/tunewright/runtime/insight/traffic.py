"""Write the shapes that a model met to a file at intervals: RECORD_TRAFFIC."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import weakref

from tunewright.errors import TunewrightError
from tunewright.knowledge.traffic import ModelTraffic, TrafficEntry, TrafficFile, today

from ..requests.request import DeviceModel
from ..requests.request_meter import ModelMeter

LOG = logging.getLogger("tunewright")
#: seconds between two writes; a killed process loses the shapes since its last write
EVERY = 60.0


class TrafficRecorder:
    """The recorder of one model. It refers to the model weakly, and writes last when the model or the process ends."""

    def __init__(self, model: DeviceModel, digest: str, name: str) -> None:
        self._model, self._digest, self._name = weakref.ref(model), digest, name
        self._file = TrafficFile.of(model.env.settings)
        self._writer = f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(8)}"
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._meter = ModelMeter([value.name for value in model.graph.inputs])
        self._written, self._is_told = 0, False
        model.meter = self._meter
        self._over = threading.Event()
        threading.Thread(target=self._serve, name="tunewright-traffic", daemon=True).start()
        weakref.finalize(model, self._end)

    def _serve(self) -> None:
        while not self._over.wait(EVERY):
            self.write()

    def _end(self) -> None:
        self._over.set()
        self.write()

    def write(self) -> None:
        """Write the shapes met so far, if any are new."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            model = self._model()
            self._meter = (model.meter if model is not None else None) or self._meter
            entry = TrafficEntry(today(), dict(self._meter.histogram().rows))
            if entry.count == self._written:
                return
            made = ModelTraffic(self._name, tuple(self._meter.names), {self._writer: entry})
            try:
                self._file.add({self._digest: made})
                self._written = entry.count
            except TunewrightError as error:
                if not self._is_told:
                    LOG.warning("traffic is not recorded: %s", error)
                self._is_told = True

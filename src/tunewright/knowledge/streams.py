"""The measured best numbers of streams, requests and batches for a model, stored beside the user's knowledge base.

Records of kernels have problems as keys, and a whole model is no problem. These answers therefore have their own file
in the same folder: ``streams.json``, with an answer per model, target and relevant settings.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._version import __version__
from ..devices.base import Target
from ..errors import InputError
from ..ir.graph import Graph, Value
from ..ir.graph_text import format_array, format_attr
from ..settings import Settings
from . import open_databases
from .files import make_folder
from .json_file import JsonFile

LOG = logging.getLogger("tunewright")

FILE = "streams.json"
SCHEMA = "tunewright.streams/1"
#: Maximum number of answers that are kept; the oldest are dropped first.
MOST = 1000
#: A larger number of streams or requests means that the file is damaged.
LARGEST = 4096
#: Measurements on a busy machine after which an answer becomes final.
MOST_TRIES = 3
#: Constants of up to this many elements are part of the structure; larger ones are weights.
FEW = 8


@dataclass(frozen=True)
class StreamsAnswer:
    """The configuration that was measured to be best, and all that were compared."""

    streams: int
    requests: int
    #: inferences per second by "streams x requests", as in "2x4"; "2x32x8" if 8 requests run together
    rates: Mapping[str, float]
    #: number of requests that run together
    batch: int = 1
    #: why no larger batch was compared
    ended: str = ""
    #: why the answer is uncertain, and how often it was measured; a later load measures again
    doubt: str = ""
    tries: int = 1
    #: for readers: model, target, date and version
    model: str = ""
    target: str = ""
    #: of the model's structure
    digest: str = ""
    date: str = ""
    version: str = __version__

    @property
    def is_provisional(self) -> bool:
        """Whether the answer is used now but measured again by a later load."""
        return bool(self.doubt) and self.tries < MOST_TRIES

    @staticmethod
    def of(found: Any) -> StreamsAnswer | None:
        """Parse an answer from a file; None if it is invalid."""
        try:
            names = {f.name for f in dataclasses.fields(StreamsAnswer)}
            answer = StreamsAnswer(**{k: v for k, v in found.items() if k in names})
            numbers = (answer.streams, answer.requests, answer.batch, answer.tries)
            named = ("ended", "doubt", "model", "target", "digest", "date", "version")
            right = all(type(n) is int and 1 <= n <= LARGEST for n in numbers)
            right = right and all(type(getattr(answer, name)) is str for name in named)
            rates = {str(k): float(v) for k, v in answer.rates.items()}
        except (AttributeError, TypeError, ValueError):
            return None
        return dataclasses.replace(answer, rates=rates) if right else None


def told(rates: Mapping[str, float]) -> str:
    """Describe rates in one line: streams x requests (x batch), and inferences per second.

    If there are several batches, only the best rate of each is shown.
    """
    shown = dict(rates)
    if any(batch_of(name) > 1 for name in rates):
        best: dict[int, str] = {}
        for name, rate in rates.items():
            other = best.setdefault(batch_of(name), name)
            if rate > rates[other]:
                best[batch_of(name)] = name
        shown = {name: rates[name] for _, name in sorted(best.items())}
    return ", ".join(f"{name}: {rate:.4g}/s" for name, rate in shown.items())


def batch_of(name: str) -> int:
    """Return the batch of a compared configuration: 8 in "2x32x8", 1 in "2x4"."""
    third = name.split("x")[2:3]
    return int(third[0]) if third and third[0].isdecimal() else 1


def key(graph: Graph, target: Target, settings: Settings, batches: bool = False) -> str:
    """Return the key of an answer. It does not depend on weights. ``batches``: requests may run together."""
    text = _hash(graph)
    others = (settings.inference_precision_hint, settings.execution_mode_hint, settings.performance_hint_num_requests)
    text.update(repr((target, others)).encode())
    if batches:
        text.update(b"batches")
    return text.hexdigest()[:32]


def digest(graph: Graph) -> str:
    """Return the digest of a model's structure, independent of the device."""
    return _hash(graph).hexdigest()[:16]


def _hash(graph: Graph) -> hashlib._Hash:
    text = hashlib.sha256()
    for line in _lines(graph):
        text.update(line.encode())
        text.update(b"\n")
    return text


def _lines(graph: Graph) -> Iterator[str]:
    """Yield a graph's structure as text: every node with its attributes and the sources of its inputs."""
    numbers: dict[Value, str] = {v: f"in{i} {v.type}" for i, v in enumerate(graph.inputs)}

    def name(value: Value | None) -> str:
        if value is None:
            return "_"
        if value.const is not None:
            few = value.const.size <= FEW and value.const.dtype.kind in "iub"
            return format_array(value.const) if few else f"{value.const.dtype}{list(value.const.shape)}"
        return numbers[value]

    for i, node in enumerate(graph.nodes):
        attrs = (f"{k}={_attr(v)}" for k, v in sorted(node.attrs.items()))
        yield f"{node.op} {' '.join(attrs)} ({', '.join(name(v) for v in node.inputs)})"
        numbers |= {v: f"{i}.{k}" for k, v in enumerate(node.outputs)}
        for label, body in sorted(node.bodies.items()):
            yield f"{label} {{"
            yield from _lines(body)
            yield "}"
    yield f"return {', '.join(name(v) for v in graph.outputs)}"


def _attr(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else format_attr(value)


class StreamsFile(JsonFile):
    """The answers of one folder."""

    title, setting = "measured streams", "USER_DB_PATH"

    @staticmethod
    def of(settings: Settings) -> StreamsFile:
        return StreamsFile(open_databases.user_folder(settings) / FILE)

    def read(self) -> dict[str, StreamsAnswer]:
        """Return all answers. Warns and returns none if the file is damaged."""
        try:
            with self.opened() as descriptor:
                return self._answers(descriptor)
        except FileNotFoundError:
            return {}
        except InputError as error:
            LOG.warning("%s; it is not used", error)
            return {}

    def find(self, key: str) -> StreamsAnswer | None:
        return self.read().get(key)

    def add(self, key: str, answer: StreamsAnswer) -> None:
        """Store an answer. If that fails (a read-only folder), it warns, and the next process measures again."""
        dated = dataclasses.replace(
            answer, date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), version=__version__
        )
        try:
            make_folder(self.path.parent)
            with self.locked() as descriptor:
                try:
                    known = self._answers(descriptor)
                except InputError as error:
                    LOG.warning("%s; it is begun anew", error)
                    known = {}
                self._write(descriptor, known | {key: dated})
        except (OSError, InputError) as error:
            LOG.warning("%s: measured streams cannot be kept: %s", self.path, error)

    def forget(self, which: Callable[[str, StreamsAnswer], bool]) -> dict[str, StreamsAnswer]:
        """Remove answers and return them. The next load with NUM_STREAMS = AUTO measures again."""
        if not self.path.exists():
            return {}
        try:
            with self.locked() as descriptor:
                known = self._answers(descriptor)
                gone = {key: answer for key, answer in known.items() if which(key, answer)}
                if gone:
                    self._write(descriptor, {k: v for k, v in known.items() if k not in gone})
                return gone
        except OSError as error:
            raise self.error(f"cannot be written: {error.strerror or error}") from None

    def _write(self, descriptor: int, known: Mapping[str, StreamsAnswer]) -> None:
        newest = sorted(known.items(), key=lambda item: item[1].date)[-MOST:]
        content = {"schema": SCHEMA, "models": {k: dataclasses.asdict(v) for k, v in newest}}
        self.replace(descriptor, json.dumps(content, indent=1) + "\n")

    def _answers(self, descriptor: int) -> dict[str, StreamsAnswer]:
        content = self.load(descriptor)
        if content is None:
            return {}
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise self.error(f"is not of {SCHEMA}")
        models = content.get("models")
        found = {k: StreamsAnswer.of(v) for k, v in models.items()} if isinstance(models, dict) else {}
        return {k: answer for k, answer in found.items() if answer is not None}

"""NUM_STREAMS = AUTO: as many streams and requests as a model does best with, by measurement.

The first load measures for `SECONDS`, and what it finds is kept per model and device (`tuning.streams`); later ones, in
any process, use that. PERFORMANCE_HINT = THROUGHPUT uses what was measured, and measures nothing. Whether requests are
best run together is measured by `batch_tune`, which goes on from what is found here.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..devices.base import Device
from ..devices.host import Others
from ..errors import TunewrightError
from ..frontend.model import Model
from ..ir.types import DType, TensorType, Type
from ..runtime.asynchronous import AsyncInferQueue
from ..runtime.compiled import CompiledModel
from ..runtime.request import DeviceModel
from ..settings import Settings
from ..tuning.streams import Answer, StreamsFile, digest, key, told

LOG = logging.getLogger("tunewright")

#: how long all candidates are measured together, and a turn of one
SECONDS, TURN = 2.0, 0.05
#: rounds that make a comparison
LEAST = 3
#: what is less than this much faster is no reason for more streams or requests, nor for a larger batch: that makes
#: every request wait for others
WORTH, WORTH_BATCH = 1.02, 1.05
#: what is so much slower than the fastest is not as fast, however much rounds differ
NOISE = 1.1
#: A measurement is in doubt where others used more of the processor than this, or where the middle of all changes from
#: one turn of a point to its next is larger: on a quiet machine that is 1 to 3 %.
BUSY, RESTLESS = 0.15, 0.10
#: streams of a GPU that are tried
GPU = (1, 2, 4)


class Point(NamedTuple):
    """One way to serve a model."""

    streams: int
    requests: int
    #: requests that run together
    batch: int = 1

    @property
    def name(self) -> str:
        """As in "2x4", and "2x32x8" where 8 requests run together."""
        return "x".join(map(str, self if self.batch > 1 else self[:2]))

    @property
    def effort(self) -> tuple[int, int, int]:
        """What is less comes first: smaller batches, fewer streams, fewer requests."""
        return self.batch, self.streams, self.requests


#: inferences per second of every point, a number for each round: those of one round were measured next to each other
Rates = dict[Point, list[float]]


@dataclass
class Compared:
    """Streams that were compared: the models by streams, and the inferences per second of each point."""

    best: Point
    models: dict[int, DeviceModel]
    rates: dict[Point, float]
    inputs: Mapping[str, Any]
    #: why it is not certain; empty: it is
    doubt: str = ""


def candidates(units: int, is_cpu: bool, most: int = 0) -> list[Point]:
    """What is compared, the least first: 1, 2, 4 ... streams to one on each unit; as many requests, or twice as many.

    ``most``: more requests the application does not keep going (PERFORMANCE_HINT_NUM_REQUESTS); 0: any number.
    """
    counts = sorted({*(1 << k for k in range(units.bit_length()) if 1 << k <= units), units}) if is_cpu else list(GPU)
    found = [Point(n, r) for n in counts for r in (n, 2 * n) if not most or r <= most]
    return found or [Point(1, 1)]


def is_automatic(settings: Settings) -> bool:
    """NUM_STREAMS = AUTO: what is not known yet may be measured. Who deletes answers (FIND_ENFORCE = 5) wants none."""
    return settings.num_streams < 0 and settings.find_enforce != "5"


def known(model: Model, device: Device, settings: Settings, batches: bool = False) -> Answer | None:
    """What was measured of a model; None: nothing, or it is to be measured again, or was deleted just now."""
    file = StreamsFile.of(settings)
    if not file.path.exists() or (settings.find_enforce in "24" and is_automatic(settings)):
        return None
    name = key(model.graph, device.target, settings, batches)
    if settings.find_enforce == "5":
        file.forget(lambda other, _: other == name)
        return None
    return file.find(name)


def is_due(answer: Answer, settings: Settings) -> bool:
    """Whether the answer is of a busy machine, and this load may measure again."""
    return answer.is_provisional and is_automatic(settings) and not _forbidden(settings)


def keep(
    model: Model, device: Device, settings: Settings, best: Point, rates: Mapping[Point, float], batches: bool = False,
    ended: str = "", doubt: str = "",
) -> Answer:  # fmt: skip
    """Write down what was measured. ``doubt``: why that is not certain."""
    file, name = StreamsFile.of(settings), key(model.graph, device.target, settings, batches)
    before = file.find(name) if file.path.exists() else None
    tries = before.tries + 1 if before is not None and before.is_provisional else 1
    found = {point.name: round(rate, 3) for point, rate in rates.items()}
    answer = Answer(
        best.streams, best.requests, found, best.batch, ended, doubt, tries, model.path or model.name,
        str(device.target), digest(model.graph),
    )  # fmt: skip
    file.add(name, answer)
    if answer.is_provisional:
        LOG.info("NUM_STREAMS = AUTO: %s; the next load measures again", doubt)
    return answer


def compiled_auto(
    compile: Callable[[int, bool], DeviceModel], model: Model, device: Device, settings: Settings
) -> DeviceModel | None:
    """A model with the streams that are best for it; None: nothing is known, and nothing may or can be measured.

    ``compile(streams, last)`` makes the model for this number of streams; after the ``last`` call the model may go.
    """
    answer = known(model, device, settings)
    if answer is not None and not (is_due(answer, settings) and sample(model.inputs) is not None):
        made = compile(answer.streams, True)
        made.best_requests, made.streams_origin = answer.requests, origin(answer)
        return made
    if not is_automatic(settings):
        return None
    found = compare_streams(compile, sample(model.inputs), device, settings)
    if found is None:
        return None
    answer = keep(model, device, settings, found.best, found.rates, doubt=found.doubt)
    LOG.info("NUM_STREAMS = AUTO: %d streams, %d requests (%s)", answer.streams, answer.requests, told(answer.rates))
    made = found.models[answer.streams]
    made.best_requests, made.streams_origin = answer.requests, origin(answer)
    return made


def compare_streams(
    compile: Callable[[int, bool], DeviceModel], inputs: Mapping[str, Any] | None, device: Device, settings: Settings
) -> Compared | None:
    """Measure how many streams and requests are best; None where that may not or cannot be done: the log says why."""
    why = _why_not(settings, inputs)
    if why:
        LOG.info("NUM_STREAMS = AUTO: %s", why)
        return None
    assert inputs is not None
    tried = candidates(device.target.units, device.target.device == "cpu", settings.performance_hint_num_requests)
    counts = sorted({point.streams for point in tried})
    LOG.info("NUM_STREAMS = AUTO: comparing %s streams for %g s", ", ".join(map(str, counts)), SECONDS)
    models = {n: compile(n, False) for n in counts}
    try:
        rates, doubt = measure_calmly({point: models[point.streams] for point in tried}, inputs)
    except TunewrightError as error:
        LOG.warning("NUM_STREAMS = AUTO: random inputs do not run (%s), so nothing was measured", error)
        return None
    if rates is None:
        LOG.info("NUM_STREAMS = AUTO: an inference takes too long to compare anything within %g s", SECONDS)
        return None
    medians = {one: statistics.median(found) for one, found in rates.items()}
    return Compared(best(rates), models, medians, inputs, doubt)


def measure_calmly(models: Mapping[Point, CompiledModel], inputs: Mapping[str, Any]) -> tuple[Rates | None, str]:
    """`measure`, once more where the machine was busy; and why the result is in doubt all the same, or nothing."""
    rates, doubt = None, ""
    for _ in range(2):
        others = Others()
        rates = measure(models, inputs, SECONDS)
        doubt = "" if rates is None else doubt_of(rates, others.share())
        if not doubt:
            break
    return rates, doubt


def doubt_of(rates: Rates, others: float | None) -> str:
    """Why rates say little of a quiet machine; empty: they do. ``others``: their share of the processor meanwhile."""
    if others is not None and others > BUSY:
        return f"others used {others:.0%} of the processor while it was measured"
    changes = [abs(b / a - 1) for found in rates.values() for a, b in pairwise(found)]
    if changes and statistics.median(changes) > RESTLESS:
        return f"the same differed by {statistics.median(changes):.0%} from turn to turn"
    return ""


def origin(answer: Answer) -> str:
    """Where a choice comes from, for people."""
    when = f"measured {answer.date[:10]}" if answer.date else "measured now"
    end = f"; {answer.ended}" if answer.ended else ""
    after = "the next load measures again" if answer.is_provisional else f"as in {answer.tries} measurements"
    doubt = f"; {answer.doubt}: {after}" if answer.doubt else ""
    return f"{when}: {told(answer.rates)}{end}{doubt}"


def _why_not(settings: Settings, inputs: Mapping[str, Any] | None) -> str:
    forbidden = _forbidden(settings)
    if forbidden:
        return f"{forbidden}: nothing is measured, a stream on each thread"
    if inputs is None:
        return "not all input shapes are fixed, so nothing was measured: a stream on each thread"
    return ""


def _forbidden(settings: Settings) -> str:
    """The setting that forbids measuring; empty: none does."""
    return "FROZEN" if settings.frozen else "TUNING_DISABLED" if settings.tuning_mode == "TUNING_DISABLED" else ""


def sample(types: Mapping[str, Type | None], seed: int = 0) -> dict[str, np.ndarray[Any, Any]] | None:
    """Values for inputs of fixed shapes; None where some are open. Numbers of things are small: most are indices."""
    rng, found = np.random.default_rng(seed), {}
    for name, type in types.items():
        if not isinstance(type, TensorType) or not type.is_static or type.dtype is DType.STRING:
            return None
        numbers = rng.random(type.dims) if type.dtype.is_float else rng.integers(0, 2, type.dims)
        found[name] = numbers.astype(type.dtype.numpy)
    return found


def measure(models: Mapping[Point, CompiledModel], inputs: Mapping[str, Any], seconds: float) -> Rates | None:
    """Inferences per second of each, in turns; None where the time is too short for `LEAST` rounds."""
    queues = {point: AsyncInferQueue(model, point.requests) for point, model in models.items()}
    for queue in queues.values():  # plans, memory and caches
        for _ in queue:
            queue.start_async(inputs)
        queue.wait_all()
    rates: Rates = {point: [] for point in models}
    end = time.perf_counter() + seconds
    turn = min(TURN, seconds / (LEAST + 1) / len(models))
    while time.perf_counter() < end:
        for point, queue in queues.items():
            rates[point].append(rate(queue, inputs, turn, point.batch))
            if time.perf_counter() > end and len(rates[point]) < LEAST:
                return None
    return rates


def rate(queue: AsyncInferQueue, inputs: Mapping[str, Any], seconds: float, batch: int = 1) -> float:
    """Inferences per second of a queue that is kept full for so long. Batches are: the last does not wait for more."""
    begin, count = time.perf_counter(), 0
    while count < len(queue) or count % batch or time.perf_counter() - begin < seconds:
        queue.start_async(inputs)
        count += 1
    queue.wait_all()
    return count / (time.perf_counter() - begin)


def best(rates: Rates) -> Point:
    """The one with the least effort, unless the fastest beats it; then the least of those that beat it, too, and are
    about as fast as the fastest."""
    fastest = max(rates, key=lambda point: statistics.median(rates[point]))
    least = min(rates, key=lambda point: point.effort)
    if fastest == least or not beats(rates, fastest, least):
        return least
    near = [one for one in rates if beats(rates, one, least) and _is_near(rates, fastest, one)]
    return min([fastest, *near], key=lambda point: point.effort)


def beats(rates: Rates, one: Point, other: Point) -> bool:
    """Whether it is faster by more than noise: by enough in the middle of all rounds, and at all in three of four."""
    ratios = _ratios(rates, one, other)
    return statistics.median(ratios) > _worth(one, other) and ratios[len(ratios) // 4] > 1


def _is_near(rates: Rates, fastest: Point, one: Point) -> bool:
    return not beats(rates, fastest, one) and statistics.median(_ratios(rates, fastest, one)) < NOISE


def _ratios(rates: Rates, one: Point, other: Point) -> list[float]:
    return sorted(mine / its for mine, its in zip(rates[one], rates[other], strict=True))


def _worth(one: Point, other: Point) -> float:
    return WORTH_BATCH if one.batch > other.batch else WORTH

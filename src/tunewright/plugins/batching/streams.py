"""NUM_STREAMS = AUTO: find the best numbers of streams and requests for a model by measurement.

The first load measures for `SECONDS` and stores the result per model and device (`knowledge.streams`); later loads in
any process use it. PERFORMANCE_HINT = THROUGHPUT uses a stored result and measures nothing. `batch_tune` continues from
here, and measures whether requests should run together.
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

from tunewright.devices.base import Device
from tunewright.devices.host import Others
from tunewright.errors import TunewrightError
from tunewright.frontend.model import Model
from tunewright.ir.types import DType, TensorType, Type
from tunewright.knowledge.streams import StreamsAnswer, StreamsFile, digest, key, told
from tunewright.runtime.requests.asynchronous import AsyncInferQueue
from tunewright.runtime.requests.compiled import CompiledModel
from tunewright.runtime.requests.request import DeviceModel
from tunewright.settings import Settings

LOG = logging.getLogger("tunewright")

#: Seconds for measuring all candidates, and for one turn of a candidate.
SECONDS, TURN = 2.0, 0.05
#: Minimum number of rounds for a comparison.
LEAST = 3
#: Minimum speed-up that justifies more streams or requests, and a larger batch, which makes every request wait for
#: others.
WORTH, WORTH_BATCH = 1.02, 1.05
#: A candidate slower than the fastest by this factor is not equally fast, however much rounds differ.
NOISE = 1.1
#: A measurement is in doubt if other processes used more of the processor than BUSY. It is also in doubt if the median
#: change between turns of a point exceeds RESTLESS. On a quiet machine that change is 1 to 3 %.
BUSY, RESTLESS = 0.15, 0.10
#: Numbers of streams that are tried on a GPU.
GPU = (1, 2, 4)


class ServingPoint(NamedTuple):
    """One way to serve a model."""

    streams: int
    requests: int
    #: number of requests that run together
    batch: int = 1

    @property
    def name(self) -> str:
        """Name as in "2x4"; "2x32x8" if 8 requests run together."""
        return "x".join(map(str, self if self.batch > 1 else self[:2]))

    @property
    def effort(self) -> tuple[int, int, int]:
        """Sort key: smaller batches, then fewer streams, then fewer requests."""
        return self.batch, self.streams, self.requests


#: Inferences per second of every point, one value for each round; values of one round were measured next to each other.
Rates = dict[ServingPoint, list[float]]


@dataclass
class Compared:
    """Result of a comparison: models by their streams, and inferences per second of each point."""

    best: ServingPoint
    models: dict[int, DeviceModel]
    rates: dict[ServingPoint, float]
    inputs: Mapping[str, Any]
    #: why the result is uncertain; empty if it is not
    doubt: str = ""


def candidates(units: int, shares_cores: bool, most: int = 0) -> list[ServingPoint]:
    """Return the points to compare: 1, 2, 4 ... streams up to one per unit, with as many or twice as many requests.

    ``most``: maximum number of requests that the application has in flight (PERFORMANCE_HINT_NUM_REQUESTS); 0: any
    number.
    """
    counts = (
        sorted({*(1 << k for k in range(units.bit_length()) if 1 << k <= units), units}) if shares_cores else list(GPU)
    )
    found = [ServingPoint(n, r) for n in counts for r in (n, 2 * n) if not most or r <= most]
    return found or [ServingPoint(1, 1)]


def is_automatic(settings: Settings) -> bool:
    """Whether NUM_STREAMS = AUTO allows measuring. FIND_ENFORCE = 5, which deletes answers, forbids it."""
    return settings.num_streams < 0 and settings.find_enforce != "5"


def known(model: Model, device: Device, settings: Settings, batches: bool = False) -> StreamsAnswer | None:
    """Return the stored answer of a model.

    Returns None if there is none, if it must be measured again, or if it was just deleted.
    """
    file = StreamsFile.of(settings)
    if not file.path.exists() or (settings.find_enforce in "24" and is_automatic(settings)):
        return None
    name = key(model.graph, device.target, settings, batches)
    if settings.find_enforce == "5":
        file.forget(lambda other, _: other == name)
        return None
    return file.find(name)


def is_due(answer: StreamsAnswer, settings: Settings) -> bool:
    """Whether the answer comes from a busy machine and this load may measure again."""
    return answer.is_provisional and is_automatic(settings) and not _forbidden(settings)


def keep(
    model: Model, device: Device, settings: Settings, best: ServingPoint, rates: Mapping[ServingPoint, float],
    batches: bool = False, ended: str = "", doubt: str = "",
) -> StreamsAnswer:  # fmt: skip
    """Store a measurement and return its answer. ``doubt``: why it is uncertain."""
    file, name = StreamsFile.of(settings), key(model.graph, device.target, settings, batches)
    before = file.find(name) if file.path.exists() else None
    tries = before.tries + 1 if before is not None and before.is_provisional else 1
    found = {point.name: round(rate, 3) for point, rate in rates.items()}
    answer = StreamsAnswer(
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
    """Compile a model with its best number of streams; None if no answer is stored and none can be measured.

    ``compile(streams, last)`` compiles the model for this number of streams; the ``last`` call may consume the model.
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
    """Measure the best numbers of streams and requests.

    Returns None if that is forbidden or impossible; the log has the reason.
    """
    why = _why_not(settings, inputs)
    if why:
        LOG.info("NUM_STREAMS = AUTO: %s", why)
        return None
    assert inputs is not None
    tried = candidates(device.target.units, device.target.traits.shares_cores, settings.performance_hint_num_requests)
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


def measure_calmly(models: Mapping[ServingPoint, CompiledModel], inputs: Mapping[str, Any]) -> tuple[Rates | None, str]:
    """Call `measure`, a second time if the machine was busy. Also return why the result is still in doubt, or ""."""
    rates, doubt = None, ""
    for _ in range(2):
        others = Others()
        rates = measure(models, inputs, SECONDS)
        doubt = "" if rates is None else doubt_of(rates, others.share())
        if not doubt:
            break
    return rates, doubt


def doubt_of(rates: Rates, others: float | None) -> str:
    """Return why rates may not hold on a quiet machine; empty if they do. ``others``: CPU share of other processes."""
    if others is not None and others > BUSY:
        return f"others used {others:.0%} of the processor while it was measured"
    changes = [abs(b / a - 1) for found in rates.values() for a, b in pairwise(found)]
    if changes and statistics.median(changes) > RESTLESS:
        return f"the same differed by {statistics.median(changes):.0%} from turn to turn"
    return ""


def origin(answer: StreamsAnswer) -> str:
    """Describe the origin of an answer for users."""
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
    """Return the setting that forbids measuring; empty if there is none."""
    return "FROZEN" if settings.frozen else "TUNING_DISABLED" if settings.tuning_mode == "TUNING_DISABLED" else ""


def sample(types: Mapping[str, Type | None], seed: int = 0) -> dict[str, np.ndarray[Any, Any]] | None:
    """Make values for inputs of fixed shapes; None if some are open. Integers are small, because most are indices."""
    rng, found = np.random.default_rng(seed), {}
    for name, type in types.items():
        if not isinstance(type, TensorType) or not type.is_static or type.dtype is DType.STRING:
            return None
        numbers = rng.random(type.dims) if type.dtype.is_float else rng.integers(0, 2, type.dims)
        found[name] = numbers.astype(type.dtype.numpy)
    return found


def measure(models: Mapping[ServingPoint, CompiledModel], inputs: Mapping[str, Any], seconds: float) -> Rates | None:
    """Measure inferences per second of each point, in turns. None if the time is too short for `LEAST` rounds."""
    queues = {point: AsyncInferQueue(model, point.requests) for point, model in models.items()}
    for queue in queues.values():  # makes plans, allocates memory and fills caches
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
    """Return inferences per second of a queue that is kept full for this time.

    Batches are completed, so that the last one does not wait for more requests.
    """
    begin, count = time.perf_counter(), 0
    while count < len(queue) or count % batch or time.perf_counter() - begin < seconds:
        queue.start_async(inputs)
        count += 1
    queue.wait_all()
    return count / (time.perf_counter() - begin)


def best(rates: Rates) -> ServingPoint:
    """Return the point with the least effort, unless the fastest beats it.

    Then return the one with the least effort among those that beat it too and are about as fast as the fastest.
    """
    fastest = max(rates, key=lambda point: statistics.median(rates[point]))
    least = min(rates, key=lambda point: point.effort)
    if fastest == least or not beats(rates, fastest, least):
        return least
    near = [one for one in rates if beats(rates, one, least) and _is_near(rates, fastest, one)]
    return min([fastest, *near], key=lambda point: point.effort)


def beats(rates: Rates, one: ServingPoint, other: ServingPoint) -> bool:
    """Whether ``one`` is faster beyond noise: enough in the median over rounds, and faster in three of four rounds."""
    ratios = _ratios(rates, one, other)
    return statistics.median(ratios) > _worth(one, other) and ratios[len(ratios) // 4] > 1


def _is_near(rates: Rates, fastest: ServingPoint, one: ServingPoint) -> bool:
    return not beats(rates, fastest, one) and statistics.median(_ratios(rates, fastest, one)) < NOISE


def _ratios(rates: Rates, one: ServingPoint, other: ServingPoint) -> list[float]:
    return sorted(mine / its for mine, its in zip(rates[one], rates[other], strict=True))


def _worth(one: ServingPoint, other: ServingPoint) -> float:
    return WORTH_BATCH if one.batch > other.batch else WORTH

"""NUM_STREAMS = AUTO: as many streams and requests as a model does best with, by measurement.

The first load measures for `SECONDS`, and what it finds is kept per model and device (`tuning.streams`); later ones, in
any process, use that. PERFORMANCE_HINT = THROUGHPUT uses what was measured, and measures nothing.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..devices.base import Device
from ..errors import TunewrightError
from ..frontend.model import Model
from ..ir.types import DType, TensorType, Type
from ..runtime.asynchronous import AsyncInferQueue
from ..runtime.compiled import CompiledModel
from ..runtime.request import DeviceModel
from ..settings import Settings
from ..tuning.streams import Answer, StreamsFile, key

LOG = logging.getLogger("tunewright")

#: how long all candidates are measured together, and a turn of one
SECONDS, TURN = 2.0, 0.05
#: rounds that make a comparison
LEAST = 3
#: what is less than this much faster is no reason for more streams or requests
WORTH = 1.02
#: streams of a GPU that are tried
GPU = (1, 2, 4)

#: streams, requests
Candidate = tuple[int, int]


def candidates(units: int, is_cpu: bool, most: int = 0) -> list[Candidate]:
    """What is compared, the least first: 1, 2, 4 ... streams to one on each unit; as many requests, or twice as many.

    ``most``: more requests the application does not keep going (PERFORMANCE_HINT_NUM_REQUESTS); 0: any number.
    """
    counts = sorted({*(1 << k for k in range(units.bit_length()) if 1 << k <= units), units}) if is_cpu else list(GPU)
    found = [(n, r) for n in counts for r in (n, 2 * n) if not most or r <= most]
    return found or [(1, 1)]


def compiled_auto(
    compile: Callable[[int, bool], DeviceModel], model: Model, device: Device, settings: Settings
) -> DeviceModel | None:
    """A model with the streams that are best for it; None: nothing is known, and nothing may or can be measured.

    ``compile(streams, last)`` makes the model for so many streams; behind the ``last`` call nobody needs the model.
    """
    automatic = settings.num_streams < 0
    file = StreamsFile.of(settings)
    if not automatic and not file.path.exists():
        return None
    name = key(model.graph, device.target, settings)
    known = None if settings.find_enforce in "24" and automatic else file.find(name)
    if known is not None:
        made = compile(known.streams, True)
        return _served(made, known.requests, f"measured {known.date[:10]}: {told(known.rates)}")
    if not automatic:
        return None
    inputs = sample(model.inputs)
    why = _why_not(settings, inputs)
    if why:
        LOG.info("NUM_STREAMS = AUTO: %s", why)
        return None
    tried = candidates(device.target.units, device.target.device == "cpu", settings.performance_hint_num_requests)
    counts = sorted({n for n, _ in tried})
    LOG.info("NUM_STREAMS = AUTO: comparing %s streams for %g s", ", ".join(map(str, counts)), SECONDS)
    models = {n: compile(n, False) for n in counts}
    try:
        rates = measure(models, tried, inputs or {}, SECONDS)
    except TunewrightError as error:
        LOG.warning("NUM_STREAMS = AUTO: random inputs do not run (%s), so nothing was measured", error)
        return None
    if rates is None:
        LOG.info("NUM_STREAMS = AUTO: an inference takes too long to compare anything within %g s", SECONDS)
        return None
    streams, requests = best(rates)
    found = {f"{n}x{r}": round(rate, 3) for (n, r), rate in rates.items()}
    LOG.info("NUM_STREAMS = AUTO: %d streams, %d requests (%s)", streams, requests, told(found))
    file.add(name, Answer(streams, requests, found, model.path or model.name, str(device.target)))
    return _served(models[streams], requests, f"measured now: {told(found)}")


def _served(made: DeviceModel, requests: int, origin: str) -> DeviceModel:
    made.best_requests, made.streams_origin = requests, origin
    return made


def _why_not(settings: Settings, inputs: Mapping[str, Any] | None) -> str:
    if settings.frozen or settings.tuning_mode == "TUNING_DISABLED":
        return f"{'FROZEN' if settings.frozen else 'TUNING_DISABLED'}: nothing is measured, a stream on each thread"
    if inputs is None:
        return "not all input shapes are fixed, so nothing was measured: a stream on each thread"
    return ""


def told(rates: Mapping[str, float]) -> str:
    """In a line: streams x requests, and inferences per second."""
    return ", ".join(f"{name}: {rate:.4g}/s" for name, rate in rates.items())


def sample(types: Mapping[str, Type | None]) -> dict[str, np.ndarray[Any, Any]] | None:
    """Values for inputs of fixed shapes; None where some are open. Numbers of things are small: most are indices."""
    rng, found = np.random.default_rng(0), {}
    for name, type in types.items():
        if not isinstance(type, TensorType) or not type.is_static or type.dtype is DType.STRING:
            return None
        numbers = rng.random(type.dims) if type.dtype.is_float else rng.integers(0, 2, type.dims)
        found[name] = numbers.astype(type.dtype.numpy)
    return found


def measure(
    models: Mapping[int, CompiledModel], tried: Sequence[Candidate], inputs: Mapping[str, Any], seconds: float
) -> dict[Candidate, float] | None:
    """Inferences per second of each, in turns; None where the time is too short for `LEAST` rounds."""
    queues = {(n, r): AsyncInferQueue(models[n], r) for n, r in tried}
    for queue in queues.values():  # plans, memory and caches
        for _ in queue:
            queue.start_async(inputs)
        queue.wait_all()
    rates: dict[Candidate, list[float]] = {one: [] for one in tried}
    end = time.perf_counter() + seconds
    turn = min(TURN, seconds / (LEAST + 1) / len(tried))
    while time.perf_counter() < end:
        for one, queue in queues.items():
            rates[one].append(rate(queue, inputs, turn))
            if time.perf_counter() > end and len(rates[one]) < LEAST:
                return None
    return {one: statistics.median(found) for one, found in rates.items()}


def rate(queue: AsyncInferQueue, inputs: Mapping[str, Any], seconds: float) -> float:
    """Inferences per second of a queue that is kept full for so long."""
    begin, count = time.perf_counter(), 0
    while count < len(queue) or time.perf_counter() - begin < seconds:
        queue.start_async(inputs)
        count += 1
    queue.wait_all()
    return count / (time.perf_counter() - begin)


def best(rates: Mapping[Candidate, float]) -> Candidate:
    """The fastest; among those that are hardly slower the one with the fewest streams, then requests."""
    most = max(rates.values())
    return min(one for one, found in rates.items() if found * WORTH >= most)

"""NUM_STREAMS = AUTO if requests may run together: measure streams and requests first, then ever larger batches.

A batch is compared in turns with the best one so far. It must be faster beyond noise, since it makes every request wait
for others. The search ends when one of these holds:

- two batches in a row were not faster;
- the next one would not fit, or cannot run;
- the application does not have as many requests in flight;
- `SECONDS` are over, or `MOST` is reached.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from typing import TYPE_CHECKING

from tunewright.errors import TunewrightError
from tunewright.frontend.model import Model
from tunewright.knowledge.streams import StreamsAnswer, told
from tunewright.runtime.requests.asynchronous import AsyncInferQueue
from tunewright.runtime.requests.compiled import CompiledModel
from tunewright.runtime.several.batch import BatchModel
from tunewright.settings import Settings

from . import streams
from .batch_size import fits
from .streams import Compared, ServingPoint

if TYPE_CHECKING:
    from ..batch import Batch

LOG = logging.getLogger("tunewright")

#: Seconds after which no larger batch is begun, and seconds for comparing a batch with the best so far.
SECONDS, STEP = 30.0, 1.0
#: Largest batch that is tried: few applications have more requests in flight than four times as many.
MOST = 64


def tuned(
    plugin: Batch, model: Model, one: Model, settings: Settings
) -> tuple[StreamsAnswer | None, CompiledModel | None]:
    """Measure the best configuration of a model, store it, and return it with the model that serves so.

    Returns None for the answer if it cannot be measured; the log has the reason. Returns None for the model if it still
    has to be compiled with tuning. ``one``: the model for one example.
    """
    # Models that are only compared are not tuned.
    quiet = dataclasses.replace(settings, tuning_mode=_QUIET.get(settings.tuning_mode, settings.tuning_mode),
                                find_enforce="1")  # fmt: skip
    found = streams.compare_streams(
        lambda count, last: plugin.alone(model, quiet, count), streams.sample(one.inputs), plugin.single.whole, quiet
    )
    if found is None:
        return None, None
    climb = _Climb(plugin, model, one, quiet, found)
    climb.run()
    answer = streams.keep(one, plugin.single.whole, settings, climb.best, climb.rates, True, climb.ended, found.doubt)
    LOG.info(
        "NUM_STREAMS = AUTO: %d streams, %d requests, %d of them together (%s); %s",
        answer.streams, answer.requests, answer.batch, told(answer.rates), answer.ended,
    )  # fmt: skip
    if (quiet.tuning_mode, quiet.find_enforce) != (settings.tuning_mode, settings.find_enforce):
        return answer, None
    climb.model.best_requests, climb.model.streams_origin = answer.requests, streams.origin(answer)
    return answer, climb.model


_QUIET = {"TUNING_CREATE": "TUNING_USE_EXISTING"}


class _Climb:
    """Tries batches of 2, 4, 8 ... examples as long as they pay."""

    def __init__(self, plugin: Batch, model: Model, one: Model, settings: Settings, found: Compared) -> None:
        self._plugin, self._model, self._settings, self._found = plugin, model, settings, found
        self.best, self.rates, self.ended = found.best, dict(found.rates), ""
        self.model: CompiledModel = found.models[found.best.streams]
        self._examples = [values for seed in range(2) if (values := streams.sample(one.inputs, seed)) is not None]

    def run(self) -> None:
        until, batch, lost = time.monotonic() + SECONDS, 1, 0
        while not self.ended:
            batch *= 2
            if time.monotonic() > until:
                self.ended = f"{SECONDS:g} s were over before a batch of {batch}"
            else:
                self.ended = self._bound(batch) or self._try(batch)
            lost = 0 if self.best.batch == batch else lost + 1
            if lost == 2 and not self.ended:  # twice in a row, because once may be noise
                self.ended = f"batches of {batch // 2} and {batch} do not pay"

    def _bound(self, batch: int) -> str:
        most = self._settings.performance_hint_num_requests
        if most and batch > most:
            return f"PERFORMANCE_HINT_NUM_REQUESTS = {most}"
        return f"no more than {MOST} are tried" if batch > MOST else ""

    def _try(self, batch: int) -> str:
        """Compare a batch with the best one so far. Returns why larger ones are useless, or an empty string."""
        try:
            tried = self._points(batch)
            if not tried:
                return f"a batch of {batch} does not fit into the memory"
            for made in dict.fromkeys(tried.values()):
                self._run_different(made)
            rates = streams.measure({self.best: self.model, **tried}, self._found.inputs, STEP)
        except (TunewrightError, MemoryError) as error:
            return f"a batch of {batch} cannot run: {error}"
        refused = next((made.refused for made in tried.values() if made.refused), "")
        if refused:
            return f"a batch of {batch} cannot run: {refused}"
        if rates is None:
            return f"a batch of {batch} takes too long to be compared within {STEP:g} s"
        before = self.rates[self.best]
        # scaled by the best one so far, because the machine's speed may have changed since the earlier measurements
        for point in tried:
            ratios = [mine / its for mine, its in zip(rates[point], rates[self.best], strict=True)]
            self.rates[point] = before * statistics.median(ratios)
        won = streams.best(rates)
        if won != self.best:
            self.best, self.model = won, tried[won]
        return ""

    def _run_different(self, made: BatchModel) -> None:
        """Run a batch of different examples, which the batch model compares with single runs.

        The measurement itself repeats one example.
        """
        queue = AsyncInferQueue(made, made.size)
        for number in range(made.size):
            queue.start_async(self._examples[number % len(self._examples)])
        queue.wait_all()

    def _points(self, batch: int) -> dict[ServingPoint, BatchModel]:
        """Compile a batch for the best number of streams so far and the next smaller one.

        For each there are two points: as many requests as fill a batch per stream, and twice as many, which arrive
        while others run.
        """
        counts = [n for n in self._found.models if n <= self.best.streams][-2:]
        most = self._settings.performance_hint_num_requests
        whole, found = self._plugin.single.whole, dict[ServingPoint, BatchModel]()
        made: BatchModel | None = None
        for count in counts[::-1]:
            points = [ServingPoint(count, k * count * batch, batch) for k in (1, 2)]
            points = [point for point in points if not most or point.requests <= most]
            if not points:
                continue
            if made is None or whole.with_threads(max(1, whole.target.units // count)) is not made.together.env.device:
                alone = self._found.models[count]
                made = self._plugin.together(alone, self._model, self._settings, count, batch)
            else:
                made = made.with_streams(count)
            if fits(made.together, count):
                found |= dict.fromkeys(points, made)
        return found

"""Derives advice from the figures of a benchmark. Each piece of advice names the numbers that it follows from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tunewright.tuning.offline.suggested_commands import command

from .statistics import TimeSlices, statistics

if TYPE_CHECKING:
    from tunewright.runtime.insight.counters import CounterRow
    from tunewright.runtime.requests.compiled import CompiledModel
    from tunewright.settings import Settings

    from .measure import BenchmarkResult, Load

#: a stream counts as one too many if this part of its time is idle
IDLE = 0.75
#: parts of an inference from which on advice mentions them
WAITING, HOST, COPIES, ON_HOST, UNTUNED = 0.25, 0.25, 0.15, 0.05, 0.2
#: interquartile range and drift, as parts of the median, from which on figures are doubtful
NOISY, DRIFT = 0.15, 0.1
#: with fewer inferences the slowest percentiles are chance
FEW = 20


@dataclass(frozen=True)
class NodeKernel:
    """The kernel that runs a node."""

    name: str
    op: str
    kernel: str
    #: default, heuristic, shipped, tuned or locked; empty if there was no choice
    origin: str
    on_host: bool
    #: part of the time of all nodes, if it was measured
    share: float | None = None
    #: measured speed-up over the default kernel
    gain: float | None = None


@dataclass(frozen=True)
class Facts:
    """All facts that advice uses, with times in seconds."""

    streams: int
    requests: int
    #: mean number of streams in use at a time
    concurrency: float
    #: Medians: latency; time on a stream; host time within it; copies (None: not measured).
    latency: float
    run: float
    host: float
    copy: float | None
    #: interquartile range of latencies, and change from the first to the last quarter, as parts of the median
    spread: float
    drift: float
    inferences: int
    kernels: Sequence[NodeKernel] = field(default_factory=list)
    model: str = "MODEL"
    device: str = "CPU"
    #: command-line options that reproduce the model's inputs
    options: Sequence[str] = ()
    #: settings that the model was compiled with
    settings: Settings | None = None
    #: number of requests that run together
    batch: int = 1


class Again(NamedTuple):
    """The parts of a command line that runs a model in the same way."""

    model: str
    options: Sequence[str]
    settings: Settings


@dataclass(frozen=True)
class BenchmarkAdvice:
    """One piece of advice. ``kind`` is for programs, ``text`` says what was measured and what to try."""

    kind: str
    text: str


ORIGINS = {
    "lockfile": "locked", "tuning file": "tuned", "user knowledge base": "tuned", "search": "tuned",
    "model file": "tuned",
    "system knowledge base": "shipped", "heuristic": "heuristic", "default": "default",
}  # fmt: skip


def origin_word(text: str) -> str:
    """Return the origin of a choice as one word, or an empty text if there was no choice."""
    return next((word for start, word in ORIGINS.items() if text.startswith(start)), "")


def advise(facts: Facts) -> list[BenchmarkAdvice]:
    """Return advice, most important first."""
    return [*_streams(facts), *_kernels(facts), *_parts(facts), *_doubts(facts)]


def _streams(facts: Facts) -> Iterator[BenchmarkAdvice]:
    idle = facts.streams - facts.concurrency
    if idle >= IDLE and facts.streams > 1:
        # Streams have equal shares of the threads, so the threads of an idle stream are lost to the others.
        enough = facts.streams * facts.batch
        count, few = round(idle), facts.requests < enough
        busy = max(1, facts.streams - count)
        text = f"{count} of {facts.streams} streams idle ({facts.concurrency:.1f} inferences ran at a time): "
        fewer = f", or --streams {facts.requests}" if facts.batch == 1 else ""
        text += f"try --requests {enough}{fewer}" if few else f"try --streams {busy}"
        yield BenchmarkAdvice("idle-streams", text)
    waiting = 1 - facts.run / facts.latency if facts.latency else 0.0
    # With batches, requests wait on purpose until their batch is full.
    if waiting >= WAITING and facts.requests > facts.streams and facts.batch == 1:
        yield BenchmarkAdvice(
            "waiting-requests",
            f"requests wait {waiting:.0%} of their latency for a stream ({facts.requests} requests, {facts.streams} "
            f"streams): try --requests {facts.streams}, which waits less and keeps the streams as busy",
        )


def _kernels(facts: Facts) -> Iterator[BenchmarkAdvice]:
    kernels = facts.kernels
    counted = any(k.share is not None for k in kernels)
    host = [k for k in kernels if k.on_host]
    if host and len(host) < len(kernels):  # if all kernels run on the host, the host is the device
        share = sum(k.share or 0.0 for k in host)
        if not counted or share >= ON_HOST:
            ops = Counter(k.op.removeprefix("tunewright::") for k in host).most_common(4)
            which = ", ".join(op if n == 1 else f"{n} {op}" for op, n in ops)
            which += ", ..." if len({k.op for k in host}) > 4 else ""
            time = f" and take {share:.0%} of the time" if counted else ""
            many = f"{len(host)} nodes run" if len(host) > 1 else "1 node runs"
            time = time if len(host) > 1 else time.replace("take", "takes")
            why = command("query", facts.model, device=facts.device, settings=facts.settings)
            yield BenchmarkAdvice("host-nodes", f"{many} on the host{time}: {which}. `{why}` says why")
    chosen = [k for k in kernels if k.origin and not k.on_host]
    untuned = [k for k in chosen if k.origin == "default"]
    share = sum(k.share or 0.0 for k in untuned) if counted else len(untuned) / max(1, len(chosen))
    if untuned and share >= UNTUNED:
        gains = [k.gain for k in chosen if k.gain is not None]
        what = f"kernels with {share:.0%} of the time" if counted else f"{len(untuned)} of {len(chosen)} kernels"
        tune = command("tune", facts.model, device=facts.device, options=facts.options, settings=facts.settings)
        text = f"{what} are untuned: `{tune}`"
        if len(gains) >= 3:
            typical = median(gains)
            text += f"; here tuned kernels are {typical:.2f} times as fast as their defaults (median of {len(gains)})"
            if counted and typical > 1:
                text += f", so expect about {share * (1 - 1 / typical):.0%} less time"
        yield BenchmarkAdvice("untuned", text)


def _parts(facts: Facts) -> Iterator[BenchmarkAdvice]:
    device = any(not k.on_host for k in facts.kernels) or not facts.kernels
    host = facts.host / facts.run if facts.run else 0.0
    if host >= HOST and device:
        what = "more than one stream hides it (--hint throughput)" if facts.streams == 1 else "larger batches share it"
        yield BenchmarkAdvice(
            "host-bound", f"the host takes {host:.0%} of each inference ({facts.host * 1e6:,.0f} us): {what}"
        )
    if facts.copy is not None and facts.run and facts.copy / facts.run >= COPIES:
        yield BenchmarkAdvice(
            "copies",
            f"copies take {facts.copy / facts.run:.0%} of each inference: tensors can stay on the device "
            "(docs/remote-tensors.md)",
        )


def _doubts(facts: Facts) -> Iterator[BenchmarkAdvice]:
    if facts.inferences < FEW:
        some = "1 inference was" if facts.inferences == 1 else f"{facts.inferences} inferences were"
        text = f"only {some} measured: the slowest percentiles are chance (-t longer)"
        yield BenchmarkAdvice("few-inferences", text)
        return
    if facts.spread >= NOISY:
        yield BenchmarkAdvice(
            "noisy",
            f"load was noisy: the interquartile range is {facts.spread:.0%} of the median. Close other programs, or "
            "measure longer (-t)",
        )
    if abs(facts.drift) >= DRIFT:
        way = "slower" if facts.drift > 0 else "faster"
        yield BenchmarkAdvice(
            "drift",
            f"the last quarter was {abs(facts.drift):.0%} {way} than the first: the machine was warming up or "
            "throttling, or other programs started or ended (-w, -t)",
        )


# -- facts ------------------------------------------------------------------------------------------------------------
def facts_of(compiled: CompiledModel, result: BenchmarkResult, load: Load, again: Again, slices: TimeSlices) -> Facts:
    """Collect the facts of a run. ``again``: the model, options and settings that run it in the same way."""
    latency = statistics(result.latencies)
    quarter = max(1, len(slices.latencies) // 4)
    enough = len(slices.latencies) >= 8
    drift = median(slices.latencies[-quarter:]) / median(slices.latencies[:quarter]) - 1 if enough else 0.0
    return Facts(
        compiled.streams.count, load.requests, sum(result.runs) / compiled.size / max(result.seconds, 1e-9),
        latency["median"],
        median(result.runs), median(result.hosts), median(result.copies) if result.rows else None,
        latency["iqr"] / latency["median"] if latency["median"] else 0.0, drift, len(result.latencies),
        kernels_of(compiled, result.rows), again.model, compiled.device_name, again.options, again.settings,
        compiled.size,
    )  # fmt: skip


def kernels_of(compiled: CompiledModel, rows: Sequence[CounterRow]) -> list[NodeKernel]:
    """Return the kernels that ran: from the counters if there are any, with the gains in a single device's plans."""
    gains, planned = {}, {}
    from tunewright.runtime.requests.request import DeviceModel

    if isinstance(compiled, DeviceModel):
        from tunewright.runtime.insight.explain import steps

        for plan in compiled.program.plans:
            for _, step, _ in steps(plan):
                if step.optimized_out or step.control is not None or step.kernel is None:
                    continue
                name = step.node.name or step.node.output.name
                choice = step.choice
                if choice is not None and choice.measurement is not None:
                    gains[name] = choice.measurement.evidence.gain.median
                origin = "" if choice is None else origin_word(choice.why)
                planned[name] = NodeKernel(name, step.node.op, step.kernel.name, origin, step.on_host, None,
                                       gains.get(name))  # fmt: skip
    if not rows:
        return list(planned.values())
    ran = [row for row in rows if row.calls and row.kernel != "control flow"]
    total = sum(row.device_seconds + row.host_seconds for row in ran) or 1.0
    shares = [(row.device_seconds + row.host_seconds) / total for row in ran]
    return [
        NodeKernel(r.name, r.type, r.kernel, origin_word(r.origin), r.host_seconds > 0, share, gains.get(r.name))
        for r, share in zip(ran, shares, strict=True)
    ]

"""Records for tests of `tunewright kb`: problems that can be posed, places here and elsewhere, made-up times."""

from __future__ import annotations

from dataclasses import replace

from tunewright.devices.base import Target
from tunewright.devices.null import NullDevice
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.key import Key, Where
from tunewright.knowledge.record import Evidence, Fault, Measurement, Ratio
from tunewright.plugins.single import open_device
from tunewright.search.base import Status
from tunewright.search.space import Config
from tunewright.solvers.base import Problem
from tunewright.solvers.problem_json import to_json

NULL = Where.of(NullDevice().target)
FOREIGN = Where.of(
    Target("gpu", "Imagined GPU 9000", "sm_99", 132, (("opencl", "Imagined"), ("driver", "5.1")), "c", "-w")
)


def here(name="CPU.HOST"):
    """A place of this machine."""
    return Where.of(open_device(name).target)


def problem(op="Relu", shape=(2, 3), fused=()):
    type = TensorType(DType.FLOAT32, shape)
    return Problem(op, (type,), (type,), {}, tuple(Fused(name, (~0,)) for name in fused), 0, (False,))


def measurement(
    posed=None, where=NULL, solver="null.any", config=(), gain=(1.5, 1.4, 1.6), confirmed=True, seconds=1e-4,
    date="2026-11-15T12:00:00Z", regime="cold", version="1.0", default=("null.slow", ()),
):  # fmt: skip
    posed = posed or problem()
    samples = tuple(seconds * (1 + (i * 7 % 5 - 2) / 100) for i in range(20))
    evidence = Evidence(
        seconds, min(samples), max(samples), samples, 1e-7, Ratio(*gain, 20), Ratio(1.0, 0.99, 1.01, 20), confirmed,
        (default[0], Config(default[1])), regime, 3, 1 << 20, {"load before": "0.10"},
    )  # fmt: skip
    key = Key(posed.key(), where, solver, version, "0" * 32, "1" * 32)
    return Measurement(key, Config(config), evidence, to_json(posed), posed.family(), tuple(posed.sizes), date, "0.1.0")


def exact(posed, config, device="CPU.NATIVE", **about):
    """A measurement with the key that its candidate has on a device now; the default's solver, if none is named."""
    from tunewright.settings import Settings
    from tunewright.tuning.tuner import Tuner

    opened = open_device(device)
    solver = about.pop("solver", None) or Tuner(Settings()).ask(posed, opened)[0][0]
    made = measurement(posed, Where.of(opened.target), solver.id, config, **about)
    key = Key.of(posed, opened.target, solver, made.config)
    return Measurement(key, made.config, made.evidence, made.problem, made.family, made.sizes, made.date, made.tool)


def fault(
    posed=None, where=NULL, solver="null.any", config=(), status=Status.CRASHED, why="signal 11",
    date="2026-11-15T12:00:00Z", version="1.0",
):  # fmt: skip
    key = replace(measurement(posed, where, solver).key, version=version)
    return Fault(key, Config(config), status, why, date, "0.1.0")

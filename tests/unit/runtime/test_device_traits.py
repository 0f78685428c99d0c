"""A device of a kind that the package has never heard of answers every question through its traits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers.made_devices import check, feed, network
from tunewright import Core
from tunewright.devices.base import KINDS, Target, Traits
from tunewright.devices.host import HostDevice
from tunewright.devices.null import NullDevice
from tunewright.ir.types import DType, TensorType
from tunewright.measure.isolated import measurer_for
from tunewright.measure.local import LocalMeasurer, floor
from tunewright.plugins import metrics, single
from tunewright.plugins.batch import Batch
from tunewright.plugins.find import find
from tunewright.plugins.multi import ConfiguredDevice
from tunewright.plugins.placement.costs import estimate
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.solvers.host.reference import HostReference

TRAITS = Traits(
    batches_pay=True, has_gpu_properties=True, streams=3, most_streams=5, bytes_per_clock=1, unit_flops=1e9,
    unit_bandwidth=1e9,
)  # fmt: skip


class Accelerator(HostDevice):
    family = "accelerator"
    stand_in = "on an accelerator"

    def __init__(self, name: str, traits: Traits | None = TRAITS) -> None:
        super().__init__(name)
        self.target = dataclasses.replace(self.target, device="npu", units=4, own_traits=traits)

    def energy_meter(self) -> str:
        return "it has no counter"


class HiddenAccelerator(Accelerator):
    is_hidden = True


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    device = Accelerator("NPU")
    known, reasons = single.available()
    both = {**known, "NPU": Accelerator, "NPU.1": HiddenAccelerator}
    real = single._opened
    monkeypatch.setattr(single, "available", lambda: (both, reasons))
    monkeypatch.setattr(single, "serving", both.get)
    monkeypatch.setattr(single, "_opened", lambda key: device if key == "NPU" else real(key))
    return device


def square(n: int) -> Problem:
    types = TensorType(DType.FLOAT32, (n, n)), TensorType(DType.FLOAT32, (n, n))
    return Problem("MatMul", types, (types[0],), {}, constant=(False, False))


def test_streams_and_requests(accelerator: Accelerator) -> None:
    assert single.streams(accelerator, Settings.make({"PERFORMANCE_HINT": "THROUGHPUT"}, Settings())) == 3
    assert metrics.streams_range(accelerator) == (
        1,
        5,
    )
    assert metrics.requests_range(accelerator)[1] > 2 * 5  # batches of requests are useful
    one_each = dataclasses.replace(accelerator.target, own_traits=Traits(streams=0, most_streams=0))
    assert one_each.most_streams == 4


def test_batches_pay(accelerator: Accelerator) -> None:
    wanted = Settings.make({"PERFORMANCE_HINT": "THROUGHPUT"}, Settings())
    assert isinstance(find("NPU", wanted), Batch)
    accelerator.target = dataclasses.replace(accelerator.target, own_traits=Traits())
    assert not isinstance(find("NPU", wanted), Batch)


def test_lists_and_properties(accelerator: Accelerator) -> None:
    assert "NPU" in single.visible() and "NPU.1" not in single.visible(alternatives=True)
    assert "GPU_EXECUTION_UNITS_COUNT" in metrics.metrics(accelerator)
    assert not ConfiguredDevice("NPU", 0, Settings()).shares_cores


def test_costs_follow_the_figures_of_a_unit(accelerator: Accelerator) -> None:
    accelerator.runs_references = False
    problem = square(256)
    assert estimate(problem, accelerator) == pytest.approx(2 * 256**3 / (4 * 1e9), rel=0.01)
    slow, fast = accelerator.target, dataclasses.replace(accelerator.target, own_traits=None)
    assert floor(problem, slow) == pytest.approx(KINDS["cpu"].bytes_per_clock * floor(problem, fast))


def test_a_scripted_device_is_measured_in_this_process() -> None:
    class Scripted(NullDevice):
        family = "scripted"

        def __init__(self) -> None:
            super().__init__("SCRIPTED")
            self.target = Target("npu", "scripted", "none", 1, own_traits=Traits(is_scripted=True))

    device = Scripted()
    assert isinstance(measurer_for(device, Settings()), LocalMeasurer)
    assert HostReference().why_not(square(8), device.target) == "the Null device runs nothing"


def test_a_device_of_references_runs_them_as_its_own(accelerator: Accelerator) -> None:
    """No step counts as a fallback to the host, with or without a fallback."""
    compiled = Core({"HOST_FALLBACK": "NO"}).compile_model(network(), "NPU")
    check(compiled(feed(2.0))["y"], 2.0)
    assert not any(support.on_host for support in Core().query_model(network(), "NPU").values())
    assert accelerator.energy_meter() == "it has no counter"


def test_own_traits_are_no_part_of_keys() -> None:
    target = Accelerator("NPU").target
    plain = dataclasses.replace(target, own_traits=None)
    assert target == plain and hash(target) == hash(plain) and repr(target) == repr(plain)
    assert plain.traits == Traits()
    assert np.all([KINDS[kind] == Target(kind, "a", "b", 1).traits for kind in KINDS])

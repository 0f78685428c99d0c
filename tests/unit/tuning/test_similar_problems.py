"""What one layer taught is tried on the next: another epilogue, another shape, in the same run and in later ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.tuning_noise import TARGET, Fake, Machine
from tunewright.devices.null import NullDevice
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.key import Where
from tunewright.search import Config
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning.similar_problems import EACH, Kin
from tunewright.tuning.tuner import Tuner

TILES = Fake("plain", {"tile": list(range(1, 33)), "unroll": list(range(1, 17))})
SETTINGS = Settings.make({"TUNE_RESULT_PATH": "", "AUTO_TUNE_MODE": "random", "CACHE_DIR": ""}, Settings())
BEST = Config(tile=29, unroll=13)


def problem(rows: int = 64, dtype: DType = DType.FLOAT32, fused: bool = False, op: str = "MatMul") -> Problem:
    x, w, y = (TensorType(dtype, dims) for dims in ((rows, 32), (32, 16), (rows, 16)))
    plain = Problem(op, (x, w), (y,), {}, constant=(False, True))
    return replace(plain, epilogue=(Fused("Relu", (-1,), {}),)) if fused else plain


def needle(solver: str, config: Config) -> float:
    """One of 512 configs is twice as fast as all others."""
    return 0.0005 if config == BEST else 0.001


def tuned(tuner: Tuner, posed: Problem, seconds: float) -> list[Config]:
    """The configs that a search tries, in order."""
    device = NullDevice()
    device.target = TARGET
    default = tuner.default(posed, device)
    outcome = tuner.tune(posed, device, default, tuner.known(posed, device, default), seconds=seconds, decide=False)
    assert outcome is not None
    return [trial.candidate[1] for trial in outcome.trials]


def tuner(user: MemoryDatabase) -> Tuner:
    machine = Machine(needle, compile_seconds=0.01)
    made = Tuner(SETTINGS, [TILES], user, MemoryDatabase(), measurer=lambda device, settings: machine)
    made.clock = machine.clock
    return made


@pytest.mark.parametrize("later", [False, True], ids=["in the same run", "in a later one"])
@pytest.mark.parametrize("other", [problem(fused=True), problem(rows=96), problem(rows=512, fused=True)])
def test_the_winner_of_one_layer_is_tried_on_the_next(other: Problem, later: bool):
    """Winograd at 1.33x in one layer was not tried on the next one, which differs by a ReLU."""
    user = MemoryDatabase()
    one = tuner(user)
    assert BEST in tuned(one, problem(), 100.0)
    assert tuned(tuner(user) if later else one, other, 0.1)[1] == BEST, "right after the default"


@pytest.mark.parametrize("other", [problem(dtype=DType.FLOAT16), problem(op="Gemm")])
def test_problems_of_another_kind_are_no_kin(other: Problem):
    user = MemoryDatabase()
    one = tuner(user)
    tuned(one, problem(), 100.0)
    assert not [*one.kin.suggestions(other, Where.of(TARGET))]


def test_the_nearest_come_first_and_are_few():
    user = MemoryDatabase()
    for rows in (32, 64, 128, 1024):
        tuned(tuner(user), problem(rows), 100.0)
    found = [*Kin(user).suggestions(problem(66), Where.of(TARGET))]
    assert found[0] == ("plain", BEST) and len(found) <= 4 * EACH
    elsewhere = replace(TARGET, name="another", arch="other")
    assert not [*Kin(user).suggestions(problem(66), Where.of(elsewhere))]
    assert not [*Kin(user).suggestions(problem(), Where.of(replace(TARGET, arch="other")))]


def test_what_was_no_faster_than_the_default_teaches_nothing():
    user = MemoryDatabase()
    machine = Machine(lambda solver, config: 0.001 if config["tile"] == config["unroll"] == 1 else 0.002)
    one = Tuner(SETTINGS, [TILES], user, MemoryDatabase(), measurer=lambda device, settings: machine)
    one.clock = machine.clock
    assert len(tuned(one, problem(), 20.0)) > 3
    assert not [*one.kin.suggestions(problem(fused=True), Where.of(TARGET))]

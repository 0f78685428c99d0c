"""Networks of convolutions, and surveys of them with a known truth: `speed` of a config depends on the problem."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from tunewright.devices.base import Target
from tunewright.ir.types import DType, TensorType, blocked
from tunewright.knowledge.key import Key
from tunewright.knowledge.record import Sighting, Survey
from tunewright.search.space import Config, Space
from tunewright.solvers import problem_json
from tunewright.solvers.base import Device, Kernel, Problem, Solver

TARGET = Target(
    "cpu", "A processor", "256-bit vectors", 2, (("driver", "3.0"), ("opencl", "A runtime")), "c", "-w", 32, 16
)


class Tiles(Solver):
    """Says what it would do, and is never compiled."""

    id, language, ops = "tiles", "c", frozenset({"Conv"})

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return None if target.registers >= 16 else "too few registers"

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"nb": [1, 2, 3, 4, 6], "ur": [1, 2, 3, 4, 5, 6, 7, 8, 10, 14], "run": [1, 2, 4, 8, 16, 32, 64]},
                     lambda c: int(str(c["nb"])) * int(str(c["ur"])) < target.registers, version="1")  # fmt: skip

    def default(self, problem: Problem, target: Target) -> Config:
        return Config(nb=2, ur=6, run=1)

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        raise NotImplementedError


SOLVER = Tiles()


def conv(channels: int, filters: int, size: int, kernel: int = 3, batch: int = 1) -> Problem:
    """A convolution in blocks of 8 channels."""
    layout, pad, dtype = blocked(8), kernel // 2, DType.FLOAT32
    types = (
        TensorType(dtype, (batch, channels, size, size), layout),
        TensorType(dtype, (filters, channels, kernel, kernel)),
    )
    made = TensorType(dtype, (batch, filters, size, size), layout)
    attrs = {"kernel_shape": (kernel, kernel), "pads": (pad,) * 4, "strides": (1, 1), "group": 1}
    return Problem("Conv", types, (made,), attrs, (), 0, (False, True))


#: networks, as channels, filters, size and kernel of their layers
NETWORKS = {
    "wide": [(64, 64, 56, 3), (64, 128, 28, 3), (128, 128, 28, 3), (128, 256, 14, 3), (256, 256, 14, 3),
             (256, 512, 7, 3)],
    "deep": [(64, 64, 56, 1), (64, 256, 56, 1), (256, 128, 28, 1), (128, 512, 28, 1), (512, 256, 14, 1),
             (256, 256, 7, 1)],
    "mixed": [(32, 64, 56, 3), (64, 96, 28, 3), (96, 192, 14, 3), (96, 192, 28, 1), (192, 384, 14, 1),
              (192, 64, 14, 1)],
    "small": [(32, 48, 56, 1), (48, 96, 28, 3), (96, 160, 14, 1), (160, 256, 14, 3), (256, 320, 7, 1),
              (128, 256, 7, 3)],
}  # fmt: skip


def problems(network: str) -> list[Problem]:
    return [conv(*layer) for layer in NETWORKS[network]]


def speed(problem: Problem, config: Config) -> float:
    """Tiles that fit rows waste nothing, deep convolutions like many filters at once, small ones short runs."""
    weights, made = problem.inputs[1], problem.outputs[0]
    assert isinstance(weights, TensorType) and isinstance(made, TensorType)
    nb, ur, run = (int(str(config[name])) for name in ("nb", "ur", "run"))
    width = made.dims[-1]
    waste = -(-width // ur) * ur / width
    reuse = nb * ur / (nb + ur)
    wanted = math.log2(max(width // 7, 1)) + 1
    deep = weights.dims[2] == 3
    return reuse / waste * (1.15 if (nb >= 2) == deep else 1.0) / (1 + 0.1 * abs(math.log2(run) - wanted))


def survey(problem: Problem, seed: int, count: int = 40, noise: float = 0.01, target: Target = TARGET) -> Survey:
    """What a session would have seen: so many configs at random, gains with noise."""
    rng, who = random.Random(f"{seed} {problem.key()}"), SOLVER
    space = who.space(problem, target)
    default = who.default(problem, target)
    assert space.rows is not None
    seen = [space.config(row) for row in rng.sample(space.rows.tolist(), count)]
    gains = [speed(problem, c) / speed(problem, default) * math.exp(rng.gauss(0, noise)) for c in seen]
    return Survey(
        Key.of(problem, target, who, default), default, 1e-3 * seed + 1e-3,
        tuple(Sighting(who.id, who.version, c, g) for c, g in zip(seen, gains, strict=True)), "layer",
        problem_json.to_json(problem), problem.family(), problem.sizes, "2026-11-15T12:00:00Z", "0.1",
    )  # fmt: skip


def surveys(*networks: str, target: Target = TARGET) -> Iterator[Survey]:
    for n, network in enumerate(networks or NETWORKS):
        for problem in problems(network):
            yield survey(problem, n, target=target)

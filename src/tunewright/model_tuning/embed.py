"""Put a model's tuning results into its file and take them out again; `knowledge.embedded` handles the file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError
from ..knowledge import embedded
from ..knowledge.database import Database, newest
from ..knowledge.embedded import EmbeddedDatabase
from ..knowledge.record import Measurement
from ..runtime.requests.request import DeviceModel


def problems_of(model: DeviceModel) -> set[str]:
    """Return the keys of the problems that a compiled model has posed so far."""
    return {problem for problem, _ in model.env.tuner.chosen}


def answers(layers: Iterable[Database], problems: set[str]) -> list[Measurement]:
    """Return the confirmed, newest measurements of problems, the largest gains first."""
    mine = [m for m in measurements(layers) if m.key.problem in problems]
    confirmed = [m for m in newest(mine) if m.evidence.confirmed]
    return sorted(confirmed, key=lambda m: (-m.evidence.gain.low, m.digest))


def measurements(layers: Iterable[Database]) -> list[Measurement]:
    """Return the distinct measurements of several knowledge bases."""
    found = {r.digest: r for layer in layers for r in layer if isinstance(r, Measurement)}
    return list(found.values())


def put(path: Path, to: Path, found: list[Measurement]) -> tuple[list[Measurement], int]:
    """Write a model with these measurements in addition to its own.

    Returns the measurements that were left out, and the bytes of the others. If not all fit, the new ones come first.
    """
    if to.absolute().parent != path.absolute().parent and _is_split(path):
        raise InputError(
            "stores its weights in external files, which are looked up in the model's folder", where=str(path),
            hint="name a file in the model's folder",
        )  # fmt: skip
    given = {m.digest for m in found}
    every = [*found, *(m for m in measurements([EmbeddedDatabase(path)]) if m.digest not in given)]
    fitting = embedded.within(every)
    return every[len(fitting) :], embedded.embed(path, to, fitting)


def _is_split(model: Path) -> bool:
    """Whether the model's weights are in other files."""
    import onnx
    from onnx.external_data_helper import _get_all_tensors, uses_external_data

    loaded = onnx.load(str(model), load_external_data=False)
    return any(uses_external_data(tensor) for tensor in _get_all_tensors(loaded))

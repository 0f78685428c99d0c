"""``tunewright lock``: the kernels that a model uses now, written down beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import (
    Configs,
    DeviceName,
    Inputs,
    ModelFile,
    Preprocessing,
    Seed,
    Shapes,
    check_writable,
    console,
    note,
    parse_config,
    working,
)

if TYPE_CHECKING:
    from ..core import Core
    from ..frontend.model import Model
    from ..tuning.lockfile import Written

#: replaced kernels, and kernels that are not reproducible, of which each is named
SHOWN = 8


def lock(
    model: ModelFile,
    input: Inputs = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    device: DeviceName = "CPU",
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Write down the kernel of every layer, as it is chosen now: MODEL.lock.json, or the LOCK_FILE of the settings.

    `--frozen` then loads the model with exactly these kernels, or fails. One inference is run, and nothing is tuned.
    Lock again with other shapes to add theirs. Of several devices (MULTI, AUTO, HETERO, BATCH) all are locked.

    Example: tunewright lock model.onnx --shape batch=8
    """
    from ..core import Core
    from ..plugins.find import find
    from .explain import looking
    from .inputs import concrete, load

    core = Core(parse_config(config))
    core.settings, aside = looking(core.settings)
    if aside:
        note(aside)
    find(device, core.settings)  # a wrong name fails before the work
    path = lock_path(core, model)
    feed = load(core, model, input, shape, preprocess, seed)
    write_lock(core, concrete(feed), feed.values, device, path)


def lock_path(core: Core, model: Path) -> Path:
    """Where the lockfile of a model goes, if it can be written."""
    from ..tuning.lockfile import LockFile, default_path

    path = Path(core.settings.lock_file).expanduser() if core.settings.lock_file else default_path(model)
    check_writable(path)
    if path.exists() and path.stat().st_size:
        LockFile(path).read()  # what is no lockfile is told before the work
    return path


def write_lock(core: Core, model: Model, values: Mapping[str, Any], device: str, path: Path) -> None:
    """Lock a model, and say what that changed."""
    with working("compiling"):
        done = run_and_lock(core, model, values, device, path)
    for title, written in done:
        for text in remarks(written):
            note(text)
        part = f"{title}: " if title else ""
        console().print(part + summary(written), markup=False, soft_wrap=True)


def run_and_lock(
    core: Core, model: Model, values: Mapping[str, Any], device: str, path: str | os.PathLike[str]
) -> list[tuple[str, Written]]:
    """Run a model once as it would run without a lockfile, tuning nothing, and lock what it used.

    What that changed, for each part of it that is on a device of its own, and which that is.
    """
    from .explain import looking

    core.settings, _ = looking(core.settings)
    found = []
    for piece in core.pieces(model, values, device, {"LOCK_FILE": "", "FROZEN": "NO"}):
        piece.compiled(piece.inputs)
        found.append((piece.title, core.lock(piece.compiled, path)))
    return found


def summary(done: Written) -> str:
    """What locking changed, in a line."""
    counts = [(done.added, "new"), (len(done.replaced), "replaced"), (done.same, "as before")]
    told = ", ".join(f"{n} {what}" for n, what in counts if n)
    return f"{done.total} {'kernel' if done.total == 1 else 'kernels'} in {done.path}: {told or 'nothing to lock'}"


def remarks(done: Written) -> list[str]:
    """What a user should know about it."""
    found = [f"replaced: {text}" for text in done.replaced[:SHOWN]]
    if done.dropped:
        found.append(f"{done.dropped} kernels were dropped: they were locked in the other EXECUTION_MODE_HINT")
    found += [f"not reproducible, --frozen refuses it: {text}" for text in done.refused[:SHOWN]]
    more = max(0, len(done.replaced) - SHOWN) + max(0, len(done.refused) - SHOWN)
    return [*found, f"and {more} more"] if more else found


COMMANDS = (lock,)

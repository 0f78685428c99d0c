"""Commands that users are advised to run next. They are complete, so a pasted command continues the current work.

`command` and `driver` make all such commands. They name the device, and every setting that is not the default and says
where files are or how kernels run. It does not matter whether a setting came from a config or the environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable

from ...settings import Settings
from ...solvers.base import Problem
from .command import to_line

#: Settings that a command leaves out: side outputs of a process, which should not be repeated, and settings that a
#: tuning command decides itself.
_ASIDE = frozenset({
    "DUMP_KERNELS", "ENABLE_LOGGING_CMD", "ENABLE_TUNE_DUMP", "FIND_ENFORCE", "FROZEN", "GRAPH_DUMPS_DIR",
    "HETERO_DUMP_GRAPH_DOT", "KERNEL_SYMBOLS_DIR", "PERF_COUNT", "SOURCES_DUMPS_DIR", "TUNE_DUMP_PATH", "TUNING_MODE",
    "VERIFY_PASSES",
})  # fmt: skip


def command(
    *words: str,
    device: str = "",
    settings: Settings | None = None,
    options: Iterable[str] = (),
    without: Collection[str] = (),
) -> str:
    """Return a command that can be pasted into a shell: ``command("tune", "m.onnx", device="CPU", settings=settings)``.

    ``options`` are appended as given. Settings named in ``without`` are left out.
    """
    named = ["-d", device] if device else []
    return shlex.join(["tunewright", *words, *named, *options, *_settings(settings, without)])


def driver(problem: Problem, device: str, settings: Settings, options: Iterable[str] = ()) -> str:
    """Return the command that poses a single problem. Raises `InputError` if it would be too long for a shell."""
    return " ".join([to_line(problem), shlex.join(["-d", device, *options, *_settings(settings)])])


def _settings(settings: Settings | None, without: Collection[str] = ()) -> list[str]:
    """Return options for all settings that are not the default."""
    words = []
    for key, value in ({} if settings is None else settings.changed()).items():
        if key not in _ASIDE and key not in without:
            words += ["-c", f"{key}={value}"]
    return words

"""The commands that users are told to run next: complete, so that pasting one goes on with what was begun.

Every such command is made by `command` or `driver`. It names the device, and every setting that is not the default and
says where things are or how kernels run, whether it came from a config or from the environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable

from ..settings import Settings
from ..solvers.base import Problem
from .command import to_line

#: Settings that a command leaves out: what a process does by the way, which nobody wants twice, and what a tuning
#: command decides itself.
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
    """A command as it can be pasted into a shell: ``command("tune", "m.onnx", device="CPU", settings=settings)``.

    ``options`` follow as they were given; settings of the names ``without`` are left out.
    """
    named = ["-d", device] if device else []
    return shlex.join(["tunewright", *words, *named, *options, *_settings(settings, without)])


def driver(problem: Problem, device: str, settings: Settings, options: Iterable[str] = ()) -> str:
    """The command that poses a problem by itself; InputError where it would be too long for a shell."""
    return " ".join([to_line(problem), shlex.join(["-d", device, *options, *_settings(settings)])])


def _settings(settings: Settings | None, without: Collection[str] = ()) -> list[str]:
    """What is not the default."""
    words = []
    for key, value in ({} if settings is None else settings.changed()).items():
        if key not in _ASIDE and key not in without:
            words += ["-c", f"{key}={value}"]
    return words

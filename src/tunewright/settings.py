"""Settings: one frozen value, passed down from `Core`; this module is the only reader of the environment.

A key may be given in a config mapping (``{"PERF_COUNT": "YES"}``) or as a variable (``TUNEWRIGHT_PERF_COUNT=YES``).
The mapping wins over the environment, the environment over the default. OpenVINO's ``KEY_`` prefix is accepted.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import SettingsError

_TRUE, _FALSE = {"YES", "TRUE", "ON", "1"}, {"NO", "FALSE", "OFF", "0"}


def _memory() -> int:
    """Bytes of memory of the machine, or of the container: more would get the process killed, so that is the limit."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 40
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(physical, int(file.read()))
    except (OSError, ValueError):  # there is none, or it says "max"
        return physical


_MEMORY = _memory()


def _setting(default: Any, help: str, least: int | None = None, values: Mapping[str, str] | None = None) -> Any:
    """``values``: what a text may be, in capital letters, each with the spelling that it is read as."""
    return field(default=default, metadata={"help": help, "least": least, "values": values})


def _folder(help: str) -> Any:
    """A folder that must have a name: an empty one is a shell variable that was not set, not a wish."""
    return field(default=None, metadata={"help": help, "named": True})


def _words(*names: str, **others: str) -> dict[str, str]:
    """Values that stand for themselves, and other spellings of them."""
    return {name: name for name in names} | others


#: with OpenVINO's numbers of before
_LEVELS = _words("LOW", "MEDIUM", "HIGH") | {"0": "MEDIUM", "1": "LOW", "2": "MEDIUM", "3": "HIGH"}
_MODES = _words("TUNING_DISABLED", "TUNING_USE_EXISTING", "TUNING_CREATE")
#: MIOpen's names and numbers
_ENFORCE = {"NONE": "1", "DB_UPDATE": "2", "SEARCH": "3", "SEARCH_DB_UPDATE": "4", "DB_CLEAN": "5"}
_FIND = {"1": "NORMAL", "2": "FAST", "3": "HYBRID", "5": "DYNAMIC_HYBRID"}


@dataclass(frozen=True)
class Settings:
    """What a user may set. Field names in upper case are the keys; `describe` lists them."""

    perf_count: bool = _setting(False, "collect performance counters per step")
    host_fallback: bool = _setting(True, "run an operation on the host when the device has no kernel for it")
    cpu_bind_threads: bool = _setting(True, "keep threads of the CPU device on their cores; read when it is first used")
    cpu_threads_num: int = _setting(
        0, "threads that an inference on the CPU may use (0: all that the process may use)", 0
    )
    performance_hint: str = _setting(
        "LATENCY", "LATENCY: one inference at a time with all threads; THROUGHPUT: one on each thread, side by side",
        values=_words("LATENCY", "THROUGHPUT"),
    )
    num_streams: int = _setting(
        0, "inferences that run side by side, each with its share of the threads (0: as PERFORMANCE_HINT says)", 0
    )
    inference_precision_hint: str = _setting(
        "AUTO", "what networks of single-precision numbers are computed in (AUTO: F16 on GPUs through CUDA, else F32)",
        values=_words("AUTO", "F32", "F16", "BF16"),
    )
    gpu_queue_priority: str = _setting(
        "MEDIUM", "which work of a GPU goes first: LOW, MEDIUM or HIGH (on CUDA, and on OpenCL where it has hints)",
        values=_LEVELS,
    )
    gpu_queue_throttle: str = _setting(
        "MEDIUM", "LOW: who waits for a GPU sleeps, which leaves the processor to others and answers a little later",
        values=_LEVELS,
    )
    join_launches: bool = _setting(True, "launch the kernels of small plans together, as one")
    enable_loop_unrolling: bool = _setting(True, "unroll loops of fixed trip count")
    max_unroll: int = _setting(16, "largest trip count that is unrolled", 0)
    plan_cache_size: int = _setting(16, "plans kept per model, one for each set of input shapes", 1)
    fold_bytes: int = _setting(64 << 20, "largest tensor that constant folding may create, in bytes", 0)
    fold_seconds: float = _setting(10.0, "time that constant folding may take per model, in seconds", 0)
    flush_denormals: bool = _setting(True, "set denormal weights to zero at load (they make kernels many times slower)")
    verify_passes: bool = _setting(False, "check the graph's invariants after every pass, not only after the last")
    disabled_passes: str = _setting("", "comma-separated names of passes or rules that are switched off")

    execution_mode_hint: str = _setting(
        "PERFORMANCE", "ACCURACY: no kernel whose numerics are worse than direct summation; PERFORMANCE: any",
        values=_words("PERFORMANCE", "ACCURACY"),
    )
    tuning_mode: str = _setting(
        "TUNING_USE_EXISTING", "when to tune: TUNING_DISABLED, TUNING_USE_EXISTING or TUNING_CREATE (a load tunes)",
        values=_MODES,
    )
    find_enforce: str = _setting(
        "1", "which problems: 1 as TUNING_MODE says, 2 also known ones, 3 what is missing, 4 always, 5 delete entries",
        values=_words(*_ENFORCE.values(), **_ENFORCE),
    )
    find_mode: str = _setting(
        "NORMAL", "which candidates: NORMAL, FAST, HYBRID or DYNAMIC_HYBRID, as in MIOpen",
        values=_words(*_FIND.values(), **_FIND),
    )
    auto_tune_mode: str = _setting("AUTO", "how to search: AUTO, NO_TUNE, RL, GA, RL,GA or the name of a strategy")
    tuning_file: str = _setting("", "a file of tuned kernels: read first, extended by TUNING_CREATE")
    user_db_path: str | None = _folder("folder of the user's knowledge base (unset: in the user's data folder)")
    tune_bank_path: str | None = _folder("another name of USER_DB_PATH, which wins")
    user_db_mode: str = _setting(
        "SQLITE", "SQLITE, or SHARED for folders on a network: a file per writer and no locks",
        values=_words("SQLITE", "SHARED"),
    )
    system_db_path: str | None = _folder("folder of the system's knowledge base and heuristic (unset: as shipped)")
    lock_file: str = _setting("", "a file that names the kernel of each problem: it comes before every knowledge base")
    frozen: bool = _setting(False, "load only what LOCK_FILE names exactly: a miss is an error, nothing is tuned")
    heuristic_path: str | None = _setting(
        None, "a trained heuristic (unset: the user's, else the one that ships; empty: none)"
    )
    tune_result_path: str = _setting(".", "folder of the result files of tuning (empty: none are written)")
    tune_seconds: float = _setting(5.0, "time that tuning one problem may take, in seconds", 0)
    tune_budget: float = _setting(0.0, "time that tuning may take in all for one loaded model (0: no bound)", 0)
    tune_timeout: float = _setting(20.0, "time that one candidate may take to compile or to run, in seconds", 0)
    tune_regime: str = _setting(
        "LAYER", "where data comes from: LAYER: weights from memory, the rest from the cache; COLD, WARM: all of it",
        values=_words("LAYER", "COLD", "WARM"),
    )
    tune_seed: int = _setting(0, "of what is random in tuning", 0)
    enable_tune_dump: bool = _setting(False, "write every problem that is met to TUNE_DUMP_PATH, to tune it elsewhere")
    tune_dump_path: str | None = _folder(
        "a .jsonl file, or a folder for one per process (unset: tune_dump_pid<number>.jsonl where the program runs)"
    )
    enable_logging_cmd: bool = _setting(False, "print every problem that is met as a `tunewright driver` command")
    cache_dir: str | None = _setting(None, "folder of compiled kernels (unset: the user's cache folder; empty: none)")
    cache_bytes: int = _setting(512 << 20, "most bytes in CACHE_DIR; the least recently used kernels go first", 0)

    max_file_bytes: int = _setting(16 << 30, "guard: largest model file", 1)
    max_nodes: int = _setting(500_000, "guard: most nodes, after functions are expanded and loops unrolled", 1)
    max_nesting: int = _setting(64, "guard: deepest nesting of subgraphs and functions", 1)
    max_tensor_bytes: int = _setting(min(16 << 30, _MEMORY), "guard: largest single tensor", 1)
    max_memory_bytes: int = _setting(min(64 << 30, _MEMORY), "guard: most memory for all weights, or for one plan", 1)
    max_iterations: int = _setting(1_000_000, "guard: most iterations of all loops in one inference", 1)

    @classmethod
    def make(cls, config: Mapping[str, Any] | None = None, base: Settings | None = None) -> Settings:
        """Settings from ``config`` over ``base`` (by default: the environment over the defaults)."""
        return _apply(base if base is not None else cls.from_environment(), config or {}, "config")

    @classmethod
    def from_environment(cls) -> Settings:
        """The defaults, changed by ``TUNEWRIGHT_*`` variables."""
        found = {}
        for f in dataclasses.fields(cls):
            text = os.environ.get(f"TUNEWRIGHT_{f.name.upper()}")
            if text is not None:
                found[f.name.upper()] = text
        return _apply(cls(), found, "environment")

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """One row per key: name, type, default, help."""
        return [
            {
                "key": f.name.upper(), "type": str(f.type).removesuffix(" | None"), "default": f.default,
                "help": f.metadata["help"],
            }
            for f in dataclasses.fields(cls)
        ]

    def get(self, key: str) -> Any:
        """The value of a key; an unknown key names the closest one."""
        return getattr(self, _field(key, "property").name)


#: kind of folder -> the variable that names it, and where it is below the home folder without one
_FOLDERS = {
    "data": ("XDG_DATA_HOME", ".local/share"),
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "config": ("XDG_CONFIG_HOME", ".config"),
}


def own_folder(kind: str) -> Path:
    """The user's folder for our data, cache or config. It need not exist."""
    try:
        import platformdirs
    except ImportError:  # where Tunewright runs from its source, with what is there
        variable, below = _FOLDERS[kind]
        return Path(os.environ.get(variable) or Path.home() / below) / "tunewright"
    return Path(getattr(platformdirs, f"user_{kind}_dir")("tunewright", appauthor=False))


def export(name: str, value: str) -> None:
    """A variable that a library reads when it is loaded, unless the user has set it."""
    os.environ.setdefault(name, value)


@contextmanager
def exported(name: str, value: str) -> Iterator[None]:
    """The same for a while: other processes must not inherit it."""
    if is_exported(name):
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def is_exported(name: str) -> bool:
    """A library will find this variable."""
    return name in os.environ


def child_environment(settings: Settings) -> dict[str, str]:
    """The environment of a Python process that finds the same settings, and the same modules, as this one."""
    found = dict(os.environ)
    for f in dataclasses.fields(Settings):
        value = getattr(settings, f.name)
        if value is None:
            found.pop(f"TUNEWRIGHT_{f.name.upper()}", None)
        else:
            found[f"TUNEWRIGHT_{f.name.upper()}"] = str(value)
    found["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return found


_FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
#: OpenVINO's names of before
_RENAMED = {
    f"{plugin}_plugin_{name}": f"gpu_queue_{name}" for plugin in ("gpu", "cldnn") for name in ("priority", "throttle")
}


def _field(key: str, where: str) -> dataclasses.Field[Any]:
    name = key.upper().removeprefix("KEY_").lower()
    name = _RENAMED.get(name, name)
    if name not in _FIELDS:
        close = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0].upper()}?" if close else "`tunewright settings` lists the keys"
        raise SettingsError(f"unknown setting {key}", where=where, hint=hint)
    return _FIELDS[name]


def _apply(base: Settings, config: Mapping[str, Any], where: str) -> Settings:
    changes = {}
    for key, value in config.items():
        f = _field(str(key), where)
        changes[f.name] = _parse(f, value, where)
    return dataclasses.replace(base, **changes)


def _parse(f: dataclasses.Field[Any], value: Any, where: str) -> Any:
    key = f.name.upper()
    if f.type == "bool":
        text = str(value).upper()
        if text in _TRUE | _FALSE:
            return text in _TRUE
        raise SettingsError(f"{key} = {value!r} is not YES or NO", where=where)
    if f.type in ("int", "float"):
        try:
            number = int(str(value)) if f.type == "int" else float(str(value))
        except ValueError:
            kind = "a whole number" if f.type == "int" else "a number"
            raise SettingsError(f"{key} = {value!r} is not {kind}", where=where) from None
        least = f.metadata.get("least")
        if not (least is None or number >= least):
            raise SettingsError(f"{key} = {value!r} is below {least}", where=where)
        return number
    values = f.metadata.get("values")
    if values is None:
        if f.metadata.get("named") and value is not None and not str(value).strip():
            raise SettingsError(f"{key} is empty", where=where, hint="name a folder, or unset it")
        return None if value is None and "None" in str(f.type) else str(value)
    text = str(value).strip().upper()
    if text not in values:
        raise SettingsError(f"{key} = {value!r} is none of {', '.join(values)}", where=where)
    return values[text]

"""Settings: one frozen value, passed down from `Core`. Only this module reads the environment.

A key may be given in a config mapping (``{"PERF_COUNT": "YES"}``) or as a variable (``TUNEWRIGHT_PERF_COUNT=YES``). The
mapping wins over the environment, the environment over the default. Keys and values may carry OpenVINO's ``KEY_``
prefix. A variable with the prefix ``TUNEWRIGHT_`` that names no setting gets a warning.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import SettingsError

LOG = logging.getLogger("tunewright")
#: prefix of the environment variables
PREFIX = "TUNEWRIGHT_"
_TRUE, _FALSE = {"YES", "TRUE", "ON", "1"}, {"NO", "FALSE", "OFF", "0"}


def _memory() -> int:
    """Bytes of memory of the machine, or of its container if less: the system kills a process that uses more."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 40
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(physical, int(file.read()))
    except (OSError, ValueError):  # no such file, or it says "max"
        return physical


def _nodes() -> int:
    """Number of NUMA nodes of the machine."""
    return max(1, sum(1 for _ in Path("/sys/devices/system/node").glob("node[0-9]*")))


_MEMORY = _memory()


def _setting(
    default: Any, help: str, least: int | None = None, values: Mapping[str, str] | None = None,
    words: Mapping[str, int] | None = None,
) -> Any:  # fmt: skip
    """Declare a setting.

    ``least``: the smallest number allowed. ``values``: the accepted texts in capital letters, each with its canonical
    spelling. ``words``: words accepted in place of numbers, with the numbers.
    """
    return field(default=default, metadata={"help": help, "least": least, "values": values, "words": words})


def _folder(help: str) -> Any:
    """Declare a folder setting that may not be empty: an empty value usually comes from an unset shell variable."""
    return field(default=None, metadata={"help": help, "named": True})


def _words(*names: str, **others: str) -> dict[str, str]:
    """Map each name to itself, and each alias to the name it stands for."""
    return {name: name for name in names} | others


#: includes the numbers of earlier OpenVINO releases
_LEVELS = _words("LOW", "MEDIUM", "HIGH", MED="MEDIUM", DEFAULT="MEDIUM", DISABLED="MEDIUM") | {
    "0": "MEDIUM", "1": "LOW", "2": "MEDIUM", "3": "HIGH",
}  # fmt: skip
_TASKS = _words("LOW", "ANY", "HIGH", MEDIUM="ANY", DEFAULT="ANY")
_BINDING = dict.fromkeys(_TRUE, "YES") | dict.fromkeys(_FALSE, "NO") | {"NUMA": "NUMA"}
_MODES = _words(
    "TUNING_DISABLED", "TUNING_USE_EXISTING", "TUNING_CREATE", "TUNING_BACKGROUND", DISABLED="TUNING_DISABLED",
    USE_EXISTING="TUNING_USE_EXISTING", CREATE="TUNING_CREATE", BACKGROUND="TUNING_BACKGROUND",
)  # fmt: skip
#: MIOpen's names and numbers
_ENFORCE = {"NONE": "1", "DB_UPDATE": "2", "SEARCH": "3", "SEARCH_DB_UPDATE": "4", "DB_CLEAN": "5"}
_FIND = {"1": "NORMAL", "2": "FAST", "3": "HYBRID", "5": "DYNAMIC_HYBRID"}


@dataclass(frozen=True)
class Settings:
    """All settings. Field names in upper case are the keys; `describe` lists them."""

    perf_count: bool = _setting(False, "collect performance counters per step")
    host_fallback: bool = _setting(True, "run an operation on the host when the device has no kernel for it")
    cpu_bind_threads: str = _setting(
        "YES",
        "YES: threads of the CPU device stay on one core each; NUMA: on the cores of a node; NO: anywhere",
        values=_BINDING,
    )
    cpu_threads_num: int = _setting(
        0, "threads that an inference on the CPU may use (0: all that the process may use)", 0
    )
    cpu_isa: str = _setting(
        "AUTO",
        "instruction set that the CPU device compiles for (AUTO: the best that the processor has)",
        values=_words("AUTO", "X86-64", "X86-64-V2", "X86-64-V3", "X86-64-V4", "ARMV8-A"),
    )
    cpu_compiler: str = _setting(
        "", "the clang that compiles CPU kernels (empty: the one of the package ziglang, else from PATH)"
    )
    performance_hint: str = _setting(
        "LATENCY",
        "LATENCY: one inference at a time with all threads; THROUGHPUT: one on each thread, side by side; "
        "CUMULATIVE_THROUGHPUT: the same on all devices of AUTO",
        values=_words("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT", UNDEFINED="LATENCY"),
    )
    performance_hint_num_requests: int = _setting(
        0, "most requests that the application runs at a time; limits the number of streams (0: not known)", 0
    )
    num_streams: int = _setting(
        0,
        "inferences that run side by side, each with its share of the threads (0: as PERFORMANCE_HINT says; AUTO: "
        "measured, together with the best batch if requests run together)",
        -1,
        words={"AUTO": -1, "NUMA": _nodes()},
    )
    exclusive_async_requests: bool = _setting(
        False, "requests of all models of a device with this setting run one after the other"
    )
    device_id: str = _setting("", "which of several devices a name like GPU means: its number")
    dyn_batch_enabled: bool = _setting(False, "a model of fixed batch also takes inputs of fewer examples")
    inference_precision_hint: str = _setting(
        "AUTO",
        "precision of networks of single-precision numbers (AUTO: F16 on GPUs through CUDA, else F32)",
        values=_words("AUTO", "F32", "F16", "BF16"),
    )
    enable_fp16_for_quantized_models: bool = _setting(
        True, "compute the F16 parts of a quantised network in F16; NO: in F32"
    )
    nv12_two_inputs: bool = _setting(
        False, "images come as NV12 video frames: the device converts inputs x/y and x/uv to an input x of 3 channels"
    )
    config_file: str = _setting("", "files with your own kernels for operations (XML, separated by spaces)")
    model_priority: str = _setting(
        "MEDIUM",
        "which model goes first where several run: sets GPU_QUEUE_PRIORITY and GPU_HOST_TASK_PRIORITY, and "
        "which device AUTO chooses",
        values=_words("LOW", "MEDIUM", "HIGH", MED="MEDIUM", DEFAULT="MEDIUM"),
    )
    gpu_host_task_priority: str = _setting(
        "ANY",
        "LOW: threads that build kernels for a GPU give way to others; HIGH and LOW also choose the cores of a "
        "hybrid processor",
        values=_TASKS,
    )
    gpu_queue_priority: str = _setting(
        "MEDIUM",
        "which work of a GPU goes first: LOW, MEDIUM or HIGH (on CUDA, and on OpenCL where it has hints)",
        values=_LEVELS,
    )
    gpu_queue_throttle: str = _setting(
        "MEDIUM",
        "LOW: a thread that waits for a GPU sleeps: the processor is free, and answers come a little later",
        values=_LEVELS,
    )
    compilation_num_threads: int = _setting(0, "threads that build kernels (0: all that the process may use)")
    multi_device_priorities: str = _setting("", "the devices of MULTI and AUTO, the preferred one first: GPU,CPU")
    allow_auto_batching: bool = _setting(
        True,
        "requests to a GPU run together as batches, where the hint is a THROUGHPUT and the model's examples are "
        "proven to be independent",
    )
    auto_batch_timeout: int = _setting(1000, "how long a request waits for others to fill its batch, in ms", 0)
    target_fallback: str = _setting("", "the devices of HETERO, the preferred one first: GPU,CPU")
    hetero_affinity: str = _setting("", "a file that says which node runs on which device of HETERO")
    hetero_placement: str = _setting(
        "AUTO",
        "how HETERO places nodes: PRIORITY by the order of devices, COST by what they take, AUTO as it was "
        "measured, else by costs where they are known, else by the order",
        values=_words("AUTO", "PRIORITY", "COST"),
    )
    hetero_dump_graph_dot: bool = _setting(False, "HETERO writes hetero_affinity.dot and hetero_subgraphs.dot")
    join_launches: bool = _setting(True, "run neighbouring kernels as one launch")
    shape_templates: bool = _setting(True, "make plans for whole classes of shapes where a model leaves sizes open")
    enable_loop_unrolling: bool = _setting(True, "unroll loops of fixed trip count")
    max_unroll: int = _setting(16, "largest trip count that is unrolled", 0)
    plan_cache_size: int = _setting(16, "plans kept per model, one for each set of input shapes", 1)
    fold_bytes: int = _setting(64 << 20, "largest tensor that folding may create, in bytes (moved weights: any)", 0)
    fold_seconds: float = _setting(10.0, "time that constant folding may take per model, in seconds", 0)
    flush_denormals: bool = _setting(True, "set denormal weights to zero at load (they make kernels many times slower)")
    verify_passes: bool = _setting(False, "check the graph's invariants after every pass, not only after the last")
    disabled_passes: str = _setting("", "comma-separated names of passes or rules that are switched off")
    graph_dumps_dir: str = _setting("", "folder for drawings of the graph after each pass (.dot and .txt; empty: none)")
    sources_dumps_dir: str = _setting("", "folder for the sources of all kernels of a model (empty: none)")
    kernel_symbols_dir: str = _setting(
        "", "folder that keeps compiled CPU kernels as files, so that perf and gdb know their names (empty: none)"
    )
    dump_kernels: bool = _setting(False, "write the sources of the kernels of CONFIG_FILE as they are built")

    execution_mode_hint: str = _setting(
        "PERFORMANCE",
        "ACCURACY: no kernel whose numerics are worse than direct summation; PERFORMANCE: any",
        values=_words("PERFORMANCE", "ACCURACY"),
    )
    tuning_mode: str = _setting(
        "TUNING_USE_EXISTING",
        "when to tune: TUNING_DISABLED, TUNING_USE_EXISTING, TUNING_CREATE (a load tunes) or "
        "TUNING_BACKGROUND (a helper process tunes while the model serves)",
        values=_MODES,
    )
    find_enforce: str = _setting(
        "1",
        "which problems: 1 as TUNING_MODE says, 2 also known ones, 3 what is missing, 4 always, 5 delete entries",
        values=_words(*_ENFORCE.values(), **_ENFORCE),
    )
    find_mode: str = _setting(
        "NORMAL",
        "which candidates: NORMAL, FAST, HYBRID or DYNAMIC_HYBRID, as in MIOpen",
        values=_words(*_FIND.values(), **_FIND),
    )
    auto_tune_mode: str = _setting("AUTO", "how to search: AUTO, NO_TUNE, RL, GA, RL,GA or the name of a strategy")
    tuning_file: str = _setting("", "a file of tuned kernels: read first, extended by TUNING_CREATE")
    user_db_path: str | None = _folder("folder of the user's knowledge base (unset: in the user's data folder)")
    tune_bank_path: str | None = _folder("another name of USER_DB_PATH; if both are set, USER_DB_PATH is used")
    user_db_mode: str = _setting(
        "SQLITE",
        "SQLITE, or SHARED for folders on a network: a file per writer and no locks",
        values=_words("SQLITE", "SHARED"),
    )
    system_db_path: str | None = _folder("folder of the system's knowledge base and heuristic (unset: as shipped)")
    use_embedded: bool = _setting(
        False, "records in a model file (tunewright kb embed) answer too, after the user's knowledge base"
    )
    lock_file: str = _setting("", "a file that names the kernel of each problem: it comes before every knowledge base")
    frozen: bool = _setting(False, "load only what LOCK_FILE names exactly: a miss is an error, nothing is tuned")
    heuristic_path: str | None = _setting(
        None, "a trained heuristic (unset: the user's, else the one that ships; empty: none)"
    )
    tune_result_path: str = _setting(".", "folder of the result files of tuning (empty: none are written)")
    tune_seconds: float = _setting(5.0, "time that tuning one problem may take, in seconds", 0)
    tune_budget: float = _setting(0.0, "time that tuning may take in all for one loaded model (0: no bound)", 0)
    background_duty: float = _setting(10.0, "share of the time in which background tuning may work, in per cent", 0)
    background_priority: str = _setting(
        "IDLE",
        "priority of background tuning: IDLE (when the processor is idle), LOW (nice 19) or NORMAL",
        values=_words("IDLE", "LOW", "NORMAL"),
    )
    background_memory: int = _setting(
        0, "most bytes that background tuning may allocate (0: half of MAX_MEMORY_BYTES)", 0
    )
    record_traffic: bool = _setting(
        False, "keep a histogram of the shapes that models meet and how long they take in the knowledge base"
    )
    tune_timeout: float = _setting(20.0, "time that one candidate may take to compile or to run, in seconds", 0)
    tune_regime: str = _setting(
        "LAYER",
        "where kernels find their data: LAYER: weights in memory, the rest in the cache; COLD: all in memory; "
        "WARM: all in the cache",
        values=_words("LAYER", "COLD", "WARM"),
    )
    tune_max_workspace: int = _setting(
        0, "tuning leaves out candidates that need more bytes of scratch memory than this (0: no limit)", 0
    )
    tune_seed: int = _setting(0, "seed of tuning", 0)
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
        """Return settings with ``config`` applied to ``base`` (by default the environment applied to the defaults)."""
        return _apply(base if base is not None else cls.from_environment(), config or {}, "config")

    @classmethod
    def from_environment(cls) -> Settings:
        """Return the defaults, changed by ``TUNEWRIGHT_*`` variables."""
        # This runs often, so it walks the variables that exist, not all possible ones. New names win over old ones.
        given = {n.removeprefix(PREFIX).lower(): n for n in os.environ if n.startswith(PREFIX)}
        _warn_of_unknown(given)
        found = {name.upper(): os.environ[given[name]] for name in (*_RENAMED, *_FIELDS) if name in given}
        return _apply(cls(), found, "environment") if found else cls()

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Return one row per key: type, accepted values (None: any of the type), default, and meaning."""
        return [
            {
                "key": f.name.upper(), "type": str(f.type).removesuffix(" | None"), "default": f.default,
                "values": _choices(f), "least": f.metadata.get("least"), "read_only": False,
                "aliases": [name.upper() for name, new in _RENAMED.items() if new == f.name],
                "help": f.metadata["help"],
            }
            for f in dataclasses.fields(cls)
        ]  # fmt: skip

    def changed(self) -> dict[str, str]:
        """Return the settings that differ from the default, by key, as texts that parse to the same values."""
        found: dict[str, str] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value != f.default and value is not None:
                words = {number: word for word, number in (f.metadata.get("words") or {}).items()}
                text = ("YES" if value else "NO") if f.type == "bool" else words.get(value, value)
                found[f.name.upper()] = str(text)
        return found

    @classmethod
    def deprecated(cls) -> dict[str, str]:
        """Return the deprecated keys that are still accepted, each with its replacement."""
        return {name.upper(): new.upper() for name, new in _DEPRECATED.items()}

    @staticmethod
    def key(name: str) -> str:
        """Return the key that a name or an alias stands for."""
        return _field(name, "property").name.upper()

    def get(self, key: str) -> Any:
        """Return the value of a key. The error for an unknown key suggests the closest one."""
        return getattr(self, _field(key, "property").name)


#: kind of folder -> environment variable that names it, and its default place below the home folder
_FOLDERS = {
    "data": ("XDG_DATA_HOME", ".local/share"),
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "config": ("XDG_CONFIG_HOME", ".config"),
}


#: stands in for a missing home folder: nothing exists there, and nothing can be created there
_NO_HOME = Path("/nonexistent")


def own_folder(kind: str) -> Path:
    """Return the user's folder for Tunewright's data, cache or config. It need not exist."""
    try:
        found = _in_home(kind)
    except RuntimeError:  # a container without HOME, whose user id has no entry
        found = Path("~")
    # Older releases of platformdirs return "~/.cache" unexpanded.
    return found if found.is_absolute() else _NO_HOME / _FOLDERS[kind][1] / "tunewright"


def _in_home(kind: str) -> Path:
    try:
        import platformdirs
    except ImportError:  # Tunewright runs from its source tree without platformdirs
        variable, below = _FOLDERS[kind]
        return Path(os.environ.get(variable) or Path.home() / below) / "tunewright"
    return Path(getattr(platformdirs, f"user_{kind}_dir")("tunewright", appauthor=False))


def write_dump(key: str, path: Path, text: str) -> None:
    """Write a dump file that a setting asks for, and create its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror or error}", where=key) from None


def export(name: str, value: str) -> None:
    """Set a variable that a library reads when it is loaded, unless the user has set it."""
    os.environ.setdefault(name, value)


@contextmanager
def exported(name: str, value: str) -> Iterator[None]:
    """Set such a variable for the duration of a ``with`` block, so that later child processes do not inherit it."""
    if is_exported(name):
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def is_exported(name: str) -> bool:
    """Whether a library will find this variable."""
    return name in os.environ


def rejoin_words(breaks: str = ":=") -> str:
    """Undo bash's splitting of words at ``breaks`` (as in KEY=VALUE) in a process that completes a command line.

    Returns the start of the current word up to its last break, because bash replaces only the text after it.
    """
    if os.environ.get("_TUNEWRIGHT_COMPLETE") != "complete_bash":
        return ""
    words: list[str] = []
    at, glued = 0, False
    for number, word in enumerate(os.environ.get("COMP_WORDS", "").split("\n")):
        is_break = bool(word) and set(word) <= set(breaks)
        if words and (is_break or glued):
            words[-1] += word
        else:
            words.append(word)
        glued = is_break
        if str(number) == os.environ.get("COMP_CWORD"):
            at = len(words) - 1
    if not at:
        return ""
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(at)
    last = max(words[at].rfind(mark) for mark in breaks)
    return words[at][: last + 1]


def child_environment(settings: Settings) -> dict[str, str]:
    """Return an environment in which a Python process finds the same settings and modules as this one."""
    found = dict(os.environ)
    for f in dataclasses.fields(Settings):
        value = getattr(settings, f.name)
        if value is None:
            found.pop(PREFIX + f.name.upper(), None)
        else:
            found[PREFIX + f.name.upper()] = str(value)
    found["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    for name in _unknown({n.removeprefix(PREFIX).lower(): n for n in found if n.startswith(PREFIX)}):
        del found[name]  # this process has already warned about it
    return found


_FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
#: other names for keys
_ALIASES = {
    "throughput_streams": "num_streams",
    "max_num_threads": "compilation_num_threads",
    "gpu_max_num_threads": "compilation_num_threads",
    "inference_num_threads": "cpu_threads_num",
    "enable_profiling": "perf_count",
    "gpu_model_priority": "model_priority",
    "queue_priority": "gpu_queue_priority",
    "host_task_priority": "gpu_host_task_priority",
    "plugin_throttle": "gpu_queue_throttle",
    "gpu_plugin_throttle": "gpu_queue_throttle",
    "gpu_enable_loop_unrolling": "enable_loop_unrolling",
    "gpu_nv12_two_inputs": "nv12_two_inputs",
}
#: Names that OpenVINO has deprecated, some of them long ago. OpenVINO's guide misspells one of them as "cldnd_".
_DEPRECATED = {
    "cpu_throughput_streams": "num_streams",
    "gpu_throughput_streams": "num_streams",
    "cldnn_throughput_streams": "num_streams",
    "plugin_priority": "gpu_queue_priority",
    "gpu_plugin_priority": "gpu_queue_priority",
    "cldnn_plugin_priority": "gpu_queue_priority",
    "cldnn_plugin_throttle": "gpu_queue_throttle",
    "cldnd_plugin_throttle": "gpu_queue_throttle",
    "cldnn_max_num_threads": "compilation_num_threads",
    "cldnn_enable_loop_unrolling": "enable_loop_unrolling",
    "cldnn_enable_fp16_for_quantized_models": "enable_fp16_for_quantized_models",
    "cldnn_nv12_two_inputs": "nv12_two_inputs",
    "cldnn_graph_dumps_dir": "graph_dumps_dir",
    "cldnn_sources_dumps_dir": "sources_dumps_dir",
}
_RENAMED = _ALIASES | _DEPRECATED
#: prefixes of keys that do not apply here, and why
_ELSEWHERE = {
    ("omp_", "kmp_"): "Tunewright does not use OpenMP; CPU_THREADS_NUM sets the number of threads",
    ("vpu_", "myriad_", "hddl_"): "Tunewright does not support VPUs",
    ("fpga_", "dlia_", "dla_"): "Tunewright does not support FPGAs",
}
#: Prefixes of variables that are not settings: those of the tests and of scripts/fetch_models.py.
_NO_SETTINGS = ("test_", "models")
#: old names and unknown variables that this process has warned about
_warned: set[str] = set()


def plain(key: str) -> str:
    """Return a key or a word value in canonical spelling: capital letters, without OpenVINO's prefix."""
    return key.strip().upper().removeprefix("KEY_")


def closest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that is most similar to ``key``, or None."""
    found = difflib.get_close_matches(plain(key), list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def _unknown(given: Mapping[str, str]) -> list[str]:
    """Return the variables that match no setting. ``given``: variables by lower-case name without the prefix."""
    return [
        variable
        for name, variable in given.items()
        if name not in _FIELDS and name not in _RENAMED and not name.startswith(_NO_SETTINGS)
    ]


def _warn_of_unknown(given: Mapping[str, str]) -> None:
    """Log one warning for each variable that matches no setting; a typing mistake would otherwise go unnoticed."""
    for variable in _unknown(given):
        if variable not in _warned:
            _warned.add(variable)
            close = closest(variable.removeprefix(PREFIX), map(str.upper, [*_FIELDS, *_RENAMED]))
            hint = f"did you mean {PREFIX}{close}?" if close else "`tunewright settings` lists the names"
            LOG.warning("environment: %s is not a setting and has no effect (%s)", variable, hint)


def _choices(f: dataclasses.Field[Any]) -> list[str] | None:
    """Return the values that a key accepts, or None. A key with words also accepts numbers."""
    if f.type == "bool":
        return ["YES", "NO"]
    values = f.metadata.get("values")
    if values:
        return list(dict.fromkeys(values.values()))
    return list(f.metadata.get("words") or ()) or None


def _field(key: str, where: str) -> dataclasses.Field[Any]:
    name = plain(key).lower()
    if name in _DEPRECATED and name not in _warned:
        _warned.add(name)
        LOG.warning("%s is an old name: use %s", name.upper(), _DEPRECATED[name].upper())
    name = _RENAMED.get(name, name)
    for prefixes, why in _ELSEWHERE.items():
        if name not in _FIELDS and name.startswith(prefixes):
            raise SettingsError(f"{key} is not applicable: {why}", where=where)
    if name not in _FIELDS:
        close = closest(key, map(str.upper, [*_FIELDS, *_RENAMED]))
        hint = f"did you mean {close}?" if close else "`tunewright settings` lists the keys"
        raise SettingsError(f"unknown setting {key}", where=where, hint=hint)
    return _FIELDS[name]


def _apply(base: Settings, config: Mapping[str, Any], where: str) -> Settings:
    changes: dict[str, Any] = {}
    follow: dict[str, Any] = {}
    for key, value in config.items():
        f = _field(str(key), where)
        if f.name == "model_priority":
            follow |= _priorities(value, where)
        else:
            changes[f.name] = _parse(f, value, where)
    return dataclasses.replace(base, **follow | changes)


def _priorities(value: Any, where: str) -> dict[str, str]:
    """Parse a model's priority into all settings that follow from it. It may also name single settings, with ``|``."""
    found: dict[str, str] = {}
    for part in map(plain, str(value).split("|")):
        for name in ("gpu_queue_priority", "gpu_host_task_priority"):
            if part.startswith(f"{name.upper()}_"):
                found[name] = _parse(_FIELDS[name], part.removeprefix(f"{name.upper()}_"), where)
                break
        else:
            level = _parse(_FIELDS["model_priority"], part.removeprefix("GPU_").removeprefix("MODEL_PRIORITY_"), where)
            task = _parse(_FIELDS["gpu_host_task_priority"], level, where)
            found = {"model_priority": level, "gpu_queue_priority": level, "gpu_host_task_priority": task} | found
    return found


def _number(f: dataclasses.Field[Any], value: Any) -> int | float | None:
    """Parse a number or a word that stands for one. Returns None if the text is neither."""
    text = str(value).strip()
    words = f.metadata.get("words")
    if words:
        word = plain(text).removeprefix("CPU_THROUGHPUT_").removeprefix("GPU_THROUGHPUT_").removeprefix("CLDNN_")
        if word in words:
            return int(words[word])
    try:
        return int(text) if f.type == "int" else float(text)
    except ValueError:
        return None


def _parse(f: dataclasses.Field[Any], value: Any, where: str) -> Any:
    key = f.name.upper()
    if f.type == "bool":
        text = plain(str(value))
        if text in _TRUE | _FALSE:
            return text in _TRUE
        raise SettingsError(f"{key} = {value!r} is not YES or NO", where=where)
    if f.type in ("int", "float"):
        number = _number(f, value)
        if number is None:
            kind = "a whole number" if f.type == "int" else "a number"
            others = "".join(f" or {word}" for word in f.metadata.get("words") or ())
            raise SettingsError(f"{key} = {value!r} is not {kind}{others}", where=where)
        least = f.metadata.get("least")
        if not (least is None or number >= least):
            raise SettingsError(f"{key} = {value!r} is below {least}", where=where)
        return number
    values = f.metadata.get("values")
    if values is None:
        if f.metadata.get("named") and value is not None and not str(value).strip():
            raise SettingsError(f"{key} is empty", where=where, hint="name a folder, or unset it")
        return None if value is None and "None" in str(f.type) else str(value)
    text = plain(str(value))
    known = next((one for one in (text, text.removeprefix(f"{key}_")) if one in values), None)
    if known is None:
        raise SettingsError(f"{key} = {value!r} is not one of {', '.join(values)}", where=where)
    return values[known]

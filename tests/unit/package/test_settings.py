"""The tuning settings: by config key, by environment variable, through `Core`; every spelling, and what is refused."""

from __future__ import annotations

import dataclasses
import os

import pytest

from tunewright import Core, settings, tools
from tunewright.errors import SettingsError
from tunewright.settings import Settings, child_environment

WORDS = {"MED": "MEDIUM", "DEFAULT": "MEDIUM"}
LEVELS = {"0": "MEDIUM", "1": "LOW", "2": "MEDIUM", "3": "HIGH", "DISABLED": "MEDIUM", **WORDS}
#: key -> {what is given: what it is read as}
SPELLINGS = {
    "TUNING_MODE": {
        **{name: name for name in ("TUNING_DISABLED", "TUNING_USE_EXISTING", "TUNING_CREATE", "TUNING_BACKGROUND")},
        **{name.removeprefix("TUNING_"): name
           for name in ("TUNING_DISABLED", "TUNING_USE_EXISTING", "TUNING_CREATE", "TUNING_BACKGROUND")},
        "tuning_create": "TUNING_CREATE", "KEY_TUNING_CREATE": "TUNING_CREATE", "use_existing": "TUNING_USE_EXISTING",
    },
    "FIND_ENFORCE": {
        **{str(n): str(n) for n in range(1, 6)},
        "NONE": "1", "DB_UPDATE": "2", "SEARCH": "3", "SEARCH_DB_UPDATE": "4", "DB_CLEAN": "5", "search": "3",
    },
    "FIND_MODE": {
        **{name: name for name in ("NORMAL", "FAST", "HYBRID", "DYNAMIC_HYBRID")},
        "1": "NORMAL", "2": "FAST", "3": "HYBRID", "5": "DYNAMIC_HYBRID", "dynamic_hybrid": "DYNAMIC_HYBRID",
    },
    "PERFORMANCE_HINT": {
        **{name: name for name in ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")}, "throughput": "THROUGHPUT",
        "UNDEFINED": "LATENCY",
    },
    "CPU_BIND_THREADS": {
        **dict.fromkeys(("YES", "TRUE", "ON", "1", "yes"), "YES"), **dict.fromkeys(("NO", "FALSE", "OFF", "0"), "NO"),
        "NUMA": "NUMA",
    },
    "NUM_STREAMS": {"0": 0, "3": 3, "AUTO": -1, "auto": -1, "-1": -1},
    "MODEL_PRIORITY": {**{name: name for name in ("LOW", "MEDIUM", "HIGH")}, "high": "HIGH", **WORDS},
    "GPU_HOST_TASK_PRIORITY": {"LOW": "LOW", "ANY": "ANY", "HIGH": "HIGH", "MEDIUM": "ANY", "DEFAULT": "ANY"},
    "EXCLUSIVE_ASYNC_REQUESTS": {"YES": True, "no": False},
    "COMPILATION_NUM_THREADS": {"2": 2, "-1": -1},
    "HETERO_PLACEMENT": {name: name for name in ("PRIORITY", "COST", "AUTO")},
    "INFERENCE_PRECISION_HINT": {**{name: name for name in ("AUTO", "F32", "F16", "BF16")}, "f16": "F16"},
    "GPU_QUEUE_PRIORITY": {**{name: name for name in ("LOW", "MEDIUM", "HIGH")}, "high": "HIGH", **LEVELS},
    "GPU_QUEUE_THROTTLE": {**{name: name for name in ("LOW", "MEDIUM", "HIGH")}, "low": "LOW", **LEVELS},
    "AUTO_TUNE_MODE": {name: name for name in ("AUTO", "NO_TUNE", "RL", "GA", "RL,GA", "GA,RL", "random")},
    "TUNING_FILE": {"some/file.json": "some/file.json", "": ""},
    "EXECUTION_MODE_HINT": {"PERFORMANCE": "PERFORMANCE", "ACCURACY": "ACCURACY", "accuracy": "ACCURACY"},
    "USE_EMBEDDED": {"YES": True, "no": False},
    "LOCK_FILE": {"model.onnx.lock.json": "model.onnx.lock.json", "": ""},
    "FROZEN": {"YES": True, "no": False},
    "USER_DB_PATH": {"/user/specified/directory": "/user/specified/directory"},
    "TUNE_BANK_PATH": {"bank": "bank"},
    "USER_DB_MODE": {"SQLITE": "SQLITE", "shared": "SHARED"},
    "SYSTEM_DB_PATH": {"some folder": "some folder"},
    "TUNE_SECONDS": {"0.5": 0.5, "7": 7.0},
    "TUNE_TIMEOUT": {"2": 2.0},
    "TUNE_BUDGET": {"90": 90.0},
    "BACKGROUND_DUTY": {"25": 25.0, "0.5": 0.5},
    "BACKGROUND_PRIORITY": {"IDLE": "IDLE", "low": "LOW", "NORMAL": "NORMAL"},
    "BACKGROUND_MEMORY": {"1073741824": 1 << 30},
    "RECORD_TRAFFIC": {"YES": True, "no": False},
    "TUNE_RESULT_PATH": {"results": "results", "": ""},
    "TUNE_REGIME": {"LAYER": "LAYER", "COLD": "COLD", "warm": "WARM"},
    "TUNE_SEED": {"7": 7},
    "CPU_ISA": {
        name: name.upper() for name in ("AUTO", "x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "armv8-a")
    },
    "CPU_COMPILER": {"clang-19": "clang-19", "": ""},
    "KERNEL_SYMBOLS_DIR": {"symbols": "symbols", "": ""},
    "CACHE_DIR": {"cache": "cache", "": ""},
    "CACHE_BYTES": {"1024": 1024},
}  # fmt: skip
CASES = [(key, text, value) for key, spellings in SPELLINGS.items() for text, value in spellings.items()]
WRONG = [
    ("TUNING_MODE", "ENABLED", ["TUNING_DISABLED", "TUNING_USE_EXISTING", "TUNING_CREATE"]),
    ("TUNING_MODE", "", ["TUNING_CREATE"]),
    ("FIND_ENFORCE", "0", ["1", "2", "3", "4", "5", "NONE", "DB_UPDATE", "SEARCH", "SEARCH_DB_UPDATE", "DB_CLEAN"]),
    ("FIND_ENFORCE", "6", ["DB_CLEAN"]),
    ("FIND_ENFORCE", "CLEAN", ["DB_CLEAN"]),
    ("FIND_MODE", "4", ["NORMAL", "FAST", "HYBRID", "DYNAMIC_HYBRID"]),
    ("FIND_MODE", "FAST_HYBRID", ["DYNAMIC_HYBRID"]),
    ("USER_DB_MODE", "WAL", ["SQLITE", "SHARED"]),
    ("TUNE_REGIME", "HOT", ["COLD", "WARM"]),
    ("USER_DB_PATH", "", ["name a folder"]),
    ("TUNE_BANK_PATH", " ", ["name a folder"]),
    ("SYSTEM_DB_PATH", "", ["name a folder", "unset"]),
    ("TUNE_SECONDS", "-1", ["below 0"]),
    ("BACKGROUND_DUTY", "-1", ["below 0"]),
    ("BACKGROUND_PRIORITY", "HIGH", ["IDLE", "LOW", "NORMAL"]),
    ("TUNE_SECONDS", "nan", ["below 0"]),
    ("TUNE_TIMEOUT", "soon", ["not a number"]),
    ("TUNE_SEED", "1.5", ["not a whole number"]),
    ("CACHE_BYTES", "-1", ["below 0"]),
    ("NUM_STREAMS", "-2", ["below -1"]),
    ("NUM_STREAMS", "many", ["not a whole number", "AUTO"]),
    ("CPU_ISA", "AVX2", ["X86-64-V3", "X86-64-V4", "ARMV8-A"]),
    ("CPU_BIND_THREADS", "CORES", ["YES", "NO", "NUMA"]),
    ("MODEL_PRIORITY", "URGENT", ["LOW", "MEDIUM", "HIGH"]),
]


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TUNEWRIGHT_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("key", "text", "value"), CASES)
def test_a_config_key_sets_it(key, text, value) -> None:
    for name in (key, f"KEY_{key}", key.lower()):
        assert Settings.make({name: text}).get(key) == value


@pytest.mark.parametrize(("key", "text", "value"), CASES)
def test_a_variable_sets_it(key, text, value, monkeypatch) -> None:
    monkeypatch.setenv(f"TUNEWRIGHT_{key}", text)
    assert Settings.from_environment().get(key) == value
    assert Core().settings.get(key) == value


@pytest.mark.parametrize(("key", "text", "value"), CASES)
def test_a_core_sets_it(key, text, value) -> None:
    assert Core({key: text}).settings.get(key) == value
    core = Core()
    core.set_property({key: text})
    assert core.settings.get(key) == value
    assert core.get_property("CPU.HOST", key) == value


@pytest.mark.parametrize(("key", "text", "named"), WRONG)
def test_a_wrong_value_names_the_choices(key, text, named, monkeypatch) -> None:
    with pytest.raises(SettingsError) as by_config:
        Settings.make({key: text})
    monkeypatch.setenv(f"TUNEWRIGHT_{key}", text)
    with pytest.raises(SettingsError) as by_variable:
        Settings.from_environment()
    for caught, where in ((by_config, "config"), (by_variable, "environment")):
        assert key in str(caught.value) and str(caught.value).startswith(where)
        assert all(name in str(caught.value) for name in named), caught.value


def test_older_names_of_openvino_are_understood() -> None:
    settings = Settings.make({"KEY_GPU_PLUGIN_PRIORITY": 3, "CLDNN_PLUGIN_THROTTLE": "1"})
    assert (settings.gpu_queue_priority, settings.gpu_queue_throttle) == ("HIGH", "LOW")


def test_other_names_are_variables_too_and_the_newest_wins(monkeypatch) -> None:
    monkeypatch.setenv("TUNEWRIGHT_THROUGHPUT_STREAMS", "2")
    assert Settings.from_environment().num_streams == 2
    monkeypatch.setenv("TUNEWRIGHT_NUM_STREAMS", "3")
    assert Settings.from_environment().num_streams == 3
    monkeypatch.setenv("TUNEWRIGHT_MODEL_PRIORITY", "HIGH")
    assert Settings.from_environment().gpu_queue_priority == "HIGH"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("NUM_STREEMS", "NUM_STREAMS"), ("CACHEDIR", "CACHE_DIR"), ("GPU_THROUGHPUT_STREAM", "GPU_THROUGHPUT_STREAMS"),
     ("exclusive_requests", "EXCLUSIVE_ASYNC_REQUESTS"), ("KEY_PERF_COUNTS", "PERF_COUNT")],
)  # fmt: skip
def test_an_unknown_key_names_the_closest_one(wrong, meant) -> None:
    with pytest.raises(SettingsError, match=f"did you mean {meant}\\?"):
        Settings.make({wrong: 1})


@pytest.mark.parametrize("key", ["OMP_NUM_THREADS", "KMP_BLOCKTIME", "VPU_HW_STAGES_OPTIMIZATION", "DLA_ARCH_NAME"])
def test_what_has_no_meaning_here_says_why(key) -> None:
    with pytest.raises(SettingsError, match=r"not applicable: Tunewright does not (use OpenMP|support (VPUs|FPGAs))"):
        Settings.make({key: 1})


def test_a_process_that_is_started_finds_the_same_settings(monkeypatch) -> None:
    mine = Settings.make({"NUM_STREAMS": "AUTO", "GPU_MODEL_PRIORITY": "GPU_QUEUE_PRIORITY_LOW", "CPU_BIND_THREADS": 0})
    for name, value in child_environment(mine).items():
        if name.startswith("TUNEWRIGHT_"):
            monkeypatch.setenv(name, value)
    assert Settings.from_environment() == mine


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("TUNING_MODE", "TUNING_DISABLED", "TUNING_DISABLED"), ("TUNING_MODE", "TUNING_CREATE", "TUNING_CREATE"),
        ("TUNING_MODE", "TUNING_USE_EXISTING", "TUNING_USE_EXISTING"),
        ("PERF_COUNT", "YES", True), ("PERF_COUNT", "NO", False), ("EXCLUSIVE_ASYNC_REQUESTS", "YES", True),
        ("CLDNN_ENABLE_FP16_FOR_QUANTIZED_MODELS", "NO", False), ("GPU_NV12_TWO_INPUTS", "YES", True),
        ("GPU_ENABLE_LOOP_UNROLLING", "NO", False), ("DUMP_KERNELS", "YES", True),
        ("GPU_THROUGHPUT_STREAMS", "GPU_THROUGHPUT_AUTO", -1), ("GPU_PLUGIN_PRIORITY", "0", "MEDIUM"),
        ("GPU_PLUGIN_PRIORITY", "3", "HIGH"), ("GPU_PLUGIN_THROTTLE", "1", "LOW"),
        ("GPU_MODEL_PRIORITY", "GPU_MODEL_PRIORITY_HIGH", "HIGH"),
        ("GPU_MODEL_PRIORITY", "GPU_MODEL_PRIORITY_LOW", "LOW"),
    ],
)  # fmt: skip
def test_values_of_documents_000_and_001_may_keep_their_prefix(key, value, meant) -> None:
    for given in (value, f"KEY_{value}", f"key_{value.lower()}"):
        assert Settings.make({f"KEY_{key}": given}, Settings()).get(key) == meant


@pytest.mark.parametrize("level", ["HIGH", "LOW", "MED", "DISABLED", "DEFAULT"])
def test_priorities_of_document_001_may_keep_their_prefix(level) -> None:
    want = Settings.make({"GPU_QUEUE_PRIORITY": level}, Settings()).gpu_queue_priority
    for value in (f"GPU_QUEUE_PRIORITY_{level}|GPU_HOST_TASK_PRIORITY_LOW",
                  f"KEY_GPU_QUEUE_PRIORITY_{level} | KEY_GPU_HOST_TASK_PRIORITY_LOW"):  # fmt: skip
        found = Settings.make({"KEY_GPU_MODEL_PRIORITY": value}, Settings())
        assert (found.gpu_queue_priority, found.gpu_host_task_priority) == (want, "LOW")
    assert Settings.make({"GPU_QUEUE_PRIORITY": f"GPU_QUEUE_PRIORITY_{level}"}, Settings()).gpu_queue_priority == want


def test_a_variable_that_is_no_setting_gets_one_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("TUNEWRIGHT_FIND_ENFORC", "3")
    monkeypatch.setenv("TUNEWRIGHT_TEST_GPU", "1")
    for _ in range(3):
        assert Settings.from_environment() == Settings()
    (record,) = caplog.records
    assert "TUNEWRIGHT_FIND_ENFORC " in record.message and "did you mean TUNEWRIGHT_FIND_ENFORCE?" in record.message
    assert "TUNEWRIGHT_FIND_ENFORC" not in child_environment(Settings()), "a worker would warn again"
    assert os.environ["TUNEWRIGHT_FIND_ENFORC"] == "3"


def test_what_is_said_of_a_key_can_be_given() -> None:
    for row in Settings.describe():
        for value in row["values"] or ():
            Settings.make({row["key"]: value})
        for name in row["aliases"]:
            assert Settings.key(name) == row["key"]
        assert Settings.make({row["key"]: row["default"]}, Settings()).get(row["key"]) == row["default"]


def test_the_cases_cover_every_choice_of_every_setting() -> None:
    for f in dataclasses.fields(Settings):
        values = f.metadata.get("values")
        if values:
            assert set(SPELLINGS[f.name.upper()].values()) == set(values.values()), f.name
            assert set(values) <= {text.upper() for text in SPELLINGS[f.name.upper()]}, f.name


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_numbers_may_be_numbers(number) -> None:
    assert Settings.make({"FIND_ENFORCE": number}).find_enforce == str(number)


def test_config_wins_over_environment_and_environment_over_default(monkeypatch) -> None:
    assert Settings.from_environment().find_enforce == "1"
    monkeypatch.setenv("TUNEWRIGHT_FIND_ENFORCE", "SEARCH")
    assert Core().settings.find_enforce == "3"
    core = Core({"FIND_ENFORCE": "4"})
    assert core.settings.find_enforce == "4"
    core.set_property({"FIND_ENFORCE": "DB_CLEAN"})
    assert core.settings.find_enforce == "5"


def test_a_folder_may_be_unset_again() -> None:
    base = Settings.make({"SYSTEM_DB_PATH": "x"}, Settings())
    assert Settings.make({"SYSTEM_DB_PATH": None}, base).system_db_path is None


def test_the_list_of_settings_is_readable(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    assert tools.execute(["settings"]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in SPELLINGS)
    assert max(map(len, out.splitlines())) <= 120

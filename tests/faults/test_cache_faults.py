"""The kernel cache under kill -9, corruption, full and read-only disks: results are the same, and nothing is left."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

from helpers import fresh_device
from tunewright.devices import kernel_cache
from tunewright.devices.kernel_cache import KernelCache
from tunewright.plugins.single import SingleDevice, open_device
from tunewright.settings import Settings

MODEL = '<ir_version: 10, opset_import: ["" : 21]> g (float[8, 40] x) => (float[8, 40] y) { s = Softmax(x) y = Erf(s) }'


def settle(folder, patch):
    """A home and a folder for temporary files of its own, for this process and its children."""
    for name, variable in {
        "home": "HOME", "config": "XDG_CONFIG_HOME", "user": "XDG_CACHE_HOME", "temporary": "TMPDIR"
    }.items():  # fmt: skip
        (folder / name).mkdir()
        patch.setenv(variable, str(folder / name))
    patch.setenv("OPENBLAS_NUM_THREADS", "1")
    for name in ("TUNEWRIGHT_CACHE_DIR", "TUNEWRIGHT_CACHE_BYTES"):
        patch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    settle(tmp_path, monkeypatch)
    monkeypatch.setattr(kernel_cache, "_caches", {})
    yield
    while started:
        child = started.pop()
        child.kill()
        child.communicate()


started = []


def python(code, *arguments, within=(), **environment):
    """A child process; none outlives its test."""
    started.append(
        subprocess.Popen(
            [*within, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], text=True,
            env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
    )  # fmt: skip
    return started[-1]


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if not path.is_dir())


# Writers that are killed

WRITER = """
    import hashlib, random, sys
    from pathlib import Path
    from tunewright.devices.kernel_cache import KernelCache
    cache, rng = KernelCache(Path(sys.argv[1]), 1 << 24), random.Random(int(sys.argv[2]))
    print("go", flush=True)
    while True:
        key, body = f"key {rng.randrange(4)}", rng.randbytes(rng.randrange(1, 300_000))
        cache.put(key, {"body": body, "digest": hashlib.sha256(key.encode() + body).digest()})
"""


@pytest.mark.parametrize("kills", [12, pytest.param(150, marks=pytest.mark.soak)])
def test_a_killed_writer_never_leaves_half_an_entry(tmp_path, kills):
    import hashlib

    rng, reader = random.Random(kills), KernelCache(tmp_path / "kernels", 1 << 24)
    writers = [python(WRITER, reader.folder, seed) for seed in range(2)]  # one starts while the other is watched
    for kill in range(kills):
        writer = writers[kill % 2]
        assert writer.stdout.readline() == "go\n"
        deadline, late = time.monotonic() + rng.uniform(0, 0.1), time.monotonic() + 60
        while (now := time.monotonic()) < deadline or (not reader.counters.hits and now < late):
            for key in (f"key {k}" for k in range(4)):
                found = reader.get(key)
                assert found is None or found["digest"] == hashlib.sha256(key.encode() + found["body"]).digest()
        writer.kill()
        writer.communicate()
        writers[kill % 2] = python(WRITER, reader.folder, kill + 2)
    assert reader.counters.rejected == reader.counters.errors == 0 and reader.counters.hits > 0


CROWD = """
    import json, random, sys
    from pathlib import Path
    from tunewright.devices import kernel_cache
    kernel_cache._TRUST = 0.0  # they look at the folder each time, so the bound holds for all together
    cache, rng = kernel_cache.KernelCache(Path(sys.argv[1]), 500_000), random.Random(int(sys.argv[2]))
    for _ in range(int(sys.argv[3])):
        key = f"key {rng.randrange(40)}"
        found = cache.get(key)
        assert found is None or found == {"a": key.encode() * (1000 + int(key[4:]) * 90)}
        if found is None:
            cache.put(key, {"a": key.encode() * (1000 + int(key[4:]) * 90)})
    print(json.dumps(cache.counters.as_dict()))
"""


@pytest.mark.parametrize("turns", [300, pytest.param(5000, marks=pytest.mark.soak)])
def test_four_processes_share_a_cache_that_is_too_small(tmp_path, turns):
    crowd = [python(CROWD, tmp_path / "kernels", seed, turns) for seed in range(4)]
    evictions = 0
    for child in crowd:
        out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
        counters = json.loads(out)
        assert counters["rejected"] == counters["errors"] == 0 and counters["hits"]
        evictions += counters["evictions"]
    cache = KernelCache(tmp_path / "kernels", 500_000)
    assert evictions and 0 < sum(entry.nbytes for entry in cache.entries()) <= 500_000
    assert all(entry.path.suffix == ".kernel" for entry in cache.entries())


# Inference

compiles = pytest.mark.skipif(open_device("CPU").family == "host", reason="the CPU device compiles nothing here")
#: what the CPU device compiles beside kernels: the thread pool, what reads CPUID, and a probe; and it keeps what
#: became of the probe, which is not loaded then
OWN, VERDICTS, PROBES = 3, 1, 1

INFER = """
    import hashlib, json, logging, os, signal, sys
    import numpy as np
    from onnx import parser
    told = []
    class Told(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
    logging.getLogger("tunewright").addHandler(Told())
    import tunewright
    from tunewright.devices import kernel_cache
    from tunewright.settings import Settings
    model, then = parser.parse_model(sys.argv[1]), sys.argv[2]
    x = np.linspace(-3, 3, 320, dtype=np.float32).reshape(8, 40)
    config = {"HOST_FALLBACK": "NO"}
    if len(sys.argv) > 3:
        config["CACHE_DIR"] = sys.argv[3]
    y = tunewright.Core(config).compile_model(model, "CPU")({"x": x})["y"]
    cache = kernel_cache.KernelCache.of(Settings.make(config))
    print(json.dumps({
        "y": hashlib.sha256(y.tobytes()).hexdigest(), "told": told, "counters": cache and cache.counters.as_dict(),
    }), flush=True)
    if then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def infer(*arguments, then="", expect=0, **options):
    child = python(INFER, MODEL, then, *arguments, **options)
    out, err = child.communicate(timeout=300)
    assert child.returncode == expect, err
    return json.loads(out)


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """What the first process said, and the folders that it left."""
    if open_device("CPU").family == "host":
        pytest.skip("the CPU device compiles nothing here")
    left = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:
        settle(left, patch)
        return infer(), left


@pytest.fixture
def warm(cold, tmp_path):
    """What the first process said; its folders are here."""
    for name in ("user", "config"):
        shutil.copytree(cold[1] / name, tmp_path / name, dirs_exist_ok=True)
    return cold[0]


def test_the_second_process_compiles_nothing(warm, tmp_path):
    counters = warm["counters"]
    assert counters["misses"] + VERDICTS == counters["stores"] > OWN + VERDICTS + 1
    assert counters["hits"] == 0 and not warm["told"]
    again = infer()
    assert again["counters"] == {**counters, "misses": 0, "stores": 0, "hits": counters["misses"] - PROBES}
    assert again["y"] == warm["y"] and not again["told"]
    kept = files(tmp_path / "user")
    assert len(kept) == counters["stores"] and all(name.startswith("tunewright/kernels/") for name in kept)
    assert files(tmp_path / "config") == ["tunewright/kernel-cache.key"]
    assert not files(tmp_path / "home") and not os.listdir(tmp_path / "temporary")


def test_without_a_cache_nothing_is_written_anywhere(cold, tmp_path):
    done = infer(TUNEWRIGHT_CACHE_DIR="")
    assert done["counters"] is None
    assert not any(files(tmp_path / name) for name in ("home", "config", "user", "temporary"))
    assert not os.listdir(tmp_path / "temporary") and done["y"] == cold[0]["y"]


def test_a_model_may_have_a_folder_of_its_own(warm, tmp_path):
    """Of its kernels: what the device needs itself is nobody's."""
    mine = KernelCache((tmp_path / "user" / "tunewright" / "kernels").rename(tmp_path / "mine"), 1 << 24)
    kernels = [entry for entry in mine.entries() if entry.label.startswith("CPU ")]
    kernels[0].path.unlink()
    done = infer(mine.folder, TUNEWRIGHT_CACHE_DIR="")
    assert len(kernels) == warm["counters"]["stores"] - OWN - VERDICTS > 1
    assert (done["counters"]["stores"], done["counters"]["hits"]) == (1, len(kernels) - 1)
    assert len(files(mine.folder)) == warm["counters"]["stores"] and not files(tmp_path / "user")


def test_a_killed_process_leaves_what_it_compiled_and_nothing_else(cold, tmp_path):
    dead = infer(then="die", expect=-signal.SIGKILL)
    assert dead["counters"] == cold[0]["counters"] and not os.listdir(tmp_path / "temporary")
    again = infer()
    assert again["counters"]["hits"] == dead["counters"]["misses"] - PROBES and again["counters"]["misses"] == 0


def spoil(path, rng, others):
    """Damage an entry in one of several ways; ``others`` are what other entries hold."""
    data = path.read_bytes()
    at = rng.randrange(len(data))
    how = rng.choice(["flip", "cut", "swap", "mix"])
    other = rng.choice(others)
    if how == "flip":
        data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    elif how == "cut":
        data = data[:at]
    elif how == "swap":
        data = other
    else:
        data = data[:at] + bytes(b ^ 0xFF for b in data[at : at + 100]) + other[at + 100 :]
    path.write_bytes(data)


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(10))])
def test_spoilt_entries_do_not_change_results(warm, tmp_path, seed):
    """In a process of its own, so that nothing but the cache could have the kernels."""
    entries = sorted((tmp_path / "user" / "tunewright" / "kernels").iterdir())
    kept, rng = {path: path.read_bytes() for path in entries}, random.Random(seed)
    for path in entries:
        spoil(path, rng, [kept[p] for p in entries if p != path])
    again = infer()
    assert again["y"] == warm["y"] and not again["told"]
    assert again["counters"] == {**warm["counters"], "rejected": len(entries)}, "they were replaced"


@pytest.mark.parametrize("name", fresh_device.NAMES)
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.soak)])
def test_every_corruption_is_detected_and_the_results_are_identical(tmp_path, name, count):
    from tunewright.frontend.onnx import load

    settings = Settings.make({"CACHE_DIR": str(tmp_path / "kernels"), "HOST_FALLBACK": "NO"})
    model, rng = load(parser.parse_model(MODEL), settings), random.Random(count)
    x = np.linspace(-3, 3, 320, dtype=np.float32).reshape(8, 40)
    cache = KernelCache.of(settings)
    assert cache is not None
    first = SingleDevice(fresh_device.fresh(name)).compile(model, settings)({"x": x})["y"].tobytes()
    kept = {entry.path: entry.path.read_bytes() for entry in cache.entries()}
    assert len(kept) > 1
    for k in range(count):
        path = rng.choice(list(kept))
        spoil(path, rng, [kept[p] for p in kept if p != path])
        before = cache.counted()
        y = SingleDevice(fresh_device.fresh(name)).compile(model, settings)({"x": x})["y"]
        assert y.tobytes() == first, k
        changed = cache.counted() - before
        assert (changed.rejected, changed.misses, changed.hits) == (1, 1, len(kept) - 1), k
        kept[path] = path.read_bytes()


# Disks


def mounted(kind, folder):
    """A command under which a folder is a file system of its own, as only root can make it."""
    make = {
        "full": f"mount -t tmpfs -o size=4k,mode=700 tmpfs {folder}",
        "read-only": f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}",
    }[kind]
    within = ["unshare", "-m", "sh", "-c", f'{make} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    return within


def test_a_full_disk_is_told_once_and_results_are_the_same(cold, tmp_path):
    (tmp_path / "kernels").mkdir(mode=0o700)
    done = infer(tmp_path / "kernels", within=mounted("full", tmp_path / "kernels"))
    (told,) = done["told"]
    assert "No space left" in told and done["y"] == cold[0]["y"]
    assert done["counters"]["errors"] == done["counters"]["misses"] > 1


def test_a_read_only_disk_is_read_and_told_once(warm, tmp_path):
    folder = tmp_path / "user" / "tunewright" / "kernels"
    gone = next(e.path for e in KernelCache(folder, 1 << 24).entries() if e.label.startswith("CPU "))
    gone.unlink()
    done = infer(within=mounted("read-only", folder))
    (told,) = done["told"]
    assert "Read-only file system" in told and done["y"] == warm["y"] and not gone.exists()
    counters = done["counters"]
    assert (counters["misses"], counters["errors"], counters["hits"]) == (1, 1, warm["counters"]["misses"] - PROBES - 1)


def test_a_home_that_cannot_be_written_is_told_once(cold, tmp_path):
    (tmp_path / "file").write_text("")
    done = infer(XDG_CONFIG_HOME=str(tmp_path / "file"), XDG_CACHE_HOME=str(tmp_path / "file"))
    (told,) = done["told"]
    assert "there is no kernel cache" in told and done["y"] == cold[0]["y"]
    assert not os.listdir(tmp_path / "temporary")


# Warm start

LOAD = """
    import json, time
    import numpy as np
    import tunewright
    from tunewright.plugins.single import open_device
    from tunewright.testing.models import resnet
    core = tunewright.Core()
    model, device = core.read_model(resnet(50)), open_device("CPU")
    core.compile_model(resnet(18, size=32), "CPU.HOST")  # imports
    x = np.zeros((1, 3, 224, 224), np.float32)
    begin = time.perf_counter()
    compiled = core.compile_model(model, "CPU")
    ready = time.perf_counter()
    compiled({"x": x})
    print(json.dumps([ready - begin, time.perf_counter() - begin]))
"""


@pytest.mark.soak
@compiles
def test_a_warm_start_of_resnet50_takes_a_quarter_of_a_cold_one(tmp_path):
    """In fresh processes, the best of three: `compile_model`, and with the first inference."""

    def best(clear):
        found = []
        for _ in range(3):
            if clear:
                shutil.rmtree(tmp_path / "user" / "tunewright", ignore_errors=True)
            child = python(LOAD)
            out, err = child.communicate(timeout=120)
            assert child.returncode == 0, err
            found.append(json.loads(out))
        return [min(column) for column in zip(*found, strict=True)]

    cold, warm = best(clear=True), best(clear=False)
    print(f"cold {cold}, warm {warm}")
    assert warm[0] <= 0.25 * cold[0] and warm[1] <= 0.25 * cold[1], (cold, warm)

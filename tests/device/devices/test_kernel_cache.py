"""The kernel cache: what it keeps, whom it trusts, how large it gets, and the programs of a device that use it."""

import errno
import itertools
import logging
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from helpers import fresh_device, opencl_runtime
from helpers.fresh_device import fresh
from helpers.launches import kernel
from tunewright.devices import kernel_cache
from tunewright.devices.kernel_cache import KernelCache, is_inside, pack, unpack
from tunewright.devices.native import programs as native_programs
from tunewright.devices.opencl import programs
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers.c.source.emit import EmittedLaunch, Out

FILES = {"program": bytes(range(256)) * 8, "k/1-1-1/k.so": b"code", "empty": b""}
KEY = {"source": "kernel void k() {}", "driver": "1.0"}


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A home of its own, and nothing told yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for name in ("TUNEWRIGHT_CACHE_DIR", "TUNEWRIGHT_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kernel_cache, "_told", False)
    monkeypatch.setattr(kernel_cache, "_caches", {})


@pytest.fixture
def cache(tmp_path):
    return KernelCache(tmp_path / "kernels", 1 << 20)


def only(cache):
    (entry,) = cache.entries()
    return entry.path


# What it keeps


def test_what_is_put_comes_back(cache):
    assert cache.get(KEY) is None
    assert cache.put(KEY, FILES, "a device")
    assert cache.get(KEY) == FILES
    assert cache.get(dict(reversed(KEY.items()))) == FILES, "the order of a key's fields says nothing"
    assert KernelCache(cache.folder, 1 << 20).get(KEY) == FILES, "another process"
    assert cache.counters.as_dict() == {
        "hits": 2, "misses": 1, "stores": 1, "evictions": 0, "rejected": 0, "errors": 0
    }  # fmt: skip


def test_a_later_group_takes_the_place_of_an_earlier_one(cache):
    cache.put(KEY, FILES)
    cache.put(KEY, {"other": b"x"})
    assert cache.get(KEY) == {"other": b"x"} and len(cache.entries()) == 1


@pytest.mark.parametrize("field", KEY)
def test_a_key_with_another_field_is_another_key(cache, field):
    cache.put(KEY, FILES)
    assert cache.get({**KEY, field: KEY[field] + " "}) is None
    assert cache.get({**KEY, "more": ""}) is None
    assert cache.get(KEY) == FILES


def test_files_are_only_their_owners(cache):
    cache.put(KEY, FILES)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert only(cache).stat().st_mode & 0o777 == 0o600
    assert os.listdir(cache.folder) == [only(cache).name], "nothing unfinished is left"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".", "a//b", "a/./b", "a/", "..", "a\\b", "a\0b"])
def test_a_group_has_no_names_that_lead_out_of_it(cache, name):
    assert not is_inside(name)
    with pytest.raises(ValueError, match="is not the name of a file in a group"):
        cache.put(KEY, {name: b"x"})


def test_a_name_that_leads_out_is_refused_by_the_reader_too(cache, monkeypatch):
    with monkeypatch.context() as careless:
        careless.setattr(kernel_cache, "is_inside", lambda name: True)
        cache.put(KEY, {"a": b"x", "../evil": b"x"})
        assert cache.get(KEY) is not None
    assert cache.get(KEY) is None and cache.counters.rejected == 1


# Whom it trusts


def damaged(data, rng, other):
    """One of the ways in which an entry can be wrong."""
    how = rng.choice(["flip", "cut", "grow", "zero", "empty", "swap", "mix"])
    at = rng.randrange(len(data))
    if how == "flip":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if how == "cut":
        return data[:at]
    if how == "grow":
        return data + rng.randbytes(rng.randrange(1, 64))
    if how == "zero":
        return data[:at] + bytes(len(data) - at)
    if how == "empty":
        return b""
    return other if how == "swap" else data[:at] + other[at:]


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.soak)])
def test_an_entry_that_was_changed_is_a_miss_and_removed(cache, count):
    rng = random.Random(count)
    other = {**KEY, "driver": "2.0"}
    cache.put(other, {name: data + b"!" for name, data in FILES.items()})
    theirs = only(cache).read_bytes()
    cache.put(KEY, FILES)
    path = cache._path(kernel_cache.key_text(KEY))
    whole = path.read_bytes()
    done = 0
    while done < count:
        data = damaged(whole, rng, theirs)
        if data == whole:
            continue
        path.write_bytes(data)
        assert cache.get(KEY) is None and not path.exists()
        done += 1
    assert cache.counters.rejected == cache.counters.misses == count
    assert cache.get(other) is not None


def test_every_bit_counts():
    data, secret = pack("key", {"a": b"x"}, b"s" * 32), b"s" * 32
    assert unpack(data, "key", secret) == {"a": b"x"}
    for at in range(len(data)):
        for bit in range(8):
            assert unpack(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], "key", secret) is None
        assert unpack(data[:at], "key", secret) is None


def test_members_cannot_change_places():
    secret = b"s" * 32
    ab, ba = pack("key", {"a": b"xx", "b": b"yy"}, secret), pack("key", {"a": b"yy", "b": b"xx"}, secret)
    assert len(ab) == len(ba)
    assert unpack(ab[:-36] + ba[-36:-32] + ab[-32:], "key", secret) is None


def test_an_entry_of_another_key_is_refused_though_it_is_genuine(cache):
    cache.put(KEY, FILES)
    other = {**KEY, "driver": "2.0"}
    only(cache).rename(cache._path(kernel_cache.key_text(other)))
    assert cache.get(other) is None and cache.counters.rejected == 1


def test_an_entry_of_another_version_is_refused_though_it_is_genuine(cache, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(kernel_cache, "MAGIC", b"tunewright kernel 0\n")
        cache.put(KEY, FILES)
        assert cache.get(KEY) == FILES
    assert cache.get(KEY) is None and cache.counters.rejected == 1


def test_a_new_secret_makes_everything_a_miss(cache, tmp_path):
    cache.put(KEY, FILES)
    key = tmp_path / "config" / "tunewright" / "kernel-cache.key"
    assert key.stat().st_mode & 0o777 == 0o600 and key.stat().st_size == 32
    key.write_bytes(bytes(32))
    again = KernelCache(cache.folder, 1 << 20)
    assert again.get(KEY) is None and again.counters.rejected == 1
    assert again.put(KEY, FILES) and again.get(KEY) == FILES


def test_a_secret_that_was_cut_off_is_made_anew(cache, tmp_path):
    cache.put(KEY, FILES)
    key = tmp_path / "config" / "tunewright" / "kernel-cache.key"
    key.write_bytes(b"short")
    again = KernelCache(cache.folder, 1 << 20)
    assert again.get(KEY) is None and again.put(KEY, FILES) and key.stat().st_size == 32


def test_processes_that_start_at_once_agree_on_the_secret(tmp_path):
    code = "from tunewright.devices.kernel_cache import _secret; print(_secret().hex())"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    assert len({child.communicate(timeout=60)[0] for child in started}) == 1
    assert os.listdir(tmp_path / "config" / "tunewright") == ["kernel-cache.key"]


@pytest.mark.parametrize("what", ["folder", "secret"])
def test_what_others_may_write_or_read_is_not_used(cache, tmp_path, caplog, what):
    cache.put(KEY, FILES)
    if what == "folder":
        cache.folder.chmod(0o777)
    else:
        (tmp_path / "config" / "tunewright" / "kernel-cache.key").chmod(0o644)
    again = KernelCache(cache.folder, 1 << 20)
    with caplog.at_level(logging.WARNING, "tunewright"):
        assert again.get(KEY) is None and not again.put(KEY, FILES) and again.get(KEY) is None
    (told,) = caplog.records
    assert "others than its owner have access" in told.getMessage()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_folder_is_not_used(cache, caplog):
    cache.put(KEY, FILES)
    os.chown(cache.folder, 12345, 12345)
    again = KernelCache(cache.folder, 1 << 20)
    with caplog.at_level(logging.WARNING, "tunewright"):
        assert again.get(KEY) is None and not again.put(KEY, FILES)
    (told,) = caplog.records
    assert "belongs to another user" in told.getMessage()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "huge"])
def test_what_is_not_a_plain_file_is_a_miss(cache, tmp_path, kind):
    cache.put(KEY, FILES)
    path = only(cache)
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "huge":
        os.truncate(path, 1 << 40)
    else:
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    assert cache.get(KEY) is None


# How large it gets


def test_the_least_recently_used_go_first(tmp_path):
    cache = KernelCache(tmp_path / "kernels", 100_000)
    for k in range(9):
        cache.put(f"{k}", {"a": bytes(10_000)})
        os.utime(cache._path(f"{k}"), (1000 + k, 1000 + k))
    assert cache.get("0") is not None, "which makes it the newest"
    cache.put("9", {"a": bytes(20_000)})
    assert cache.get("0") is not None and cache.get("9") is not None
    assert cache.get("1") is None and cache.get("8") is not None
    assert cache.counters.evictions == 10 - len(cache.entries())


def test_the_bound_holds(tmp_path):
    rng, cache = random.Random(1), KernelCache(tmp_path / "kernels", 50_000)
    for k in range(200):
        cache.put(f"{k}", {"a": bytes(rng.randrange(1, 9_000))})
        assert sum(p.stat().st_size for p in cache.folder.iterdir()) <= 50_000
    assert cache.counters.stores == 200 and cache.counters.evictions > 100 and len(cache.entries()) > 4


def test_the_bound_holds_for_what_others_have_written(tmp_path):
    first, second = (KernelCache(tmp_path / "kernels", 50_000) for _ in range(2))
    for k in range(10):
        first.put(f"a{k}", {"a": bytes(4_000)})
    second.put("b", {"a": bytes(20_000)})
    assert sum(entry.nbytes for entry in second.entries()) <= 50_000 and second.get("b") is not None


def test_what_is_larger_than_the_bound_is_not_stored(tmp_path):
    cache = KernelCache(tmp_path / "kernels", 1000)
    assert not cache.put(KEY, FILES) and not cache.entries()
    assert KernelCache(tmp_path / "none", 0).put("k", {}) is False


def test_what_killed_writers_left_is_removed_and_other_files_are_not(tmp_path):
    cache = KernelCache(tmp_path / "kernels", 10_000)
    cache.put("old", {"a": bytes(4_000)})
    left, fresh = cache.folder / f"{'0' * 16}.unfinished", cache.folder / f"{'1' * 16}.unfinished"
    mine = [cache.folder / name for name in ("notes.kernel", "letter.txt", f"{'0' * 64}.kernel.bak")]
    for path in (left, fresh, *mine):
        path.write_bytes(bytes(3_000))
    os.utime(left, (1000, 1000))
    cache = KernelCache(cache.folder, 10_000)  # another process: this one does not look so soon again
    cache.put("new", {"a": bytes(1_000)})
    assert cache.get("old") is not None, "there is room for it"
    assert not left.exists() and fresh.exists() and all(path.exists() for path in mine)
    assert [entry.path for entry in cache.clear()] and not cache.entries()
    assert fresh.exists() and all(path.exists() for path in mine)


# What goes wrong


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_told_once(cache, monkeypatch, caplog, code):
    cache.put(KEY, FILES)

    def fail(*arguments):
        raise OSError(code, os.strerror(code), str(cache.folder))

    monkeypatch.setattr(os, "replace", fail)
    with caplog.at_level(logging.WARNING, "tunewright"):
        assert not any(cache.put(f"{k}", FILES) for k in range(5))
    (told,) = caplog.records
    assert os.strerror(code) in told.getMessage() and "CACHE_DIR" in told.getMessage()
    assert cache.counters.errors == 5 and cache.get(KEY) == FILES
    assert [p.suffix for p in cache.folder.iterdir()] == [".kernel"], "nothing unfinished is left"


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = KernelCache(tmp_path / "file" / "kernels", 1 << 20)
    with caplog.at_level(logging.WARNING, "tunewright"):
        assert cache.get(KEY) is None and not cache.put(KEY, FILES) and not cache.entries() and not cache.clear()
        KernelCache(tmp_path / "file" / "others", 1 << 20).get(KEY)
    (told,) = caplog.records
    assert "there is no kernel cache" in told.getMessage()


# Which one is used


def test_settings_name_the_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TUNEWRIGHT_CACHE_DIR", raising=False)
    unset = KernelCache.of(Settings.make())
    assert unset is not None and unset.folder == tmp_path / "user" / "tunewright" / "kernels"
    assert KernelCache.of(Settings.make({"CACHE_DIR": ""})) is None
    a = KernelCache.of(Settings.make({"CACHE_DIR": str(tmp_path / "a"), "CACHE_BYTES": 77}))
    assert a is KernelCache.of(Settings.make({"CACHE_DIR": str(tmp_path / "a"), "CACHE_BYTES": 77})) is not unset
    assert a is not None and a.limit_bytes == 77
    monkeypatch.setenv("HOME", str(tmp_path))
    home = KernelCache.of(Settings.make({"CACHE_DIR": "~/b"}))
    assert home is not None and home.folder == tmp_path / "b"
    assert not (tmp_path / "user").exists() and not (tmp_path / "a").exists(), "asking writes nothing"


def test_a_build_uses_the_environments_unless_told(cache, monkeypatch):
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", str(cache.folder))
    named = kernel_cache.current()
    assert named is not None and named.folder == cache.folder
    with kernel_cache.using(None):
        assert kernel_cache.current() is None
        with kernel_cache.using(cache):
            assert kernel_cache.current() is cache
        assert kernel_cache.current() is None
    assert kernel_cache.current() is named


# The programs of a device


@pytest.fixture(params=fresh_device.NAMES)
def name(request):
    return request.param


def call(k):
    """A kernel that writes a number."""
    return EmittedLaunch("k", (4,), (Out(),), "", ("GLOBAL i32* x",), f"x[GID(0)] = {k};")


def source(device, k):
    return call(k).program(device.dialect)


def run(device, program):
    x, queue = np.zeros(4, np.int32), device.queue()
    made = kernel(device, call(0), [], [x])
    made.programs = [program]
    made.run(queue, [], [x])
    queue.finish()
    return x.tolist()


#: numbers that no other test's kernels have: a text that this process has compiled is not compiled again
unused = itertools.count(7_000_000)


def test_programs_in_memory_are_bounded_and_kernels_outlive_them(name, monkeypatch):
    for module in (programs, native_programs):
        monkeypatch.setattr(module, "MOST", 2)
    device = fresh(name)
    with kernel_cache.using(None):
        first = device.build(source(device, next(unused)))
        expected = run(device, first)
        kept = [device.build(source(device, next(unused))) for _ in range(3)]
        assert len(device._programs) == 2
        assert run(device, first) == expected, "still alive"
        assert device.build(source(device, run(device, kept[2])[0])) is kept[2], "the latest is kept"


def test_a_program_is_stored_at_once_and_loaded_by_the_next(name, cache):
    k, device, other = next(unused), fresh(name), fresh(name)
    with kernel_cache.using(cache):
        program = device.build(source(device, k))
        assert (cache.counters.hits, cache.counters.misses, cache.counters.stores) == (0, 1, 1)
        again = other.build(source(other, k))
    assert (cache.counters.hits, cache.counters.misses, cache.counters.stores) == (1, 1, 1)
    assert run(device, program) == run(other, again) == [k] * 4


def test_a_program_in_memory_is_stored_in_every_cache_that_asks(name, cache, tmp_path):
    """Wherever it came from."""
    k, device, other = next(unused), fresh(name), KernelCache(tmp_path / "other", 1 << 20)
    text = source(device, k)
    with kernel_cache.using(None):
        device.build(text)
    with kernel_cache.using(cache):
        device.build(text)
        device.build(text)
    loaded = fresh(name)
    for each in (cache, other):
        with kernel_cache.using(each):
            assert run(loaded, loaded.build(text)) == [k] * 4
    key = device._programs._key(text)
    assert cache.peek(key) == other.peek(key) is not None
    assert (cache.counters.stores, cache.counters.hits, other.counters.stores) == (1, 1, 1)


@pytest.mark.parametrize("what", ["program", "object", "x"])
def test_what_the_runtime_refuses_is_compiled_and_replaced(name, cache, what):
    k, device = next(unused), fresh(name)
    text = source(device, k)
    key = device._programs._key(text)
    files = {what: b"nonsense"}
    if name == "CPU":
        files["compiler"] = device._programs._compiler.identity.encode()
    cache.put(key, files)
    with kernel_cache.using(cache):
        assert run(device, device.build(text)) == [k] * 4
    assert cache.counters.rejected == 1 and cache.peek(key) not in (None, files)


@opencl_runtime.needs_opencl
def test_a_key_names_everything(monkeypatch):
    raw = open_device(opencl_runtime.NAME).raw
    found = programs.identity(raw, "-w")
    assert {"container", "device", "driver", "version", "platform", "library", "processor", "options"} <= set(found)
    assert found["driver"] == raw.driver_version and raw.platform.version in found["platform"]
    assert programs.identity(raw, "-x") != found
    monkeypatch.setattr(programs, "cpu_flags", lambda: frozenset({"another"}))
    assert programs.identity(raw, "-w")["processor"] != found["processor"]


@pytest.mark.skipif(opencl_runtime.NAME != "CPU.INTEL", reason="Intel's runtime is not here")
def test_the_library_of_the_runtime_is_part_of_the_key():
    library, size, changed = programs.identity(open_device("CPU.INTEL").raw, "")["library"].split()
    assert "libintelocl" in library and int(size) > 0 and int(changed) > 0

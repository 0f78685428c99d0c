"""From a kernel's text to a cubin and what its launch needs: without a GPU, for any of them.

Nothing of Triton's own cache on disk is used. What was compiled is kept in memory with the kernel, and in the kernel
cache under a key with everything that it depends on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

from tunewright.devices import build_options, kernel_cache
from tunewright.devices.base import Target
from tunewright.devices.cuda.driver import NUMBERS, WARP, LoadedCubin, Unloadable, driver
from tunewright.devices.kernel_cache import KernelCache
from tunewright.errors import ExecutionError

from .text import WIDE, define

Files: TypeAlias = Mapping[str, bytes]
Constant: TypeAlias = int | float | bool | str | None
#: is given what was compiled, at once; from any thread
Keep: TypeAlias = "Callable[[Wanted, Files], None]"

BINARY, ABOUT = "kernel.cubin", "kernel.json"
#: keywords of a launch that are for the compiler; all others are constants of the kernel
OPTIONS = frozenset({"num_warps", "num_stages", "maxnreg"})
#: pointers to memory that begins at a multiple of this are told so
ALIGNED = 16
#: what Triton calls the element types of torch
POINTERS = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1", "uint8": "u8",
    "int8": "i8", "int16": "i16", "uint16": "u16", "int32": "i32", "uint32": "u32", "int64": "i64", "uint64": "u64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip
#: what a launch needs to know beside the cubin, each a whole number; the first is a text
_NAME, _NEEDED = "name", ("num_warps", "shared", "global_scratch_size", "overlaps")
#: From this compute capability on a kernel may be put in place while the last programs of the one before it run:
#: launches of a graph follow each other sooner. It waits for that one before it touches memory: whatever came before is
#: over as well. (To let it begin still earlier, by gdc_launch_dependents, costs more than it gains)
OVERLAPPING = 90
_WAIT = "    tl.extra.cuda.gdc_wait()\n"
#: see `text.WIDE`
_WIDENED = WIDE.replace(
    "return x", 'return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)'
)


@dataclass(frozen=True)
class Wanted:
    """One kernel to be compiled: a text, with what a launch tells of its arguments."""

    text: str
    name: str
    #: types of the arguments in their order: "*fp16", "*fp16 16" for aligned memory, "i32", "none"
    arguments: tuple[str, ...]
    constants: tuple[tuple[str, Constant], ...]
    options: tuple[tuple[str, int], ...]
    #: compute capability: 90
    arch: int

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text, "name": self.name, "arguments": list(self.arguments),
            "constants": dict(self.constants), "options": dict(self.options), "arch": self.arch,
        }  # fmt: skip

    @staticmethod
    def of(data: Mapping[str, Any]) -> Wanted:
        """From `to_json`."""
        return Wanted(
            data["text"], data["name"], tuple(data["arguments"]), tuple(sorted(data["constants"].items())),
            tuple(sorted(data["options"].items())), data["arch"],
        )  # fmt: skip

    def key(self) -> dict[str, str]:
        """Everything that the cubin depends on."""
        given = {name: json.dumps(value, sort_keys=True) for name, value in self.to_json().items() if name != "text"}
        return {**_identity(self.arch), **given, "source": self.text}


@cache
def _identity(arch: int) -> dict[str, str]:
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.nvidia.compiler import get_ptxas

    ptxas = get_ptxas(arch)
    return {
        "container": kernel_cache.MAGIC.decode().strip(),
        "kind": "triton",
        "target": f"cuda {arch} {WARP}",
        "added": _WIDENED + (_WAIT if arch >= OVERLAPPING else ""),
        "triton": triton.__version__,
        "ptxas": str(ptxas.version),
        "environment": json.dumps(dict(get_cache_invalidating_env_vars()), sort_keys=True),
    }


def capability(target: Target) -> int | None:
    """The compute capability that kernels of a target are compiled for; None where they are interpreted."""
    from triton import knobs

    digits = target.arch.removeprefix("sm_")
    return int(digits) if digits.isdigit() and not knobs.runtime.interpret else None


def build(wanted: Wanted) -> dict[str, bytes]:
    """Compile, in this process. ExecutionError when the compiler refuses."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    overlaps = wanted.arch >= OVERLAPPING
    text = wanted.text.replace(WIDE, _WIDENED)
    function = define(waiting(text, wanted.name) if overlaps else text, wanted.name)
    names = function.arg_names
    signature = dict.fromkeys(names, "constexpr")
    constants: dict[str, Any] = dict(wanted.constants)
    aligned = {}
    places = [name for name in names if name not in constants]
    if len(places) != len(wanted.arguments):
        raise ExecutionError(f"a kernel of {len(places)} arguments is given {len(wanted.arguments)}")
    for name, told in zip(places, wanted.arguments, strict=True):
        type, _, alignment = told.partition(" ")
        if type == "none":
            constants[name] = None
            continue
        signature[name] = type
        if alignment:
            aligned[(names.index(name),)] = [["tt.divisibility", ALIGNED]]
    try:
        source = ASTSource(function, signature, constants, aligned)
        target = GPUTarget("cuda", wanted.arch, WARP)
        backend = make_backend(target)
        options = backend.parse_options(dict(wanted.options))
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, source.language)
        about: dict[str, Any] = {"target": target, **vars(options)}
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        made = source.make_ir(target, options, functions, modules, context)
        for stage in stages.values():
            made = stage(made, about)
    except Exception as error:  # Triton raises whatever it likes
        raise ExecutionError(f"Triton cannot compile a kernel: {_words(error)}") from error
    if about.get("num_ctas", 1) != 1 or about.get("profile_scratch_size", 0):
        raise ExecutionError("a kernel that needs a cluster or a profiler cannot be launched")
    kept = {name: about[name] for name in (_NAME, *_NEEDED) if name in about} | {"overlaps": int(overlaps)}
    return {BINARY: bytes(made), ABOUT: json.dumps(kept).encode()}


def waiting(text: str, name: str) -> str:
    """A kernel's text that first waits for the kernel before it."""
    head, of, rest = text.partition(f"\ndef {name}(")
    arguments, end, body = rest.partition("):\n")
    assert of and end, "a kernel begins with one line"
    return head + of + arguments + end + _WAIT + body


def _words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"


# ---- kernels that were compiled ----------------------------------------------------------------------------------


@dataclass
class _Kept:
    files: Files
    #: in which caches it is; it came from the first one, unless it was compiled here
    caches: list[KernelCache] = field(default_factory=list)
    compiled: bool = False
    #: by the number of the GPU
    loaded: dict[int, LoadedCubin] = field(default_factory=dict)


class Compiled:
    """A kernel's text, launched like a function that `triton.jit` made: ``kernel[grid](*arguments, **constants)``."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.kept: dict[Wanted, _Kept] = {}
        self._known: dict[Any, Wanted] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def wanted(self, arguments: Sequence[Any], keywords: Mapping[str, Any], arch: int) -> Wanted:
        """What a launch with these arguments needs."""
        types = tuple(map(_type, arguments))
        key = types, tuple(keywords.items()), arch
        found = self._known.get(key)
        if found is None:
            options = tuple(sorted((k, int(v)) for k, v in keywords.items() if k in OPTIONS and v is not None))
            constants = tuple(sorted((k, v) for k, v in keywords.items() if k not in OPTIONS))
            found = self._known[key] = Wanted(self.text, self.name, types, constants, options, arch)
        return found

    def _launch(self, grid: Sequence[int], *arguments: Any, **keywords: Any) -> None:
        recording = _recording.get()
        if recording is not None:
            arch, found = recording
            found.append((self, self.wanted(arguments, keywords, arch)))
            return
        import torch

        device = torch.cuda.current_device()
        wanted = self.wanted(arguments, keywords, _arch(device))
        kept = self.kept.get(wanted)
        kernel = None if kept is None else kept.loaded.get(device)
        if kernel is None:
            kernel = self._load(wanted, device)
        scratch = None
        if kernel.scratch:  # freed in the stream's order: nobody gets it before this kernel is over
            nbytes = kernel.scratch * grid_size(grid)
            scratch = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        stream = torch.cuda.current_stream(device).cuda_stream
        at = 0 if scratch is None else scratch.data_ptr()
        driver().launch(kernel, grid, stream, values(wanted.arguments, arguments), at, device)

    def _load(self, wanted: Wanted, device: int) -> LoadedCubin:
        obtain([(self, wanted)], kernel_cache.current())
        kept = self.kept[wanted]
        try:
            kernel = load(kept.files, device)
        except Unloadable:
            if kept.compiled:
                raise
            for there in kept.caches:  # the driver does not take it, whatever the key says
                there.reject(wanted.key())
            del self.kept[wanted]
            return self._load(wanted, device)
        kept.loaded[device] = kernel
        return kernel


def grid_size(grid: Sequence[int]) -> int:
    x, y, z = (*grid, 1, 1)[:3]
    return x * y * z


def load(files: Files, device: int) -> LoadedCubin:
    """Put a kernel into a GPU's memory."""
    about = describe(files)
    return driver().load(
        files[BINARY], about[_NAME], about["num_warps"], about["shared"], about["global_scratch_size"], device,
        bool(about["overlaps"]),
    )  # fmt: skip


def describe(files: Files) -> dict[str, Any]:
    """What a launch needs; ValueError when an entry does not say so."""
    try:
        about = json.loads(files[ABOUT])
        right = isinstance(about[_NAME], str) and all(type(about[n]) is int and about[n] >= 0 for n in _NEEDED)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no compiled kernel: {error!r}") from None
    if not right or not files.get(BINARY, b"").startswith(b"\x7fELF"):
        raise ValueError("no compiled kernel")
    return dict(about)


def values(types: Sequence[str], arguments: Sequence[Any]) -> list[Any]:
    """Arguments as the driver takes them."""
    import ctypes

    found: list[Any] = []
    for type, value in zip(types, arguments, strict=True):
        if type.startswith("*"):
            found.append(ctypes.c_void_p(value.data_ptr()))
        elif type != "none":
            found.append(NUMBERS[type](value))
    return found


def _type(value: Any) -> str:
    """What a kernel is told of an argument."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    type = f"*{POINTERS[str(value.dtype).removeprefix('torch.')]}"
    return type if value.device.type != "meta" and value.data_ptr() % ALIGNED else f"{type} {ALIGNED}"


@cache
def _arch(device: int) -> int:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return int(major * 10 + minor)


# ---- what a call needs, before it is called ------------------------------------------------------------------------

Pair: TypeAlias = tuple[Compiled, Wanted]
_recording: ContextVar[tuple[int, list[Pair]] | None] = ContextVar("kernels of a call", default=None)
_lock = threading.RLock()


def is_recording() -> bool:
    """Whether nothing is to be computed now: see `recording`."""
    return _recording.get() is not None


@contextmanager
def recording(arch: int) -> Iterator[list[Pair]]:
    """Launches inside, on tensors without memory (torch's device "meta"), are only taken down: a list of pairs."""
    found: list[Pair] = []
    token = _recording.set((arch, found))
    try:
        yield found
    finally:
        _recording.reset(token)


def build_each(wanted: Sequence[Wanted], keep: Keep) -> None:
    """Compile kernels here, one after the other."""
    for one in wanted:
        keep(one, build(one))


def obtain(
    pairs: Iterable[Pair], cache: KernelCache | None, builder: Callable[[Sequence[Wanted], Keep], None] = build_each
) -> None:
    """Have kernels compiled and stored: those that neither memory nor the cache has are built.

    What was built until ``builder`` raises, or Ctrl-C interrupts it, is not lost.
    """
    with _lock:
        missing: dict[Wanted, Compiled] = {}
        for owner, wanted in dict.fromkeys(pairs):
            build_options.write_source(wanted.text, ".py", wanted.name)
            kept = owner.kept.get(wanted)
            if kept is None:
                files = None if cache is None else _stored(wanted, cache)
                if files is None or cache is None:
                    missing[wanted] = owner
                    continue
                kept = owner.kept[wanted] = _Kept(files, [cache])
            _store(wanted, kept, cache)

        def keep(wanted: Wanted, files: Files) -> None:
            kept = missing[wanted].kept[wanted] = _Kept(files, compiled=True)
            _store(wanted, kept, cache)

        with build_options.waiting():
            builder(list(missing), keep)


def _stored(wanted: Wanted, cache: KernelCache) -> Files | None:
    key = wanted.key()
    files = cache.get(key)
    if files is not None:
        try:
            describe(files)
        except ValueError:
            cache.reject(key)
            return None
    return files


def _store(wanted: Wanted, kept: _Kept, cache: KernelCache | None) -> None:
    if cache is not None and not cache.closed and cache not in kept.caches:
        kept.caches.append(cache)
        cache.put(wanted.key(), kept.files, f"CUDA: sm_{wanted.arch} (Triton)")

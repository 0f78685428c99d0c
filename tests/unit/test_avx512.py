"""Default kernels for Intel's processors with AVX-512: whole vectors, which stay in registers, and right results.

PoCL's compiler may take the processor for another one, so here each text says which one it is compiled for.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tunewright.devices import opencl, programs
from tunewright.devices.host import cpu_flags
from tunewright.devices.opencl import OpenCLDevice
from tunewright.ir.types import PLAIN, blocked
from tunewright.plugins.single import available
from tunewright.testing.kernelcheck import Case, check

NEEDED = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
RNG = np.random.default_rng(0)
BLOCK = blocked(16)
VERSION = "OpenCL 3.0 PoCL HSTR: pthread-x86_64-unknown-linux-gnu-"


def test_processors_of_whose_vectors_the_compiler_would_use_half() -> None:
    assert opencl._halves(VERSION + "icelake-client") and opencl._halves(VERSION + "sapphirerapids")
    assert not opencl._halves(VERSION + "znver4") and opencl._vectors(VERSION + "znver4") == (64, 32)
    assert not opencl._halves(VERSION + "skylake") and not opencl._halves("OpenCL 3.0 LINUX")


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def conv(channels: int, filters: int, size: int, window: int, stride: int = 1, group: int = 1) -> Case:
    inputs = [normal(1, channels, size, size), normal(filters, channels // group, window, window), normal(filters)]
    attrs = {"kernel_shape": (window,) * 2, "strides": (stride,) * 2, "pads": (window // 2,) * 4, "group": group}
    layouts = (PLAIN if channels < 4 else BLOCK, BLOCK)
    return Case("Conv", inputs, attrs, constant=frozenset({1, 2}), layouts=layouts)


#: a case, the solver whose default kernel runs it, and the multiply-adds of its smallest loop
CASES = {
    "3 x 3": (conv(32, 64, 9, 3), "opencl.conv_blocked", 24),
    "7 x 7 of a picture": (conv(3, 64, 23, 7, 2), "opencl.conv_blocked", 24),
    "Winograd": (conv(32, 64, 22, 3), "opencl.conv_winograd_two", 24),
    "depthwise": (conv(32, 32, 14, 3, 1, 32), "opencl.conv_depthwise", 9),
    "product": (Case("MatMul", [normal(13, 70), normal(70, 96)], constant=frozenset({1})), "opencl.matmul", 18),
}  # fmt: skip

#: the others take seconds each
SHORT = ("Winograd", "product")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> OpenCLDevice:
    if "CPU.POCL" not in available()[0]:
        pytest.skip("PoCL is not installed")
    if not cpu_flags() >= NEEDED:
        pytest.skip(f"the processor lacks {', '.join(sorted(NEEDED - cpu_flags()))}")
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", "")
    monkeypatch.setattr(programs, "WHOLE", programs.WHOLE.replace('"tune', '"arch=skylake-avx512,tune'))
    made = OpenCLDevice("CPU.POCL")
    made.target = replace(made.target, vector_bytes=64, registers=32)
    made.confined = True  # launches are `joined`: in others PoCL drops what a text says of its functions
    made._programs = programs.Programs(made.name, made.context, made.raw, made.target.options, whole=True)
    return made


def some(mask: int, bits: int) -> bytes:
    """A byte with these bits under the mask."""
    return b"[" + b"".join(re.escape(bytes([n])) for n in range(256) if n & mask == bits) + b"]"


#: Instructions by their bytes. EVEX is 62, three bytes (a table of operations; type; length) and the operation, VEX C4,
#: two bytes and the operation. Multiply-adds of f32 on 512 and on 256 bits, and stores of 512 bits to the stack:
FUSED, TABLE, TYPE = b"[\x98\xa8\xb8]", some(0x0F, 2), some(0x83, 0x01)
WHOLE = b"\x62" + TABLE + TYPE + some(0x60, 0x40) + FUSED
HALF = b"(?:\x62" + TABLE + TYPE + some(0x60, 0x20) + b"|\xc4" + some(0x1F, 2) + some(0x87, 0x05) + b")" + FUSED
SPILL = b"\x62" + some(0x0F, 1) + some(0x87, 0x04) + some(0x7F, 0x48) + b"[\x11\x29]" + some(0x07, 4) + b"\x24"


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.soak) for n in CASES])
def test_whole_vectors_that_stay_in_registers(name: str, device: OpenCLDevice) -> None:
    case, solver, least = CASES[name]
    assert check(case, solver, 0, device, specialised=False) == []
    folders = device._programs._private
    assert folders is not None
    (where,) = (str(kept.where) for text, kept in device._programs._kept.items() if "joined(" in text)
    (code,) = (folders.programs / where).rglob("*.so")
    whole, half, spills = (len(re.findall(each, code.read_bytes())) for each in (WHOLE, HALF, SPILL))
    assert whole >= least and half == spills == 0

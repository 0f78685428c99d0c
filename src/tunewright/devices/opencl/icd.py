"""Which OpenCL runtimes the loader sees: what the system has, what other wheels bring, and Intel's from its wheel.

Intel's wheel is not found by itself: the file that should name its library names a path that does not exist, and the
library needs others beside it. So those are loaded first, and the loader is given a folder of files with right paths.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunewright.settings import exported

SYSTEM_FOLDER = Path("/etc/OpenCL/vendors")
#: what libintelocl.so needs, in order
INTEL_LIBRARIES = ("libtbb.so.12", "libirng.so", "libintlc.so.5", "libsvml.so", "libimf.so")


@contextmanager
def runtimes() -> Iterator[None]:
    """While the loader looks for platforms (once per process): every runtime that can be used is in its sight."""
    library = _intel_library()
    if library is None:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="tunewright-icd-"))
    try:
        for file in _system():
            shutil.copy(file, folder)
        for number, path in enumerate(_shipped()):
            (folder / f"shipped{number}.icd").write_text(f"{path}\n", encoding="utf-8")
        (folder / "intel.icd").write_text(f"{library}\n", encoding="utf-8")
        with exported("OCL_ICD_VENDORS", str(folder)):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _system() -> list[Path]:
    return sorted(SYSTEM_FOLDER.glob("*.icd")) if SYSTEM_FOLDER.is_dir() else []


def _shipped() -> list[Path]:
    """Runtimes inside pyopencl's own wheel folder: the loader forgets them when it is given another folder."""
    import pyopencl

    home = Path(pyopencl.__file__).parent / ".libs"
    names = [line.strip() for file in home.glob("*.icd") for line in file.read_text(encoding="utf-8").splitlines()]
    return [home / Path(name).name for name in names if name]


def _intel_library() -> Path | None:
    """libintelocl.so of the wheel ``intel-opencl-rt``, with what it needs loaded; None when it is not to be had."""
    import importlib.metadata  # takes long to import, and few ask

    try:
        files = importlib.metadata.files("intel-opencl-rt") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(f.locate())).resolve() for f in files if f.name == "libintelocl.so"]
    if not found or not found[0].is_file():
        return None
    try:
        for name in INTEL_LIBRARIES:
            ctypes.CDLL(str(found[0].parent / name), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(found[0]))
    except OSError:  # a package that it needs (intel-cmplr-lib-rt) is missing: the runtime cannot be used
        return None
    return found[0]

"""Which OpenCL runtimes the loader sees: the system's, those of other wheels, and Intel's from its wheel.

The loader does not find Intel's wheel by itself: the file that should name its library names a missing path. The
library also needs other libraries beside it. So this module loads those first and gives the loader a folder of files
with correct paths.
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
#: libraries that libintelocl.so needs, in load order
INTEL_LIBRARIES = ("libtbb.so.12", "libirng.so", "libintlc.so.5", "libsvml.so", "libimf.so")


@contextmanager
def runtimes() -> Iterator[None]:
    """Show the loader every usable runtime while it looks for platforms (once per process)."""
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
    """Return the runtimes inside pyopencl's wheel folder: the loader forgets them when given another folder."""
    import pyopencl

    home = Path(pyopencl.__file__).parent / ".libs"
    names = [line.strip() for file in home.glob("*.icd") for line in file.read_text(encoding="utf-8").splitlines()]
    return [home / Path(name).name for name in names if name]


def _intel_library() -> Path | None:
    """Return libintelocl.so of the wheel ``intel-opencl-rt``, with its dependencies loaded; None when it is
    unavailable."""
    import importlib.metadata  # slow to import, and rarely needed

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
    except OSError:  # a required package (intel-cmplr-lib-rt) is missing: the runtime cannot be used
        return None
    return found[0]

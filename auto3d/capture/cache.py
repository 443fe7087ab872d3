"""A cache on disk of results about a model, as JSON. An entry is valid only while nothing that it depends on changes.

The file name is the hash of an identity: the caller's description of the model, the versions of Python and of all
installed packages, and the source of capture, derived, partition, runtime and tensor. It is the same in every process
that would import the same packages, before and after it has imported the user's code, and in any working folder. An
entry also lists the loaded source files outside of installed packages, such as a user's model, with the hash of each
file, and begins with the hash of its content. It is out of date where a file has changed, or where an import would now
find another file under the same name. An entry that is out of date or damaged is ignored and made again. A file that
the model's code opens itself is not noticed.
"""

import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ENTRIES = 256  # most entries on disk; the least recently used entries are removed
_STARTED = time.time()
_ENGINE = Path(__file__).parents[1]
_INSTALLED = ("site-packages", "dist-packages")
_KNOWN = tuple(f"{folder}{os.sep}" for folder in (sysconfig.get_paths()["stdlib"], _ENGINE))
_MAIN = ("__main__", "__mp_main__")


def _package_folders() -> tuple[str, ...]:
    """Folders of installed packages from which this process imports, without folders of a user's code."""
    named = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    installed = [folder for folder in sys.path if Path(folder).name in _INSTALLED]
    return tuple(dict.fromkeys([*named, *installed]))


_PACKAGES = _package_folders()  # before any import of a model's code, which may change sys.path


def default_folder() -> Path:
    """The folder AUTO3D_CACHE, else auto3d in the user's cache folder (XDG_CACHE_HOME or ~/.cache)."""
    chosen = os.environ.get("AUTO3D_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "auto3d"


class StaleEntryError(Exception):
    """An entry that is not valid here; the message says what differs."""


class Cache:
    """Entries in one private folder, written atomically; any number of processes may use it at the same time.

    It only saves time: if the folder cannot be read or written, every result is computed again. ``code_folders`` are
    those in which the user's modules are looked for before sys.path.
    """

    def __init__(self, folder: Path | None = None, *, code_folders: Sequence[str] = ()) -> None:
        self._folder = (folder or default_folder()) / "models"
        self._code_folders = code_folders

    def load(self, identity: Mapping[str, Any], read: Callable[[Any], T]) -> T | None:
        """``read`` applied to the content of the entry of ``identity``; None if there is no valid entry."""
        file = self._file(_key(identity))
        try:
            content = self.load_copy(file, identity, read)
            os.utime(file)  # mark it as just used
        except (OSError, StaleEntryError):
            return None
        return content

    def load_copy(self, file: Path, identity: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """As ``load``, from ``file``, a copy of an entry that may come from another machine.

        Raises StaleEntryError if it is not valid here, and OSError if it cannot be read.
        """
        try:
            digest, _, text = file.read_text().partition("\n")
            if digest != _digest(text.encode()):
                raise StaleEntryError("its content is damaged")
            entry = json.loads(text)
            if difference := _difference(entry, identity, self._code_folders):
                raise StaleEntryError(difference)
            return read(entry["content"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StaleEntryError(f"its content cannot be read: {error}") from None

    def copy(self, identity: Mapping[str, Any], file: Path) -> None:
        """Copy the entry of ``identity`` to ``file``, if there is one."""
        with suppress(FileNotFoundError):
            shutil.copyfile(self._file(_key(identity)), file)

    def store(self, identity: Mapping[str, Any], content: Any) -> None:
        """Store ``content``, made of JSON types, which the currently loaded modules have just computed."""
        key = _key(identity)
        try:
            sources = {path: _file_digest(path) for path in _loaded_sources()}
            engine = (str(file) for file in _engine_files())
            if any(Path(path).stat().st_mtime > _STARTED for path in (*sources, *engine)):
                return  # a file may have changed after it was loaded, and the content would be of the old version
            entry = {"key": key, "sources": sources, "modules": _top_modules(sources), "content": content}
            text = json.dumps(entry, separators=(",", ":"))
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".", delete=False) as stream:
                stream.write(f"{_digest(text.encode())}\n{text}")
            Path(stream.name).replace(self._file(key))
            self._remove_oldest()
        except OSError:
            return

    def _file(self, key: str) -> Path:
        return self._folder / f"{_digest(key.encode())}.json"

    def _remove_oldest(self) -> None:
        with os.scandir(self._folder) as entries:
            by_use = sorted((entry.stat().st_mtime, entry.path) for entry in entries)
        for _, path in by_use[:-ENTRIES]:
            Path(path).unlink(missing_ok=True)


def _key(identity: Mapping[str, Any]) -> str:
    return json.dumps([identity, sys.version, _installed(), _engine_digest()], sort_keys=True)


def _difference(entry: Mapping[str, Any], identity: Mapping[str, Any], code_folders: Sequence[str]) -> str:
    """How the circumstances of ``entry`` differ from this process; empty if it is valid here."""
    if entry["key"] != (key := _key(identity)):
        (_, python, packages, engine), (_, our_python, our_packages, our_engine) = map(json.loads, (entry["key"], key))
        if python != our_python:
            return f"Python {our_python.split()[0]} here, {python.split()[0]} there"
        if packages != our_packages:
            return _different_packages(our_packages, packages)
        if engine != our_engine:
            return "auto3d has another version here than there"
        return "it is of another model, or of other settings"
    for path, known in entry["sources"].items():
        try:
            same = _file_digest(path) == known
        except OSError:
            same = False
        if not same:
            return f"the file {path} differs"
    for name, file in entry["modules"].items():
        if (place := place_of(name, code_folders)) not in ("", file):
            return f"the module {name} is {place} here, {file} there"
    return ""


def _different_packages(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The packages that differ, torch and transformers before others."""
    here, there = ({name.partition("-")[0]: name for name in names} for names in (ours, theirs))
    names = sorted(set(here) | set(there), key=lambda name: (name not in ("torch", "transformers"), name))

    def version(folder: str | None) -> str:
        return "none" if folder is None else folder.rpartition(".")[0].partition("-")[2]

    first = next((name for name in names if here.get(name) != there.get(name)), None)
    if first is None:
        return "other packages are installed here than there"
    return f"{first} {version(here.get(first))} here, {version(there.get(first))} there"


@cache
def _installed() -> list[str]:
    """Name and version of every installed package, from the names of their folders: reading their metadata is slow.

    auto3d is not among them: its source counts, and its folder is a package's only where it was installed.
    """
    packages: set[str] = set()
    for folder in _PACKAGES:
        try:
            packages.update(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
        except OSError:  # a zip file, or a folder that does not exist
            continue
    return sorted(name for name in packages if not name.startswith("auto3d"))


def place_of(module: str, code_folders: Sequence[str]) -> str:
    """The file from which an import takes the top-level ``module``; empty if that is no file, or there is none."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) or ""
    spec = PathFinder.find_spec(module, [*(folder for folder in code_folders if folder not in sys.path), *sys.path])
    return (spec.origin if spec is not None else None) or ""


def _top_modules(sources: Iterable[str]) -> dict[str, str]:
    """The loaded modules outside of packages whose files are among ``sources``, with their files."""
    known = set(sources)
    top = {name: module for name, module in list(sys.modules.items()) if "." not in name and name not in _MAIN}
    files = {name: str(getattr(module, "__file__", None)) for name, module in sorted(top.items())}
    return {name: file for name, file in files.items() if file in known}


@cache
def _engine_digest() -> str:
    digest = sha256()
    for file in _engine_files():
        digest.update(f"{file.name} {_digest(file.read_bytes())}".encode())
    return digest.hexdigest()


def _engine_files() -> list[Path]:
    return sorted(
        file
        for package in ("capture", "derived", "partition", "runtime", "tensor")
        for file in (_ENGINE / package).rglob("*.py")
    )


def _loaded_sources() -> list[str]:
    """Source files of the loaded modules, except files of Python, of installed packages and of the engine."""
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {name for name in names if isinstance(name, str) and name.endswith(".py") and os.path.isabs(name)}
    return sorted(file for file in files if not _is_known(file))  # torch.ops has a file name that is no path


def _is_known(name: str) -> bool:
    return name.startswith(_KNOWN) or any(f"{os.sep}{folder}{os.sep}" in name for folder in _INSTALLED)


def _file_digest(path: str) -> str:
    return _digest(Path(path).read_bytes())


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()

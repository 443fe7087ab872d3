"""What was found out about a model, kept on disk: plain JSON, believed only where nothing that decides it has changed.

An entry is found by the hash of an identity: what the caller says decides the model, the versions of Python and of all
installed packages, and the source of capture, partition and runtime themselves. It also names the source files that
were loaded beside the installed packages, such as a model of one's own, with the hash of each, and begins with the hash
of all it holds. An entry that does not fit any more, or that is damaged, is as none: it is made again. What cannot be
seen from here is a file that the model's code opens by itself.
"""

import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ENTRIES = 256  # that are kept; those longest unused go
_STARTED = time.time()
_ENGINE = Path(__file__).parents[1]
_INSTALLED = ("site-packages", "dist-packages")
_KNOWN = tuple(f"{folder}{os.sep}" for folder in (sysconfig.get_paths()["stdlib"], _ENGINE))


def default_folder() -> Path:
    """AUTO3D_CACHE, else auto3d in the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    chosen = os.environ.get("AUTO3D_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "auto3d"


class Cache:
    """Entries in one private folder, each written whole; any number of processes may use it at once.

    It only saves time: where the folder cannot be read or written, everything is made anew.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or default_folder()) / "models"

    def load(self, identity: Mapping[str, Any], read: Callable[[Any], T]) -> T | None:
        """What ``read`` makes of the entry of ``identity``; None if there is none that can be believed."""
        key = _key(identity)
        file = self._file(key)
        try:
            digest, _, text = file.read_text().partition("\n")
            if digest != _digest(text.encode()):
                return None
            entry = json.loads(text)
            if entry["key"] != key or any(_file_digest(path) != known for path, known in entry["sources"].items()):
                return None
            found = read(entry["content"])
            os.utime(file)  # used now
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        return found

    def store(self, identity: Mapping[str, Any], content: Any) -> None:
        """Keep ``content``, made of what JSON knows, just found by the modules that are loaded now."""
        key = _key(identity)
        try:
            sources = {path: _file_digest(path) for path in _loaded_sources()}
            engine = (str(file) for file in _engine_files())
            if any(Path(path).stat().st_mtime > _STARTED for path in (*sources, *engine)):
                return  # written since they were loaded, perhaps: the content may be of what they were
            text = json.dumps({"key": key, "sources": sources, "content": content}, separators=(",", ":"))
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


def _installed() -> list[str]:
    """Name and version of every installed package, as their folders have them: reading each one's data is slow."""
    found = set()
    for folder in sys.path:
        try:
            found.update(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
        except OSError:  # a zip file, or a folder that is not there
            continue
    return sorted(found)


@cache
def _engine_digest() -> str:
    digest = sha256()
    for file in _engine_files():
        digest.update(f"{file.name} {_digest(file.read_bytes())}".encode())
    return digest.hexdigest()


def _engine_files() -> list[Path]:
    return sorted(file for package in ("capture", "partition", "runtime") for file in (_ENGINE / package).glob("*.py"))


def _loaded_sources() -> list[str]:
    """Files of the modules loaded now, without Python's own, installed packages' and the engine's."""
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {name for name in names if isinstance(name, str) and name.endswith(".py") and os.path.isabs(name)}
    return sorted(file for file in files if not _is_known(file))  # torch.ops calls itself a file, but not a whole path


def _is_known(name: str) -> bool:
    return name.startswith(_KNOWN) or any(f"{os.sep}{folder}{os.sep}" in name for folder in _INSTALLED)


def _file_digest(path: str) -> str:
    return _digest(Path(path).read_bytes())


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()

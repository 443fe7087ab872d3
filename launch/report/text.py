"""JSON for a page that is passed on: no path of this machine, and nothing that could end a script element."""

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any

SHORT = "…/"  # stands for the folder of a file on this machine
DIGITS = 6  # significant digits of a number in a page
_PATH = re.compile(
    r"""(?<![\w./…<])(?<!http:)(?<!https:)(?:file:)?  # not in a word, a relative path, an address or a tag
    /{1,3}(?:[^\s/'"`:;,()\[\]{}<>|]+/)*            # the folders
    ([^\s/'"`:;,()\[\]{}<>|]*)                       # the name""",
    re.VERBOSE,
)


def embedded(value: Any, folders: Iterable[Path] = ()) -> str:
    """``value``, which may hold dataclasses, as JSON for a script element.

    Folders in absolute paths are left out of its texts; ``folders`` are folders whose names may have spaces, beside the
    usual folders.
    """
    known = {Path.cwd(), Path.home(), Path(sys.prefix), Path(sys.base_prefix), Path(tempfile.gettempdir()), *folders}
    names = sorted((str(path) for path in known if path.is_absolute() and path != Path("/")), key=len, reverse=True)
    text = json.dumps(_plain(value, names), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def without_folders(text: str, folders: Iterable[str] = ()) -> str:
    """``text`` with ``…/name`` for each absolute path; ``folders`` are also found where their names have spaces.

    The path of this program, with which commands begin where it is not on PATH, becomes its name.
    """
    if Path(sys.argv[0]).is_absolute():
        text = text.replace(f"{sys.argv[0]} ", f"{Path(sys.argv[0]).name} ")
    for folder in folders:
        text = re.sub(rf"{re.escape(folder)}(?=/|\b|$)/?", SHORT, text)
    return _PATH.sub(lambda match: f"{SHORT}{match[1]}" if len(match[0]) > 1 else match[0], text)


def _plain(value: Any, folders: list[str]) -> Any:
    if isinstance(value, str):
        return without_folders(value, folders)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name), folders) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, folders) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, folders) for inner in value]
    return value

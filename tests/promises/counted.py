"""Runs a command of auto3d in this process and counts what it does: python tests/promises/counted.py FILE ARGUMENTS…

Writes the counts to FILE as JSON: names, and numbers that do not depend on the speed of the machine.
"""

import atexit
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

METHODS = {  # name of a count -> module and path of the function, where each call looks it up
    "processes": ("multiprocessing.process", "BaseProcess.start"),
    "captures": ("torch.export", "export"),
    "simulations": ("auto3d.cost.model", "CostModel.seconds"),
    "estimates of memory": ("auto3d.cost.memory.plan", "PlanMemory.of_device"),
    "looks at candidates": ("auto3d.search.search", "Search._begin_look"),
    "loads from the cache": ("auto3d.capture.cache", "Cache.load"),
    "stores in the cache": ("auto3d.capture.cache", "Cache.store"),
}
PROCESSES = ("subprocess.Popen", "os.fork", "os.posix_spawn")


def count(found: Counter[str]) -> None:
    """Add to ``found`` from now on."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in PROCESSES:
            found["processes"] += 1

    sys.addaudithook(note)
    for name, (module, path) in METHODS.items():
        owner: Any = import_module(module)
        *outer, last = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        setattr(owner, last, _counting(getattr(owner, last), name, found))


def _counting(function: Callable[..., Any], name: str, found: Counter[str]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found[name] += 1
        return function(*args, **kwargs)

    return call


def _bytes_read() -> int:
    """Bytes that this process has read from files and pipes."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def main() -> None:
    file, sys.argv = Path(sys.argv[1]), ["auto3d", *sys.argv[2:]]
    from launch.main import main as run

    found: Counter[str] = Counter()
    count(found)
    before = _bytes_read()
    atexit.register(lambda: file.write_text(json.dumps({**found, "bytes read": _bytes_read() - before})))
    run()


if __name__ == "__main__":
    main()

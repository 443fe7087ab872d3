"""Records of comparisons on a GPU: a line of JSON for each."""

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from tests.distributed.parity_report import failure


def timed(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``run`` finds, or that it failed and why, and its seconds."""
    begun = time.monotonic()
    try:
        found = run()
    except AssertionError as error:
        found = {"verdict": "failed", "note": failure(error)}
    except Exception as error:
        found = {"verdict": "failed", "note": f"{type(error).__name__}: {error}"}
    return found | {"seconds": round(time.monotonic() - begun, 2)}


def all_right(records: Iterable[dict[str, Any]], file: TextIO, seconds: float) -> bool:
    """Write ``records`` to ``file`` and the terminal; begin none after ``seconds``. Returns whether all are right."""
    begun, right = time.monotonic(), True
    for found in records:
        right &= found["verdict"] == "right"
        print(json.dumps(found), file=file, flush=True)
        print(found["case"], found["verdict"], found.get("note", found.get("error", "")), flush=True)
        if time.monotonic() - begun > seconds:
            break
    return right

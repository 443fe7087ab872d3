"""How often Python looks for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = 100_000  # more new objects than gone ones until the next look; Python's default is 700


@contextmanager
def garbage_collected_seldom() -> Iterator[None]:
    """Look for garbage seldom: a search makes many objects that stay and hardly a cycle of them."""
    before = gc.get_threshold()
    gc.set_threshold(max(_SELDOM, before[0]) if before[0] else 0, *before[1:])  # 0: never
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection: a capture makes no garbage, and looking for it would take a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""When Python looks for garbage: among millions of objects that an import, a capture or a search keeps, for seconds."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()
_RARE = (200_000, 20, 100)  # an import of torch and of its tracer makes more than a million objects
_found_frozen = False


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection: imports, captures and searches make hardly any garbage.

    At the end no collection begins among the millions of objects that were made meanwhile: the next full collection
    sees them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not _has_frozen():
                gc.freeze()
                gc.unfreeze()  # all objects are now in the oldest generation
            gc.enable()


def _has_frozen() -> bool:
    """Whether the process has frozen objects, which Python counts by a walk through all of them: so they are counted
    until some are found."""
    global _found_frozen
    _found_frozen = _found_frozen or gc.get_freeze_count() > 0
    return _found_frozen


def collect_rarely() -> None:
    """Look for garbage once in many objects: for a process of our own that does not train."""
    gc.set_threshold(*_RARE)


def collect_as_usual() -> None:
    """Look for garbage as Python does by itself, but never among the objects of now: for a rank, as it begins."""
    gc.freeze()
    gc.set_threshold(*_USUAL)

"""Workers of pytest-xdist as forks of the process that starts them, which has imported for all of them.

Otherwise each of them imports torch, transformers and the tests by itself, and in a new clone compiles them too.
"""

import gc
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from execnet.gateway_io import popen_bootstrapline

from tests.promises.preloaded import CONTROL, DIES_WITH_PARENT, Preloaded, divert, new_process, run_and_end

TESTS = Path(__file__).parent


def import_tests() -> None:
    """What fails is imported again by the worker that reports it."""
    for file in sorted(TESTS.rglob("test_*.py")):
        if (file.parent / "__init__.py").exists():
            with suppress(Exception, pytest.skip.Exception):
                import_module(".".join(file.relative_to(TESTS.parent).with_suffix("").parts))


def is_worker(words: Sequence[str]) -> bool:
    return [*words] == ["-c", popen_bootstrapline]


def fork_workers() -> None:
    """From now on workers are forked from a copy of this process, which has no threads of execnet's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    if os.fork():
        theirs.close()
        copy = Preloaded(ours, {})
        divert(lambda: copy, is_worker)
        return
    ours.close()
    CONTROL(DIES_WITH_PARENT, signal.SIGKILL)
    gc.freeze()  # a collection would touch, and so copy, all that the workers share
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__  # not those of pytest's capture
    sys.modules["__main__"] = ModuleType("__main__")
    asked = new_process(theirs)
    random.seed()
    np.random.seed()
    run_and_end(asked["words"])

"""``python -m launch.executors DESCRIPTOR DRIVER``: the warm process, as ``launch.executors.warm`` starts it.

DESCRIPTOR is of the pipe on which it gets the recipe and the trials' calls; DRIVER is the process that it dies with.
"""

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from auto3d.garbage import collect_rarely, garbage_collection_paused

if __name__ == "__main__":
    collect_rarely()
    with garbage_collection_paused():
        from launch.executors.fork_trials import serve
        from launch.run.ranks import die_with_parent

    die_with_parent(int(sys.argv[2]))
    with suppress(EOFError, BrokenPipeError):  # the driver is gone
        serve(Connection(int(sys.argv[1])))

"""How `make test` divides the tests between its workers, each of which is a process of pytest-xdist.

A file's tests run on one worker, in their order: they share captured models, and fixtures of their module. Long files
start first, so that none is left at the end. Tests on SLURM mostly wait for it; so they run beside the others, in two
lanes, and each lane has two of the cluster's four nodes.
"""

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

SLURM = "tests/slurm/"
LANES = {"slurm on n1, n2": (), "slurm on n3, n4": ()}
LONGEST_FIRST = ("tests/slurm", "tests/distributed", "tests/launch", "tests/capture", "tests/runtime")


class FilePerWorker(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return next((lane for lane, files in LANES.items() if file.removeprefix(SLURM) in files), file)


def longest_first(item: pytest.Item) -> int:
    """A key to sort tests by."""
    places = (place for place, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start))
    return next(places, len(LONGEST_FIRST))

"""How `make test` divides the tests between its workers, each of which is a process of pytest-xdist.

The tests of a file run on one worker, in their order: they share captured models and the fixtures of their module. All
tests on SLURM run on one worker, as they share one cluster; they mostly wait for it, beside the others. The tests of
compiled code do too, so that it is compiled once. What takes long starts first, and the tests of the longest files run
each on its own, so that no long file is left at the end.
"""

import pytest
from xdist.scheduler import LoadScopeScheduling

SLURM = "tests/slurm"
PROMISES = "tests/promises"
WHEEL = f"{PROMISES}/test_wheel.py"  # a test in this file uses the cluster
OF_WHEEL = ("[README.md]", "[docs/commands.md]")  # pages whose commands share a process of the wheel that has torch
COMPILING = ("tests/synthesis", "tests/search/test_synthesized.py")  # tests of the same compiled code
ON_THEIR_OWN = (  # files whose tests share nothing
    *(f"{PROMISES}/test_{name}.py" for name in ("recipes", "papers", "commands")),
    "tests/trainer/test_small.py",
)
LONGEST_FIRST = (
    f"{PROMISES}/test_commands.py",
    WHEEL,
    SLURM,
    PROMISES,
    "tests/trainer",
    "tests/distributed",
    "tests/launch",
    "tests/capture",
    "tests/runtime",
    *("tests/cost", "tests/search", "tests/synthesis", "tests/tensor", "tests/derived", "tests/zoo", "tests/test_"),
)

NOT_QUICK = (  # tests that start processes, train, wait for SLURM or take a minute: the marker `processes`
    SLURM,
    "tests/capture/test_masks.py",
    "tests/distributed",
    "tests/launch/commands",
    "tests/launch/doctor",
    "tests/launch/drivers",
    "tests/launch/executors",
    "tests/launch/model",
    "tests/launch/report",
    "tests/launch/run",
    "tests/runtime/test_fake_devices.py",
    "tests/streams",
    "tests/test_in_300_lines.py",
    "tests/test_python_api.py",
    "tests/trainer/test_examples.py",
    "tests/zoo",
)


class FilePerWorker(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        if nodeid.endswith(OF_WHEEL):
            return OF_WHEEL[0]
        if nodeid.startswith(ON_THEIR_OWN):
            return nodeid
        for shared in ((SLURM, WHEEL), COMPILING):
            if nodeid.startswith(shared):
                return shared[0]
        return nodeid.partition("::")[0]


def sort_longest_first(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        ranks = (rank for rank, folder in enumerate(LONGEST_FIRST) if item.nodeid.startswith(folder))
        return next(ranks, len(LONGEST_FIRST))

    items.sort(key=rank)


def room(nodeid: str) -> str:
    """The folder of a test, below tests/."""
    folder = nodeid.partition("::")[0].rpartition("/")[0]
    return folder.removeprefix("tests").strip("/") or "tests"

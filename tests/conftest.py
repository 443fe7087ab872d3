import gc
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# Threads of OpenMP sleep while they wait. By default they spin, and where processes outnumber the cores, a thread spins
# while the one that it waits for has no core: a comparison with the eager module took ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch
import transformers

from launch.run.devices import hide_devices
from tests import forked_workers, workers
from tests.processes import ProcessPool
from tests.promises.preloaded import divert
from tests.promises.running import PROGRAMS, preloaded
from tests.soak import mark_further_cases

for name in [name for name in os.environ if name.startswith("SLURM_")]:  # a cluster's, to which tests would submit
    del os.environ[name]
gc.disable()  # until all tests are collected: what is imported stays
torch.set_num_threads(1)  # before anything runs: the pool forks this process
hide_devices()  # the pool forks ranks for CPUs
divert(lambda: preloaded(PROGRAMS))
transformers.logging.set_verbosity_error()
hypothesis.settings.register_profile(  # other workers of `make test` make an example slow
    "auto3d", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("auto3d")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests neither use nor fill the cache of who runs them; all workers share theirs."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["AUTO3D_CACHE"] = str(run / "cache")


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Four processes that run many distributed cases, one after the other."""
    with ProcessPool(4) as pool:
        yield pool


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    if not config.option.file_or_dir:  # all tests
        forked_workers.import_tests()
    forked_workers.fork_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> workers.FilePerWorker:
    config.option.loadscopereorder = False  # keep the order of the items
    return workers.FilePerWorker(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(workers.NOT_QUICK):
            item.add_marker("processes")
        if item.nodeid.startswith(workers.PROMISES):
            item.add_marker("promises")
    mark_further_cases(items, whole_files=not any("::" in argument for argument in config.args))
    if hasattr(config, "workerinput"):  # this is a worker of pytest-xdist
        workers.sort_longest_first(items)


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection looks at what was imported
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the time went, by room."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[workers.room(report.nodeid)] += report.duration
    if sum(seconds.values()) > 60:
        terminalreporter.section("seconds of the tests by room, all workers together")
        for room, spent in seconds.most_common():
            terminalreporter.write_line(f"{spent:7.0f}  {room}")

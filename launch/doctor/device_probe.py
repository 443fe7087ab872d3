"""The probes of `auto3d doctor --devices`: messages, schedules and training, on a rank per device.

Each probe forks its own ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from auto3d.errors import InputError
from auto3d.runtime.measurement import Status
from auto3d.runtime.process.world import World
from auto3d.words import counted
from launch.doctor.exchange_probe import CONNECTIONS, ExchangeResult, exchange
from launch.doctor.link_probe import Links, measure_links
from launch.doctor.training_probe import TrainedRank, degrees, plan_training, train_both_ways
from launch.model.build import use_device
from launch.run.devices import hide_devices
from launch.run.diagnosis import Ending
from launch.run.ranks import NodeRanks, Report, run_ranks

MEET_S = 60.0  # time that the ranks of a probe have to meet
WAIT_S = 30.0  # limit of each wait for another rank
LINKS_S, EXCHANGE_S, TRAINING_S = 120.0, 90.0, 120.0  # limits of the probes, which take seconds if nothing is wrong
DEVICES_S = LINKS_S + max(map(len, CONNECTIONS.values())) * EXCHANGE_S + TRAINING_S
LINES = 3  # lines of an error to keep: its cause and up to two ranks that waited


@dataclass(frozen=True)
class ExchangeRun:
    """The exchange probe at one number of hardware ``connections`` of a GPU; None on a CPU, which has none."""

    connections: int | None
    result: ExchangeResult | None  # result of the first rank; None if it failed
    error: str = ""

    def __str__(self) -> str:
        """The connections, as words to append to a name."""
        return "" if self.connections is None else f" with {counted(self.connections, 'connection')}"


@dataclass(frozen=True)
class DeviceReport:
    """Results of the probes. A probe has a result, or an error of one line, or neither if it was not run."""

    ranks: int
    device: str  # cpu or cuda
    links: Links | None = None
    links_error: str = ""
    exchanges: list[ExchangeRun] = field(default_factory=list)
    layout: str = ""  # dp and pp of the training, as text
    training: list[TrainedRank] = field(default_factory=list)  # all ranks of all nodes
    training_error: str = ""


def probe_devices(
    ranks: int, *, device: str, node_of: Callable[[int], NodeRanks | None], announce: Callable[[str], None]
) -> DeviceReport:
    """The results of all probes on ``ranks`` ranks, one per device.

    Every node of a job calls this. ``node_of`` maps the number of a probe to the ranks that this node runs of it, or to
    None if all ranks run here. ``announce`` is called with a line of text when a probe begins.
    """
    announce(f"measuring messages between neighbours on {counted(ranks, 'rank')}")
    links, error = _run_part(
        ranks,
        lambda world, report: measure_links(world, device, meet_s=MEET_S, wait_s=WAIT_S),
        limit_s=LINKS_S,
        node=node_of(1),
    )
    if error:  # The other probes need messages, too.
        return DeviceReport(ranks, device, links_error=error)
    exchanges = []
    for number, connections in enumerate(CONNECTIONS[device] if ranks > 1 else ()):
        exchanges.append(_exchange(ranks, device, connections, node_of(2 + number), announce))
    announce(f"training a small model on {counted(ranks, 'rank')} and comparing it with plain PyTorch")
    if device == "cpu":
        hide_devices()
        shared = plan_training(ranks, device)

    def train(world: World, report: Report) -> list[TrainedRank]:
        if device == "cuda":
            use_device(world.device(device))
        training = shared if device == "cpu" else plan_training(ranks, device)
        return train_both_ways(world, training, device, meet_s=MEET_S, wait_s=WAIT_S)

    training, error = _run_part(
        ranks,
        train,
        limit_s=TRAINING_S,
        node=node_of(2 + len(exchanges)),
    )
    return DeviceReport(
        ranks,
        device,
        links=links,
        exchanges=exchanges,
        layout="dp={} pp={}".format(*degrees(ranks)),
        training=training or [],
        training_error=error,
    )


def _exchange(
    ranks: int, device: str, connections: int | None, node: NodeRanks | None, announce: Callable[[str], None]
) -> ExchangeRun:
    begun: list[str] = []  # patterns that have begun; only rank 0 reports them, to its own node

    def target(world: World, report: Report) -> ExchangeResult:
        return exchange(
            world, device, connections, meet_s=MEET_S, wait_s=WAIT_S, begin=lambda pattern: report(str(pattern))
        )

    announce(f"exchanging the messages of schedules on {counted(ranks, 'rank')}{ExchangeRun(connections, None)}")
    exchanged, error = _run_part(ranks, target, limit_s=EXCHANGE_S, node=node, on_report=begun.append)
    if error and begun:
        error = f"in {begun[-1]}: {error}"
    return ExchangeRun(connections, exchanged, error)


def _run_part(
    ranks: int,
    target: Callable[[World, Report], Any],
    *,
    limit_s: float,
    node: NodeRanks | None,
    on_report: Callable[[Any], None] = lambda report: None,
) -> tuple[Any, str]:
    """The result of this node's first rank and no error, or None and an error of one line."""
    try:
        outcome = run_ranks(ranks, target, limit_s=limit_s, straggle_s=MEET_S, node=node, on_report=on_report)
    except InputError as error:
        return None, str(error)
    if outcome.status is Status.OK:
        return outcome.result, ""
    lines = outcome.error.splitlines()
    if outcome.ending is Ending.RAISED and len(lines) > 1:  # the error has a traceback
        rank, _, _ = lines[0].partition(": ")
        kind, separator, message = lines[-1].partition(": ")
        return None, f"{rank}: {kind.rpartition('.')[2]}{separator}{message}"
    return None, "; ".join(lines[:LINES])


def merge_reports(reports: Sequence[DeviceReport]) -> DeviceReport:
    """The first node's report, with the first error of any node in each probe."""
    first = reports[0]
    return replace(
        first,
        links_error=_first(report.links_error for report in reports),
        exchanges=[
            replace(runs[0], error=_first(run.error for run in runs))
            for runs in zip(*(report.exchanges for report in reports), strict=False)  # a node may have stopped early
        ],
        training_error=_first(report.training_error for report in reports),
    )


def _first(errors: Iterable[str]) -> str:
    return next(filter(None, errors), "")

"""The result lines of `auto3d doctor`, the tables below them, and a report of all lines as Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.text import Text
from tabulate import tabulate

from launch.doctor.all_reduce_probe import Rate
from launch.doctor.link_probe import PairRate
from launch.doctor.training_probe import TrainedRank


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}


@dataclass(frozen=True)
class Check:
    """One result line. The names of the fields are the keys of `auto3d doctor --json`."""

    verdict: Verdict
    what: str
    found: str
    advice: str = ""  # next step for the user; empty if there is nothing to do
    rates: list[Rate] = field(default_factory=list)  # measured all-reduces
    links: list[PairRate] = field(default_factory=list)
    memory: list[TrainedRank] = field(default_factory=list)

    @property
    def line(self) -> str:
        return f"{self.what}: {self.found}{f'. What to do: {self.advice}' if self.advice else ''}"

    @property
    def tables(self) -> list[str]:
        rates = rate_table(self.rates) if self.rates else ""
        links = link_table(self.links) if self.links else ""
        memory = memory_table(self.memory) if self.memory else ""
        return [table for table in (rates, links, memory) if table]


def show(check: Check, console: Console) -> None:
    """Print the line of ``check``, then its tables."""
    line = Text(f"{check.verdict:8}", style=COLOURS[check.verdict])
    line.append(f"{check.what}: {check.found}", style="default")
    if check.advice:
        line.append(f". What to do: {check.advice}", style="bold default")
    console.print(line, soft_wrap=True)
    for table in check.tables:
        console.print(f"\n{table}\n", markup=False, soft_wrap=True)


def report(checks: Iterable[Check], *, command: str) -> str:
    """All ``checks`` as Markdown for a bug report. The home folder's path, which has the user's name, becomes ~."""
    lines = [f"# auto3d doctor, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "", f"`{command}`", ""]
    for check in checks:
        lines.append(f"- **{check.verdict}** {check.line}")
        for table in check.tables:
            lines += ["", "  ```", *(f"  {row}" for row in table.splitlines()), "  ```", ""]
    home = str(Path.home())
    text = "\n".join(lines) + "\n"
    return text if home == "/" else text.replace(home, "~")


def rate_table(rates: Sequence[Rate]) -> str:
    rows = [
        (
            size_text(rate.size_bytes),
            rate.repetitions,
            f"{1e3 * rate.seconds:.3f}",
            f"{rate.algorithm_gbit_per_s:.3f}",
            f"{rate.bus_gbit_per_s:.3f}",
        )
        for rate in rates
    ]
    return _table(
        ["all-reduce size", "repetitions", "median (ms)", "size / time\n(Gbit/s)", "bus bandwidth\n(Gbit/s)"], rows
    )


def link_table(rates: Sequence[PairRate]) -> str:
    """A row per size, inside nodes and between nodes, with the slowest pair and the median over all pairs."""
    rows = []
    for between_nodes in (False, True):
        for size in dict.fromkeys(rate.size_bytes for rate in rates):
            same = [rate for rate in rates if (rate.between_nodes, rate.size_bytes) == (between_nodes, size)]
            if not same:
                continue
            one_way, both_ways = [r.one_way_gbit_per_s for r in same], [r.both_ways_gbit_per_s for r in same]
            figures = (min(one_way), median(one_way), min(both_ways), median(both_ways))
            where = "between nodes" if between_nodes else "inside a node"
            rows.append((where, size_text(size), len(same), *(f"{figure:.3f}" for figure in figures)))
    heads = ["messages", "size", "pairs", "one way:\nslowest", "median\n(Gbit/s)", "both at once:\nslowest"]
    return _table([*heads, "median, each\nway (Gbit/s)"], rows)


def memory_table(ranks: Sequence[TrainedRank]) -> str:
    rows = [
        (
            rank.rank,
            rank.host,
            *(f"{size / 2**20:.1f}" for size in (rank.predicted_bytes, rank.used_bytes)),
            f"{rank.used_bytes / rank.predicted_bytes:.2f}",
        )
        for rank in ranks
    ]
    return _table(["rank", "node", "predicted\n(MiB)", "peak\n(MiB)", "peak /\npredicted"], rows)


def size_text(size_bytes: int) -> str:
    return f"{size_bytes // 2**20} MiB" if size_bytes >= 2**20 else f"{size_bytes // 2**10} KiB"


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return tabulate(rows, heads, disable_numparse=True, colalign=["right"] * len(heads))

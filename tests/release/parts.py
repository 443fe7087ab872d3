"""The parts of a release: what each runs, what it writes, and the files whose change makes its figures out of date."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEARCH = ("auto3d/capture", "auto3d/cost", "auto3d/partition", "auto3d/schedule", "auto3d/search", "auto3d/simulate",
          "auto3d/derived", "auto3d/tensor", "launch/model", "recipes")  # fmt: skip
RUNTIME = (
    "auto3d/capture",
    "auto3d/partition",
    "auto3d/runtime",
    "auto3d/schedule",
    "auto3d/derived",
    "auto3d/tensor",
)
LAUNCH = ("auto3d", "launch", "slurm")


@dataclass(frozen=True, kw_only=True)
class Part:
    """``tests`` has the files and folders that the part tries: a later change of one makes its record out of date."""

    name: str
    command: str  # in the root of the clone, by sh
    minutes: int  # about, on two cores
    tests: tuple[str, ...]
    needs_slurm: bool = False


def _benchmark(name: str, minutes: int, *tests: str, needs_slurm: bool = False) -> Part:
    return Part(
        name=name.replace("_", "-"),
        command=f"python -m tests.benchmarks.{name}",
        minutes=minutes,
        tests=(f"tests/benchmarks/{name}.py", *tests),
        needs_slurm=needs_slurm,
    )


PARTS = (
    Part(
        name="clone", command="python -m tests.release.clone", minutes=25, tests=("Makefile", "pyproject.toml", *LAUNCH)
    ),
    Part(
        name="commands",
        command="AUTO3D_WHOLE=1 python -m pytest -m promises tests/promises/test_commands.py",
        minutes=15,
        tests=("README.md", "docs", *LAUNCH),
    ),
    Part(name="parity", command="make parity", minutes=60, tests=("tests/distributed", *RUNTIME)),
    Part(name="zoo", command="make zoo", minutes=20, tests=("tests/zoo", *RUNTIME)),
    Part(
        name="optimizers",
        command="python -m pip install --quiet -e '.[optimizers]' && python -m tests.optimizers --write",
        minutes=25,
        tests=("tests/optimizers", "auto3d/runtime"),
    ),
    Part(name="soak", command="make soak", minutes=90, tests=("tests", *LAUNCH)),
    Part(name="papers", command="make papers", minutes=30, tests=("launch/papers", "recipes/papers", *SEARCH)),
    Part(
        name="alternatives",
        command="make alternatives",
        minutes=30,
        tests=("launch/papers", "recipes/papers", *SEARCH),
    ),
    Part(
        name="yardstick",
        command="auto3d yardstick --out results/published",
        minutes=5,
        tests=("launch/yardstick", "recipes/published", *SEARCH),
    ),
    Part(name="peers", command="make reference RECIPE=peers", minutes=10, tests=("launch/peers", *RUNTIME)),
    _benchmark("autopipe", 3, *SEARCH),
    _benchmark("capture", 2, "auto3d/capture", "auto3d/tensor", "launch/model"),
    _benchmark("compiled", 3, *RUNTIME),
    _benchmark("emulated", 5, *RUNTIME, "auto3d/simulate"),
    _benchmark("estimates", 3, *SEARCH),
    _benchmark("host", 2, *RUNTIME),
    _benchmark("memory", 20, "auto3d/cost", *RUNTIME),
    _benchmark("mixed", 5, *SEARCH),
    _benchmark("mixed_slurm", 15, *LAUNCH, needs_slurm=True),
    _benchmark("planning", 15, *SEARCH),
    _benchmark("profile", 5, *RUNTIME, "auto3d/cost", "launch/model"),
    _benchmark("programs", 4, *RUNTIME),
    _benchmark("published", 3, *SEARCH),
    _benchmark("rannc", 3, "auto3d/partition", "auto3d/capture"),
    _benchmark("rannc_stages", 6, "auto3d/partition", "auto3d/cost", "launch/model", *RUNTIME),
    _benchmark("reading", 2, "auto3d/data"),
    _benchmark("report", 2, "launch/report"),
    _benchmark("runtime", 10, *RUNTIME),
    _benchmark("search", 20, *SEARCH),
    _benchmark("simulate", 3, "auto3d/schedule", "auto3d/simulate"),
    _benchmark("sub_pipelined", 3, *RUNTIME),
    _benchmark("submission", 10, *LAUNCH, needs_slurm=True),
    _benchmark("sums", 3, *RUNTIME, "auto3d/cost", "auto3d/simulate"),
    _benchmark("synthesis", 15, "auto3d/synthesis", "auto3d/schedule", "auto3d/simulate"),
    _benchmark("tensor", 5, *RUNTIME),
    _benchmark("tuned_memory", 5, "auto3d/cost", *RUNTIME),
)

"""Samples per second of reading at 1, 4 and 16 ranks, and what comparing them costs: python -m tests.benchmarks.reading

Each rank is a process with its own share of the micro-batches, as a first stage has under data parallelism: samples of
4,096 tokens of a file that ranks map to memory, of JSON lines that were tokenized once, and of a function. All ranks
read at the same time, so that beyond the machine's cores they share them. The cost of a fingerprint is the time of a
micro-batch of one sample with it and without it, in turn in one process; that of a neighbour's sample is of reading it
to compare it.
"""

import json
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from tabulate import tabulate

from auto3d.data import Batches, DataSettings, InputField
from auto3d.data.fingerprint import total
from auto3d.runtime.samples.neighbours import BUDGET_US
from launch.report.release import Target
from tests.benchmarks import reading
from tests.targets import end

TOKENS, SAMPLES, MICRO_BATCHES = 4096, 512, 32
RANKS = (1, 4, 16)
SECONDS = 2.0  # of reading, for a figure
REPETITIONS = 25
ITERATION_S = 1.0
TIMEOUT_S = 120


class Rows:
    """The samples of a function."""

    def __init__(self) -> None:
        self.tokens = np.random.default_rng(0).integers(0, 50_000, (SAMPLES, TOKENS))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.tokens[sample]}


def sources(folder: Path) -> dict[str, DataSettings]:
    tokens = np.random.default_rng(0).integers(0, 50_000, SAMPLES * TOKENS + 1, dtype=np.uint16)
    np.save(folder / "tokens.npy", tokens)
    rows = tokens[:-1].reshape(SAMPLES, TOKENS).tolist()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    column = {"input_ids": InputField(kind="column", shape=(TOKENS,))}
    return {
        "tokens": DataSettings(
            source="tokens",
            files=(str(folder / "tokens.npy"),),
            sequence_length=TOKENS,
            vocabulary_size=50_000,
            inputs={"input_ids": InputField(kind="tokens")},
        ),
        "json": DataSettings(source="json", files=(str(folder / "rows.jsonl"),), inputs=column),
        "a function": DataSettings(source=f"{reading.__name__}:Rows", inputs=column),
    }


def batches_of(settings: DataSettings, ranks: int, *, is_compared: bool = True) -> Batches:
    global_batch = ranks * MICRO_BATCHES
    return Batches(settings, seed=1, global_batch=global_batch, micro_batch_size=1, is_compared=is_compared)


def samples_per_s(settings: DataSettings, ranks: int) -> float:
    """Samples per second that ``ranks`` processes read together."""
    context = get_context("fork")
    ready, speeds = context.Barrier(ranks, timeout=TIMEOUT_S), context.Queue()

    def read(rank: int) -> None:
        speeds.put(speed_of_rank(settings, ranks, rank, ready.wait))

    processes = [context.Process(target=read, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = [speeds.get(timeout=TIMEOUT_S) for _ in processes]
    for process in processes:
        process.join()
    return sum(found)


def speed_of_rank(settings: DataSettings, ranks: int, rank: int, wait: Callable[[], object]) -> float:
    """Samples per second that one of ``ranks`` reads, once all are ready."""
    mine, read = batches_of(settings, ranks), 0
    mine.read(0, rank * MICRO_BATCHES, ["input_ids"])
    wait()
    begun = time.perf_counter()
    while (passed := time.perf_counter() - begun) < SECONDS:
        iteration, index = divmod(read, MICRO_BATCHES)
        mine.read(iteration, rank * MICRO_BATCHES + index, ["input_ids"])
        read += 1
    return read / passed


def iteration_s(mine: Batches) -> float:
    """Seconds in which a rank reads its micro-batches of an iteration and adds up their fingerprints, if any."""
    begun = time.perf_counter()
    for index in range(MICRO_BATCHES):
        found = mine.read(0, index, ["input_ids"]).fingerprints
        if found is not None:
            total(found, index)
    return time.perf_counter() - begun


def neighbour_s(mine: Batches) -> float:
    """Seconds in which it reads as many micro-batches only to compare them."""
    begun = time.perf_counter()
    for index in range(MICRO_BATCHES):
        found = mine.fingerprints(0, index)
        assert found is not None
        total(found, index)
    return time.perf_counter() - begun


def compared_s(settings: DataSettings) -> tuple[float, float]:
    """Seconds that fingerprints take of an iteration, and those of reading as many samples of a neighbour."""
    mine, alone = batches_of(settings, 1), batches_of(settings, 1, is_compared=False)
    for each in (mine, alone):
        iteration_s(each)
    found = [(iteration_s(mine) - iteration_s(alone), neighbour_s(mine)) for _ in range(REPETITIONS)]
    return median(own for own, _ in found), median(of_neighbour for _, of_neighbour in found)


def main() -> None:
    rows, targets = [], []
    with TemporaryDirectory() as folder:
        for name, settings in sources(Path(folder)).items():
            speeds = [f"{samples_per_s(settings, ranks):,.0f}" for ranks in RANKS]
            cost, of_neighbour = compared_s(settings)
            rows.append((name, *speeds, *(f"{1e6 * each / MICRO_BATCHES:.1f}" for each in (cost, of_neighbour))))
            what = f"{name}: fingerprints of {MICRO_BATCHES} micro-batches, part of an iteration of {ITERATION_S:g} s"
            targets.append(Target(what=what, found=100 * cost / ITERATION_S, wish=0.1, unit=" %"))
            if not settings.is_by_position:
                of_neighbour = min(of_neighbour, BUDGET_US / 1e6)  # no more is read
            what = what.replace("fingerprints", "a neighbour's samples")
            targets.append(Target(what=what, found=100 * of_neighbour / ITERATION_S, wish=0.1, unit=" %"))
            print(*rows[-1], file=sys.stderr, flush=True)
    headings = ["source", *(f"samples/s, {ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS)]
    headings += ["µs of a fingerprint", "of a neighbour's sample"]
    print(tabulate(rows, headings, tablefmt="github", disable_numparse=True))
    end(targets)


if __name__ == "__main__":
    main()

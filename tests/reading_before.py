"""Reading in trainings, now and before one rank read for others: python -m tests.reading_before [COMMIT]

A commit (by default the last one whose ranks compared nothing) is checked out beside this tree. Both train a model that
computes next to nothing, by plans for 1, 4 and 16 ranks, on the same data: a file of tokens, a function's samples, and
a dataset with a collator, which is what a Trainer has. So a sample counts once all stages that need its inputs have got
them, by reading them or as a message. The two run in turn, each with processes that wait while the other runs; a ratio
is the median of the ratios of rounds. Processor time, of all threads of all ranks, changes least on a busy machine.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

BEFORE = "89918c347be4060da52b47230893e496b378b463"
ROOT = Path(__file__).parents[1]
PLANS = {1: (1, 1), 4: (2, 2), 16: (4, 4)}  # ranks -> dp, pp
SOURCES = ("tokens", "a function", "a collator")
TOKENS, SAMPLES = 4096, 512  # tokens of a sample, and samples
TEXT_TOKENS = 512  # tokens of a sample for the collator
MICRO_BATCHES, MICRO_BATCH = 8, 4
ITERATIONS = {1: 40, 4: 16, 16: 8}  # of a round
STARTS = 7  # how often the processes of both trees are started
ROUNDS = 3  # trainings of each source on both trees in a start


class Rows:
    """The samples of a function, or of a dataset whose collator makes tensors of lists."""

    def __init__(self, *, listed: bool = False) -> None:
        import numpy as np

        tokens = np.random.default_rng(0).integers(0, 50_000, (SAMPLES, TEXT_TOKENS if listed else TOKENS))
        self.rows: Any = tokens.tolist() if listed else tokens

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return {"input_ids": self.rows[sample], "labels": self.rows[sample]}


@cache
def listed() -> Rows:
    return Rows(listed=True)


def collated(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As transformers' default collator."""
    import torch

    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class InTurn:
    """Each global batch begins where the last one ended."""

    def __init__(self, global_batch: int) -> None:
        self.global_batch = global_batch

    def of(self, iteration: int) -> list[int]:
        first = iteration * self.global_batch
        return [number % SAMPLES for number in range(first, first + self.global_batch)]

    def place(self, iteration: int) -> tuple[int, int]:
        return divmod(iteration, SAMPLES // self.global_batch)


def model() -> Any:
    """Four layers that compute next to nothing of the first token."""
    import torch
    from torch import nn

    class Least(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50_000, 2)
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.embedding(input_ids[:, 0])
            for layer in self.layers:
                hidden = layer(hidden).tanh()
            return {"loss": (hidden.mean(dim=-1) - labels[:, 0]).square().mean()}

    return Least()


def serve(folder: Path) -> None:
    """Answer lines of standard input, "begin RANKS" or a source, of which the ranks then train a round."""
    import numpy as np
    import torch

    from auto3d.data import DataSettings, InputField
    from tests.distributed.parity import SGD, make_plan
    from tests.models import TRAINED, captured
    from tests.processes import ProcessPool

    torch.set_num_threads(1)
    listed()  # ranks inherit it
    file = folder / "tokens.npy"
    np.save(file, np.random.default_rng(0).integers(0, 50_000, SAMPLES * TOKENS, dtype=np.uint16))
    names, columns = ("input_ids", "labels"), InputField(kind="column", shape=(TOKENS,))
    of_rows = DataSettings(source=f"{__name__}:Rows", inputs=dict.fromkeys(names, columns), shuffle=False)
    of_tokens = DataSettings(
        source="tokens",
        files=(str(file),),
        cache=folder / "data",
        shuffle=False,
        sequence_length=TOKENS,
        vocabulary_size=50_000,
        inputs=dict.fromkeys(names, InputField(kind="tokens")),
    )
    short = DataSettings(
        inputs=dict.fromkeys(names, InputField(kind="tokens")), sequence_length=TEXT_TOKENS, vocabulary_size=50_000
    )
    TRAINED.update({"tokens": (model, of_tokens), "a function": (model, of_rows), "a collator": (model, short)})
    pool: ProcessPool | None = None
    plans: dict[str, Any] = {}
    for line in map(str.strip, sys.stdin):
        if line.startswith("begin"):
            if pool is not None:
                pool.__exit__()
            ranks = int(line.split()[1])
            dp, pp = PLANS[ranks]
            sizes = {"micro_batches": MICRO_BATCHES, "micro_batch_size": MICRO_BATCH}
            plans = {name: make_plan(name, dp=dp, pp=pp, **sizes) for name in SOURCES}
            order = InTurn(dp * MICRO_BATCHES * MICRO_BATCH)
            data = {"tokens": of_tokens, "a function": of_rows, "a collator": order}
            pool = ProcessPool(ranks)
            for name in SOURCES:  # ranks inherit captures, and open files
                captured(name, MICRO_BATCH)
                pool.run(ranks, train, name, plans[name], data[name], 2, SGD)
            answer = "ready"
        else:
            assert pool is not None
            found = pool.run(ranks, train, line, plans[line], data[line], ITERATIONS[ranks], SGD)
            samples = ITERATIONS[ranks] * plans[line].global_batch
            seconds = max(seconds for seconds, _ in found)
            answer = f"{samples / seconds} {sum(processor for _, processor in found) / samples}"
        print(f"answer {answer}", flush=True)
    if pool is not None:
        pool.__exit__()


def train(world: Any, name: str, plan: Any, data: Any, iterations: int, optimizer: Any) -> tuple[float, float]:
    """Seconds and processor seconds of ``iterations``, after one that is not counted."""
    from auto3d.runtime.settings import TrainingSettings
    from auto3d.runtime.training import Training
    from auto3d.trainer.samples import CollatedData
    from tests.models import captured

    if isinstance(data, InTurn):
        data = CollatedData(dataset=listed(), collate=collated, order=data)
    settings = TrainingSettings(
        iterations=iterations + 1, optimizer=optimizer, device="cpu", threads_per_rank=1, timeout_s=60
    )
    training = Training(captured(name, plan.micro_batch_size), plan, settings, data, world).iterations()
    next(training)
    begun, before = perf_counter(), process_time()
    for _ in training:
        pass
    return perf_counter() - begun, process_time() - before


class Server:
    """The processes of one tree."""

    def __init__(self, tree: Path, folder: Path) -> None:
        folder.mkdir()
        environment = os.environ | {"PYTHONPATH": str(tree), "AUTO3D_CACHE": str(folder / "cache")}
        environment |= {"OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", str(folder)],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        for answer in self._process.stdout:
            if answer.startswith("answer "):
                return answer.split()[1:]
        raise RuntimeError(f"the processes have ended, while asked: {line}")

    def end(self) -> None:
        self._process.communicate()


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """The tree of ``commit``."""
    tree = folder / "tree"
    known = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    if subprocess.run(known, capture_output=True).returncode:
        sys.exit(f"{commit} is not in this clone; fetch the history of the branch")
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


Found = tuple[float, float]  # samples/s, and processor seconds of a sample


def measured(tree: Path, folder: Path, ranks: int, start: int) -> dict[str, list[tuple[Found, Found]]]:
    """Of each source what rounds have found before, in ``tree``, and now."""
    folder.mkdir()
    trees = {"before": tree, "now": ROOT}
    servers = {name: Server(trees[name], folder / name) for name in sorted(trees, reverse=bool(start % 2))}
    for server in servers.values():
        server.ask(f"begin {ranks}")
    found: dict[str, list[tuple[Found, Found]]] = {source: [] for source in SOURCES}
    for source in SOURCES:
        for number in range(ROUNDS):
            answers: dict[str, Found] = {}
            for name in sorted(servers, reverse=bool(number % 2)):
                speed, processor_s = map(float, servers[name].ask(source))
                answers[name] = speed, processor_s
            found[source].append((answers["before"], answers["now"]))
    for server in servers.values():
        server.end()
    return found


def main(commit: str) -> None:
    from tabulate import tabulate

    rows = []
    with TemporaryDirectory() as name, checked_out(commit, Path(name)) as tree:
        for ranks, (dp, pp) in PLANS.items():
            found = [measured(tree, Path(name) / f"{ranks} {start}", ranks, start) for start in range(STARTS)]
            for source in SOURCES:
                starts = [of_source[source] for of_source in found]
                rounds = [both for start in starts for both in start]
                speeds = [median(each[side][0] for each in rounds) for side in (0, 1)]
                costs = [median(each[side][1] for each in rounds) for side in (0, 1)]
                faster = sorted(median(now[0] / before[0] for before, now in start) for start in starts)
                cheaper = median(now[1] / before[1] for before, now in rounds)
                row = (source, f"dp={dp} pp={pp}", *(f"{each:,.0f}" for each in speeds), f"{median(faster):.2f}")
                row = (*row, f"{faster[0]:.2f} to {faster[-1]:.2f}", *(f"{1e6 * each:,.0f}" for each in costs))
                rows.append((*row, f"{cheaper:.2f}"))
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    headings = ["source", "plan", "samples/s before", "now", "ratio", "of starts"]
    headings += ["processor µs a sample before", "now", "ratio"]
    print(tabulate(rows, headings, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
    else:
        main(*(sys.argv[1:] or [BEFORE]))

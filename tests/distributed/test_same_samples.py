"""Ranks that read different data for the same sample end the training, with the sample and the ranks."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from auto3d.data import DataSettings, InputField
from auto3d.plan import Plan
from auto3d.runtime.process.world import World, leave
from auto3d.runtime.samples.same_samples import SamplesDifferError
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import Training
from auto3d.runtime.waiting import PeerLostError
from auto3d.schedule import samples_at_once
from tests.distributed.parity import ADAMW, make_plan
from tests.distributed.test_uneven import make_plan as uneven_plan
from tests.models import SEQUENCE, TEXT, captured

ITERATION, SAMPLE, PLACE = 39, 5, 7  # The fault is in this iteration and sample of it, from 0, at this token.
ITERATIONS = 41


def token_files(folder: Path, global_batch: int, *, swapped: bool = False, sample: int = SAMPLE) -> None:
    """A file of tokens, and a second one in which one token of a ``sample`` of the global batch is another, or it and
    the next are ``swapped``."""
    tokens = np.random.default_rng(1).integers(0, 256, ITERATIONS * global_batch * SEQUENCE, dtype=np.uint16)
    np.save(folder / "right.npy", tokens)
    samples = tokens.reshape(-1, SEQUENCE)
    first = ITERATION * global_batch
    if swapped:
        samples[[first + sample, first + sample + 1]] = samples[[first + sample + 1, first + sample]]
    else:
        samples[first + sample, PLACE] ^= 1
    np.save(folder / "wrong.npy", tokens)


def renumbered(folder: Path, global_batch: int) -> None:
    """A file of tokens, and a second one in which all tokens have other numbers."""
    tokens = np.random.default_rng(1).integers(0, 256, ITERATIONS * global_batch * SEQUENCE, dtype=np.uint16)
    np.save(folder / "right.npy", tokens)
    np.save(folder / "wrong.npy", 255 - tokens)


class Rows:
    """The samples of a function, of which each takes ``seconds`` to read."""

    reads = 0  # how often this process has read a sample

    def __init__(self, file: str, seconds: float) -> None:
        self.rows, self.seconds = np.load(file).reshape(-1, SEQUENCE).astype(np.int64), seconds
        Rows.reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        Rows.reads += 1
        if self.seconds:  # time.sleep(0) waits for a core, too
            time.sleep(self.seconds)
        return {"input_ids": self.rows[sample], "labels": self.rows[sample]}


def data_of(rank: int, folder: Path, wrong: set[int], seconds: float | None) -> DataSettings:
    file = folder / ("wrong.npy" if rank in wrong else "right.npy")
    if seconds is not None:
        return DataSettings(
            source=f"{__name__}:Rows",
            arguments={"file": str(file), "seconds": seconds},
            inputs=dict.fromkeys(("input_ids", "labels"), InputField(kind="column", shape=(SEQUENCE,))),
            shuffle=False,
        )
    return replace(TEXT, source="tokens", files=(str(file),), shuffle=False, cache=folder / file.stem)


def train_rank(
    world: World,
    model: str,
    plan: Plan,
    folder: Path,
    wrong: set[int],
    iterations: int = ITERATIONS,
    seconds: float | None = None,
) -> tuple[int, str]:
    """The number of iterations that it ran, and the error that ended it. ``wrong`` ranks have the second file. With
    ``seconds`` a function gives the samples, of which each takes so long.

    Under an asynchronous schedule, ranks learn of a difference one after another. A rank that waits for one that has
    ended then loses it, in a later iteration, and says nothing.
    """
    clip_norm = 0.0 if plan.schedule == "pipedream" else ADAMW.clip_norm
    optimizer = replace(ADAMW, clip_norm=clip_norm)
    settings = TrainingSettings(
        iterations=iterations, optimizer=optimizer, device="cpu", threads_per_rank=1, timeout_s=60
    )
    done = 0
    try:
        data = data_of(world.rank, folder, wrong, seconds)
        training = Training(captured(model, samples_at_once(plan)), plan, settings, data, world)
        for _ in training.iterations():
            done += 1
    except SamplesDifferError as error:
        return done, str(error)
    except PeerLostError:
        assert plan.schedule == "pipedream"
    finally:
        leave()
    return done, ""


def errors_of(results: list[tuple[int, str]], name: str) -> list[str]:
    """The errors of all ranks; of an asynchronous plan, those of the ranks that say something: at least one does."""
    errors = [error for _, error in results]
    if name == "asynchronous":
        assert any(errors)
        return [error for error in errors if error]
    return errors


PLANS = {
    "pipeline": ("gpt2", lambda: make_plan("gpt2", dp=1, pp=2)),
    "two pipelines": ("gpt2", lambda: make_plan("gpt2", dp=2, pp=2)),
    "tensor-parallel": ("gpt2-4-heads", lambda: make_plan("gpt2-4-heads", dp=1, pp=1, tp=2)),
    "both": ("gpt2-4-heads", lambda: make_plan("gpt2-4-heads", dp=1, pp=2, tp=2)),
    "two pipes": ("gpt2", lambda: make_plan("gpt2", dp=1, pp=2, schedule="chimera")),
    "replicas": ("gpt2", lambda: uneven_plan("gpt2", [1, 2])),
    "slices": ("llama", lambda: make_plan("llama", dp=1, pp=2, schedule="seq1f1b", options={"slices": 2})),
    "asynchronous": ("llama", lambda: make_plan("llama", dp=1, pp=2, schedule="pipedream")),
}


@pytest.mark.parametrize(("name", "swapped"), [*((name, False) for name in PLANS), ("pipeline", True)])
def test_one_token_of_one_sample_or_two_samples_in_another_order(name, swapped, processes, tmp_path):
    model, make = PLANS[name]
    plan = make()
    captured(model, samples_at_once(plan))
    token_files(tmp_path, plan.global_batch, swapped=swapped)
    wrong = plan.placement[-1][-1]
    assert processes.run(plan.ranks, train_rank, model, plan, tmp_path, set(), 6) == [(6, "")] * plan.ranks
    results = processes.run(plan.ranks, train_rank, model, plan, tmp_path, {wrong})
    done = {done for done, _ in results}
    assert max(done) <= ITERATION if name == "asynchronous" else done == {ITERATION}
    for error in errors_of(results, name):
        assert error.startswith(f"iteration {ITERATION + 1}: "), error
        if name != "asynchronous":  # there, no two ranks are at the same place
            assert f"have read different data for sample {SAMPLE} of the global batch" in error
            assert str(wrong) in error.partition("have")[0]


PIPELINES = {
    "data-parallel": ("gpt2", lambda: make_plan("gpt2", dp=4, pp=1)),
    "tensor-parallel": ("gpt2-4-heads", lambda: make_plan("gpt2-4-heads", dp=2, pp=1, tp=2)),
    "pipelines": ("gpt2", lambda: make_plan("gpt2", dp=2, pp=2)),
    "replicas": ("gpt2", lambda: uneven_plan("gpt2", [2, 2])),
    "asynchronous": ("llama", lambda: make_plan("llama", dp=2, pp=2, schedule="pipedream")),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_whose_data_differ(name, processes, tmp_path):
    """All ranks of the last pipeline, or rank 3 alone, number what they read in another way."""
    model, make = PIPELINES[name]
    plan = make()
    captured(model, samples_at_once(plan))
    renumbered(tmp_path, plan.global_batch)
    wrong = set(range(plan.ranks // plan.dp * (plan.dp - 1), plan.ranks)) if plan.dp > 1 else {plan.ranks - 1}
    results = processes.run(plan.ranks, train_rank, model, plan, tmp_path, wrong)
    assert [done for done, _ in results] == [0] * plan.ranks
    for error in errors_of(results, name):
        assert error.startswith("iteration 1: ")
        if name != "asynchronous":
            assert "have read different data for sample" in error


ALONE = {
    "data-parallel": ("gpt2", lambda: make_plan("gpt2", dp=2, pp=1)),
    "pipelines": ("gpt2", lambda: make_plan("gpt2", dp=2, pp=2)),
    "four pipelines": ("gpt2", lambda: make_plan("gpt2", dp=4, pp=1)),
    "tensor-parallel": ("gpt2-4-heads", lambda: make_plan("gpt2-4-heads", dp=2, pp=1, tp=2)),
    "uneven replicas": ("gpt2", lambda: uneven_plan("gpt2", [1, 2])),
    "replicas in two pipelines": ("gpt2", lambda: uneven_plan("gpt2", [2], dp=2)),
    "replicas": ("gpt2", lambda: uneven_plan("gpt2", [2, 2])),
    "two pipes": ("gpt2", lambda: make_plan("gpt2", dp=2, pp=2, schedule="chimera")),
    "slices": ("llama", lambda: make_plan("llama", dp=2, pp=2, schedule="seq1f1b", options={"slices": 2})),
    "asynchronous": ("llama", lambda: make_plan("llama", dp=2, pp=2, schedule="pipedream")),
}


def those_who_share_the_last_sample(plan: Plan) -> set[int]:
    """All ranks of the last pipeline; if there is one alone, the last replica of each stage."""
    if plan.dp > 1:
        return set(range(plan.ranks // plan.dp * (plan.dp - 1), plan.ranks))
    return {ranks[-1] for ranks in plan.placement}


@pytest.mark.parametrize(
    ("name", "seconds"), [*((name, None) for name in ALONE), ("data-parallel", 0.0), ("pipelines", 0.0)]
)
def test_one_token_of_a_sample_that_only_ranks_with_the_same_file_train(name, seconds, processes, tmp_path):
    """All who train the last sample of a global batch read it from a file of their own, as of their node."""
    model, make = ALONE[name]
    plan = make()
    captured(model, samples_at_once(plan))
    last = plan.global_batch - 1
    token_files(tmp_path, plan.global_batch, sample=last)
    wrong = those_who_share_the_last_sample(plan)
    assert 0 < len(wrong) < plan.ranks
    results = processes.run(plan.ranks, train_rank, model, plan, tmp_path, wrong, ITERATIONS, seconds)
    done = {done for done, _ in results}
    assert max(done) <= ITERATION if name == "asynchronous" else done == {ITERATION}
    for error in errors_of(results, name):
        assert error.startswith(f"iteration {ITERATION + 1}: "), error
        if name != "asynchronous":
            assert f"have read different data for sample {last} of the global batch; each rank reads by itself" in error
            named = {int(number) for number in error.partition("have")[0].partition("ranks")[2].split(" and ")}
            assert len(named & wrong) == 1


def train_and_count(world: World, model: str, plan: Plan, folder: Path, iterations: int, seconds: float) -> int:
    """The samples that a rank has read."""
    assert train_rank(world, model, plan, folder, set(), iterations, seconds) == (iterations, "")
    return Rows.reads


def test_samples_that_are_slow_to_read_are_compared_now_and_then(processes, tmp_path):
    plan = make_plan("gpt2", dp=2, pp=1)
    captured("gpt2", samples_at_once(plan))
    token_files(tmp_path, plan.global_batch)
    at_once, iterations = plan.micro_batch_size, 30
    own = iterations * plan.global_batch // 2
    for reads in processes.run(plan.ranks, train_and_count, "gpt2", plan, tmp_path, iterations, 0.004 / at_once):
        compared, rest = divmod(reads - own, at_once)
        measured, due = 4, 5  # readings before the first iteration; the first four iterations and number 16
        assert not rest
        # A micro-batch takes 4 ms or, on a busy machine, longer.
        assert measured + due - 1 <= compared <= measured + due + iterations // 4

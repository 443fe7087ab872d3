"""kill -9 of a random rank at a random moment of a save: the checkpoint before or the new one loads, whole."""

import multiprocessing
import os
import random
import signal
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic, sleep

import pytest

from auto3d.plan import Plan
from auto3d.runtime.checkpoint.format import Checkpoints, complete, newest
from auto3d.runtime.checkpoint.reading import CheckpointReader
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import Training
from tests.distributed.parity import ADAMW, make_plan
from tests.models import TRAINED, captured

RANKS = 2


def train_for_ever(world: World, plan: Plan, folder: Path) -> None:
    """Save after every iteration."""
    settings = TrainingSettings(iterations=10_000, optimizer=ADAMW, timeout_s=60)
    training = Training(
        captured("gpt2", 2), plan, settings, TRAINED["gpt2"][1], world, checkpoints=Checkpoints(folder=folder, every=1)
    )
    for _ in training.iterations():
        pass


def killed_at_random(seed: int, plan: Plan, folder: Path) -> int:
    """Kill a random rank once a few checkpoints are there; returns the iteration of the newest one just before."""
    draw = random.Random(seed)
    context = multiprocessing.get_context("fork")
    meeting_point = f"file://{folder}.meeting-{seed}"
    worlds = [World(rank=rank, size=RANKS, local_rank=rank, meeting_point=meeting_point) for rank in range(RANKS)]
    start = newest(folder) or 0
    ranks = [context.Process(target=train_for_ever, args=(world, plan, folder), daemon=True) for world in worlds]
    for rank in ranks:
        rank.start()
    try:
        after, end = start + draw.randint(1, 3), monotonic() + 60
        while (newest(folder) or 0) < after:
            assert monotonic() < end
            assert all(rank.is_alive() for rank in ranks), "it does not train"
            sleep(0.001)
        sleep(draw.uniform(0, 0.06))  # an iteration and its save take about as long
        before = newest(folder)
        os.kill(draw.choice(ranks).pid, signal.SIGKILL)
        wait([rank.sentinel for rank in ranks], timeout=10)
        sleep(draw.choice([0, 0.05]))  # the other rank may live on for a while
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
    return before


@pytest.mark.parametrize("moments", [5, pytest.param(40, marks=pytest.mark.soak)])
def test_the_old_or_the_new_checkpoint_loads(tmp_path, moments):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    plan = make_plan("gpt2", dp=1, pp=2, shard_optimizer=True)
    folder = tmp_path / "checkpoints"
    whole = None
    for number in range(moments):
        before = killed_at_random(seed + number, plan, folder)
        after = newest(folder)
        assert after is not None
        assert before <= after, f"seed {seed + number}"
        for iteration in complete(folder):
            with CheckpointReader(folder / f"iteration-{iteration:08d}") as reader:
                tensors = {name: reader.whole(name) for name in reader.checkpoint.tensors}
                assert reader.checkpoint.iteration == iteration
            assert {int(tensor) for name, tensor in tensors.items() if name.endswith(".step")} == {iteration}
            assert whole is None or tensors.keys() == whole
            whole = tensors.keys()

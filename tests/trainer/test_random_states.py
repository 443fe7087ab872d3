"""What a script draws without a seed: another value in each run, but the same on all ranks, so that all train alike."""

import random

import numpy as np
import torch
import transformers

from auto3d import init
from tests.promises.preloaded import SCRIPT
from tests.promises.running import run
from tests.trainer import small
from tests.trainer.scripts import as_rank, begin, free_port

ORDERS = {
    "python": lambda rows: random.sample(rows, len(rows)),
    "numpy": lambda rows: [rows[i] for i in np.random.permutation(len(rows))],
    "torch": lambda rows: [rows[i] for i in torch.randperm(len(rows))],
}


def forget_seeds():
    """Be a process in which nothing was seeded; those of the tests are forked from one, and so begin alike."""
    random.seed()
    np.random.seed()
    torch.seed()


def drawn(world, port, seeded):
    as_rank(world, port)
    forget_seeds()
    if seeded:
        transformers.set_seed(3)
    init(pp=world.size)
    return [order(range(100)) for order in ORDERS.values()]


def test_ranks_draw_alike_and_runs_differ_unless_they_are_seeded(processes):
    first, second = (processes.run(4, drawn, free_port(), False) for _ in range(2))
    for orders in (first, second):
        assert orders == [orders[0]] * 4
    for here, there in zip(first[0], second[0], strict=True):
        assert here != there
    transformers.set_seed(3)
    assert processes.run(4, drawn, free_port(), True) == [[order(range(100)) for order in ORDERS.values()]] * 4


def shuffled(world, folder, port):
    """An order that Python and numpy have drawn, and the losses of its training."""
    forget_seeds()
    begin(world, folder, port, pp=2, dp=2)
    rows = small.rows(32)
    order = ORDERS["numpy"](ORDERS["python"](range(len(rows))))
    made = small.trainer(data=small.with_labels([rows[i] for i in order]))
    made.train()
    return order, [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def trained_alone(world, folder, order):
    begin(world, folder, None, ours=False)
    rows = small.rows(32)
    classes = transformers.Trainer, transformers.TrainingArguments
    data = small.with_labels([rows[i] for i in order])
    made = small.trainer(data=data, classes=classes, gradient_accumulation_steps=4)
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_a_shuffle_without_a_seed_is_that_of_one_process(processes, tmp_path):
    (order, losses), *others = processes.run(4, shuffled, tmp_path, free_port())
    assert [each for each, _ in others] == [order] * 3  # torch begins with one seed in all processes
    (alone,) = processes.run(1, trained_alone, tmp_path, order)
    np.testing.assert_allclose(losses, alone, rtol=1e-4)


def test_a_rank_that_never_calls_init(tmp_path):
    """The others end when their launcher does, and say whom they met nowhere if nobody ends them."""
    (tmp_path / SCRIPT).write_text("from auto3d.trainer import setup; setup.MEET_S = 2.0; setup.init(pp=2)")
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    printed = run(SCRIPT, tmp_path, variables={**ranks, "MASTER_PORT": str(free_port())}, code=1, timeout_s=60)
    assert "rank 1 of 2 on" in printed
    assert "the ranks did not meet at tcp://127.0.0.1" in printed

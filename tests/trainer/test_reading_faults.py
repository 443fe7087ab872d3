"""A dataset that is another one on one rank, in mid-training: named where two read it, harmless where one does."""

import io
import re
from contextlib import redirect_stdout
from functools import partial
from time import sleep

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from auto3d.errors import InputError
from tests.distributed.test_watch import windows
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port

STEPS, BATCH = 41, 4
FAULT, COMPARED = 40, 33  # iterations; pipelines beside each other compare a micro-batch of every sixteenth


class Samples:
    """Samples in their order, of which rank 1 has another token in the one of number ``wrong``."""

    def __init__(self, wrong=None, per_epoch=STEPS * BATCH):
        self.tokens = np.random.default_rng(2).integers(0, 64, (per_epoch, 16))
        self.wrong, self.epoch = wrong, 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, number):
        tokens = torch.tensor(self.tokens[number]) + 7 * self.epoch
        if number == self.wrong and dist.is_initialized() and dist.get_rank() == 1:
            tokens[3] += 1
        return {"input_ids": tokens % 64, "labels": tokens % 64}


class TellsEpoch(TrainerCallback):
    """Tells the dataset of its epoch, but on rank 1 of another one in the second."""

    def __init__(self, samples):
        self.samples = samples

    def on_epoch_begin(self, args, state, control, **_):
        epoch = round(state.epoch)
        self.samples.epoch = epoch + 1 if epoch == 1 and args.process_index == 1 else epoch


def trained(data, *, callbacks=(), dp=1, **arguments):
    arguments = {"train_sampling_strategy": "sequential", "max_steps": STEPS, **arguments}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": BATCH // 2 // dp}
    trainer = small.trainer(data=data, callbacks=callbacks, **sizes, **arguments)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def error_of(*arguments, **options):
    with pytest.raises(InputError) as caught:
        trained(*arguments, **options)
    return str(caught.value)


def of_degrees(world, folder, port, degrees, fault):
    """What training says of one other token, and of another epoch; what it gives where it says nothing."""
    begin(world, folder, port, **degrees)
    dp, wrong = degrees.get("dp", 1), (fault - 1) * BATCH + 2 * (degrees.get("dp", 1) > 1)
    say = trained if degrees == {"pp": 2} else error_of
    told = Samples(per_epoch=4 * BATCH)
    return (
        trained(Samples(), dp=dp) if say is trained else None,
        say(Samples(wrong), dp=dp),
        error_of(told, callbacks=[TellsEpoch(told)], dp=dp),
    )


TOKEN = "iteration {}: ranks 0 and 1 have read different data for sample {} of the global batch; "


@pytest.mark.parametrize(
    ("degrees", "fault"),
    [
        ({"pp": 2}, FAULT),
        ({"tp": 2}, FAULT),
        ({"dp": 2}, COMPARED),
        *soak(({"pp": 2, "schedule": "seq1f1b:slices=2"}, FAULT)),
    ],
    ids=str,
)
def test_data_that_differ_on_one_rank(degrees, fault, processes, tmp_path):
    for right, found, epoch in processes.run(
        2, partial(of_degrees, degrees=degrees, fault=fault), tmp_path, free_port()
    ):
        assert epoch.startswith(TOKEN.format(5, 0))
        if degrees == {"pp": 2}:
            assert found == right, "rank 0 reads for both"
        else:
            assert found.startswith(TOKEN.format(fault, 2 if "dp" in degrees else 0))


class Sleeps(list):
    def __getitem__(self, number):
        sleep(0.02)
        return super().__getitem__(number)


def lines_of_slow_data(world, folder, port):
    """What a rank prints of a training whose dataset sleeps 20 ms for each sample, with windows of 3 iterations."""
    begin(world, folder, port)
    output = io.StringIO()
    with windows(3, 0.0), redirect_stdout(output):
        small.trainer(data=Sleeps(small.with_labels(small.rows(64))), max_steps=8).train()
    return [line for line in output.getvalue().splitlines() if "wait for data" in line]


def test_the_trainer_says_once_that_stages_wait_for_data(processes, tmp_path):
    first, other = processes.run(2, lines_of_slow_data, tmp_path, free_port())
    (line,) = first
    assert re.fullmatch(
        r"auto3d: warning: stages wait for data: reading takes \d+ % of an iteration on rank \d .*", line
    )
    assert not other, "rank 0 alone prints"

"""Samples that worker processes read: those of one transformers process with as many workers, under every plan."""

import multiprocessing
import os
import re
import signal
import sys
from functools import partial
from math import prod
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from time import monotonic, sleep

import pytest
import torch

from auto3d.errors import InputError
from auto3d.runtime.waiting import PeerLostError
from auto3d.trainer import workers
from tests.promises.preloaded import SCRIPT as FORKED
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port
from tests.trainer.test_draws import AHEAD, CASES, CLASSES, made, numbers, trained

DRAWN = ("torch", "random", "numpy")  # what ``trained`` draws at the end
TWO = {"dataloader_num_workers": 2}
SELDOM = TWO | {"eval_steps": 4}  # each evaluation forks workers of its own


@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        ({"pp": 2}, ("nothing", "masks", "a dataset's own generator")),
        (AHEAD, ("an epoch that ends early",)),
        ({"dp": 2}, ("a random transform", "an order by torch's generator")),  # test_draws.py has two pipelines
        *soak(*((degrees, tuple(CASES)) for degrees in ({"pp": 2}, AHEAD, {"dp": 2, "pp": 2}))),
        *soak(({"tp": 2}, ("masks", "masks by their own generator", "an order by torch's generator"))),
    ],
    ids=str,
)
def test_workers_read_what_they_do_in_one_process(degrees, names, processes, tmp_path):
    (alone,) = processes.run(1, partial(trained, names=names, options=SELDOM), tmp_path, None, *CLASSES)
    ranks = processes.run(
        prod(degrees.values()), partial(trained, names=names, options=SELDOM, **degrees), tmp_path, free_port()
    )
    for name, expected in alone.items():
        drawn = len(DRAWN) if name == "nothing" else 0  # data that draw nothing leave the script's generators alone
        for rank in ranks:
            assert rank[name][: len(expected) - drawn] == pytest.approx(expected[: len(expected) - drawn], rel=1e-4), (
                name
            )


def resumed(world, folder, port):
    """The numbers of a whole training, and of trainings that go on in the middle of its second epoch and before it."""
    begin(world, folder, port)
    found = []
    for step in (None, 4, 3):
        trainer = made(
            "a dataset's own generator", save_strategy="steps", save_steps=1, output_dir=f"after{step}", **TWO
        )
        trainer.train(resume_from_checkpoint=step and f"afterNone/checkpoint-{step}")
        found.append(numbers(trainer))
    return found


def test_a_training_with_workers_that_resumes_draws_the_same(processes, tmp_path):
    ranks = processes.run(2, resumed, tmp_path, free_port())
    assert ranks[0] == ranks[1]
    whole, *later = ranks[0]
    for each in later:
        assert each == pytest.approx(whole, rel=1e-5)


class Rows(torch.utils.data.Dataset):
    """Rows of tokens; ``of_worker`` is called in a worker before sample 41 is read."""

    def __init__(self, of_worker):
        self.rows, self.of_worker = small.with_labels(small.rows(400)), of_worker

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        if number == 41 and torch.utils.data.get_worker_info() is not None:
            self.of_worker()
        return self.rows[number]


def raise_it():
    raise OSError("no such file\nor folder")


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def failing(world, folder, port, of_worker):
    """What the training raises on this rank, and the processes that it leaves."""
    begin(world, folder, port)
    made("nothing", max_steps=1, **TWO)  # the names and flags of this process
    trainer = small.trainer(
        data=Rows(of_worker), max_steps=100, logging_steps=50, train_sampling_strategy="sequential", **TWO
    )
    with pytest.raises((InputError, PeerLostError)) as error:
        trainer.train()
    return type(error.value).__name__, str(error.value), [each.pid for each in multiprocessing.active_children()]


@pytest.mark.parametrize(
    ("of_worker", "lines"),
    [
        (
            raise_it,
            "train_dataset, eval_dataset or data_collator: worker 0 raised OSError: no such file in "
            rf"{__file__}, line \d+; reading sample 41 of the dataset failed",
        ),
        (
            be_killed,
            r"TrainingArguments.dataloader_num_workers: worker 0 of 2 \(process id \d+\) has ended by signal 9 "
            r"\(SIGKILL\), at samples (32, 33|36, 37|40, 41) of the dataset or the next that it was to read: its "
            r"memory may not be enough \(of the host, or of /dev/shm\), or its code may have ended it",
        ),
    ],
)
def test_a_worker_that_fails_is_named(of_worker, lines, processes, tmp_path):
    first, last = processes.run(2, partial(failing, of_worker=of_worker), tmp_path, free_port())
    assert (first[0], last[0]) == ("InputError", "PeerLostError")
    assert re.fullmatch(lines, first[1]), first[1]
    assert first[2] == last[2] == []


def slept(samples, seconds):
    sleep(seconds)
    return samples


def test_a_slow_worker_is_named(monkeypatch):
    monkeypatch.setattr(workers, "SLOW_S", 0.2)
    lines = []
    tasks = [(range(2), {"seconds": 0.0}), (range(2, 4), {"seconds": 1.0}), (range(4, 6), {"seconds": 0.0})]
    reads = workers.ReadAhead(None, slept, tasks, workers.Workers(2), lines.append)
    assert list(reads) == [range(2), range(2, 4), range(4, 6)]
    reads.end()
    (line,) = lines
    assert re.fullmatch(
        r"the pipeline waits for data since \d s: worker 1 of 2 was to read samples 2, 3 of the dataset", line
    )


def fail_to_begin(worker):
    raise OSError(f"no database for worker {worker}")


def test_a_worker_that_does_not_begin_is_named():
    tasks = [(range(2), {"seconds": 0.0})]
    reads = workers.ReadAhead(None, slept, tasks, workers.Workers(1, init=fail_to_begin), print)
    with pytest.raises(InputError) as error:
        next(reads)
    assert str(error.value) == (
        "TrainingArguments.dataloader_num_workers: OSError: no database for worker 0 (worker 0 of 1 was to read "
        "samples 0, 1 of the dataset)"
    )


REFUSED = {
    "dataloader_multiprocessing_context": "spawn",
    "dataloader_persistent_workers": True,
}


def refused(world, folder, port):
    begin(world, folder, port)
    found = {}
    for name, value in REFUSED.items():
        with pytest.raises(InputError) as error:
            made("mixup", **{name: value}, **TWO).train()
        found[name] = str(error.value)
    kept = made("nothing", dataloader_persistent_workers=True, dataloader_prefetch_factor=3, **TWO)
    kept.train()
    return found, numbers(kept)


def test_what_workers_cannot_do_is_refused(processes, tmp_path):
    ((found, kept),) = processes.run(1, refused, tmp_path, None)
    for name in REFUSED:
        assert found[name].startswith(f"TrainingArguments.{name}: found "), found
    assert len(kept) > 6


SCRIPT = """
import signal, sys
sys.path.append({tests!r})
from auto3d.transformers import Trainer, TrainingArguments, init
from tests.trainer import small
from tests.trainer.test_workers import Slow

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without a handler
init()
trainer = small.trainer(data=Slow(small.with_labels(small.rows(64))), max_steps=1000, dataloader_num_workers=2)
trainer.train()
print("trained to the end")
"""


class Slow(list):
    """Rows that say in which process each is read."""

    def __getitem__(self, number):
        if torch.utils.data.get_worker_info() is not None:
            print(f"worker {os.getpid()}", flush=True)
            sleep(0.05)
        return super().__getitem__(number)


@pytest.mark.parametrize("number", [signal.SIGINT, *soak(signal.SIGTERM, signal.SIGKILL)], ids=str)
def test_no_worker_is_left(number, tmp_path):
    (tmp_path / FORKED).write_text(SCRIPT.format(tests=str(Path(__file__).parents[2])))
    with Popen([sys.executable, FORKED], cwd=tmp_path, stdout=PIPE, stderr=DEVNULL, text=True) as script:
        pids = set()
        for line in script.stdout:
            assert line != "trained to the end\n"
            if line.startswith("worker ") and len(pids) < 2:
                pids.add(int(line.split()[1]))
                if len(pids) == 2:
                    script.send_signal(number)
        assert len(pids) == 2
    end = monotonic() + 20
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and monotonic() < end:
        sleep(0.1)
    assert not left

"""Collators and datasets that draw at random: the batches of one transformers process, under every plan."""

import multiprocessing
import random
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import DataCollatorForLanguageModeling, TrainerCallback, set_seed

from auto3d import Trainer, TrainingArguments
from auto3d.runtime.samples import inputs
from auto3d.trainer.draws import TrainingDraws
from auto3d.trainer.generators import PROCESS, Generators, States
from auto3d.trainer.samples import CollatedData, InOrder
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port

CLASSES = transformers.Trainer, transformers.TrainingArguments


class Mixed(nn.Module):
    """Classifies images, of which labels say how much is of each class."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, pixels, labels=None):
        logits = self.last(self.first(pixels).relu())
        return {"logits": logits} if labels is None else {"loss": loss_of(logits, labels), "logits": logits}


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits, labels)


class Images(torch.utils.data.Dataset):
    """Images, each with what ``change`` draws for it."""

    def __init__(self, count, change):
        drawn = torch.Generator().manual_seed(1)
        self.pixels = torch.randn(count, 8, generator=drawn)
        self.labels = nn.functional.one_hot(torch.randint(4, (count,), generator=drawn), 4).float()
        self.change, self.rng = change, np.random.default_rng(5)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, number):
        return {"pixels": self.change(self, self.pixels[number]), "labels": self.labels[number]}


def same(images, pixels):
    return pixels


def flipped(images, pixels):
    """Sometimes flipped, and drawn upon only then."""
    if random.random() < 0.5:
        return pixels.flip(0) + random.gauss(0, 1)
    return pixels


def with_noise(images, pixels):
    return pixels + torch.from_numpy(images.rng.normal(size=8).astype(np.float32))


def mixup(rows):
    """Each image is mixed with another one of its batch."""
    pixels, labels = (torch.stack([row[name] for row in rows]) for name in ("pixels", "labels"))
    order, share = np.random.permutation(len(rows)), float(np.random.beta(1, 1))
    return {
        "pixels": share * pixels + (1 - share) * pixels[order],
        "labels": share * labels + (1 - share) * labels[order],
    }


def of_images(change=same, collator=None, **options):
    set_seed(0)
    data = Images(24, change), Images(10, change)
    return small.trainer(Mixed(), data[0], eval_dataset=data[1], collator=collator, **options)


def of_masks(samples=24, seed=None, **options):
    data = [{"input_ids": row} for row in small.rows(samples)]
    collator = DataCollatorForLanguageModeling(small.tokenizer(), mlm_probability=0.3, seed=seed)
    return small.trainer(small.llama(), data, eval_dataset=data[:10], collator=collator, **options)


class EndsEpoch(TrainerCallback):
    """Ends the first epoch after two steps, of which a batch more was read."""

    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = state.global_step == 2


DRAWING = {
    "masks": lambda **options: of_masks(22, **options),  # the last batch of an epoch lacks samples
    "masks by their own generator": lambda **options: of_masks(seed=7, **options),
    "mixup": lambda **options: of_images(collator=mixup, **options),
    "a random transform": lambda **options: of_images(flipped, **options),
    "a dataset's own generator": lambda **options: of_images(with_noise, **options),
    "an order by torch's generator": lambda **options: of_masks(train_sampling_strategy="group_by_length", **options),
    "an epoch that ends early": lambda **options: of_images(flipped, callbacks=[EndsEpoch()], **options),
}
CASES = {"nothing": of_images, **DRAWING}


def compare_labels(prediction):
    """A number that depends on the labels and their order."""
    labels = prediction.label_ids.reshape(len(prediction.label_ids), -1)
    return {"labels": float((labels * np.arange(1, len(labels) + 1)[:, None]).mean())}


def made(name, *classes, **options):
    multiprocessing.current_process().name = "MainProcess"  # as that of a launcher's is
    multiprocessing.current_process()._config["daemon"] = False  # so that it may have worker processes
    defaults = {"num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 4, "label_names": ["labels"]}
    defaults |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "metrics": compare_labels}
    return CASES[name](**defaults | {"classes": classes or (Trainer, TrainingArguments)} | options)


def numbers(trainer):
    keys = ("loss", "eval_loss", "eval_labels")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


class HostMemory:
    """Memory through which a thread reads ahead, as on a GPU."""

    def begin_thread(self):
        pass

    def empty_pinned(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def queue_copy(self, tensors):
        return {name: tensor.clone() for name, tensor in tensors.items()}, self

    def synchronize(self):
        pass


def trained(world, folder, port, *classes, names, ahead=False, options=None, **degrees):
    """Losses and metrics of a training, of an evaluation after it, and what the script then draws."""
    begin(world, folder, port, ours=not classes, **degrees)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        if ahead:
            patch.setattr(inputs, "pinned_memory_of", lambda device: HostMemory())
        for name in names:
            trainer = made(name, *classes, gradient_accumulation_steps=4 // degrees.get("dp", 1), **options or {})
            if name == "a random transform":
                trainer.evaluate()  # the training goes on from what it has drawn
            trainer.train()
            trainer.evaluate()
            found[name] = [*numbers(trainer), torch.rand(()).item(), random.random(), np.random.rand()]
            assert not multiprocessing.active_children(), "all workers have ended"
    return found


AHEAD = {"pp": 2, "ahead": True}


@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        (AHEAD, ("mixup", "a dataset's own generator", "an epoch that ends early")),
        ({"dp": 2, "pp": 2}, ("masks", "a random transform")),
        ({"tp": 2}, ("masks by their own generator",)),
        *soak(*((degrees, tuple(DRAWING)) for degrees in ({"pp": 2}, AHEAD, {"dp": 2, "pp": 2}))),
        *soak(({"tp": 2}, ("masks", "masks by their own generator", "an order by torch's generator"))),
    ],
    ids=str,
)
def test_draws_are_those_of_one_process(degrees, names, processes, tmp_path):
    (alone,) = processes.run(1, partial(trained, names=names), tmp_path, None, *CLASSES)
    ranks = processes.run(prod(degrees.values()), partial(trained, names=names, **degrees), tmp_path, free_port())
    for name, expected in alone.items():
        for rank in ranks:
            assert rank[name] == pytest.approx(expected, rel=1e-4), name


def resumed(world, folder, port, names):
    """The numbers of whole trainings, and of trainings that go on after step 4, in the second epoch, and after 3."""
    begin(world, folder, port)
    found = {}
    for name in names:
        whole = made(name, save_strategy="steps", save_steps=1, output_dir=name)
        whole.train()
        found[name] = [numbers(whole)]
        for step in (4, 3):
            later = made(name, output_dir="later")
            later.train(resume_from_checkpoint=f"{name}/checkpoint-{step}")
            found[name].append(numbers(later))
    return found


RESUMED = ("a dataset's own generator", "masks by their own generator", "an order by torch's generator")


@pytest.mark.parametrize("names", [RESUMED[:1], *soak((RESUMED[1:],))], ids=str)
def test_a_training_that_resumes_draws_the_same(names, processes, tmp_path):
    ranks = processes.run(2, partial(resumed, names=names), tmp_path, free_port())
    assert ranks[0] == ranks[1]
    for name in names:
        whole, *later = ranks[0][name]
        for each in later:
            assert each == pytest.approx(whole, rel=1e-5), name


class Epochs:
    """The order of three iterations of four samples in each epoch."""

    draws = None
    global_batch = 4

    def place(self, iteration):
        return divmod(iteration, 3)

    def of(self, iteration):
        return range(4 * iteration, 4 * iteration + 4)

    def after(self, iteration, states):
        with PROCESS.at(states):
            torch.rand(())
            return PROCESS.states(states)


def drawn_by(collate, reads):
    """What batches hold that are read in the order of ``reads``; a number alone evaluates after so many iterations."""
    set_seed(3)
    data = CollatedData(dataset=range(100), collate=collate, order=Epochs(), generators=Generators(collator=collate))
    draws = TrainingDraws(data.order, data.generators.states())
    draws.size, found = 2, {}
    draws.follow(data, data.generators.states())
    for read in reads:
        if isinstance(read, int):
            evaluation = replace(data, order=InOrder(samples=6, global_batch=4))
            made_draws = draws.evaluate(evaluation, read, 2)
            found[read] = made_draws.read((0, 0), range(2, 6))["drawn"].tolist()
            made_draws.end()  # a thread may ask for it while batches are read
            assert made_draws.read((0, 0), range(2, 6))["drawn"].tolist() == found[read]
        else:
            found[read] = draws.read(read, range(0))["drawn"].tolist()
    return found, draws.point(5).states.to_json()


def test_batches_may_be_read_in_any_order():
    """A thread reads ahead of an evaluation, and a rank reads some batches only, or none."""
    own = np.random.default_rng(7)

    def collate(rows):
        parts = [torch.rand(()), random.random(), np.random.rand(), own.random()]
        return {"drawn": torch.tensor([[row, *parts] for row in rows])}

    batches = [(iteration, index) for iteration in range(5) for index in (0, 1)]
    whole, end = drawn_by(collate, [*batches[:4], 2, *batches[4:6], 3, *batches[6:]])
    assert len({tuple(each[0][1:]) for each in whole.values()}) == len(whole), "each draws numbers of its own"
    ahead, end_ahead = drawn_by(collate, [*batches[:9], 2, *batches[4:9], 3, *batches[6:]])
    assert (ahead, end_ahead) == (whole, end)
    some, end_some = drawn_by(collate, [(0, 1), 2, (2, 1), 3, (3, 1), (3, 0), (4, 1)])
    assert end_some == end
    assert some == {place: whole[place] for place in some}
    assert drawn_by(collate, [2, 3])[1] == end


class Augments:
    def __init__(self):
        self.own, self.later, self.steps = [np.random.default_rng(3)], None, random.Random(5)

    def __call__(self, rows):
        self.later = self.later or torch.Generator().manual_seed(4)
        return OF_MODULE.random() + self.own[0].random() + torch.rand((), generator=self.later) + self.steps.random()


OF_MODULE = np.random.RandomState(1)


def test_a_scripts_own_generators_are_found_and_kept():
    augments = Augments()
    generators = Generators(data_collator=augments)
    with generators.seeded() as begin:
        begin(1)
        augments([])
    assert augments.later is None, "it is as before"
    states = generators.states()
    assert len(states.own) == 4
    with generators.seeded() as begin:
        begin(1)
        found = augments([])
        begin(1)
        assert augments([]) == found
        begin(2)
        assert augments([]) != found
    expected = augments([])
    assert augments([]) != expected
    for each in (states, States.from_json(states.to_json())):
        with generators.at(each):
            assert augments([]) == expected
            assert augments([]) != expected

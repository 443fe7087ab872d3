"""DataLoaders that a script's Trainer makes itself: their samples are those of one transformers process."""

import multiprocessing
from functools import partial
from math import prod

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Subset, WeightedRandomSampler
from transformers import set_seed

from auto3d import Trainer, TrainingArguments
from auto3d.errors import InputError
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port
from tests.trainer.test_draws import CLASSES, EndsEpoch, Images, Mixed, flipped, numbers, same

SAMPLES = 22  # the last step of an epoch lacks samples
WEIGHTS = [1.0 + number % 3 for number in range(SAMPLES)]


def seeded():
    return torch.Generator().manual_seed(7)


TRAINING = {  # options of the DataLoader for the training
    "weights by the global generator": lambda data: {"sampler": WeightedRandomSampler(WEIGHTS, 20)},
    "weights by a generator": lambda data: {"sampler": WeightedRandomSampler(WEIGHTS, 20, generator=seeded())},
    "shuffled": lambda data: {"shuffle": True},
    "shuffled by a generator": lambda data: {"shuffle": True, "generator": seeded(), "drop_last": True},
    "a part": lambda data: {"sampler": [3, 1, 4, 15, 9, 2, 6, 5, 8, 7]},
    "draws": lambda data: {"shuffle": True},
    "draws in workers": lambda data: {"shuffle": True, "num_workers": 2},
    "draws in an epoch that ends early": lambda data: {},
    "prepared by accelerate": lambda data: {"shuffle": True},
    "its own dataset": lambda data: {"sampler": range(20)},
}


def made(name, trainer_type, arguments_type, **options):
    multiprocessing.current_process().name = "MainProcess"  # as that of a launcher's is
    multiprocessing.current_process()._config["daemon"] = False  # so that it may have worker processes
    change = flipped if "draws" in name or "prepared" in name else same
    data, others = Images(SAMPLES, change), Images(10, change)

    class Loading(trainer_type):
        def get_train_dataloader(self):
            loader = DataLoader(data, batch_size=2, collate_fn=self.data_collator, **TRAINING[name](data))
            return self.accelerator.prepare(loader) if "prepared" in name else loader

        def get_eval_dataloader(self, eval_dataset=None):
            given = self.eval_dataset if eval_dataset is None else eval_dataset
            return DataLoader(Subset(given, [7, 1, 5, 2, 9]), batch_size=4, collate_fn=self.data_collator)

    defaults = {"num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 4}
    defaults |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "label_names": ["labels"]}
    set_seed(0)
    trainer = small.trainer(
        Mixed(),
        data,
        eval_dataset=others,
        callbacks=[EndsEpoch()] if "early" in name else [],
        classes=(Loading, arguments_type),
        **defaults | options,
    )
    if name == "its own dataset":
        trainer.train_dataset = None
    return trainer


def trained(world, folder, port, *classes, names, **degrees):
    begin(world, folder, port, ours=not classes, **degrees)
    found = {}
    for name in names:
        trainer = made(
            name, *classes or (Trainer, TrainingArguments), gradient_accumulation_steps=4 // degrees.get("dp", 1)
        )
        trainer.train()
        found[name] = [*numbers(trainer), trainer.state.global_step]
    return found


@pytest.mark.parametrize(
    ("degrees", "names"),
    [({"pp": 2}, tuple(TRAINING)), *soak(*((degrees, tuple(TRAINING)) for degrees in ({"dp": 2, "pp": 2}, {"tp": 2})))],
    ids=str,
)
def test_samples_are_those_of_one_process(degrees, names, processes, tmp_path):
    (alone,) = processes.run(1, partial(trained, names=names), tmp_path, None, *CLASSES)
    ranks = processes.run(prod(degrees.values()), partial(trained, names=names, **degrees), tmp_path, free_port())
    assert len({tuple(each) for each in alone.values()}) == len(names)
    for name, expected in alone.items():
        for rank in ranks:
            assert rank[name] == pytest.approx(expected, rel=1e-4), name


class Pairs(BatchSampler):
    def __iter__(self):
        return iter([[0, 1, 2], [3]])


def loaders(data):
    return {
        "it returned a list, ": [data],
        "a DataLoader with Pairs, ": DataLoader(data, batch_sampler=Pairs(RandomSampler(data), 2, False)),
        "a DataLoader with no batches, ": DataLoader(data, batch_size=None),
        "a DataLoader with a DistributedSampler, ": DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0)),
        "a DataLoader with batch_size=3, and ": DataLoader(data, 3),
        "a DataLoader without batches: ": DataLoader(data, 9, drop_last=True),
        "whose sampler has no length: ": DataLoader(data, 2, sampler=(number for number in range(8))),
    }


def refused(world, folder, port):
    """The lines that refuse what a Trainer's methods return."""
    begin(world, folder, port)
    data = Images(8, same)
    train = loaders(data) | {
        "its DataLoader has a generator, and ": DataLoader(Images(8, flipped), 2, generator=seeded())
    }
    evaluate = loaders(data) | {"its sampler, a RandomSampler, draws an order": DataLoader(data, 2, shuffle=True)}
    found = []
    for method, cases in {"get_train_dataloader": train, "get_eval_dataloader": evaluate}.items():
        for words, loader in cases.items():
            kind = type("Loading", (Trainer,), {method: lambda self, *_, returned=loader: returned})
            options = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2, "label_names": ["labels"]}
            trainer = small.trainer(Mixed(), data, eval_dataset=data, classes=(kind, TrainingArguments), **options)
            with pytest.raises(InputError) as caught:
                trainer.train()
            assert trainer.state.global_step == 0
            found.append((method, words, str(caught.value)))
    return found


def test_what_a_pipeline_cannot_read_is_refused_before_the_first_iteration(processes, tmp_path):
    for found in processes.run(2, refused, tmp_path, free_port()):
        for method, words, line in found:
            assert line.startswith(f"Trainer.{method}: refused: "), line
            assert words in line
            assert "\n" not in line

"""Values beside the model that a loss or a forward reads and that change in mid-training: as in one process."""

from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback, set_seed

from auto3d import Trainer, TrainingArguments
from auto3d.errors import InputError
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port

CLASSES = transformers.Trainer, transformers.TrainingArguments
HALVES = {"by": 1.0}


class Halves(TrainerCallback):
    """Halves a weight of the loss in each step, wherever a script may keep it."""

    trainer = None

    def __init__(self, holder):
        self.holder = holder

    def on_step_begin(self, args, state, control, model=None, **_):
        by = 0.5**state.global_step
        HALVES["by"] = self.trainer.by = by
        self.holder.by = np.float32(by)
        model.kept.fill_(by)


class Holder:
    by = 1.0

    def half(self):
        return float(self.by)


class Weighed(nn.Module):
    """Its loss has a weight that is read in one of many ways."""

    def __init__(self, read):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64)
        self.holder, self.read = Holder(), read
        self.register_buffer("kept", torch.ones(()))

    def forward(self, input_ids, labels=None):
        logits = self.head(self.body(self.embedding(input_ids)).relu())
        return {"logits": logits} if labels is None else {"loss": self.read(self) * loss_of(logits, labels)}


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_global(model):
    return HALVES["by"]


def of_object(model):
    return model.holder.half()


def of_buffer(model):
    return model.kept


def one(model):
    return 1.0


class Plain:
    """The loss of the model."""


class Reading:
    by = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"] * self.weight(model)
        return (loss, outputs) if return_outputs else loss


class OfTrainer(Reading):
    def weight(self, model):
        return self.by


class OfStep(Reading):
    def weight(self, model):
        return 0.5**self.state.global_step


class OfRate(Reading):
    def weight(self, model):
        return 100 * self.lr_scheduler.get_last_lr()[0]


class Weight:
    """An object with a loss for ``compute_loss_func``."""

    def __init__(self, holder):
        self.holder = holder

    def loss(self, outputs, labels, num_items_in_batch=None, scale=0.0):
        return scale * self.holder.half() * loss_of(outputs["logits"], labels)


class OfBuffer(Reading):
    def weight(self, model):
        return model.kept


FOLLOWED = {  # a name -> the Trainer's method, how the model reads
    "a global": (Plain, of_global),
    "an object of the model": (Plain, of_object),
    "an attribute of the trainer": (OfTrainer, one),
    "the step": (OfStep, one),
    "the rate": (OfRate, one),
    "an object of a function": (Weight, one),
    "a buffer": (Plain, of_buffer),
    "a buffer, in the loss": (OfBuffer, one),
}


def made(method, read, *classes, **options):
    set_seed(0)
    HALVES["by"] = 1.0
    base, arguments = classes or (Trainer, TrainingArguments)
    model = Weighed(read)
    callback = Halves(model.holder)
    if method is Weight:
        method, options = Plain, {"compute_loss_func": partial(Weight(model.holder).loss, scale=1.0), **options}
    kind = type(method.__name__, (method, base), {})
    evaluated = {"eval_dataset": small.with_labels(small.rows(8)), "eval_strategy": "steps", "eval_steps": 2}
    evaluated |= {"per_device_eval_batch_size": 2, "label_names": ["labels"], "max_steps": 3}
    trainer = small.trainer(model, callbacks=[callback], classes=(kind, arguments), **evaluated | options)
    callback.trainer = trainer
    return trainer


def trained(world, folder, port, *classes, names=tuple(FOLLOWED), **degrees):
    """Losses of steps and evaluations, and whether the pipeline was built again."""
    begin(world, folder, port, ours=not classes, **degrees)
    found = {}
    for name in names:
        method, read = FOLLOWED[name]
        trainer = made(method, read, *classes, gradient_accumulation_steps=2 // degrees.get("dp", 1))
        trainer.train()
        keys = ("loss", "eval_loss")
        numbers = [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
        found[name] = numbers, not classes and trainer._has_told_of_values
    return found


KINDS = ("an object of the model", "the step", "a buffer")


@pytest.mark.parametrize("names", [KINDS, *soak((tuple(FOLLOWED),))], ids=str)
def test_values_that_change_are_followed(names, processes, tmp_path):
    (alone,) = processes.run(1, partial(trained, names=names), tmp_path, None, *CLASSES)
    ranks = processes.run(2, partial(trained, names=names), tmp_path, free_port())
    for name, (expected, _) in alone.items():
        assert expected[1] < 0.7 * expected[0], "the weight changes the loss"
        for rank in ranks:
            assert rank[name][0] == pytest.approx(expected, rel=1e-4), name
        assert ranks[0][name][1] == ("buffer" not in name)


class Counts(Reading):
    calls = 0

    def weight(self, model):
        self.calls += 1
        return 1.0


class KeepsNumbers(Reading):
    """A list of numbers for the log, as TRL's trainers have."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.numbers = defaultdict(list)

    def weight(self, model):
        self.numbers["mean"].append(model.head.weight.abs().mean().item())
        return 1.0


class KeepsTensor(Reading):
    def weight(self, model):
        self.last = model.head.weight.detach().mean()
        return 1.0


class CountsInEvaluation(Reading):
    calls = 0

    def weight(self, model):
        self.calls += not model.training
        return 1.0


class Logs(Reading):
    def weight(self, model):
        self.log({"by": 1.0})
        return 1.0


REFUSED = {
    Counts: "Trainer.compute_loss: it changes trainer.calls, and runs only when the stages are made",
    KeepsNumbers: "Trainer.compute_loss: it changes trainer.numbers",
    KeepsTensor: "Trainer.compute_loss: it changes trainer.last",
    CountsInEvaluation: "Trainer.compute_loss: it changes trainer.calls",
    Logs: "Trainer.compute_loss: it logs, and runs only when the stages are made",
}


def refused(world, folder, port):
    begin(world, folder, port)
    found = []
    for method in REFUSED:
        trainer = made(method, one)
        with pytest.raises(InputError) as caught:
            trainer.train()
        assert trainer.state.global_step == 0
        found.append(str(caught.value))
    return found


def test_what_the_loss_itself_changes_is_refused_before_the_first_step(processes, tmp_path):
    for lines in processes.run(2, refused, tmp_path, free_port()):
        for line, words in zip(lines, REFUSED.values(), strict=True):
            assert line.startswith(words)
            assert "\n" not in line


class SetsOnOneRank(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if args.process_index:
            HALVES["by"] = 0.25


def changed_on_one_rank(world, folder, port):
    begin(world, folder, port)
    HALVES["by"] = 1.0
    trainer = small.trainer(Weighed(of_global), callbacks=[SetsOnOneRank()])
    with pytest.raises(InputError) as caught:
        trainer.train()
    return str(caught.value)


def test_a_value_that_one_rank_alone_changes_is_refused(processes, tmp_path):
    for line in processes.run(2, changed_on_one_rank, tmp_path, free_port()):
        assert "the code of the model or its loss may read it, but not on all ranks" in line

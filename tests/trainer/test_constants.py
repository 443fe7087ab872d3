"""What is no tensor in a batch, such as ``return_loss=True``, is an argument of each call of the model."""

from functools import partial
from math import prod

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import set_seed

from auto3d import Trainer, TrainingArguments
from auto3d.errors import InputError
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port
from tests.trainer.test_draws import CLASSES, numbers


class Towers(torch.nn.Module):
    """Compares texts with images, each with all others of a batch, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.texts, self.images = (
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)) for _ in range(2)
        )

    def forward(self, texts, images, scale=1.0, kind="both", return_loss=None):
        scores = self.texts(texts) @ self.images(images).T * scale
        loss = None
        if return_loss:
            right = torch.arange(len(scores), device=scores.device)
            loss = cross_entropy(scores, right)
            if kind == "both":
                loss = (loss + cross_entropy(scores.T, right)) / 2
        return {"loss": loss, "scores": scores}


def pairs(samples):
    random = np.random.default_rng(1)
    return [{"texts": random.normal(size=4), "images": random.normal(size=4)} for _ in range(samples)]


def collated(rows, **further):
    batch = {name: torch.tensor(np.array([row[name] for row in rows]), dtype=torch.float32) for name in rows[0]}
    return batch | {"return_loss": True, **further}


def metrics(prediction):
    assert prediction.label_ids == ()
    return {"labels": float(prediction.predictions.shape[1] * 100 + np.abs(prediction.predictions).mean())}


class Taking:
    """A loss that takes a constant out of the inputs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert inputs.pop("return_loss") is True
        outputs = model(**inputs)
        loss = cross_entropy(outputs["scores"], torch.arange(len(outputs["scores"])))
        return (loss, {"scores": outputs["scores"]}) if return_outputs else loss


CASES = {
    "a loss": {},
    "metrics": {"metrics": metrics},
    "other arguments": {"collator": partial(collated, scale=0.5, kind="texts", unknown=None)},
    "larger batches": {"per_device_eval_batch_size": 5},
    "its own loss": {},
}


class Lenient(Towers):
    def forward(self, texts, images, scale=1.0, kind="both", return_loss=None, unknown=1):
        assert unknown is None
        return super().forward(texts, images, scale, kind, return_loss)


def made(name, trainer_type, arguments_type, **options):
    set_seed(0)
    kind = type("Own", (Taking, trainer_type), {}) if name == "its own loss" else trainer_type
    defaults = {"max_steps": 5, "gradient_accumulation_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    defaults |= {"per_device_eval_batch_size": 2, "collator": collated, "optim": "sgd"}
    return small.trainer(
        Lenient() if name == "other arguments" else Towers(),
        pairs(22),  # the last step of an epoch lacks samples
        eval_dataset=pairs(7),
        classes=(kind, arguments_type),
        **defaults | CASES[name] | options,
    )


def trained(world, folder, port, *classes, **degrees):
    begin(world, folder, port, ours=not classes, **degrees)
    found = {}
    for name in CASES:
        classes = classes or (Trainer, TrainingArguments)
        trainer = made(name, *classes, gradient_accumulation_steps=4 // degrees.get("dp", 1))
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        predicted = trainer.predict(pairs(5))
        found[name] = [before, *numbers(trainer), predicted.metrics["test_loss"], *predicted.predictions.flatten()]
    return found


@pytest.mark.parametrize("degrees", [{"pp": 2}, *soak({"dp": 2, "pp": 2})], ids=str)
def test_a_model_is_called_as_in_one_process(degrees, processes, tmp_path):
    (alone,) = processes.run(1, trained, tmp_path, None, *CLASSES)
    for rank in processes.run(prod(degrees.values()), partial(trained, **degrees), tmp_path, free_port()):
        for name, expected in alone.items():
            assert rank[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def changing(rows):
    """Another constant for a batch of one sample."""
    return collated(rows, scale=float(len(rows)))


class InEvaluation:
    """Collates evaluations, of which there are 3 samples, with another constant."""

    def __init__(self):
        self.samples = 0

    def __call__(self, rows):
        return collated(rows, scale=1.0 + any(row["texts"][0] > 100 for row in rows))


REFUSED = {
    "scale is 1.0, and in the first batch it was 2.0": changing,
    "scale is 2.0, and in the training it is 1.0": InEvaluation(),
    "names is a list; ": lambda rows: collated(rows, names=["a"] * len(rows)),
}


def refused(world, folder, port):
    begin(world, folder, port)
    found = []
    for words, collator in REFUSED.items():
        data = [{**each, "texts": each["texts"] + 200} for each in pairs(4)]
        trainer = made("a loss", Trainer, TrainingArguments, collator=collator)
        trainer.eval_dataset = data
        with pytest.raises(InputError) as caught:
            trainer.train()
        assert trainer.state.global_step == 0
        found.append((words, str(caught.value)))
    return found


def test_what_is_not_the_same_in_all_batches_is_refused_before_the_first_iteration(processes, tmp_path):
    for found in processes.run(2, refused, tmp_path, free_port()):
        for words, line in found:
            assert words in line, line
            assert "\n" not in line

"""Epochs that end with a batch in part, which nothing can fill: the numbers of one transformers process."""

from functools import partial
from math import prod
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from auto3d.trainer.samples import TrainOrder
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port

BATCH, ACCUMULATED = 4, 4
SAMPLES = (38, 40, 46)  # an epoch ends with micro-batches of 4 and 2, of 4 and 4, of 4, 4, 4 and 2 samples


class Rates(nn.Module):
    """Predicts a number of each sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)), nn.Linear(8, 1))

    def forward(self, x, labels):
        return {"loss": functional.mse_loss(self.layers(x).squeeze(-1), labels)}


class Normalises(nn.Module):
    """Normalises by the statistics of a batch, and keeps running ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(8)),
            nn.Linear(8, 3),
        )

    def forward(self, x, labels):
        return {"loss": functional.cross_entropy(self.layers(x), (labels > 0).long())}


class Pairs(nn.Module):
    """Tells which of a batch's second halves belongs to a first: no mean over samples."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))) for _ in range(2))

    def forward(self, x, labels):
        first, second = self.first(x[:, :4]), self.second(x[:, 4:])
        alike = first @ second.T + 0 * labels
        return {"loss": functional.cross_entropy(alike, torch.arange(len(x), device=x.device))}


MODELS = {kind.__name__: kind for kind in (Rates, Normalises, Pairs)}


def made(name, samples, *classes, dp=1, **options):
    transformers.set_seed(0)
    model = MODELS[name]()
    drawn = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    data = [{"x": row, "labels": row.sum()} for row in drawn]
    options |= {"classes": classes} if classes else {}
    accumulated = ACCUMULATED // dp
    return small.trainer(
        model,
        data,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulated,
        max_steps=7,
        **options,
    )


def trained(world, folder, port, name, *classes, **degrees):
    """For each number of samples: losses and norms of each step; then the weights and buffers."""
    begin(world, folder, port, ours=not classes, **degrees)
    found = []
    for samples in SAMPLES:
        trainer = made(name, samples, *classes, dp=degrees.get("dp", 1))
        trainer.train()
        steps = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
        found.append((steps, {key: value.numpy() for key, value in trainer.model.state_dict().items()}))
    return found


class Permutes:
    """Batches of 4 of 8 samples in an order that is another one each time that it is drawn."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.generator).view(2, 4).tolist())


def test_an_epoch_is_drawn_once_for_a_thread_that_reads_ahead_of_another():
    loader = SimpleNamespace(set_epoch=lambda epoch: None, batch_sampler=Permutes())
    sizes = {"global_batch": 4, "iterations_per_epoch": 2, "state": torch.default_generator.get_state()}
    order = TrainOrder(loader, **sizes)
    permutes = Permutes()
    drawn = [batch for _ in range(3) for batch in permutes]
    for iteration in (0, 1, 2, 1, 3, 2, 4, 3):
        assert order.of(iteration) == drawn[iteration]
    resumed = TrainOrder(SimpleNamespace(set_epoch=lambda epoch: None, batch_sampler=Permutes()), **sizes)
    assert resumed.of(5) == drawn[5], "epochs before it were drawn too"


PP2 = {"pp": 2}


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("Normalises", PP2),
        ("Rates", {"dp": 2, "pp": 2}),
        *soak(
            *((name, PP2 | {"schedule": schedule}) for name in MODELS for schedule in ("zb-h1", "chimera", "gpipe")),
            *((name, PP2 | {"schedule": "interleaved-1f1b"}) for name in MODELS),
            *((name, PP2 | {"recompute": "full"}) for name in MODELS),
            *((name, {"dp": 2}) for name in MODELS),
            *((name, {"dp": 2, "pp": 2, "shard_optimizer": True}) for name in MODELS),
            ("Pairs", PP2),
        ),
    ],
    ids=str,
)
def test_an_epoch_that_ends_with_a_batch_in_part(name, degrees, processes, tmp_path):
    classes = (transformers.Trainer, transformers.TrainingArguments)
    (one,) = processes.run(1, trained, tmp_path, None, name, *classes)
    ranks = prod(degrees.get(axis, 1) for axis in ("dp", "pp", "tp"))
    several = degrees.get("dp", 1) > 1 or degrees.get("schedule") == "chimera"  # pipelines or pipes
    for found in processes.run(ranks, partial(trained, **degrees), tmp_path, free_port(), name):
        for (steps, state), (expected, weights) in zip(found, one, strict=True):
            assert steps == pytest.approx(expected, rel=1e-4)
            for key, value in weights.items():
                if several and ("running" in key or "tracked" in key):  # each keeps those of its own samples
                    continue
                assert state[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key

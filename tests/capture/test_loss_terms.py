"""Which losses are means over targets that can be counted, and which are refused where data may ignore targets."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from auto3d.capture.export import InputSpec, export
from auto3d.capture.loss_terms import LossTerms, loss_terms
from auto3d.capture.model import capture
from auto3d.errors import InputError
from auto3d.runtime.samples.batch_targets import BatchTargets, check_loss, check_statistics
from auto3d.runtime.settings import TrainingSettings
from auto3d.schedule import build_schedule

SAMPLES, CLASSES, PLACES = 2, 5, 3
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("weight", torch.ones(CLASSES))
        self.register_buffer("average", torch.zeros(()))
        self.loss = loss

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self, self.head(features).flatten(0, 1), labels.flatten())


def terms_of(loss: Loss) -> LossTerms:
    features = InputSpec(shape=(PLACES, 4), dtype=torch.float32)
    inputs = {"features": features, "labels": InputSpec(shape=(PLACES,), dtype=torch.int64)}
    return loss_terms(export(lambda: Model(loss), inputs, SAMPLES))


def cross_entropy(model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels)


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


def one_hot(labels: torch.Tensor) -> torch.Tensor:
    return functional.one_hot(labels.clamp(0), CLASSES).float()


def counts(labels: torch.Tensor) -> torch.Tensor:
    """[samples, places]: 1 where a target counts."""
    return (labels.view(-1, PLACES) >= 0).float()


def rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return each(logits, labels).view(-1, PLACES)


def of_one_class(model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A contrastive loss: targets of one class attract each other."""
    return -((labels[:, None] == labels) * (logits @ logits.T).log_softmax(-1)).sum(1).mean()


def dice(model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    both = logits.softmax(-1) * one_hot(labels)
    return (1 - 2 * both.sum(0) / (logits.softmax(-1) + one_hot(labels)).sum(0)).mean()


def kept_average(model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(logits, labels)
    model.average.mul_(0.9).add_(loss.detach())
    return loss


def with_balance(model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mixture of experts' loss has a second term, such as this one."""
    return functional.cross_entropy(logits, labels) + 0.01 * (logits.softmax(-1).mean(0) ** 2).sum()


COUNTED: dict[str, tuple[Loss, int]] = {  # loss -> its number of places
    "cross-entropy": (cross_entropy, 6),
    "smoothed": (lambda m, x, y: functional.cross_entropy(x, y, label_smoothing=0.1), 6),
    "its own ignored label": (lambda m, x, y: functional.cross_entropy(x, y, ignore_index=1), 6),
    "log-likelihood": (lambda m, x, y: functional.nll_loss(x.log_softmax(-1), y), 6),
    "of images": (lambda m, x, y: functional.cross_entropy(x.view(2, 3, -1).mT, y.view(2, 3)), 6),
    "shifted": (lambda m, x, y: functional.cross_entropy(x, functional.pad(y, (0, 1), value=-100)[1:]), 5),
    "half of it": (lambda m, x, y: -0.5 * -functional.cross_entropy(x, y).to(torch.float64) / 2, 6),
    "a learned factor": (lambda m, x, y: cross_entropy(m, x, y) * m.scale, 6),
    "a product of each": (lambda m, x, y: cross_entropy(m, torch.einsum("ad,acd->ac", x, x[:, None].tile(5, 1)), y), 6),
    "begun with zero": (lambda m, x, y: torch.zeros(()) + cross_entropy(m, x, y), 6),
}


@pytest.mark.parametrize("name", COUNTED)
def test_means_over_targets(name):
    loss, places = COUNTED[name]
    found = terms_of(loss)
    assert [term.places for term in found.counted] == [places]
    assert not found.constant
    assert not found.other


CONSTANT: dict[str, Loss] = {
    "squares": lambda m, x, y: functional.mse_loss(x, one_hot(y)),
    "logits": lambda m, x, y: functional.binary_cross_entropy_with_logits(x, one_hot(y)),
    "probabilities": lambda m, x, y: functional.cross_entropy(x, one_hot(y)),
    "mean": lambda m, x, y: each(x, y).mean(),
    "a mean for each sample": lambda m, x, y: (rows(x, y).sum(1) / counts(y).sum(1)).mean(),
    "the same targets for all data": lambda m, x, y: functional.cross_entropy(x, torch.arange(6) % CLASSES),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_means_over_all_places(name):
    found = terms_of(CONSTANT[name])
    assert len(found.constant) == 1
    assert not found.counted
    assert not found.other


OTHER: dict[str, Loss] = {
    "a mask by hand": lambda m, x, y: (each(x, y) * (y >= 0)).sum() / (y >= 0).sum(),
    "a mask before a mean": lambda m, x, y: (each(x, y) * (y >= 0) / (y >= 0).sum()).mean(),
    "a sum": lambda m, x, y: functional.cross_entropy(x, y, reduction="sum"),
    "a sum by a number": lambda m, x, y: functional.cross_entropy(x, y, reduction="sum") / 6,
    "a perplexity": lambda m, x, y: cross_entropy(m, x, y).exp(),
    "a product": lambda m, x, y: cross_entropy(m, x, y) * cross_entropy(m, x.flip(0), y),
    "a mean of a mean": lambda m, x, y: (cross_entropy(m, x, y) + x).mean(),
    "another use": kept_average,
    "a balance of experts": with_balance,
    # A number that each micro-batch counts for itself
    "a kept dimension": lambda m, x, y: (rows(x, y) / counts(y).mean((0, 1), keepdim=True)).mean(),
    "a count for each place": lambda m, x, y: (rows(x, y).sum(0) / counts(y).sum(0)).mean(),
    "a cumulative count": lambda m, x, y: (rows(x, y) / counts(y).cumsum(0)[-1]).mean(),
    "a count by a product": lambda m, x, y: (rows(x, y) / (torch.ones(SAMPLES) @ counts(y))).mean(),
    "class weights of the batch": lambda m, x, y: functional.cross_entropy(x, y, 1 / (1 + one_hot(y).sum(0))),
    "a count in the logits": lambda m, x, y: cross_entropy(m, x * counts(y).mean(), y),
    "pairs in a batch": lambda m, x, y: functional.cross_entropy(x @ x.T, torch.arange(len(x))),
    "numbered pairs in a batch": lambda m, x, y: functional.cross_entropy(x @ x.T * 20, y),
    "numbered pairs by einsum": lambda m, x, y: cross_entropy(m, torch.einsum("ad,bd->ab", x, x.tanh()), y),
    "numbered pairs and more": lambda m, x, y: cross_entropy(m, torch.cat([x, x @ x.T], 1) / m.scale, y),
    "pairs of one class": of_one_class,
    "dice": dice,
}
ONE_BY_ONE = build_schedule("1f1b", devices=2, micro_batches=4)
SETTINGS = TrainingSettings(iterations=1)


@pytest.mark.parametrize("name", OTHER)
def test_other_losses_are_refused_where_data_may_ignore_targets(name):
    found = terms_of(OTHER[name])
    assert len(found.other) == 1
    check_loss(found, ONE_BY_ONE, SETTINGS, may_ignore=False)
    with pytest.raises(InputError, match=f"what {found.other[0]} counts"):
        check_loss(found, ONE_BY_ONE, SETTINGS, may_ignore=True)


def test_a_second_term_without_targets_is_refused_where_data_may_ignore_targets():
    found = terms_of(lambda m, x, y: cross_entropy(m, x, y) + functional.mse_loss(x, one_hot(y)))
    assert (len(found.counted), len(found.constant), found.other) == (1, 1, ())
    check_loss(found, ONE_BY_ONE, SETTINGS, may_ignore=False)
    with pytest.raises(InputError, match="mse_loss has no targets to ignore"):
        check_loss(found, ONE_BY_ONE, SETTINGS, may_ignore=True)


@pytest.mark.parametrize("name", OTHER)
def test_any_loss_is_the_mean_of_micro_batches_that_are_run_whole(name):
    settings = TrainingSettings(iterations=1, loss_mean="micro-batches")
    check_loss(terms_of(OTHER[name]), ONE_BY_ONE, settings, may_ignore=True)
    with pytest.raises(InputError, match="1f1b runs each micro-batch in 2 parts"):
        check_loss(terms_of(OTHER[name]), ONE_BY_ONE, settings, may_ignore=True, parts=2)


def test_another_term_is_added_up_unless_more_depends_on_it():
    settings = TrainingSettings(iterations=1, loss_mean="items")
    found = terms_of(lambda m, x, y: cross_entropy(m, x, y) + 0.1 * x.square().mean())
    assert found.used == ()
    check_loss(found, ONE_BY_ONE, settings, may_ignore=True)
    found = terms_of(lambda m, x, y: cross_entropy(m, x * (size := x.square().mean()), y) + size)
    with pytest.raises(InputError, match="mean is added to it, and more of the model depends on it"):
        check_loss(found, ONE_BY_ONE, settings, may_ignore=True)


@pytest.mark.parametrize("name", CONSTANT)
def test_data_that_fills_a_batch_needs_a_loss_that_ignores_the_filling(name):
    found = terms_of(CONSTANT[name])
    check_loss(found, ONE_BY_ONE, SETTINGS, may_ignore=True)
    with pytest.raises(InputError, match="last_batch=pad adds samples that must not count"):
        check_loss(found, ONE_BY_ONE, SETTINGS, may_ignore=True, fills=True)


class Normalised(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)).square().mean()


NORMS = {
    "the buffer norm.num_batches_tracked": lambda: nn.BatchNorm1d(4),
    "the batch statistics of norm": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "": lambda: nn.LayerNorm(4),
}


@pytest.mark.parametrize("found", NORMS)
def test_batch_statistics_would_count_what_fills_a_batch(found):
    inputs = {"x": InputSpec(shape=(4,), dtype=torch.float32)}
    graph = capture(lambda: Normalised(NORMS[found]), inputs, 2).graph
    with pytest.raises(InputError, match=f"^why, and {found} would count them; remedy$") if found else nullcontext():
        check_statistics(graph, "why", "remedy")


def test_class_weights_are_counted():
    found = terms_of(lambda m, x, y: functional.cross_entropy(x, y, m.weight))
    assert found.counted[0].has_class_weights
    schedule = build_schedule("pipedream", devices=2, micro_batches=4)
    with pytest.raises(InputError, match="class weights"):
        check_loss(found, schedule, TrainingSettings(iterations=1), may_ignore=False)


@pytest.mark.parametrize(("settings", "match"), [({}, "may ignore labels"), ({"loss_scale": 1.0}, "overflow")])
def test_asynchronous_schedules_are_refused(settings, match):
    schedule = build_schedule("pipedream", devices=2, micro_batches=4)
    with pytest.raises(InputError, match=match):
        check_loss(terms_of(cross_entropy), schedule, TrainingSettings(iterations=1, **settings), may_ignore=True)


def test_two_heads_need_equally_many_targets():
    found = terms_of(lambda m, x, y: (cross_entropy(m, x, y) + cross_entropy(m, x.flip(0), y.flip(0))) / 2)
    assert len(found.counted) == 2
    targets = BatchTargets(terms=found, micro_batches=4, vary=True)
    assert targets.fraction([24, 24], 1, is_updated=False) == 1
    assert targets.fraction([6, 6], 1, is_updated=False) == 0.25
    with pytest.raises(InputError, match="iteration 3: the terms of the loss"):
        targets.fraction([6, 7], 3, is_updated=False)

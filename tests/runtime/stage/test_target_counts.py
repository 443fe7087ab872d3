"""A mean over targets in a stage: weighted by its count, unchanged if all targets count, zero if none does."""

import pytest
import torch
from torch.nn import functional

from auto3d.capture.loss_terms import TargetTerm, loss_terms
from auto3d.runtime.stage.target_counts import CountedMean
from tests.models import captured
from tests.runtime.stage.test_stage import whole_model


def counted(places: int, ignored: int = -100, *, weights: bool = False) -> CountedMean:
    term = TargetTerm(name="mean", ignore_index=ignored, places=places, has_class_weights=weights)
    return CountedMean(term, functional.cross_entropy)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.tensor([1.0, 2.0, 0.5])}], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
def test_a_mean_times_its_count(options, shape):
    torch.manual_seed(1)
    logits = torch.randn(shape[0], 3, *shape[1:], requires_grad=True)
    target = torch.tensor([0, -100, 2, 1, -100, 1]).view(shape)
    module = counted(6, weights="weight" in options)
    module(logits, target, **options).backward()
    ours, logits.grad = logits.grad.clone(), None
    whole = functional.cross_entropy(logits, target, reduction="sum", **options) / 6
    whole.backward()
    assert torch.allclose(ours, logits.grad, rtol=1e-6, atol=1e-8)
    assert torch.allclose(module(logits, target, **options), whole)
    number = options["weight"][[0, 2, 1, 1]].sum() if "weight" in options else torch.tensor(4)
    assert torch.equal(module.count, number)


def test_micro_batches_that_weigh_the_same_count_as_if_all_places_were_filled():
    term = TargetTerm(name="mean", ignore_index=-100, places=4, has_class_weights=False, is_alike=True)
    module, logits, target = (
        CountedMean(term, functional.cross_entropy),
        torch.randn(4, 3),
        torch.tensor([0, -100, 2, 1]),
    )
    assert torch.equal(module(logits, target), functional.cross_entropy(logits, target))
    assert module.count == 4
    assert module(logits, torch.full((4,), -100)) == module.count == 0


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("ignored", [-100, 0])
def test_no_targets_give_exactly_zero(options, ignored):
    logits = torch.randn(4, 3).fill_diagonal_(-torch.inf).requires_grad_()
    loss = counted(4, ignored)(logits, torch.full((4,), ignored), ignore_index=ignored, **options)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("model", ["gpt2", "bert-pretraining"])
def test_nothing_changes_if_all_targets_count(model):
    plain, module, batch = whole_model(model)
    plain.forward(0, {}, batch)
    plain.backward(0, {})
    terms = loss_terms(captured(model, 2).exported).counted
    weighted, again, batch = whole_model(model, terms=terms)
    weighted.forward(0, {}, batch)
    weighted.backward(0, {})
    assert torch.equal(plain.losses[0], weighted.losses[0])
    assert {number: count.item() for number, count in weighted.counts[0].items()} == {
        number: term.places for number, term in enumerate(terms)
    }
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)

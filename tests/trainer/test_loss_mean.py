"""Which loss of a global batch follows from what a script's loss does with the number of items."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from auto3d.capture.export import InputSpec
from auto3d.errors import InputError
from auto3d.trainer.loss_mean import loss_mean_of
from auto3d.trainer.own_loss import ComputeLoss, with_loss

TOKENS = {name: InputSpec(shape=(64,), dtype=torch.int64) for name in ("input_ids", "labels")}


class Words(nn.Module):
    """Logits of the next word; a loss of its own where it gets labels, which it divides."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits = self.head(self.embed(input_ids))
        if labels is None:
            return {"logits": logits}
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / num_items_in_batch, "logits": logits}


class NeedsValues(Words):
    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        assert input_ids.sum() >= 0
        return super().forward(input_ids, labels, num_items_in_batch)


def summed(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def mean(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def in_place(x, y, n):
    losses = cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    losses[0] /= n
    return losses.sum()


LOSSES = {  # a loss of logits, labels and the number of items -> its mean, or a part of the refusal
    "a sum, divided": (lambda x, y, n: summed(x, y) / n, "summed-items"),
    "a mean": (lambda x, y, n: mean(x, y), "sum"),
    "one sample divided in place": (lambda x, y, n: in_place(x, y, n), "not inversely proportional"),
    "a mean, divided": (lambda x, y, n: mean(x, y) / n, "do not add up to that of all labels"),
    "a penalty of all places": (lambda x, y, n: (summed(x, y) + x.square().sum()) / n, "do not add up to that of all"),
    "half of it divided": (lambda x, y, n: summed(x, y) / n + x.square().mean(), "not inversely proportional"),
    "divided twice": (lambda x, y, n: summed(x, y) / n**2, "not inversely proportional"),
    "a small penalty beside it": (lambda x, y, n: summed(x, y) / n + 1e-7 * x.square().mean(), "not inversely"),
    "a penalty that is 0 here": (lambda x, y, n: summed(x, y) / n + (0.5 - x.std()).relu(), "not inversely"),
    "a penalty that is 0 there": (lambda x, y, n: (summed(x, y) + (x.std() - 9).relu()) / n, "do not add up"),
    "in place": (lambda x, y, n: summed(x, y).div_(n), "summed-items"),
    "term by term": (lambda x, y, n: 0.9 * summed(x, y) / n + 0.1 * summed(2 * x, y) / n.clamp(min=1), "summed-items"),
    "no ignored labels": (lambda x, y, n: -x.log_softmax(-1).gather(-1, y[..., None]).sum() / n, "cannot be tried on"),
    "reads a value": (lambda x, y, n: summed(x, y) / max(1, int(n)), "cannot be tried on random outputs"),
}


def loss_of(function, *, name="compute_loss_func", hands_on=False):
    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"] if hands_on else inputs.pop("labels")
        outputs = model(**inputs, **{"num_items_in_batch": num_items_in_batch} if hands_on else {})
        return function(outputs["logits"], labels, num_items_in_batch), outputs

    return ComputeLoss(compute_loss, name)


def mean_of(own, build=Words, *, is_scaled=None):
    return loss_mean_of(with_loss(build, own), TOKENS, gives_items=True, is_scaled=is_scaled, device="cpu")


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_does_with_the_number_of_items(name):
    function, expected = LOSSES[name]
    try:
        found = mean_of(loss_of(function))
    except InputError as error:
        found = str(error)
        assert found.startswith("Trainer.compute_loss_func: ")
    assert expected in found
    assert "\n" not in found


class Numbers(nn.Linear):
    def forward(self, x, **_):
        return {"logits": super().forward(x)}


def test_labels_that_are_numbers_are_tried_sample_by_sample():
    specs = {"x": InputSpec(shape=(4,), dtype=torch.float32), "labels": InputSpec(shape=(3,), dtype=torch.float32)}

    def mean_of(function):
        own = with_loss(lambda: Numbers(4, 3), loss_of(function))
        return loss_mean_of(own, specs, gives_items=True, is_scaled=None, device="cpu")

    assert mean_of(lambda x, y, n: (x - y).square().sum() / n) == "summed-items"
    with pytest.raises(InputError, match="do not add up to that of all labels"):
        mean_of(lambda x, y, n: (x - y - (x - y).mean(0)).square().sum() / n)


def test_no_number_is_divided_by_twice():
    divided = LOSSES["a sum, divided"][0]
    with pytest.raises(InputError, match="both compute_loss and the model divide by num_items_in_batch"):
        mean_of(loss_of(divided, hands_on=True))
    with pytest.raises(InputError, match="loss_is_scaled_for_ga: found False, and the loss is divided by"):
        mean_of(loss_of(divided), is_scaled=False)
    assert mean_of(loss_of(LOSSES["a mean"][0]), is_scaled=False) == "micro-batches"


def test_a_model_that_needs_values():
    with pytest.raises(InputError, match="cannot be tried on random outputs"):
        mean_of(loss_of(LOSSES["a mean"][0]), NeedsValues)
    assert mean_of(None, NeedsValues) == "items", "its code names the number"

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return mean(outputs["logits"], labels), outputs

    assert mean_of(ComputeLoss(compute_loss, "compute_loss"), NeedsValues) == "sum", "its code does not"
    assert mean_of(ComputeLoss(compute_loss, "compute_loss"), NeedsValues, is_scaled=False) == "micro-batches"

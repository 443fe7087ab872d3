"""The loss scale follows torch.amp.GradScaler with its defaults."""

import pytest
import torch

from auto3d.errors import InputError
from auto3d.runtime.loss_scale import LossScale


def test_it_changes_as_torchs_does():
    ours = LossScale.of(65536.0)
    theirs = torch.amp.GradScaler("cpu")
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    overflows = {3, 4, 2100}
    for iteration in range(4200):
        parameter.grad = torch.full((1,), float("inf") if iteration in overflows else 1.0)
        theirs.scale(torch.ones(()))
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite=iteration not in overflows)
        assert ours.value == theirs.get_scale(), iteration
    again = LossScale.of(1.0)
    again.restore(ours.numbers())
    assert again == ours
    assert ours.skipped_iterations == len(overflows)


def test_gradients_that_no_scale_makes_finite_end_the_training():
    scale = LossScale.of(2.0)
    scale.update(finite=False)
    with pytest.raises(InputError, match="which did not cause it"):
        scale.update(finite=False)


def test_a_scale_that_is_not_used_has_no_state():
    assert LossScale.of(None).numbers() == {}

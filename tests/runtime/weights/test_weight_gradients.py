"""A product or convolution with a split backward has the gradients of the operator that it replaces."""

import pytest
import torch

from auto3d.runtime.weights.gradients import DeferredGradients, SplitOperation

aten = torch.ops.aten
LINEAR, ADDMM = aten.linear.default, aten.addmm.default
CASES = [  # (operator, shapes of its tensors, other arguments, position of the value, whether something is deferred)
    (LINEAR, [(2, 3, 4), (5, 4), (5,)], [], 0, True),
    (LINEAR, [(2, 4), (5, 4)], [], 0, True),
    (LINEAR, [(4,), (5, 4), (5,)], [], 0, True),
    (LINEAR, [(2, 3, 4), (4,)], [], 0, False),
    (LINEAR, [(3, 4), (5, 4), (1,)], [], 0, False),
    (ADDMM, [(5,), (3, 4), (4, 5)], [], 1, True),
    (ADDMM, [(1,), (3, 4), (4, 5)], [], 1, False),
    (ADDMM, [(1, 5), (3, 4), (4, 5)], [], 1, False),
    (ADDMM, [(3, 5), (3, 4), (4, 5)], [], 1, False),
    (aten.conv1d.default, [(2, 4, 8), (6, 2, 3), (6,)], [[1], [1], [1], 2], 0, True),
    (aten.conv1d.default, [(4, 8), (6, 4, 3), (6,)], [], 0, False),
    (aten.conv2d.default, [(2, 4, 6, 6), (8, 4, 3, 3)], [], 0, True),
    (aten.conv2d.default, [(4, 6, 6), (8, 4, 3, 3), (8,)], [], 0, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]._opname}-{case[1]}")
def test_gradients_are_those_of_the_operator(case):
    target, shapes, others, value, defers = case
    torch.manual_seed(0)
    ours = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    theirs = [each.detach().clone().requires_grad_() for each in ours]
    deferred = DeferredGradients()
    operation = SplitOperation(target, deferred)
    for _ in range(2):  # the second micro-batch adds to the gradients of the first
        result = operation(*ours, *others)
        gradient = torch.randn_like(result)
        result.backward(gradient)
        work = deferred.take()
        assert bool(work) == defers
        for each in work:
            each()
        target(*theirs, *others).backward(gradient)
    torch.testing.assert_close(ours[value].grad, theirs[value].grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)

"""A capture does what the eager module does, or is refused with the line: nothing is dropped silently."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from auto3d.capture.errors import CaptureError
from auto3d.capture.export import InputSpec
from auto3d.capture.model import capture
from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.program import ProgramOfStage

ROWS = {"x": InputSpec(shape=(4,), dtype=torch.float32)}
CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class RoundStraightThrough(torch.autograd.Function):
    """Rounds, with the clipped gradient of the identity."""

    @staticmethod
    def forward(ctx, x, levels, device):
        ctx.save_for_backward(x)
        with torch.no_grad():
            rounded = (x * levels).round() / levels
        return rounded.to(device)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, gradient, gradient * 0.5), None, None


quantise = RoundStraightThrough.apply  # bound before the trace begins, as most code does


class Quantised(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = quantise(self.layer(x), 4, x.device)
        hidden = quantise(self.second(hidden), 8, x.device)
        return self.third(hidden).square().sum()


class Scale(torch.autograd.Function):
    """Two results, one of them without a gradient, and an argument that gets no gradient."""

    @staticmethod
    def forward(ctx, x, scale):
        best = x.argmax(-1, keepdim=True).float()
        ctx.mark_non_differentiable(best)
        return x * scale, best

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * 5, None


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        scaled, best = Scale.apply(self.layer(x), self.scale)
        _, other = Scale.apply(self.unused(x), self.scale)
        return (scaled.square() * best).sum() + other.sum()


class Checkpointed(Layer):
    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        hidden = checkpoint(self.layer, self.layer(x), use_reentrant=self.reentrant)
        return hidden.square().sum()


class CheckpointedInput(Layer):
    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True).sum()


class ForwardHooks(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.layer.register_forward_hook(lambda module, args, output: output * 3)
        self.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x):
        return self.layer(x).square().sum()


def gradients_of_graph(model, build, x, cuts, **options):
    """(loss, gradients) of the captured program of ``build``, run stage by stage with the weights of ``model``."""
    captured = capture(build, ROWS, len(x))
    state = {
        name: p.detach().clone().requires_grad_(name in captured.graph.trained) for name, p in model.named_parameters()
    }
    randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU)
    bounds = [0, *cuts(len(captured.graph.nodes)), len(captured.graph.nodes)]
    stages = [
        build_stage(
            [ProgramOfStage(stage, captured)],
            {**captured.exported.constants, **state},
            loss_weight=1.0,
            randomness=randomness,
            **options,
        )
        for stage in cut(captured.graph, stages_between(bounds))
    ]
    sent = {}
    for stage in stages:
        sent |= stage.forward(0, sent, {"x": x})
    gradients = {}
    for stage in reversed(stages):
        for name, gradient in stage.backward(0, gradients).items():
            gradients.setdefault(name, []).append(gradient)
    return stages[-1].losses[0], {name: tensor.grad for name, tensor in state.items()}


@pytest.mark.parametrize(
    "build", [Quantised, Scaled, Checkpointed, lambda: Checkpointed(reentrant=False), ForwardHooks]
)
@pytest.mark.parametrize("cuts", [lambda count: [], lambda count: range(1, count)])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"split_backward": True}])
def test_functions_of_the_user_keep_their_backward(build, cuts, options):
    torch.manual_seed(1)
    model, x = build(), torch.randn(3, 4)
    loss = model(x)
    loss.backward()
    found, gradients = gradients_of_graph(model, build, x, cuts, **options)
    assert found == loss
    for name, parameter in model.named_parameters():
        assert (gradients[name] is None) == (parameter.grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad)


class ReadsAnother(torch.autograd.Function):
    weight = None

    @staticmethod
    def forward(ctx, x):
        return x * ReadsAnother.weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class UsesClosure(Layer):
    def forward(self, x):
        ReadsAnother.weight = self.layer.bias
        return ReadsAnother.apply(self.layer(x)).sum()


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class DrawsInFunction(Layer):
    def forward(self, x):
        return Noise.apply(self.layer(x)).sum()


class Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if x.max() > 0 else x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class BranchesInFunction(Layer):
    def forward(self, x):
        return Branch.apply(self.layer(x)).sum()


class TrainsNothing(Layer):
    def forward(self, x):
        return self.layer(x).detach().sum()


class ParameterHook(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x):
        return self.layer(x).sum()


class AccumulatedHook(ParameterHook):
    def __init__(self) -> None:
        Layer.__init__(self)
        self.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class BackwardHook(ParameterHook):
    def __init__(self) -> None:
        Layer.__init__(self)
        self.layer.register_full_backward_hook(lambda module, inputs, outputs: None)


class BackwardPreHook(ParameterHook):
    def __init__(self) -> None:
        Layer.__init__(self)
        self.register_full_backward_pre_hook(lambda module, outputs: None)


class TensorHook(Layer):
    def forward(self, x):
        hidden = self.layer(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        return hidden.sum()


class Packs(Layer):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return self.layer(x).square().sum()


class GradientPenalty(Layer):
    def forward(self, x):
        value = self.layer(x).tanh().sum()
        (gradient,) = torch.autograd.grad(value, self.layer.weight, create_graph=True)
        return gradient.square().sum()


PLACE = "test_faithful.py, line"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (UsesClosure, ["ReadsAnother", "not one of its arguments", PLACE]),
        (DrawsInFunction, ["Noise", "draws random numbers", PLACE]),
        (BranchesInFunction, ["Branch", "without values", PLACE]),
        (CheckpointedInput, ["use_reentrant", PLACE]),
        (TrainsNothing, ["TrainsNothing cannot be trained", "no gradient to any parameter"]),
        (ParameterHook, ["parameter layer.weight", "gradient hook"]),
        (AccumulatedHook, ["parameter layer.weight", "gradient hook"]),
        (BackwardHook, ["module layer (Linear)", "backward hook"]),
        (BackwardPreHook, ["BackwardPreHook has a backward hook"]),
        (TensorHook, ["gradient hook", PLACE]),
        (Packs, ["autograd saves", PLACE]),
        (GradientPenalty, ["computes a gradient inside forward", PLACE]),
    ],
)
def test_what_a_trace_would_drop_is_refused_with_the_place(model, words):
    with pytest.raises(CaptureError) as caught:
        capture(model, ROWS, 3)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)

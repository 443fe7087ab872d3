"""Run a captured module as one stage and compare it with the module itself."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel, capture
from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.runtime.weights.materialize import materialize

CPU = torch.device("cpu")
SEED = 3


def assert_equal_to_eager(
    build: Callable[[], nn.Module], inputs: Mapping[str, torch.Tensor], *, micro_batches: int = 2
) -> CapturedModel:
    """Run the module that ``build`` makes and its capture over the same micro-batches.

    Losses, gradients and buffers must agree. Returns the capture.
    """
    specs = {name: InputSpec(shape=tuple(value.shape[1:]), dtype=value.dtype) for name, value in inputs.items()}
    size = len(next(iter(inputs.values())))
    captured = capture(build, specs, size)
    graph = captured.graph
    (stage,) = cut(graph, stages_between([0, len(graph.nodes)]))
    names = [name for name in stage.state if name not in graph.constants]
    state = materialize(build, names, seed=SEED)
    tensors = {
        name: nn.Parameter(tensor, requires_grad=name in graph.trained) if name in graph.parameters else tensor
        for name, tensor in state.items()
    }
    running = build_stage(
        [ProgramOfStage(stage, captured)],
        {**tensors, **captured.exported.constants},
        loss_weight=1.0,
        randomness=Randomness(SEED, first_micro_batch=0, micro_batches=micro_batches, device=CPU),
    )
    torch.manual_seed(SEED)
    module = build()
    module.train()
    for number in range(micro_batches):
        batch = {name: value + number if value.is_floating_point() else value for name, value in inputs.items()}
        running.forward(number, {}, {name: value.clone() for name, value in batch.items()})
        captured_loss = running.losses[number].detach()
        running.backward(number, {})
        output = module(**{name: value.clone() for name, value in batch.items()})
        loss = output["loss"] if isinstance(output, dict) else getattr(output, "loss", output)
        loss.backward()
        torch.testing.assert_close(captured_loss, loss.detach(), rtol=1e-6, atol=0)
    for name, parameter in module.named_parameters():
        if name in graph.trained:
            _assert_close(tensors[name].grad, parameter.grad, name)
        else:
            assert parameter.grad is None or not parameter.grad.any(), f"{name} has a gradient in eager mode only"
    for name, buffer in module.named_buffers():
        if name in tensors:
            _assert_close(tensors[name], buffer, name)
    return captured


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    expected = expected.to_dense()  # a gradient may be sparse
    bound = 1e-5 * expected.double().abs().max() + 1e-7
    difference = (actual.double() - expected.double()).abs().max()
    assert difference <= bound, f"{name}: the difference is {difference:.3g}, the bound {bound:.3g}"

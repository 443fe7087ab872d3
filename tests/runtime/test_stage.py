"""A stage by itself: what a split backward puts off, and what recomputation keeps."""

import pytest
import torch

from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.data import Batches
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage import StageModule
from tests.models import MODELS, captured

CPU = torch.device("cpu")


def whole_model(model: str, **options: bool) -> tuple[StageModule, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model as one stage with zeroed gradients, its parameters, and a batch."""
    build, data = MODELS[model]
    torch.manual_seed(1)
    module = build()
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    model_captured = captured(model, 2)
    (stage,) = cut(model_captured.graph, stages_between([0, len(model_captured.graph.nodes)]))
    running = StageModule(
        stage,
        model_captured,
        {**model_captured.exported.constants, **dict(module.named_buffers()), **parameters},
        loss_weight=1.0,
        randomness=Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU),
        device=CPU,
        **options,
    )
    running.weights.start({0: 0})
    batch = Batches(data, seed=1, global_batch=2, micro_batch_size=2).micro_batch(0, 0, tuple(data.inputs))
    return running, parameters, batch


@pytest.mark.parametrize("model", ["gpt2", "vit"])
def test_the_input_half_leaves_the_weights_of_products_to_the_weight_half(model):
    running, parameters, batch = whole_model(model, split_backward=True)
    running.forward(0, {}, batch)
    running.backward_input(0, {})
    matrices = [name for name, p in parameters.items() if p.dim() > 1 and "embedding" not in name and "wpe" not in name]
    empty = [name for name in matrices if not parameters[name].grad.any()]
    assert len(empty) >= 0.9 * len(matrices) > 10
    running.backward_weight(0)
    assert all(parameters[name].grad.any() for name in matrices)


def test_a_stage_that_recomputes_keeps_nothing_of_its_forward():
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    running, _, batch = whole_model("gpt2-dropout", recompute=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        running.forward(0, {}, batch)
        assert not saved
        running.recompute(0)
        assert saved
        count = len(saved)
        running.backward(0, {})
        assert len(saved) == count, "the backward runs no forward once there was an R"

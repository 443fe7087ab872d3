"""The choice among torch's implementations of an update, on CPUs and on fake GPUs."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from auto3d.runtime.optimizer import build_optimizer
from auto3d.runtime.optimizer_state import make_state
from auto3d.runtime.settings import OptimizerSettings
from tests.distributed.parity import ADAMW, SGD


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_gpus_update_contiguous_parameters_by_fused_kernels(settings: OptimizerSettings):
    """Their state, allocated in advance, is on the device that these kernels need; a step on fake tensors checks it."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(3, 4, device="cuda:0")) for _ in range(2)]
        optimizer, _ = build_optimizer(parameters, settings, iterations=1)
        make_state(optimizer)
        assert optimizer.param_groups[0]["fused"]
        assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cuda"}
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        if settings is ADAMW:  # torch has no fake implementation of fused SGD
            optimizer.step()


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.empty(3, 4),
        lambda: torch.empty(4, 3, device="cuda:0").t(),  # its gradient in a flat buffer would have another layout
        lambda: torch.empty(3, 4, dtype=torch.complex64, device="cuda:0"),
    ],
    ids=["cpu", "transposed", "complex"],
)
def test_other_parameters_are_updated_by_torchs_default(other):
    with FakeTensorMode():
        parameters = [nn.Parameter(other())]
        optimizer, _ = build_optimizer(parameters, ADAMW, iterations=1)
        make_state(optimizer)
        assert optimizer.param_groups[0]["fused"] is None
        assert optimizer.state[parameters[0]]["step"].device.type == "cpu"

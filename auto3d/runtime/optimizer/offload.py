"""An optimizer whose state and update are on the host: weights and gradients stay on the device, copies of them travel.

After ZeRO-Offload (USENIX ATC 2021, section 4). The host copies the weights anew at each update, so that they may
change on the device, as when a checkpoint is loaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from auto3d.runtime.run_ahead import RunAhead

_ON_DEVICE = "auto3d_on_device"  # attribute of such an optimizer: id of each copy -> the parameter on the device


def offloaded(
    groups: Sequence[Mapping[str, Any]],
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    run_ahead: RunAhead,
    *,
    before_step: Callable[[], None],
) -> torch.optim.Optimizer:
    """The optimizer that ``make`` makes of copies on the host of the parameters of ``groups``, in pinned memory.

    Each of its steps calls ``before_step``, copies weights and gradients to the host, and afterwards the weights back.
    """
    copies: list[tuple[nn.Parameter, nn.Parameter, torch.Tensor]] = []

    def copied(parameter: nn.Parameter) -> nn.Parameter:
        pinned = parameter.is_cuda
        value, gradient = (torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=pinned) for _ in range(2))
        copies.append((parameter, nn.Parameter(value), gradient))
        return copies[-1][1]

    optimizer = make([{**group, "params": [copied(parameter) for parameter in group["params"]]} for group in groups])
    setattr(optimizer, _ON_DEVICE, {id(on_host): parameter for parameter, on_host, _ in copies})

    def fetch(*_: object) -> None:
        before_step()
        for parameter, on_host, gradient in copies:
            on_host.data.copy_(parameter.data, non_blocking=True)
            on_host.grad = None
            if parameter.grad is not None:
                on_host.grad = gradient.copy_(parameter.grad, non_blocking=True)
        run_ahead.catch_up()  # the host computes with the copies

    def send(*_: object) -> None:
        for parameter, on_host, _gradient in copies:
            parameter.data.copy_(on_host.data, non_blocking=True)

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(send)
    return optimizer


def updated_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Each parameter that ``optimizer`` updates, and the parameter that its state belongs to: itself, or its copy."""
    on_device: Mapping[int, nn.Parameter] = getattr(optimizer, _ON_DEVICE, {})
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        yield on_device.get(id(parameter), parameter), parameter

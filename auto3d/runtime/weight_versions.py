"""The versions of one stage's weights: what a micro-batch ran its forward with stays until its backward has run."""

from collections import Counter
from collections.abc import Mapping

import torch


class WeightVersions:
    """The state of one stage, as each micro-batch must see it (weight stashing: PipeDream, SOSP 2019, section 3.3).

    The optimizer updates the parameters in place: they are always the newest version. Where there are ``several``,
    micro-batches run on leaves that show the same memory. Only where an update comes while its version is still needed
    do the parameters move on to a copy, and the leaves keep the old memory; so a schedule that never needs an old
    version copies nothing. All leaves add their gradients to the one ``.grad`` of their parameter, which must be there
    already. Buffers have no versions.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], *, several: bool) -> None:
        self._state = state
        self._version_of: Mapping[int, int] = {}
        self._users: Counter[int] = Counter()  # version -> micro-batches of the program that have yet to end
        self._newest = 0
        self._leaves = {0: self._show() if several else state}

    def start(self, version_of: Mapping[int, int]) -> None:
        """Begin a program: ``version_of`` maps its micro-batches to how many updates each sees, 0 if left out."""
        self._version_of = version_of
        self._users = Counter(version_of.values())
        self._leaves = {0: self._leaves[self._newest]}
        self._newest = 0

    def of(self, micro_batch: int) -> Mapping[str, torch.Tensor]:
        """The state that ``micro_batch`` runs with, by name."""
        return self._leaves[self._version_of.get(micro_batch, 0)]

    def end(self, micro_batch: int) -> None:
        """Drop the version of ``micro_batch``, whose backward has run, if it was the last to need it."""
        version = self._version_of.get(micro_batch, 0)
        self._users[version] -= 1
        if not self._users[version] and version != self._newest:
            del self._leaves[version]

    def next(self) -> None:
        """Begin a new version, which the optimizer may then update in place."""
        if self._users[self._newest]:
            for tensor in self._state.values():
                if tensor.requires_grad:
                    tensor.data = tensor.data.clone()
            leaves = self._show()
        else:
            leaves = self._leaves.pop(self._newest)
        self._newest += 1
        self._leaves[self._newest] = leaves

    def _show(self) -> dict[str, torch.Tensor]:
        return {
            name: _with_gradient_of(tensor) if tensor.requires_grad else tensor for name, tensor in self._state.items()
        }


def new_leaf(parameter: torch.Tensor) -> torch.Tensor:
    """Shows the same memory to another autograd graph."""
    # Not detach(): the two would share a count of writes, and autograd refuse old versions once the newest is written.
    return parameter.data.requires_grad_()


def _with_gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    leaf = new_leaf(parameter)
    leaf.grad = parameter.grad
    return leaf

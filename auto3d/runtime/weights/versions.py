"""Versions of one stage's weights: the version that a micro-batch's forward used stays until its backward has run."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import nn

from auto3d.runtime.weights.gradients import add_gradient
from auto3d.runtime.weights.low_precision import Copies
from auto3d.runtime.weights.shard import memory_of


class WeightVersions:
    """The state of one stage as each micro-batch must see it (weight stashing: PipeDream, SOSP 2019, section 3.3).

    The optimizer updates the parameters in place, so they are always the newest version. With ``several`` versions,
    micro-batches run on leaves that share the parameters' memory. When an update comes while the newest version is
    still needed, the parameters move to a copy and the leaves keep the old memory; a schedule that never needs an old
    version therefore copies nothing. All leaves add their gradients to the ``.grad`` of their parameter, which must
    exist already. Buffers have no versions.

    Of each version, parameters also have the low-precision ``copies``: a copy is made when the first micro-batch asks
    for its version, after the update that the version begins with. Those in ``leaf_copies`` are leaves of autograd,
    whose gradients move to the gradients of their parameters.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        several: bool,
        copies: Copies | None = None,
        leaf_copies: Collection[str] = (),
    ) -> None:
        self._state = state
        self._copies = copies or {}
        self._leaf_copies = leaf_copies
        self._copied: set[int] = set()  # versions whose copies have their parameters' values
        self._version_of: Mapping[int, int] = {}
        self._users: Counter[int] = Counter()  # version -> number of micro-batches of the program that have not ended
        self._newest = 0
        self._leaves: dict[int, dict[str, torch.Tensor]] = {0: self._new_leaves() if several else dict(state)}

    def start(self, version_of: Mapping[int, int]) -> None:
        """Begin a program. ``version_of`` has, for each micro-batch, how many updates it sees; absent means 0."""
        self._version_of = version_of
        self._users = Counter(version_of.values())
        self._leaves = {0: self._leaves[self._newest]}
        self._newest = 0
        self._copied.clear()  # between programs a checkpoint may be loaded

    def of(self, micro_batch: int) -> Mapping[str, torch.Tensor]:
        """The state by name that ``micro_batch`` runs with."""
        version = self._version_of.get(micro_batch, 0)
        if self._copies and version not in self._copied:
            self._copy(self._leaves[version])
            self._copied.add(version)
        return self._leaves[version]

    def end(self, micro_batch: int) -> None:
        """Note that the backward of ``micro_batch`` has run; drops its version if no other micro-batch needs it."""
        version = self._version_of.get(micro_batch, 0)
        self._users[version] -= 1
        if not self._users[version] and version != self._newest:
            del self._leaves[version]

    def duplicate(self) -> "WeightVersions":
        """The same state in other memory, for one micro-batch."""
        state: dict[str, torch.Tensor] = {}
        for name in self._state:
            tensor = self._leaves[self._newest][name]
            state[name] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):  # compiled code distinguishes the two
                state[name] = nn.Parameter(state[name].detach(), tensor.requires_grad)
        other = WeightVersions(state, several=False, copies=self._copies, leaf_copies=self._leaf_copies)
        other.start({0: 0})
        return other

    def next(self) -> None:
        """Begin a new version, which the optimizer may then update in place."""
        if self._users[self._newest]:
            _move([tensor for tensor in self._state.values() if tensor.requires_grad])
            leaves = self._new_leaves()
        else:
            leaves = self._leaves.pop(self._newest)
        self._newest += 1
        self._leaves[self._newest] = leaves

    @torch.no_grad()
    def _copy(self, leaves: dict[str, torch.Tensor]) -> None:
        """Make the low-precision copies of the parameters ``leaves`` and add them, in the memory of old copies."""
        if self._copies.keys() <= leaves.keys():
            torch._foreach_copy_(
                [leaves[name] for name in self._copies], [leaves[parameter] for parameter, _ in self._copies.values()]
            )
            return
        for name, (parameter, dtype) in self._copies.items():
            leaves[name] = leaves[parameter].to(dtype)
            if name in self._leaf_copies:
                leaves[name].requires_grad_().register_post_accumulate_grad_hook(_adds_to(leaves[parameter]))

    def _new_leaves(self) -> dict[str, torch.Tensor]:
        return {
            name: _with_gradient_of(tensor) if tensor.requires_grad else tensor for name, tensor in self._state.items()
        }


def _adds_to(parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that moves the gradient of a copy to ``parameter``."""

    def move(copy: torch.Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if parameter.grad is None:
            add_gradient(gradient, parameter)
        else:
            parameter.grad.add_(gradient)

    return move


def _move(parameters: Iterable[torch.Tensor]) -> None:
    """Move ``parameters`` to a copy of their memory; parameters of one flat buffer stay views of one buffer."""
    copies: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        memory = parameter.untyped_storage()._cdata
        if memory not in copies:
            copies[memory] = memory_of(parameter).clone()
        parameter.data = copies[memory].as_strided(parameter.size(), parameter.stride(), parameter.storage_offset())


def new_leaf(parameter: torch.Tensor) -> torch.Tensor:
    """A leaf of another autograd graph that shares the memory of ``parameter``."""
    # Not detach(): both would share a version counter, and autograd would refuse old leaves once the newest is written.
    return parameter.data.requires_grad_()


def _with_gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    leaf = new_leaf(parameter)
    leaf.grad = parameter.grad
    return leaf

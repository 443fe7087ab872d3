"""Copies of a user's module without values, and its weights as files hold them."""

from pathlib import Path
from threading import Lock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules import module as torch_module

from auto3d.trainer.instance import build_of, separate, traits_of


class Helper:
    """Refers to a lock, to a module and to itself."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = {"lock": Lock(), "module": module, "self": self}


def test_a_copy_shares_only_what_cannot_be_copied():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.helper, model.tries, model.output = Helper(model[0]), [1, 2], model(torch.ones(3, 2))
    copy = build_of(model)()
    assert copy.helper.parts["lock"] is model.helper.parts["lock"]
    assert copy.helper.parts["module"] is copy[0] is not model[0]
    assert copy.tries == model.tries is not copy.tries
    assert torch.equal(copy.output, model.output)
    assert not copy.output.requires_grad
    for (name, new), (_, old) in zip(copy.named_parameters(), model.named_parameters(), strict=True):
        assert new.data_ptr() != old.data_ptr(), name


def test_weights_that_share_memory_or_are_views_can_be_written(tmp_path: Path):
    table = torch.randn(4, 3)
    state = {"tied": table, "again": table, "turned": table.T, "part": table[1:], "own": torch.zeros(2)}
    save_file(separate(state), tmp_path / "weights")
    found = load_file(tmp_path / "weights")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


REGISTERED = {  # place of a hook -> the call by which a script registers it in mid-training
    "on a parameter": lambda model: model.weight.register_hook(torch.neg),
    "on a parameter, once its gradient is there": lambda model: model.weight.register_post_accumulate_grad_hook(print),
    "before a forward": lambda model: model.register_forward_pre_hook(print),
    "after a forward": lambda model: model.register_forward_hook(print),
    "before a backward": lambda model: model.register_full_backward_pre_hook(print),
    "after a backward": lambda model: model.register_full_backward_hook(print),
    "before the forward of any module": lambda _: torch_module.register_module_forward_pre_hook(print),
    "after the forward of any module": lambda _: torch_module.register_module_forward_hook(print),
    "before the backward of any module": lambda _: torch_module.register_module_full_backward_pre_hook(print),
    "after the backward of any module": lambda _: torch_module.register_module_full_backward_hook(print),
}


@pytest.mark.parametrize("what", REGISTERED)
def test_a_hook_is_a_trait_of_the_model(what: str):
    """The pipeline is built again for it, or refuses it; otherwise it would be left out without a word."""
    model = nn.Linear(2, 2)
    before = dict(traits_of(model))
    handle = REGISTERED[what](model)
    try:
        assert dict(traits_of(model)) != before
    finally:
        handle.remove()
    assert dict(traits_of(model)) == before

"""All holders of a weight begin with the same bits, and these equal plain PyTorch on one process."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations
from transformers import ModernBertConfig, ModernBertForMaskedLM

from auto3d.plan import Plan
from auto3d.runtime.agreement import WeightsDifferError, fingerprint
from auto3d.runtime.checkpoint.format import Checkpoints
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import train
from auto3d.schedule import samples_at_once
from tests.distributed.parity import SGD, assert_parity, make_plan, plain_pytorch, run_rank
from tests.distributed.test_uneven import make_plan as uneven_plan
from tests.models import FEATURES, SIZES, TEXT, TRAINED, captured
from tests.soak import soak


class Layers(nn.Module):
    """A head and six layers, each of which ``make`` makes from a plain layer."""

    def __init__(self, make: Callable[[nn.Linear], nn.Module], width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(nn.Linear(width, width)) for _ in range(6))
        self.head = nn.Linear(width, 4)

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = features + torch.tanh(layer(features))
        return nn.functional.cross_entropy(self.head(features), label)


def truncated(layer: nn.Linear) -> nn.Linear:
    nn.init.trunc_normal_(layer.weight, std=0.3, a=-0.6, b=0.6)
    return layer


def of_numpy(layer: nn.Linear) -> nn.Linear:
    layer.weight.data = torch.from_numpy(np.random.standard_normal((16, 16)).astype(np.float32) / 4)
    layer.bias.data.copy_(torch.from_numpy(np.random.uniform(-random.random(), 1, 16)))
    return layer


def modern_bert() -> ModernBertForMaskedLM:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(ModernBertConfig(vocab_size=256, max_position_embeddings=64, **SIZES, **tokens))


class Attributes(nn.Module):
    """State outside of parameters and buffers: plain tensors in lists and dicts, drawn, computed, or from numpy."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.scale = torch.tensor([1.5])
        self.masks = [torch.tril(torch.ones(width, width)) / width, torch.ones(3)]
        self.noise = {"layer": (torch.randn(width), torch.from_numpy(np.random.standard_normal(width)).float())}
        self.head = nn.Linear(width, 4)
        self.start = self.head.weight.detach().clone()

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = features + torch.tanh(layer(features) * self.scale) @ self.masks[0]
            features = features + self.noise["layer"][0] * self.noise["layer"][1]
        return nn.functional.cross_entropy(self.head(features) + features @ self.start.T, label)


OWN = {
    "attributes": (Attributes, FEATURES),
    "truncated": (lambda: Layers(truncated), FEATURES),
    "numpy": (lambda: Layers(of_numpy), FEATURES),
    "weight-norm": (lambda: Layers(parametrizations.weight_norm), FEATURES),
    "modern-bert": (modern_bert, TEXT),
}


def run_own(world, model: str, *arguments) -> dict:
    with known():
        return run_rank(world, model, *arguments)


@contextmanager
def known() -> Iterator[None]:
    """Registers the models of this file by name with the parity harness of this process."""
    TRAINED.update(OWN)
    try:
        yield
    finally:
        for name in OWN:
            del TRAINED[name]


@pytest.mark.parametrize("model", OWN)
@pytest.mark.parametrize("degrees", [*soak({"dp": 1, "pp": 2}), {"dp": 2, "pp": 2}], ids=str)
def test_initialisers_that_read_what_they_wrote(processes, model, degrees):
    with known():
        plan = make_plan(model, **degrees)
        reference = plain_pytorch(model, micro_batch_size=2, optimizer=SGD)
    assert_parity(processes.run(plan.ranks, run_own, model, plan, SGD), reference)


@dataclass(frozen=True)
class Fault:
    """One inverted bit of a weight on rank 1. ``place``: where it is ``built``, ``given`` or read from a checkpoint."""

    name: str
    bit: int
    place: str

    def invert(self, tensor: torch.Tensor) -> None:
        mask = torch.tensor(1 << self.bit).to(torch.int32)
        tensor.detach().view(-1).view(torch.int32)[-1:].bitwise_xor_(mask)

    def build(self) -> nn.Module:
        module = TRAINED["gpt2"][0]()
        weight = dict(module.named_parameters())[self.name]
        if dist.is_initialized() and dist.get_rank() == 1 and not weight.is_meta:
            self.invert(weight)
        return module

    def state(self, rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        state = dict(TRAINED["gpt2"][0]().named_parameters())
        if rank == 1:
            self.invert(state[self.name])
        return state

    def damage(self, folder: Path) -> None:
        for file in folder.glob("*/*.safetensors"):
            tensors = load_file(file)
            if f"model.{self.name}" in tensors:
                self.invert(tensors[f"model.{self.name}"])
                save_file(tensors, file)


def start(world, plan: Plan, fault: Fault | None = None, folders: tuple[Path, Path] | None = None) -> str:
    """Train GPT-2, rank 1 with the second of ``folders``; returns the message of a WeightsDifferError."""
    model = captured("gpt2", samples_at_once(plan))
    state = None
    if fault is not None and fault.place == "built":
        model = replace(model, exported=replace(model.exported, build=fault.build))
    if fault is not None and fault.place == "given":
        state = fault.state(world.rank)
    settings = TrainingSettings(iterations=2, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
    checkpoints = None if folders is None else Checkpoints(folder=folders[world.rank == 1], every=1)
    try:
        train(model, plan, settings, TEXT, world, checkpoints=checkpoints, state=state)
    except WeightsDifferError as error:
        return str(error)
    return ""


EMBEDDING, HIDDEN = "transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"
replicas = partial(make_plan, "gpt2", dp=2, pp=2)


@pytest.mark.parametrize("bit", [0, *soak(31)])
@pytest.mark.parametrize(
    ("make", "name", "ranks"),
    [
        (replicas, HIDDEN, "rank 0 and rank 1"),
        (partial(make_plan, "gpt2", dp=1, pp=2), EMBEDDING, "rank 0 and rank 1"),  # tied
        (partial(make_plan, "gpt2", dp=1, pp=2, schedule="chimera"), HIDDEN, "rank 0 and rank 1"),
        (partial(make_plan, "gpt2", dp=4, pp=1), HIDDEN, "ranks 0, 2, 3 and rank 1"),
        (partial(uneven_plan, "gpt2", [3, 1]), HIDDEN, "ranks 0, 2 and rank 1"),
        (partial(make_plan, "gpt2", dp=1, tp=2, pp=2), "transformer.h.0.ln_1.weight", "rank 0 and rank 1"),
    ],
    ids=["replicas", "tied", "chimera", "data-parallel", "uneven", "shards"],
)
def test_one_bit_that_differs_ends_the_run_before_it_begins(processes, make, name, ranks, bit):
    plan = make()
    told = set(processes.run(plan.ranks, start, plan, Fault(name, bit, "built")))
    assert len(told) == 1, "every rank reports the same"
    (line,) = told
    assert line.startswith(f"{name}: its initial values differ between {ranks}; the model's initialisation does not")
    assert "\n" not in line


def test_given_weights_are_compared(processes):
    (told,) = set(processes.run(4, start, replicas(), Fault(HIDDEN, 3, "given")))
    assert told.startswith(f"{HIDDEN}: its initial values differ between rank 0 and rank 1; do all nodes read the same")


def test_what_a_checkpoint_gave_is_compared(processes, tmp_path):
    folders = (tmp_path / "seen", tmp_path / "seen elsewhere")
    assert set(processes.run(4, start, replicas(), None, (folders[0], folders[0]))) == {""}
    shutil.rmtree(folders[0] / "iteration-00000002")
    shutil.copytree(folders[0], folders[1])
    Fault(HIDDEN, 3, "checkpoint").damage(folders[1])
    for told in processes.run(4, start, replicas(), None, folders):
        assert told.startswith(f"{HIDDEN}: its initial values differ between rank 0 and rank 1; do all nodes see the")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("size", [1, 9, 8 * 512, 70_001])
def test_a_fingerprint_sees_every_element_and_its_place(dtype, size):
    torch.manual_seed(size)
    tensor = torch.randint(0, 2, (size,)).to(dtype)
    whole = fingerprint(tensor)
    assert whole == fingerprint(tensor.clone())
    for index in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[index] = 1 - changed[index].real.int()
        assert fingerprint(changed) != whole
    if size > 8 * 512:
        assert fingerprint(tensor.roll(8 * 512)) != whole

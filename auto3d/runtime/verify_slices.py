"""Compares the slices of a program with the whole one: loss and gradients after one micro-batch.

This finds a slice that does not compute its part of the whole, whatever rule made it. All slices run in one process, on
the same weights and data.
"""

from collections.abc import Mapping

import torch

from auto3d.capture.model import CapturedModel
from auto3d.data import DataSettings
from auto3d.derived.model import Derived
from auto3d.errors import InputError
from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.build_stage import build_stage
from auto3d.runtime.earlier_slices import programs_of_slices
from auto3d.runtime.layout import stages_of_slices, terms_of_slice
from auto3d.runtime.stage import StageModule
from auto3d.runtime.stage_program import DerivedProgram, ProgramOfStage
from auto3d.runtime.verify import Computed, built_state, coarseness_of, one_batch, randomness_of_one


class SlicesDifferError(InputError):
    """The slices of the sequence would not compute what the whole program does."""


def check_slices(model: Derived, data: DataSettings, *, seed: int, device: torch.device) -> None:
    """Raise SlicesDifferError unless all slices of ``model`` together do what the whole program does.

    They are compared on one micro-batch, with the bounds of ``verify.check_against_eager``. If the program computes in
    a type narrower than float32, the bounds are those of that type: a sum of rounded parts is not the rounded sum.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        state = built_state(model.whole, device)
        batch = one_batch(model.whole, data, seed=seed, device=device)
        whole, slices = run_whole(model.whole, state, batch, device), run_slices(model, state, batch, device)
        wider = coarseness_of(model.whole)
        if (difference := slices.difference(whole, dict.fromkeys(whole.gradients, wider))) is not None:
            raise SlicesDifferError(
                f"schedule: {model.share.slices} slices of the sequence change what the model computes: {difference}; "
                "use a schedule without slices, such as 1f1b"
            )


def run_whole(
    captured: CapturedModel, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], device: torch.device
) -> Computed:
    """What ``captured`` computes of ``batch`` with copies of ``state``."""
    state = _copied(state)
    (stage,) = cut(captured.graph, stages_between([0, len(captured.graph.nodes)]))
    running = build_stage(
        [ProgramOfStage(stage, captured)],
        state,
        loss_weight=1.0,
        randomness=randomness_of_one(device),
        device=device,
        terms=terms_of_slice(captured, 1).counted,
    )
    return _computed(running, 1, state, batch)


def run_slices(
    model: Derived,
    state: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    device: torch.device,
    of_shard: DerivedProgram | None = None,
) -> Computed:
    """What the slices of ``model`` compute together; ``of_shard`` is the field of SliceOfStage."""
    state = _copied(state)
    everything = stages_between([0, len(model.whole.graph.nodes)])
    running = build_stage(
        programs_of_slices(model, [stage for (stage,) in stages_of_slices(model, everything)], of_shard),
        state,
        loss_weight=1 / model.share.slices,
        randomness=randomness_of_one(device),
        device=device,
        terms=terms_of_slice(model.whole, model.share.slices).counted,
    )
    return _computed(running, model.share.slices, state, batch)


def _copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in state.items()}


def _computed(
    running: StageModule,
    slices: int,
    state: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
) -> Computed:
    """What the forwards of all ``slices``, and then their backwards, give."""
    for number in range(slices):
        running.forward(number, {}, {name: value.clone() for name, value in batch.items()})
    for number in reversed(range(slices)):
        running.backward(number, {})
    losses = torch.stack([running.losses[number] for number in range(slices)])
    return Computed(losses.sum(), {name: each.grad for name, each in state.items() if each.requires_grad}, {})

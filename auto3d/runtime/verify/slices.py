"""Compares the slices of a program with the whole program: loss and gradients after one micro-batch.

This finds a slice that does not compute its part of the whole, whatever rule made it. All slices run in one process, on
the same weights and data.
"""

from collections.abc import Sequence

import torch

from auto3d.capture.loss_terms import TargetTerm
from auto3d.capture.model import CapturedModel
from auto3d.data import DataSettings
from auto3d.derived.model import Derived
from auto3d.errors import InputError
from auto3d.plan import stages_between
from auto3d.runtime.layout import stages_of_slices, terms_of_slice
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.earlier_slices import programs_of_slices
from auto3d.runtime.stage.module import Tensors
from auto3d.runtime.stage.program import DerivedProgram, ProgramOfStage
from auto3d.runtime.verify.eager import Computed, built_state, coarseness_of, one_batch, randomness_of_one, whole_stage


class SlicesDifferError(InputError):
    """The slices of the sequence would not compute what the whole program does."""


def check_slices(model: Derived, data: DataSettings, *, seed: int, device: torch.device) -> None:
    """Raise SlicesDifferError unless all slices of ``model`` together do what the whole program does.

    They are compared on one micro-batch, with the bounds of ``verify.check_against_eager``. If the program computes in
    a type narrower than float32, the bounds are that type's: a sum of rounded parts is not the rounded sum.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        state = built_state(model.whole, device)
        batch = one_batch(model.whole, data, seed=seed, device=device)
        terms = terms_of_slice(model.whole, 1).counted
        whole = run_whole(model.whole, _copied(state), batch, device, terms=terms)
        slices = run_slices(model, _copied(state), batch, device)
        wider = coarseness_of(model.whole)
        if (difference := slices.difference(whole, dict.fromkeys(whole.gradients, wider))) is not None:
            raise SlicesDifferError(
                f"schedule: {model.share.slices} slices of the sequence change what the model computes: {difference}; "
                "use a schedule without slices, such as 1f1b"
            )


def run_whole(
    captured: CapturedModel,
    state: Tensors,
    batch: Tensors,
    device: torch.device,
    derived: DerivedProgram | None = None,
    terms: Sequence[TargetTerm] = (),
) -> Computed:
    """What ``captured`` computes of ``batch`` with ``state``; ``derived`` runs the operators that it has of its own."""
    return _computed([ProgramOfStage(whole_stage(captured), captured, derived)], state, batch, device, terms)


def run_slices(
    model: Derived, state: Tensors, batch: Tensors, device: torch.device, of_shard: DerivedProgram | None = None
) -> Computed:
    """What the slices of ``model`` compute together; ``of_shard`` is the field of SliceOfStage."""
    stages = [stage for (stage,) in stages_of_slices(model, stages_between([0, len(model.whole.graph.nodes)]))]
    terms = terms_of_slice(model.whole, model.share.slices).counted
    return _computed(programs_of_slices(model, stages, of_shard), state, batch, device, terms)


def _copied(state: Tensors) -> Tensors:
    return {name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in state.items()}


def _computed(
    programs: Sequence[ProgramOfStage],
    state: Tensors,
    batch: Tensors,
    device: torch.device,
    terms: Sequence[TargetTerm],
) -> Computed:
    """What the forwards of all ``programs`` of one stage, and then their backwards, give."""
    weight, randomness, graph = 1 / len(programs), randomness_of_one(device), programs[-1].captured.graph
    running = build_stage(programs, state, loss_weight=weight, randomness=randomness, terms=terms)
    for number in range(len(programs)):
        running.forward(number, {}, {name: value.clone() for name, value in batch.items()})
    for number in reversed(range(len(programs))):
        running.backward(number, {})
    return Computed(
        torch.stack([running.losses[number] for number in range(len(programs))]).sum(),
        {name: state[name].grad for name in sorted(graph.trained)},
        {name: state[name] for name in sorted(graph.written_buffers)},
    )

"""A stage of a captured program, ready to run on tensors of a device."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from auto3d.capture.loss_terms import ScaledTerm, TargetTerm
from auto3d.partition.segment import Segment, segments
from auto3d.runtime.loss_scale import LossScale
from auto3d.runtime.messages.tensor_group import TensorParallelRank
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.earlier_slices import SliceOfStage
from auto3d.runtime.stage.fast_calls import use_fast_calls
from auto3d.runtime.stage.halves_computation import HalvesComputation
from auto3d.runtime.stage.module import Computation, StageModule
from auto3d.runtime.stage.program import ProgramOfStage, segment_program
from auto3d.runtime.stage.segment_computation import SegmentComputation
from auto3d.runtime.stage.target_counts import TargetCounts
from auto3d.runtime.weights.gradients import DeferredGradients, WeightGradientsAtOnce
from auto3d.runtime.weights.low_precision import copies_of, used_once
from auto3d.runtime.weights.versions import WeightVersions


def build_stage(
    programs: Sequence[ProgramOfStage],
    tensors: Mapping[str, torch.Tensor],
    *,
    loss_weight: float,
    randomness: Randomness,
    recompute: bool = False,
    kept: Sequence[tuple[int, int]] = (),
    split_backward: bool = False,
    old_weights: bool = False,
    terms: Sequence[TargetTerm | ScaledTerm] = (),
    loss_scale: LossScale | None = None,
    compile: bool = False,
) -> StageModule:
    """The stage that has a single program in ``programs``, or a program for each slice of the sequence.

    ``tensors`` has its state by name; the parameters collect gradients in their ``.grad``, with ``old_weights`` in the
    ``.grad`` that exists now. The ``terms`` of the loss that the stage computes are weighted by their number of
    targets.

    A stage with ``recompute`` keeps only the activations of the operations in ``kept`` (ranges of positions), its
    inputs and received values, and the values that pass between kept and dropped operations. With ``split_backward``
    the gradients of weights are left to ``backward_weight``. With ``compile``, operators are compiled when they first
    run.
    """
    first, derived = programs[0], programs[0].derived
    halves = isinstance(derived, TensorParallelRank) and bool(derived.model.half_of)
    deferred = DeferredGradients() if split_backward else WeightGradientsAtOnce() if halves else None

    def leaf_copies(program: ProgramOfStage) -> set[str]:
        return set() if deferred is not None else used_once(program.captured, frozenset(program.stage.nodes))

    computations = [
        computation_of(
            program,
            randomness=randomness,
            halves=halves,
            kept=kept if recompute else None,
            deferred=deferred,
            terms=terms,
            leaf_copies=leaf_copies(program),
            compile=compile,
        )
        for program in programs
    ]
    stage = programs[-1].stage
    return StageModule(
        stage,
        computations,
        WeightVersions(
            {name: tensors[name] for name in first.stage.state},
            several=old_weights,
            copies=copies_of(first.captured, frozenset(first.stage.nodes)),
            leaf_copies=leaf_copies(first),
        ),
        loss=first.captured.graph.loss if stage.has_loss else None,
        loss_weight=loss_weight,
        loss_scale=loss_scale,
        deferred=deferred,
        earlier=derived.slices if isinstance(derived, SliceOfStage) else None,
    )


def computation_of(
    program: ProgramOfStage,
    *,
    randomness: Randomness,
    halves: bool = False,
    kept: Sequence[tuple[int, int]] | None = None,
    deferred: DeferredGradients | None = None,
    terms: Sequence[TargetTerm | ScaledTerm] = (),
    **options: Any,
) -> Computation:
    """What a stage computes of ``program``; all is ``kept`` if that is None. ``options`` are as in segment_program.

    With ``halves`` the halves of each micro-batch take turns.
    """
    graph, targets = program.captured.graph, TargetCounts(terms)
    divided = segments(graph, program.stage, [(0, len(graph.nodes))] if kept is None else kept)
    program_of = partial(
        _fast_program,
        captured=program.captured,
        randomness=randomness,
        deferred=deferred,
        derived=program.derived,
        targets=targets,
        **options,
    )
    if halves:
        return HalvesComputation(program, divided, program_of, randomness=randomness, targets=targets)
    return SegmentComputation(program, divided, program_of, randomness=randomness, targets=targets)


def _fast_program(segment: Segment, **options: Any) -> tuple[fx.GraphModule, list[str], list[str]]:
    """``segment_program``, called as fast as the host can; a compiled program has its own calls."""
    module, state, values = segment_program(segment, **options)
    return module if options.get("compile") else use_fast_calls(module), state, values

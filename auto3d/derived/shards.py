"""The entry point: a captured model as each rank of a tensor-parallel group runs it."""

from collections.abc import Mapping

from auto3d.capture.describe import describe
from auto3d.capture.model import CapturedModel
from auto3d.derived.model import Derived
from auto3d.derived.shard_program import local_program, placed_state
from auto3d.garbage import garbage_collection_paused
from auto3d.plan import PlanError
from auto3d.share import Share
from auto3d.tensor.derivation import Derivation
from auto3d.tensor.derive import derive
from auto3d.tensor_placement import Split


def tensor_parallel(
    captured: CapturedModel,
    share: Share,
    *,
    split: Mapping[str, Split] | None = None,
    pinned: Mapping[str, Split | None] | None = None,
    fused_attention: bool = True,
) -> Derived:
    """``captured`` as each rank with ``share`` of it, a shard of all tokens, runs it, with the least communication.

    ``split`` is how a Plan splits all of the model's state. Without it, every product's weights are split where that is
    possible, except for ``pinned`` state, by name: it has exactly this Split, or with None is whole or copied. Under
    sequence parallelism, values between products are split along the sequence where that costs no more communication.
    ``fused_attention`` is the argument of ``describe``. Raises PlanError if ``split`` or ``pinned`` does not fit the
    model.
    """
    assert split is None or pinned is None, "split says everything"
    exported = captured.exported
    names = {**exported.parameters, **exported.buffers}
    if split is not None:
        _check_fits(captured, split, share.tp)
        pinned = {name: split.get(name) for name in names.values()}
    with garbage_collection_paused():
        derivation = _derived(captured, share, pinned or {})
        program = local_program(exported, derivation, share.tp)
        graph = describe(program.exported, fused_attention=fused_attention)
        position = {node.name: number for number, node in enumerate(captured.graph.nodes)}
        return Derived(
            whole=captured,
            share=share,
            programs=(CapturedModel(graph=graph, exported=program.exported),),
            placements={names.get(name, name): placed for name, placed in program.placements.items()},
            positions=(tuple(position[program.operation_of[node.name]] for node in graph.nodes),),
            drawn_per_shard=program.drawn_per_shard,
        )


def derived_split(captured: CapturedModel, share: Share, *, pinned: Mapping[str, Split | None]) -> dict[str, Split]:
    """``tensor_parallel(...).split`` for ``share``, without the program of a rank."""
    with garbage_collection_paused():
        placed = placed_state(captured.exported, _derived(captured, share, pinned))
    return {name: placement.split for name, placement in sorted(placed.items()) if placement.split is not None}


def _derived(captured: CapturedModel, share: Share, pinned: Mapping[str, Split | None]) -> Derivation:
    _check_fits(captured, pinned, share.tp)
    names = {**captured.exported.parameters, **captured.exported.buffers}
    by_placeholder = {placeholder: pinned[name] for placeholder, name in names.items() if name in pinned}
    return derive(captured, share, pinned=by_placeholder)


def _check_fits(captured: CapturedModel, split: Mapping[str, Split | None], shards: int) -> None:
    """Raise PlanError unless each of ``split`` names state of the model and adds up to the size of its dimension."""
    state = captured.graph.parameters | captured.graph.buffers
    for name, division in split.items():
        if name not in state:
            raise PlanError(f"split: {name} is no parameter or buffer of the model")
        if division is None:
            continue
        shape = state[name].shape
        if not 0 <= division.dim < len(shape) or sum(division.blocks) != shape[division.dim]:
            raise PlanError(
                f"split: {name} has shape {list(shape)}, which blocks {list(division.blocks)} along dimension "
                f"{division.dim} do not make up"
            )
        if len(division.blocks) > 1 and division.padding(shards):
            raise PlanError(f"split: {name}: blocks {list(division.blocks)} do not divide among tp = {shards} ranks")

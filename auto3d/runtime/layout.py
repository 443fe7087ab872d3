"""The layout of a rank: what it runs, for which samples and with which peers.

It follows from the captured model, the plan, the settings and the rank alone, without a process group and without
memory on a device. A plan that does not fit is refused here, before any rank starts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from math import prod

from auto3d.capture.loss_terms import LossTerms, ScaledTerm, TargetTerm, loss_terms
from auto3d.capture.model import CapturedModel
from auto3d.capture.shard import Shard
from auto3d.derived.model import Derived
from auto3d.errors import InputError
from auto3d.mesh import PIPELINE, REPLICA, TENSOR
from auto3d.partition.stage import Stage, Transfer, cut
from auto3d.plan import AUTO3D, Plan, PlanError, StagePlan
from auto3d.runtime.messages.gradient_sync import Holders, holders
from auto3d.runtime.optimizer.checks import check_optimizer, exempt_names
from auto3d.runtime.optimizer.parameter_groups import UpdateRules, update_rules
from auto3d.runtime.replicas import rank_program, replicas_of_devices, resplit_dimensions
from auto3d.runtime.settings import SUMMED_ITEMS, TrainingSettings
from auto3d.schedule import SCHEDULES, samples_at_once, schedule_of
from auto3d.schedule.asynchronous import check_trainable, iterations_between_flushes
from auto3d.schedule.carried_buffers import check_carried_buffers
from auto3d.schedule.combinations import COMPILED, EMULATED, Feature, check_together, divisions_of
from auto3d.schedule.operation import Schedule
from auto3d.schedule.program import PipeStage
from auto3d.schedule.shape import has_one_reader
from auto3d.tensor_placement import WHOLE, PlacementKind, TensorPlacement


@dataclass(frozen=True, kw_only=True)
class PlanLayout:
    """What the layouts of all ranks of a plan have in common."""

    captured: CapturedModel  # captured for the samples that all replicas of a stage run together
    plan: Plan
    settings: TrainingSettings
    schedules: tuple[Schedule, ...]  # run one after the other; they differ only in their number of iterations
    stages: tuple[Stage, ...]
    replicas: tuple[int, ...]  # number of replicas, the same for all stages of a pipeline device
    sample_dimensions: Mapping[str, int]  # dimension of samples of each value that goes to more or fewer replicas
    terms: LossTerms  # terms of the loss of one operation; none if devices are emulated, which compute no loss
    rules: UpdateRules  # how each trained parameter is updated
    read_once: bool  # whether stage 0, on one rank of a pipeline, loads the inputs of all stages and sends them

    @property
    def schedule(self) -> Schedule:
        return self.schedules[0]


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """What one rank runs and whom it exchanges with."""

    captured: CapturedModel  # for the samples of this rank's slice of a micro-batch, and its shard of the weights
    plan: Plan  # its stages cut the graph of this capture
    derived: Derived | None  # None: the rank runs all of the model; else ``captured`` is its program
    schedules: tuple[Schedule, ...]  # run one after the other; they differ only in their number of iterations
    device: int  # pipeline device, from 0
    pipeline: int  # number of the pipeline, from 0
    replica: int  # number of the rank among the replicas of its stages, from 0
    replicas: int
    shard: int  # number of the rank in its tensor-parallel group, from 0
    model_stages: tuple[Stage, ...]  # all stages of the model, as ``captured`` has them
    read_once: bool  # whether stage 0 loads the inputs of all of them
    stages: Mapping[PipeStage, Stage]  # stages that this rank runs
    stages_of_slices: tuple[tuple[Stage, ...], ...]  # per slice of the sequence, all stages of its program
    peers: tuple[tuple[int, ...], ...]
    """For each pipeline device, its ranks with this rank's shard in this rank's pipeline."""
    sample_dimensions: Mapping[str, int]  # dimension of samples of each value that goes to more or fewer replicas
    samples: int  # samples that all replicas of a stage run together
    rules: UpdateRules  # how each trained parameter is updated
    state_names: tuple[str, ...]  # all parameters and buffers of the model; none if devices are emulated
    terms: LossTerms  # terms of the loss of one operation, for all samples that the replicas run together
    settings: TrainingSettings

    @property
    def schedule(self) -> Schedule:
        return self.schedules[0]

    @property
    def micro_batches(self) -> int:
        """Micro-batches that the rank runs in one iteration; every part of a micro-batch counts."""
        return self.plan.micro_batches * self.schedule.parts

    @property
    def first_micro_batch(self) -> int:
        """The number of the pipeline's first micro-batch in the global batch."""
        return self.pipeline * self.micro_batches

    @property
    def loss_weight(self) -> float:
        """Factor of each micro-batch's loss: their sum over the ranks is then the mean over the batch of an update, or
        the sum, if that is the loss. A loss that is a sum over items is divided by the places for them: gradients in
        float16 are then as large as the gradients of a mean."""
        if self.settings.loss_mean == SUMMED_ITEMS:
            return self.schedule.updates / self.label_places
        mean = self.schedule.updates / (self.plan.dp * self.micro_batches * self.replicas)
        return mean * self.plan.dp * self.plan.micro_batches if self.settings.loss_mean == "sum" else mean

    @property
    def label_places(self) -> int:
        """Labels of a global batch, ignored or not."""
        _, *shape = self.captured.graph.inputs["labels"].shape
        return prod(shape) * self.plan.dp * self.plan.micro_batches * self.plan.micro_batch_size

    @property
    def half_of(self) -> Mapping[str, int]:
        """Which half of a micro-batch a value of the rank's program is of; empty if it has none."""
        return {} if self.derived is None else self.derived.half_of

    @property
    def target_terms(self) -> tuple[TargetTerm, ...]:
        """The counted terms of the loss, of this rank's slice of a micro-batch."""
        return tuple(replace(term, places=term.places / self.replicas) for term in self.terms.counted)

    @property
    def trained_terms(self) -> tuple[TargetTerm | ScaledTerm, ...]:
        """The terms of the loss that a training weights, and how: see TrainingSettings.loss_mean."""
        counted = tuple(replace(term, is_alike=self.settings.weighs_micro_batches_alike) for term in self.target_terms)
        if not counted or self.settings.loss_mean != "items":
            return counted
        others = (*self.terms.constant, *self.terms.other)
        return (*counted, *(ScaledTerm(name=name, factor=self.plan.dp * self.plan.micro_batches) for name in others))

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All values that cross between stages."""
        return tuple(transfer for stage in self.model_stages for transfer in stage.received)

    @property
    def tensor_groups(self) -> list[tuple[int, ...]]:
        """The ranks of every tensor-parallel group of the plan, in the order of their shards; none if tp is 1."""
        if self.plan.tp == 1:
            return []
        return [group for mesh in self.plan.meshes for group in mesh.groups(TENSOR)]

    def is_first_copy_of(self, name: str) -> bool:
        """Whether this rank holds the parameter or buffer in the first pipeline, its first pipe and first replica."""
        on_first_pipe = any(name in stage.state for (_, pipe), stage in self.stages.items() if pipe == 0)
        return self.pipeline == 0 and self.replica == 0 and on_first_pipe

    def placement_of(self, name: str) -> TensorPlacement:
        """How the ranks of a tensor-parallel group hold a parameter or buffer."""
        return WHOLE if self.derived is None else self.derived.placements[name]

    def shard_of(self, name: str) -> Shard | None:
        """The shard that this rank holds of a parameter or buffer; None if it holds the whole of it."""
        split = self.placement_of(name).split
        return None if split is None else Shard(split, self.shard, self.plan.tp)

    def stored_name(self, name: str, shard: int | None = None) -> str:
        """The name of a parameter or buffer in checkpoints: it says which shard, by default this rank's."""
        if self.placement_of(name).split is None:
            return name
        return f"{name}[shard {self.shard if shard is None else shard} of {self.plan.tp}]"

    @property
    def all_stored_names(self) -> tuple[str, ...]:
        """The names in checkpoints of all shards of all parameters and buffers, in the same order on every rank."""
        shards = range(self.plan.tp)
        return tuple(dict.fromkeys(self.stored_name(name, shard) for name in self.state_names for shard in shards))

    @cached_property
    def holders(self) -> dict[str, Holders]:
        """The ranks over which the gradient of each trained parameter of this rank's shard is summed.

        They are in the same order on every rank. Ranks with another shard are among them only for a copied parameter:
        the others have another part of it, or the same gradient.
        """
        return self._summed_over(self.shard)

    @cached_property
    def all_holders(self) -> frozenset[Holders]:
        """The holders of all trained parameters of all shards."""
        return frozenset(holding for shard in range(self.plan.tp) for holding in self._summed_over(shard).values())

    def _summed_over(self, shard: int) -> dict[str, Holders]:
        trained = self.captured.graph.trained
        copied = {name for name in trained if self.placement_of(name).kind is PlacementKind.COPIED}
        return holders(self.plan, self.schedule, self.model_stages, trained, shard=shard, of_all_shards=copied)

    @property
    def uncounted_parameters(self) -> frozenset[str]:
        """Trained parameters whose gradient another shard counts in the norm, because it is the same on all shards."""
        if self.shard == 0:
            return frozenset()
        return frozenset(name for name in self.holders if self.placement_of(name).kind is PlacementKind.WHOLE)

    @property
    def summed_stages(self) -> set[tuple[int, ...]]:
        """Each set of stages whose common parameters several ranks hold, so that their gradients are summed."""
        return {holding.stages for holding in self.holders.values() if len(holding.ranks) > 1}

    @property
    def private_parameters(self) -> frozenset[str]:
        """Trained parameters that one stage of this rank uses, and no other rank holds."""
        users = Counter(name for stage in self.stages.values() for name in stage.state)
        return frozenset(n for n, holding in self.holders.items() if users[n] == 1 and len(holding.ranks) == 1)

    @property
    def state_of_several_ranks(self) -> frozenset[str]:
        """Parameters and buffers of which more than one rank holds the same elements."""
        whole = {name for name in self.state_names if self.placement_of(name).split is None}
        all_holders = holders(
            self.plan, self.schedule, self.model_stages, self.state_names, shard=self.shard, of_all_shards=whole
        )
        return frozenset(name for name, holding in all_holders.items() if len(holding.ranks) > 1)


def lay_out_plan(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    schedule: Schedule | None = None,
    *,
    read_once: bool = False,
) -> PlanLayout:
    """The common layout of all ranks; ``schedule`` replaces the plan's by one written by hand.

    Data that are best ``read_once`` are so where one rank can read a micro-batch for all others of its pipeline. Raises
    InputError where ``plan`` does not fit its schedule, its model or ``settings``.
    """
    if plan.engine != AUTO3D:
        raise PlanError(f"engine: {plan.engine} runs in trials of `auto3d sweep` only; this runtime is {AUTO3D}")
    if settings.precision != captured.exported.precision:
        raise InputError(
            f"precision: the model was captured for {captured.exported.precision}, and the settings say "
            f"{settings.precision}; give capture() and TrainingSettings the same"
        )
    by_hand = [schedule] * (settings.iterations // schedule.iterations) if schedule else []
    schedules = by_hand or schedules_of(plan, settings.iterations)
    first = schedules[0]
    check_together(_features(plan, settings))
    replicas = replicas_of_devices(plan, first)
    read_once = read_once and has_one_reader(plan, first) and settings.emulation is None
    stages = stages_of(captured, plan, read_once=read_once)
    check_trainable(first, stages, captured.graph.trained, clip_norm=settings.optimizer.clip_norm)
    check_carried_buffers(captured.graph, plan, first, stages)
    rules = update_rules(captured.graph, settings.optimizer, exempt_names(captured, settings.optimizer.exempt))
    check_optimizer(captured, plan, settings, rules)
    if settings.emulation is not None:
        settings.emulation.check_fits(plan.stages)
    program = rank_program(captured, plan, 1)
    of_ranks = stages if program.derived is None else cut(program.captured.graph, program.plan.stages)
    has_terms = settings.emulation is None and settings.loss_mean != SUMMED_ITEMS
    return PlanLayout(
        captured=captured,
        plan=plan,
        settings=settings,
        schedules=tuple(schedules),
        stages=stages,
        replicas=replicas,
        terms=terms_of_slice(captured, first.slices) if has_terms else LossTerms(),
        rules=rules,
        read_once=read_once,
        sample_dimensions=resplit_dimensions(captured, plan, of_ranks),  # last: it may capture the model
    )


def terms_of_slice(captured: CapturedModel, slices: int) -> LossTerms:
    """The terms of the loss of ``captured``, or of one of its ``slices``, which have equally many places."""
    terms = loss_terms(captured.exported)
    return replace(terms, counted=tuple(replace(term, places=term.places / slices) for term in terms.counted))


def _features(plan: Plan, settings: TrainingSettings) -> set[Feature]:
    """The features of a run that may not go together."""
    features = divisions_of(plan)
    if settings.emulation is not None:
        features.add(EMULATED)
    if settings.compile:
        features.add(COMPILED)
    return features


def lay_out_rank(common: PlanLayout, rank: int) -> RankLayout:
    """The layout of ``rank``; raises InputError where the model cannot run its slice of a micro-batch."""
    device, place = common.plan.position(rank)
    replicas = common.replicas[device]
    program = rank_program(common.captured, common.plan, replicas)
    captured, plan = program.captured, program.plan
    stages = common.stages if captured is common.captured else cut(captured.graph, plan.stages)
    names = {*captured.graph.parameters, *captured.graph.buffers}
    model, of_slices = program.derived, list[tuple[Stage, ...]]()
    if model is not None and model.share.slices > 1:
        of_slices = stages_of_slices(model, program.whole_stages)
    if common.settings.emulation is not None:
        counts = [stage.replicas for stage in plan.stages]
        stages, names = common.settings.emulation.stages(stages, counts, replicas), set()
    return RankLayout(
        captured=captured,
        plan=plan,
        derived=model,
        schedules=common.schedules,
        device=device,
        pipeline=place[PIPELINE],
        replica=place[REPLICA],
        replicas=replicas,
        shard=place[TENSOR],
        model_stages=stages,
        read_once=common.read_once,
        stages={
            pipe_stage: stages[pipe_stage[0]]
            for pipe_stage, home in common.schedule.device_of.items()
            if home == device
        },
        stages_of_slices=tuple(of_slices),
        peers=tuple(mesh.at(pipeline=place[PIPELINE], tensor=place[TENSOR]) for mesh in plan.meshes),
        sample_dimensions=common.sample_dimensions,
        samples=common.captured.graph.micro_batch_size,
        rules=common.rules,
        state_names=tuple(sorted(names)),
        terms=common.terms,
        settings=common.settings,
    )


def stages_of_slices(model: Derived, stages: Sequence[StagePlan]) -> list[tuple[Stage, ...]]:
    """Per slice, the stages of its program that match ``stages`` of the whole model.

    Raises PlanError if slices would exchange different values.
    """
    of_slices = [cut(program.graph, model.stages(stages, number)) for number, program in enumerate(model.programs)]
    for same in zip(*of_slices, strict=True):
        for stage in same:
            for mine, last in zip_longest(stage.received, same[-1].received):
                if mine != last:
                    value = (mine or last).value
                    raise PlanError(
                        f"stages: {stage.index} receives {value.name}, of shape {list(value.shape)}, in some slices of "
                        "the sequence only; cut the model elsewhere"
                    )
    return of_slices


def schedules_of(plan: Plan, iterations: int) -> list[Schedule]:
    """Schedules of ``plan`` that together are ``iterations`` iterations, each flushed before the next begins.

    The last schedule has the iterations that remain. So a run does, as far as it goes, what a longer run of the plan
    does.
    """
    schedule = schedule_of(plan)
    if not SCHEDULES[plan.schedule].asynchronous:
        return [schedule] * iterations
    most = iterations_between_flushes(plan.micro_batches, plan.schedule_options)
    whole, rest = divmod(iterations, most)
    return [
        schedule_of(replace(plan, schedule_options={**plan.schedule_options, "iterations": length}))
        for length in [most] * whole + [rest] * (rest > 0)
    ]


def stages_of(captured: CapturedModel, plan: Plan, *, read_once: bool = False) -> tuple[Stage, ...]:
    """The stages of ``plan``; raises PlanError if it was made for another model or micro-batch size."""
    if plan.graph != captured.graph.fingerprint:
        raise PlanError(
            f"graph: the plan was made for model {plan.graph}, this one is {captured.graph.fingerprint}; "
            "make the plan again for this model and these versions of torch and transformers, under the same "
            "PYTHONHASHSEED (auto3d sets 0) if the model's code goes through a set of strings"
        )
    if samples_at_once(plan) != captured.graph.micro_batch_size:
        raise PlanError(
            f"micro_batch_size: the plan runs {samples_at_once(plan)} samples at once; the model was captured with "
            f"{captured.graph.micro_batch_size}"
        )
    return cut(captured.graph, plan.stages, read_once=read_once)

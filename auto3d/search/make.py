"""Candidate -> Plan: the one place that makes plans from degrees and choices."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from auto3d.cost.memory.device import in_gib
from auto3d.cost.memory.plan import PlanMemory
from auto3d.cost.model import CostModel, Kept
from auto3d.errors import InputError
from auto3d.partition.methods import METHODS, STAGE_METHODS, method_named
from auto3d.partition.recompute import kept_fractions
from auto3d.partition.replicated import fastest_stages
from auto3d.partition.stage import PartitionError
from auto3d.plan import SUB_PIPELINED, Plan, PlanError, StagePlan, stages_between
from auto3d.schedule import SCHEDULES, build_schedule, parse_schedule, samples_per_replica
from auto3d.schedule.combinations import check_together, divisions, divisions_of
from auto3d.schedule.moments import stages_of
from auto3d.schedule.shape import Shape, shape, shape_of
from auto3d.search.axes import DEFAULTS_OF_SHARDS, EQUAL, OF_PLANS, UNEVEN, Candidate
from auto3d.search.kept_fractions import KeptFractions, Limits, largest_fraction
from auto3d.search.placement import MEGATRON, Degrees, place, place_replicas
from auto3d.search.planned_model import PlannedModel
from auto3d.search.problem import CandidateProblem
from auto3d.search.recompute import AUTO, FULL, NONE, schedule_options
from auto3d.search.space import ORDER_SECONDS, Refusals, Workload, check_fits
from auto3d.search.synthesized import (
    best_order,
    check_sought,
    is_sought,
    options_of_file,
    seed_candidates,
)
from auto3d.share import Share, share_of
from auto3d.simulate.costs_text import write_times
from auto3d.tensor_placement import Split

_TURNS = 12  # most cuts of a candidate for what stages keep
_TRIES = 32  # tries to find stages that fit the memory of the devices
_TIGHTER = 0.95  # factor on that memory where the cost model counts less than the maker


class PlanMaker:
    """Makes Plans of the model ``planned`` for ``workload``, with the cluster and times of the cost model ``model``.

    ``shortage`` returns which device lacks memory for a Plan, or an empty string if the Plan fits (default: by
    ``model``, on devices whose memory is known). ``memory`` has the bytes that ``shortage`` compares with the memory of
    the cluster's devices; without it, recompute auto asks ``shortage`` about every kept fraction. ``check`` raises
    InputError for a Plan that is impossible for another reason. ``order_seconds`` is the time in which the order of a
    synthesized schedule is sought.
    """

    def __init__(
        self,
        planned: PlannedModel,
        model: CostModel,
        workload: Workload,
        *,
        shortage: Callable[[Plan], str] | None = None,
        memory: PlanMemory | None = None,
        check: Callable[[Plan], None] | None = None,
        order_seconds: float = ORDER_SECONDS,
    ) -> None:
        self._order_seconds = order_seconds
        self.planned, self.model, self.workload = planned, model, workload
        self._shortage = shortage or (lambda plan: shortage_of(model, plan))
        memory = model.memory if shortage is None else memory
        self._limits = None if memory is None else Limits(memory=memory, cluster=model.cluster)
        self._check = check or (lambda plan: None)
        self._captured: dict[int, InputError | None] = {}  # number of samples -> why the model cannot be captured at it
        self._splits: dict[tuple[int, Share], dict[str, Split] | InputError] = {}
        self._sliced: dict[tuple[int, Share], InputError | None] = {}
        """(samples, share) -> why the model cannot run such slices of its sequence."""

    def plan(self, candidate: Candidate) -> Plan:
        """The Plan of ``candidate``; raises InputError if there is none, or if a device lacks the memory for it."""
        if is_sought(candidate):
            return self.with_best_order(candidate, self.seeds(candidate))
        return self._fastest(candidate, self._fitting, self.check)

    def seeds(self, candidate: Candidate) -> list[Plan]:
        """The Plans by rule with the other choices of ``candidate``, from which its order is sought.

        Where no Plan of a schedule fits the memory, its Plan that ignores memory stands for it. Raises InputError if
        there are none.
        """
        check_sought(candidate, self.model)
        plans, refusals = [], Refusals()
        for seed in seed_candidates(candidate):
            try:
                try:
                    plans.append(self.plan(seed))
                except InputError as error:
                    if error.kind != "memory":
                        raise
                    plans.append(self.unlimited(seed))
            except InputError as error:
                refusals.add(seed, str(error), error.kind)
        if not plans:
            raise PlanError(refusals.foremost.reason, kind=refusals.foremost.kind)
        return plans

    def with_best_order(self, candidate: Candidate, seeds: Sequence[Plan]) -> Plan:
        """The Plan of ``candidate`` whose order takes the least time; never slower than one of ``seeds`` that fits."""
        return best_order(
            seeds,
            self.model,
            self._shortage,
            self._check,
            seconds=self._order_seconds,
            recompute=candidate.recompute == AUTO,
            sync=candidate.sync,
            seed=self.workload.seed,
        )

    def check_depth(self, candidate: Candidate) -> None:
        """Raise PlanError if the model has fewer subgraphs than ``candidate`` has pipeline devices, with a stage each.

        It takes no schedule, whose list of operations is long where there are many devices.
        """
        if "scale" in parse_schedule(candidate.schedule)[1]:  # a part of a micro-batch has a Graph of its own
            return
        self._fingerprint(candidate.micro_batch_size)
        subgraphs = len(self.planned.cuts(candidate.micro_batch_size)) - 1
        if candidate.pp > subgraphs:
            raise PlanError(
                f"{candidate.pp} stages or more, but the model has {subgraphs} subgraphs; each stage needs one"
            )

    def check(self, plan: Plan) -> None:
        """Raise InputError if a device lacks the memory for ``plan``, or if it is impossible for another reason."""
        if missing := self._shortage(plan):
            raise PlanError(missing, kind="memory")
        check_together(divisions_of(plan))
        self._check(plan)

    def unlimited(self, candidate: Candidate) -> Plan:
        """The Plan of ``candidate`` whatever memory it needs; with recompute auto, the Plan that keeps nothing."""
        return self._fastest(candidate, self._made, lambda plan: None)

    def _fastest(self, candidate: Candidate, make: Callable[[Candidate], Plan], check: Callable[[Plan], None]) -> Plan:
        """The Plan that ``make`` gives for ``candidate``, or the fastest by prediction of it and its rivals.

        The best stages one by one need not make the fastest pipeline: the times of filling and draining it, of messages
        and of gradient sums depend on the cuts too. So where stages recompute unequally, the same method also cuts as
        if all of them recomputed everything, and a method may have another as its rival. ``check`` raises InputError
        for a rival that is impossible.
        """
        plan, method = make(candidate), METHODS.get(candidate.partition)
        if method is None or candidate.cuts is not None or candidate.replicas == UNEVEN:
            return plan
        if candidate.recompute == NONE and not shape_of(plan).recompute:
            return plan
        rivals: list[Callable[[], Plan]] = []
        if method.balances_time and candidate.recompute != AUTO and _recomputes_unequally(plan):
            rivals.append(lambda: self._made(candidate, kept=(0.0,) * len(plan.stages)))
        if method.rival:
            rivals.append(lambda: make(replace(candidate, partition=method.rival)))
        plans = [plan]
        for rival in rivals:
            with suppress(InputError):  # fewer blocks than stages, for example
                other = rival()
                check(other)
                plans.append(other)
        return min(plans, key=self.model.seconds) if len(set(plans)) > 1 else plan

    def _fitting(self, candidate: Candidate) -> Plan:
        """The Plan of ``candidate`` by its own partition; raises InputError if there is none or memory is short."""
        plan = self._made(candidate)
        if _may_fit_memory(candidate) and self._shortage(plan):
            plan = self._fastest_that_fits(candidate, plan)
        if candidate.recompute == AUTO:
            if self.model.cluster.memory_bytes is None:
                raise PlanError("recompute: auto needs to know the memory of a device")
            plan = self._keeping_most(candidate, plan)
        self.check(plan)
        return plan

    def _keeping_most(self, candidate: Candidate, plan: Plan) -> Plan:
        """``plan``, whose stages keep nothing, with the largest kept fractions that fit.

        A method that balances times, and is quick, cuts again for these fractions, which changes what fits, and so in
        turns until neither moves: once from ``plan``, and once from the cut for stages that all recompute everything.
        The fastest of all these plans is the result.
        """
        if not METHODS[candidate.partition].cuts_in_turns:
            return largest_fraction(self._kept_fractions(plan), self._shortage, self._limits)
        plans: list[Plan] = []
        cuts: list[tuple[StagePlan, ...]] = []
        refusals: list[PlanError] = []
        for start in (plan, self._made(candidate, kept=(0.0,) * len(plan.stages))):
            turn = start
            while turn.stages not in cuts and len(cuts) < _TURNS:
                cuts.append(turn.stages)
                fractions = self._kept_fractions(turn)
                try:
                    plans.append(largest_fraction(fractions, self._shortage, self._limits))
                except PlanError as error:
                    refusals.append(error)
                    break
                turn = self._made(candidate, kept=fractions.of(plans[-1]))
        if not plans:
            raise refusals[0]
        return min(plans, key=self.model.seconds) if len(plans) > 1 else plans[0]

    def _fastest_that_fits(self, candidate: Candidate, fastest: Plan) -> Plan:
        """The Plan of ``candidate`` with the fastest stages that fit; if none fit, ``fastest``, which does not either.

        If each device holds one stage, these are the fastest of all stages that fit. If a device holds several stages
        that fit one by one but not together, the largest is made smaller until they fit; this may miss stages that fit.
        If the maker's own count of memory still finds too little of it, all limits are lowered.
        """
        shape, cluster = shape_of(fastest), self.model.cluster
        memory = [cluster.memory_of(mesh.ranks) or inf for mesh in fastest.meshes]
        excluded: list[tuple[int, int, int]] = []
        for _ in range(_TRIES if min(memory) < inf else 0):
            try:
                plan = self._made(candidate, memory, excluded)
            except PartitionError:
                break
            if not self._shortage(plan):
                return plan
            excess = [needed / has for needed, has in zip(self.model.memory.of(plan), memory, strict=True)]
            device = excess.index(max(excess))
            if excess[device] > 1:
                needed = {
                    n: self.model.memory.of_stage(plan, n, plan.stages[n])[device] for n in stages_of(shape, device)
                }
                largest = max(needed, key=needed.__getitem__)
                run = largest, *plan.stages[largest].operations[0]
                if run in excluded:  # nothing smaller is possible
                    break
                excluded.append(run)
            else:
                memory = [_TIGHTER * has for has in memory]
        return fastest

    def _made(
        self,
        candidate: Candidate,
        limits: Sequence[float] | None = None,
        excluded: Sequence[tuple[int, int, int]] = (),
        kept: Kept = (),
    ) -> Plan:
        """The Plan of ``candidate``; with recompute auto, a Plan that keeps nothing, cut for stages that will keep the
        fractions ``kept``. A partition method that respects memory keeps to ``limits`` and ``excluded``, as
        CandidateProblem explains them."""
        check_fits(candidate, self.model.cluster, self.workload)
        name, given = parse_schedule(candidate.schedule)
        micro_batches = self.workload.global_batch // (candidate.dp * candidate.micro_batch_size)
        sizes = {"devices": candidate.pp, "micro_batches": micro_batches}
        if name in SCHEDULES and SCHEDULES[name].explicit:
            options = options_of_file(given, candidate, **sizes)
        else:
            options = schedule_options(name, given, candidate.recompute, candidate.sync, **sizes)
        form = shape(name, **sizes, options=options)
        samples = samples_per_replica(form.name, form.sample_parts, candidate.micro_batch_size)
        choices = {axis: getattr(candidate, axis) for axis in OF_PLANS} | {"schedule": name}
        choices |= _tensor_choices(candidate, samples)
        self._check_slices(candidate, form, samples)
        plan = Plan(
            **choices,
            graph=self._fingerprint(samples),
            global_batch=self.workload.global_batch,
            schedule_options=options,
            stages=self._draft(form, samples),
            placement=place(
                candidate.placement if candidate.replicas == EQUAL else MEGATRON,
                self.model.cluster,
                Degrees.of(candidate),
            ),
            seed=self.workload.seed,
            split=self._split(samples, share_of(candidate)),
        )
        kept = kept or _fractions(candidate, form)
        if candidate.replicas == UNEVEN:
            plan = self._unevenly(candidate, plan, form, samples, kept)
        else:
            plan = replace(plan, stages=self._stages(candidate, plan, form, samples, limits, excluded, kept))
        if "times" in SCHEDULES[name].options and "times" not in options:
            plan = replace(plan, schedule_options={**options, "times": write_times(self.model.costs(plan))})
        if SCHEDULES[name].asynchronous:
            schedule = build_schedule(name, **sizes, **options)
            self.planned.check_trainable(schedule, plan.stages, samples, clip_norm=self.workload.clip_norm)
        if candidate.kept is not None:
            return self._kept_fractions(plan).plan_of(candidate.kept)
        if candidate.recompute not in (NONE, FULL, AUTO):
            plan = self._kept_fractions(plan).plan(float(candidate.recompute))
        return plan

    def prepare(self, degrees: Iterable[tuple[int, Share]]) -> None:
        """Capture the model and divide its work now, so that the time of a search does not include it.

        ``degrees`` has the samples and the shares of the plans to come.
        """
        for samples, share in degrees:
            with suppress(InputError):
                self._fingerprint(samples)
                self._split(samples, share.of_all_tokens)
                if share.slices > 1:
                    self._check_sliced(samples, share)
                else:
                    self.planned.work(samples, share)

    def check_captured(self) -> None:
        """Raise the first error if the model could not be captured at any number of samples."""
        errors = [error for error in self._captured.values() if error is not None]
        if errors and len(errors) == len(self._captured):
            raise errors[0]

    def _fingerprint(self, samples: int) -> str:
        """The fingerprint of the model; asks for each capture once, even if it fails."""
        if samples not in self._captured:
            try:
                self._captured[samples] = None
                self.planned.fingerprint(samples)
            except InputError as error:
                self._captured[samples] = error
        if (problem := self._captured[samples]) is not None:
            raise problem
        return self.planned.fingerprint(samples)

    def _split(self, samples: int, share: Share) -> dict[str, Split]:
        """``Plan.split`` for this share; asks once for each share, even if nothing is split."""
        if share.tp == 1:
            return {}
        key = samples, share
        if key not in self._splits:
            try:
                self._splits[key] = self.planned.split(samples, share)
            except InputError as error:
                self._splits[key] = error
        split = self._splits[key]
        if isinstance(split, InputError):
            raise split
        return split

    def _check_slices(self, candidate: Candidate, form: Shape, samples: int) -> None:
        """Raise InputError if ``candidate`` or the model does not allow the slices of ``form``."""
        if form.slices == 1:
            return
        share = replace(share_of(candidate), slices=form.slices)
        check_together(divisions(share, overlap=candidate.tensor_overlap))
        self._check_sliced(samples, share)

    def _check_sliced(self, samples: int, share: Share) -> None:
        """Raise InputError if the model cannot run the slices of ``share``; asks once for each share."""
        self._fingerprint(samples)
        key = samples, share
        if key not in self._sliced:
            try:
                self._sliced[key] = None
                self.planned.work(samples, share)
            except InputError as error:
                self._sliced[key] = error
        if (problem := self._sliced[key]) is not None:
            raise problem

    def _kept_fractions(self, plan: Plan) -> KeptFractions:
        samples = plan.micro_batch_size // shape_of(plan).sample_parts
        return KeptFractions(plan, lambda stage: self.planned.starts(stage, samples))

    def _draft(self, form: Shape, samples: int) -> tuple[StagePlan, ...]:
        """Some valid stages, for a Plan whose real stages are chosen later."""
        cuts = self.planned.cuts(samples)
        if len(cuts) <= form.stages:
            raise PlanError(f"{form.stages} stages, but the model has {len(cuts) - 1} subgraphs; each stage needs one")
        return stages_between([*cuts[: form.stages], cuts[-1]])

    def _stages(
        self,
        candidate: Candidate,
        plan: Plan,
        form: Shape,
        samples: int,
        limits: Sequence[float] | None,
        excluded: Sequence[tuple[int, int, int]],
        kept: Kept,
    ) -> tuple[StagePlan, ...]:
        cuts = self.planned.cuts(samples)
        if candidate.cuts is not None:
            wanted, count = list(candidate.cuts), form.stages
            if (
                len(wanted) != count + 1
                or (wanted[0], wanted[-1]) != (0, len(cuts) - 1)
                or sorted(set(wanted)) != wanted
            ):
                takes = f"{count + 1} rising numbers from 0 to {len(cuts) - 1}"
                raise PlanError(f"partition_cuts, or plan.cuts: {wanted} must be {takes}")
            return stages_between([cuts[place] for place in wanted])
        method = method_named(candidate.partition, STAGE_METHODS, key="partition")
        if form.stages == 1:
            return stages_between([0, cuts[-1]])
        problem = CandidateProblem(
            planned=self.planned,
            model=self.model,
            plan=plan,
            shape=form,
            samples=samples,
            limits=limits,
            excluded=excluded,
            kept=kept,
        )
        return method.choose_stages(problem)

    def _unevenly(self, candidate: Candidate, plan: Plan, form: Shape, samples: int, kept: Kept) -> Plan:
        """``plan`` with the stages and replicas whose slowest stage is as fast as possible, whatever the partition.

        RaNNC chooses them this way (Tanaka et al. 2021, algorithm 1) for given numbers of stages and devices.
        """
        if form.stages != candidate.pp or len(form.device_of) != form.stages:
            raise PlanError(f"replicas: uneven ones need one stage on each device; {plan.schedule} has several on one")
        cuts = self.planned.cuts(samples)
        devices = self.model.cluster.devices // (candidate.dp * candidate.tp)  # devices of one pipeline
        halves = 2 if candidate.tp > 1 and plan.tensor_overlap == SUB_PIPELINED else 1
        before = {
            count: self.model.pipeline_times(plan, cuts, kept=kept, replicas=count).before
            for count in range(1, devices - candidate.pp + 2)
            if samples % (halves * count) == 0
        }
        fastest = fastest_stages(before, stages=form.stages, devices=devices)
        if fastest is None:
            raise PlanError(
                f"replicas: no {form.stages} of {', '.join(map(str, before))}, which divide {samples} samples, add up "
                f"to the {devices} devices of a pipeline"
            )
        bounds, counts = fastest
        stages = stages_between([cuts[place] for place in bounds])
        return replace(
            plan,
            stages=tuple(replace(stage, replicas=count) for stage, count in zip(stages, counts, strict=True)),
            placement=place_replicas(counts, dp=candidate.dp, tp=candidate.tp),
        )


def _checked_kept(candidate: Candidate, form: Shape) -> tuple[float, ...]:
    """``candidate.kept``; raises PlanError unless it has one fraction for each stage that ``form`` recomputes."""
    assert candidate.kept is not None
    if candidate.recompute != FULL:
        raise PlanError(f"kept: found together with recompute: {candidate.recompute}; it belongs to recompute: full")
    if len(candidate.kept) != form.stages:
        raise PlanError(f"kept: found {len(candidate.kept)} fractions; it takes one for each of {form.stages} stages")
    return candidate.kept


def _tensor_choices(candidate: Candidate, samples: int) -> dict[str, Any]:
    """What differs in ``candidate`` from the choices of its Plan: without tensor parallelism, some have no meaning."""
    if candidate.tp == 1:
        return DEFAULTS_OF_SHARDS
    if candidate.tensor_overlap == SUB_PIPELINED and samples % 2:
        raise PlanError(
            f"tensor_overlap: sub-pipelined halves each pass of a stage, which here has {samples} "
            f"sample{'s' * (samples > 1)}; use an even number, or none"
        )
    return {}


def _may_fit_memory(candidate: Candidate) -> bool:
    """Whether the stages of ``candidate`` come from a method that respects the memory of the devices."""
    method = METHODS.get(candidate.partition)
    return method is not None and method.fits_memory and candidate.cuts is None and candidate.replicas == EQUAL


def _fractions(candidate: Candidate, form: Shape) -> Kept:
    """The fraction that each stage keeps, None if it does not recompute; empty: nothing, or as much as fits.

    Where stages will keep as much as fits, a method that does not cut in turns takes all to recompute everything.
    """
    method = METHODS.get(candidate.partition)
    if candidate.recompute == AUTO and method is not None and not method.cuts_in_turns:
        return (0.0,) * form.stages
    if candidate.kept is None and candidate.recompute in (NONE, FULL, AUTO):
        return ()
    if candidate.kept is None:
        fractions: Sequence[float] = kept_fractions(form.in_flight, float(candidate.recompute))
    else:
        fractions = _checked_kept(candidate, form)
    return [fraction if number in form.recompute else None for number, fraction in enumerate(fractions)]


def _recomputes_unequally(plan: Plan) -> bool:
    recompute = shape_of(plan).recompute
    return 0 < len(recompute) < len(plan.stages) or any(stage.kept for stage in plan.stages)


def shortage_of(model: CostModel, plan: Plan) -> str:
    """Why ``plan`` does not fit into the memory of the devices that it is placed on; empty if it fits."""
    for device, needed in enumerate(model.memory.one_by_one(plan)):
        memory = model.cluster.memory_of(plan.meshes[device].ranks)
        if memory is not None and needed > memory:
            return f"pipeline device {device} needs {in_gib(needed)} GiB; it has {in_gib(memory)} GiB"
    return ""

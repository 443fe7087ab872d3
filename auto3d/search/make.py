"""Candidate -> Plan: the one place where plans are made of degrees and choices."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from auto3d.cost.memory import in_gib
from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.partition.methods import METHODS, STAGE_METHODS, method_named
from auto3d.partition.recompute import keep_last, kept_shares
from auto3d.partition.replicated import fastest_stages
from auto3d.partition.stage import PartitionError
from auto3d.plan import Plan, PlanError, StagePlan, stages_between
from auto3d.schedule import SCHEDULES, build_schedule, parse_schedule, samples_per_replica
from auto3d.schedule.shape import Shape, shape, shape_of
from auto3d.search.placement import MEGATRON, place, place_replicas
from auto3d.search.problem import CandidateProblem, Keep
from auto3d.search.recompute import AUTO, FULL, NONE, Shares, largest_share, schedule_options
from auto3d.search.space import EQUAL, UNEVEN, Candidate, Task, check_fits
from auto3d.search.subject import Subject

_TRIES = 32  # tries to find stages that fit the memory of the devices
_TIGHTER = 0.95  # factor on that memory where the cost model counts less than the maker


class PlanMaker:
    """Makes Plans of ``subject`` for ``task`` on the cluster of ``model``, whose times balance stages.

    ``shortage`` says what memory a Plan lacks, nothing where it fits (default: by ``model``, on the devices that are
    known); ``check`` raises InputError for a Plan that cannot be for another reason.
    """

    def __init__(
        self,
        subject: Subject,
        model: CostModel,
        task: Task,
        *,
        shortage: Callable[[Plan], str] | None = None,
        check: Callable[[Plan], None] | None = None,
    ) -> None:
        self.subject, self.model, self.task = subject, model, task
        self._shortage = shortage or (lambda plan: shortage_of(model, plan))
        self._check = check or (lambda plan: None)
        self._captured: dict[int, InputError | None] = {}  # number of samples -> why there is no model at it

    def plan(self, candidate: Candidate) -> Plan:
        """The Plan of ``candidate``; raises InputError where there is none, or a device lacks the memory for it."""
        plan = self.unlimited(candidate)
        if _may_fit_memory(candidate) and self._shortage(plan):
            plan = self._fastest_that_fits(candidate, plan)
        if candidate.recompute == AUTO:
            if self.model.cluster.memory_bytes is None:
                raise PlanError("recompute: auto needs to know the memory of a device")
            plan = largest_share(self._shares(plan), self._shortage)
        self.check(plan)
        return plan

    def check(self, plan: Plan) -> None:
        """Raise InputError where a device lacks the memory for ``plan``, or it cannot be for another reason."""
        if missing := self._shortage(plan):
            raise PlanError(missing)
        self._check(plan)

    def unlimited(self, candidate: Candidate) -> Plan:
        """The Plan of ``candidate`` whatever memory it needs; with recompute auto, of one that keeps nothing."""
        return self._made(candidate)

    def _fastest_that_fits(self, candidate: Candidate, fastest: Plan) -> Plan:
        """The Plan of ``candidate`` with the fastest stages that fit; if none fit, ``fastest``, which does not either.

        The stages are the fastest of all that fit where each device holds one of them. Where a device holds several
        that fit one by one and not together, the largest is made smaller until they do; this may miss some stages that
        fit. Where the maker's own count still finds memory short, all devices are taken to have less of it.
        """
        shape, cluster = shape_of(fastest), self.model.cluster
        memory = [cluster.memory_of(ranks) or inf for ranks in fastest.placement]
        excluded: list[tuple[int, int, int]] = []
        for _ in range(_TRIES if min(memory) < inf else 0):
            try:
                plan = self._made(candidate, memory, excluded)
            except PartitionError:
                break
            if not self._shortage(plan):
                return plan
            excess = [needed / has for needed, has in zip(self.model.memory(plan), memory, strict=True)]
            device = excess.index(max(excess))
            if excess[device] > 1:
                needed = {
                    n: self.model.stage_memory(plan, n, plan.stages[n])[device] for n in shape.holdings[device].stages
                }
                largest = max(needed, key=needed.__getitem__)
                excluded.append((largest, *plan.stages[largest].operations[0]))
            else:
                memory = [_TIGHTER * has for has in memory]
        return fastest

    def _made(
        self,
        candidate: Candidate,
        limits: Sequence[float] | None = None,
        excluded: Sequence[tuple[int, int, int]] = (),
    ) -> Plan:
        """The Plan of ``candidate``. A partition method that respects memory keeps to ``limits`` and ``excluded``, as
        CandidateProblem explains them."""
        check_fits(candidate, self.model.cluster, self.task)
        name, given = parse_schedule(candidate.schedule)
        micro_batches = self.task.global_batch // (candidate.dp * candidate.micro_batch_size)
        sizes = {"devices": candidate.pp, "micro_batches": micro_batches}
        options = schedule_options(name, given, candidate.recompute, candidate.sync, **sizes)
        form = shape(name, **sizes, options=options)
        samples = samples_per_replica(form, candidate.micro_batch_size)
        plan = Plan(
            graph=self._fingerprint(samples),
            dp=candidate.dp,
            tp=candidate.tp,
            pp=candidate.pp,
            global_batch=self.task.global_batch,
            micro_batch_size=candidate.micro_batch_size,
            schedule=name,
            schedule_options=options,
            stages=self._draft(form, samples),
            placement=place(
                candidate.placement if candidate.replicas == EQUAL else MEGATRON,
                self.model.cluster,
                dp=candidate.dp,
                tp=candidate.tp,
                pp=candidate.pp,
            ),
            seed=self.task.seed,
            shard_optimizer=candidate.shard_optimizer,
        )
        if candidate.replicas == UNEVEN:
            plan = self._unevenly(candidate, plan, form, samples)
        else:
            plan = replace(plan, stages=self._stages(candidate, plan, form, samples, limits, excluded))
        if SCHEDULES[name].asynchronous:
            schedule = build_schedule(name, **sizes, **options)
            self.subject.check_trainable(schedule, plan.stages, samples, clip_norm=self.task.clip_norm)
        if candidate.recompute not in (NONE, FULL, AUTO):
            plan = self._shares(plan).plan(float(candidate.recompute))
        return plan

    def capture(self, sizes: Iterable[int]) -> None:
        """Have the model captured at these numbers of samples now, so that a search's time is its own."""
        for samples in sizes:
            with suppress(InputError):
                self._fingerprint(samples)

    def check_captured(self) -> None:
        """Raise the first error if the model could not be captured at any number of samples."""
        if self._captured and all(self._captured.values()):
            raise next(iter(self._captured.values()))

    def _fingerprint(self, samples: int) -> str:
        """The model is asked for once, also where it cannot be captured."""
        if samples not in self._captured:
            try:
                self._captured[samples] = None
                self.subject.fingerprint(samples)
            except InputError as error:
                self._captured[samples] = error
        if error := self._captured[samples]:
            raise error
        return self.subject.fingerprint(samples)

    def _shares(self, plan: Plan) -> Shares:
        samples = plan.micro_batch_size // shape_of(plan).parts
        return Shares(plan, lambda stage: self.subject.starts(stage, samples))

    def _draft(self, form: Shape, samples: int) -> tuple[StagePlan, ...]:
        """Any stages."""
        cuts = self.subject.cuts(samples)
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
    ) -> tuple[StagePlan, ...]:
        cuts = self.subject.cuts(samples)
        if candidate.cuts is not None:
            wanted, count = list(candidate.cuts), form.stages
            if (
                len(wanted) != count + 1
                or (wanted[0], wanted[-1]) != (0, len(cuts) - 1)
                or sorted(set(wanted)) != wanted
            ):
                raise PlanError(
                    f"partition_cuts: {wanted} must be {count + 1} rising numbers from 0 to {len(cuts) - 1}"
                )
            return stages_between([cuts[place] for place in wanted])
        method = method_named(candidate.partition, STAGE_METHODS, key="partition")
        if form.stages == 1:
            return stages_between([0, cuts[-1]])
        problem = CandidateProblem(
            subject=self.subject,
            model=self.model,
            plan=plan,
            shape=form,
            samples=samples,
            limits=limits,
            excluded=excluded,
            keep=_keep(candidate, form),
        )
        return method.choose_stages(problem)

    def _unevenly(self, candidate: Candidate, plan: Plan, form: Shape, samples: int) -> Plan:
        """Stages and their replicas together, whatever the partition: the slowest stage is as fast as can be.

        So RaNNC chooses them (Tanaka et al. 2021, algorithm 1), for given numbers of stages and devices.
        """
        if form.stages != candidate.pp or len(form.device_of) != form.stages:
            raise PlanError(f"replicas: uneven ones need one stage on each device; {plan.schedule} has several on one")
        cuts = self.subject.cuts(samples)
        devices = self.model.cluster.devices // (candidate.dp * candidate.tp)  # of a pipeline
        before = {
            count: self.model.pipeline(plan, cuts, replicas=count).before
            for count in range(1, devices - candidate.pp + 2)
            if samples % count == 0
        }
        found = fastest_stages(before, stages=form.stages, devices=devices)
        if found is None:
            raise PlanError(
                f"replicas: no {form.stages} of {', '.join(map(str, before))}, which divide {samples} samples, sum up "
                f"to the {devices} devices of a pipeline"
            )
        bounds, counts = found
        stages = stages_between([cuts[place] for place in bounds])
        return replace(
            plan,
            stages=tuple(replace(stage, replicas=count) for stage, count in zip(stages, counts, strict=True)),
            placement=place_replicas(counts, dp=candidate.dp, tp=candidate.tp),
        )


def _may_fit_memory(candidate: Candidate) -> bool:
    """Whether the stages of ``candidate`` come from a method that respects the memory of the devices."""
    method = METHODS.get(candidate.partition)
    return method is not None and method.fits_memory and candidate.cuts is None and candidate.replicas == EQUAL


def _keep(candidate: Candidate, form: Shape) -> Keep:
    """Adds to a stage what it keeps under the recomputation of ``candidate``."""
    if candidate.recompute in (NONE, FULL, AUTO):
        return lambda number, stage, starts: stage
    shares = kept_shares(form.in_flight, float(candidate.recompute))

    def keep(number: int, stage: StagePlan, starts: Sequence[int]) -> StagePlan:
        return keep_last(stage, starts, shares[number]) if number in form.recompute else stage

    return keep


def shortage_of(model: CostModel, plan: Plan) -> str:
    """Why ``plan`` does not fit into the memory of the devices that it is placed on; nothing where it does."""
    for device, needed in enumerate(model.memory(plan)):
        memory = model.cluster.memory_of(plan.placement[device])
        if memory is not None and needed > memory:
            return f"pipeline device {device} needs {in_gib(needed)} GiB; it has {in_gib(memory)}"
    return ""

"""Candidate -> Plan: the one place where plans are made of degrees and choices."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from auto3d.cost.memory import in_gib
from auto3d.cost.model import CostModel, Pipeline
from auto3d.errors import InputError
from auto3d.partition.contiguous import cheapest_cuts, smallest_maximum
from auto3d.partition.layer_assignment import shortest_pipeline
from auto3d.partition.replicated import fastest_stages
from auto3d.partition.stage import check_enough
from auto3d.plan import Plan, PlanError, StagePlan, stages_between
from auto3d.schedule import SCHEDULES, build_schedule, parse_schedule, samples_per_replica
from auto3d.schedule.shape import Shape, shape, shape_of
from auto3d.search.placement import MEGATRON, place, place_replicas
from auto3d.search.recompute import AUTO, FULL, NONE, Shares, largest_share, schedule_options
from auto3d.search.space import EQUAL, UNEVEN, Candidate, Task, check_fits
from auto3d.search.subject import Subject

_ROUNDING = 1e-12  # two sums of the same times may differ by so much


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
        self._bounds = lru_cache(4096)(_bounds)
        self._captured: dict[int, InputError | None] = {}  # number of samples -> why there is no model at it

    def plan(self, candidate: Candidate) -> Plan:
        """The Plan of ``candidate``; raises InputError where there is none, or a device lacks the memory for it."""
        plan = self.unlimited(candidate)
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
            plan = replace(plan, stages=self._stages(candidate, plan, form, samples))
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

    def _stages(self, candidate: Candidate, plan: Plan, form: Shape, samples: int) -> tuple[StagePlan, ...]:
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
        if candidate.partition in ("uniform", "blocks"):
            return self.subject.stages(candidate.partition, form.stages, samples)
        if form.stages == 1:
            return stages_between([0, cuts[-1]])
        pipeline = self.model.pipeline(plan, cuts)
        bounds = self._bounds(candidate.partition, pipeline, form.stages, form.micro_batches)
        return stages_between([cuts[place] for place in bounds])

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


def _bounds(method: str, pipeline: Pipeline, stages: int, micro_batches: int) -> list[int]:
    """Places of the cuts that bound the stages."""
    before = pipeline.before
    check_enough(before, stages)
    if method == "layer-assignment":
        return shortest_pipeline(before, pipeline.messages, pipeline.speeds, micro_batches=micro_batches)
    anywhere = [[0] * len(before)] * stages
    limit = smallest_maximum(before, anywhere) * (1 + _ROUNDING)
    return cheapest_cuts(before, pipeline.messages, anywhere, limit)


def shortage_of(model: CostModel, plan: Plan) -> str:
    """Why ``plan`` does not fit into the memory of the devices that it is placed on; nothing where it does."""
    for device, needed in enumerate(model.memory(plan)):
        memory = model.cluster.memory_of(plan.placement[device])
        if memory is not None and needed > memory:
            return f"pipeline device {device} needs {in_gib(needed)} GiB; it has {in_gib(memory)}"
    return ""

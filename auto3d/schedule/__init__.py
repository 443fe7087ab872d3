"""The schedule of a Plan: the operations of each pipeline device, in order.

Each schedule is one file in families/. ``SCHEDULES`` is the only place that knows them by name.
"""

from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module

from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule
from auto3d.schedule.order_text import without_order

SCHEDULES: dict[str, Family] = {
    family.name: family
    for family in (
        import_module(f"auto3d.schedule.families.{file}").FAMILY
        for file in (
            "gpipe",
            "one_forward_one_backward",
            "interleaved",
            "interleaved_zero_bubble",
            "looped_bfs",
            "hanayo",
            "gems",
            "pipedream",
            "pipedream_2bw",
            "early_recompute",
            "shifted_critical_path",
            "chimera",
            "zb_h1",
            "zb_h2",
            "zb_1p",
            "zb_2p",
            "zb_v",
            "v_half",
            "v_min",
            "dualpipe_v",
            "seq1f1b",
            "synthesized",
        )
    )
}
"""Name -> schedule, in the order of lists and tables. To add a schedule, add the name of its file in families/."""


@lru_cache(maxsize=16)  # a schedule lists every micro-batch, and making or running one plan builds it several times
def build_schedule(name: str, *, devices: int, micro_batches: int, **options: int | str) -> Schedule:
    """The schedule ``name`` at these sizes. Raises InputError if the name is unknown or a size or option is invalid."""
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"schedule: {name!r} is unknown; choose one of {', '.join(SCHEDULES)}{hint}")
    if devices < 1 or micro_batches < 1:
        raise InputError(f"schedule {name}: {devices} devices, {micro_batches} micro-batches; both must be 1 or more")
    family = SCHEDULES[name]
    for option, value in options.items():
        if option not in family.options:
            accepted = ", ".join(family.options) or "none"
            raise InputError(f"schedule {name}: option {option!r} is unknown; its options are {accepted}")
        if type(value) is not type(family.options[option]):
            kind = "a whole number" if isinstance(family.options[option], int) else "text"
            raise InputError(f"schedule {name}: {option} is {value!r}; it must be {kind}")
    return family.build(devices=devices, micro_batches=micro_batches, **options)


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of ``plan``. Raises InputError if its name is unknown or an option or a size is invalid."""
    return build_schedule(plan.schedule, devices=plan.pp, micro_batches=plan.micro_batches, **plan.schedule_options)


def without_slices(plan: Plan) -> Plan:
    """``plan`` with the same schedule on whole sequences, as an evaluation runs it."""
    if schedule_of(plan).slices == 1:
        return plan
    return replace(plan, schedule_options={**plan.schedule_options, "slices": 1})


def samples_at_once(plan: Plan) -> int:
    """The samples of one operation of ``plan``: a micro-batch or, if the schedule splits its samples, a part of one.

    The replicas of a stage share these samples equally. The model is captured at this size. Raises PlanError if the
    micro-batch size does not divide equally.
    """
    schedule = schedule_of(plan)
    for replicas in sorted({stage.replicas for stage in plan.stages}):
        samples = samples_per_replica(schedule.name, schedule.sample_parts, plan.micro_batch_size, replicas)
    return samples * replicas


def samples_per_replica(name: str, parts: int, micro_batch_size: int, replicas: int = 1) -> int:
    """The samples of one operation that each of ``replicas`` replicas of a stage takes.

    ``name`` is the schedule's, which runs the samples of a micro-batch in ``parts`` parts. Raises PlanError as above.
    """
    slices = parts * replicas
    if micro_batch_size % slices:
        division = f"it is divided among {replicas} replicas of a stage"
        if parts > 1:
            division = f"schedule {name} runs it in {parts} parts"
            division += f", each divided among {replicas} replicas of a stage" if replicas > 1 else ""
        raise PlanError(f"micro_batch_size: {micro_batch_size}; {division}: it must be a multiple of {slices}")
    return micro_batch_size // slices


def parse_schedule(
    text: str, *, where: str = "schedule", example: str = "interleaved-1f1b:chunks=4"
) -> tuple[str, dict[str, int | str]]:
    """The name and the options in a text such as ``interleaved-1f1b:chunks=4``.

    Raises InputError if the text has another form. The message begins with ``where``, the key or flag that holds the
    text, and ends with ``example``.
    """
    name, *pairs = text.split(":")
    options: dict[str, int | str] = {}
    for pair in pairs:
        option, sign, value = pair.partition("=")
        if not (sign and option and value):
            raise InputError(f"{where}: {text!r}: write NAME:option=value, as in {example}")
        options[option] = int(value) if value.isdecimal() else value
    return name, options


def write_schedule(name: str, options: dict[str, int | str]) -> str:
    """The text that ``parse_schedule`` reads, without the order of a synthesized schedule."""
    return ":".join([name, *(f"{option}={value}" for option, value in without_order(options).items())])

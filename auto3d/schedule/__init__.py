"""Plan -> operations. Each schedule is a file in families/; ``SCHEDULES`` alone knows them by name."""

from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module

from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule

SCHEDULES: dict[str, Family] = {
    family.name: family
    for family in (
        import_module(f"auto3d.schedule.families.{file}").FAMILY
        for file in (
            "gpipe",
            "one_forward_one_backward",
            "interleaved",
            "gems",
            "pipedream",
            "pipedream_2bw",
            "early_recompute",
            "shifted_critical_path",
            "chimera",
            "zb_h1",
            "zb_h2",
            "zb_v",
        )
    )
}
"""Name -> schedule, in the order of lists and tables. To add a schedule, add the name of its file in families/."""


@lru_cache(maxsize=16)  # it lists every micro-batch, and is asked for more than once by whoever makes or runs a plan
def build_schedule(name: str, *, devices: int, micro_batches: int, **options: int | str) -> Schedule:
    """The operations of schedule ``name``; raises InputError where the name, a size or an option is not possible."""
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"schedule: {name!r} is not known; there are {', '.join(SCHEDULES)}{hint}")
    if devices < 1 or micro_batches < 1:
        raise InputError(f"schedule {name}: {devices} devices, {micro_batches} micro-batches; both must be 1 or more")
    family = SCHEDULES[name]
    for option, value in options.items():
        if option not in family.options:
            takes = ", ".join(family.options) or "none"
            raise InputError(f"schedule {name}: option {option!r} is not one of its own; it takes {takes}")
        if type(value) is not type(family.options[option]):
            kind = "a whole number" if isinstance(family.options[option], int) else "text"
            raise InputError(f"schedule {name}: {option} is {value!r}; it must be {kind}")
    return family.build(devices=devices, micro_batches=micro_batches, **options)


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of ``plan``; raises InputError where there is none of this name, options and sizes."""
    return build_schedule(plan.schedule, devices=plan.pp, micro_batches=plan.micro_batches, **plan.schedule_options)


def samples_at_once(plan: Plan) -> int:
    """How many samples an operation of ``plan`` runs: a micro-batch, or a part of one where the schedule halves them.

    All replicas of a stage run them together. The model is captured at this size. Raises PlanError where they cannot be
    so divided.
    """
    schedule = schedule_of(plan)
    for replicas in sorted({stage.replicas for stage in plan.stages}):
        samples = samples_per_replica(schedule, plan.micro_batch_size, replicas)
    return samples * replicas


def samples_per_replica(schedule: Schedule, micro_batch_size: int, replicas: int = 1) -> int:
    """How many of them each of ``replicas`` runs under a schedule by itself."""
    shares = schedule.parts * replicas
    if micro_batch_size % shares:
        shared = f" by {replicas} replicas each" if replicas > 1 else ""
        raise PlanError(
            f"micro_batch_size: {micro_batch_size}; schedule {schedule.name} runs it in {schedule.parts} parts"
            f"{shared}: it must be a multiple of {shares}"
        )
    return micro_batch_size // shares


def parse_schedule(
    text: str, *, where: str = "schedule", example: str = "interleaved-1f1b:chunks=4"
) -> tuple[str, dict[str, int | str]]:
    """``interleaved-1f1b:chunks=4`` -> the name and its options.

    Raises InputError, which says ``where`` it stands and gives an ``example``, if it is not of this form.
    """
    name, *given = text.split(":")
    options: dict[str, int | str] = {}
    for pair in given:
        option, sign, value = pair.partition("=")
        if not (sign and option and value):
            raise InputError(f"{where}: {text!r}: write NAME:option=value, as in {example}")
        options[option] = int(value) if value.isdecimal() else value
    return name, options


def write_schedule(name: str, options: dict[str, int | str]) -> str:
    """The text that ``parse_schedule`` reads."""
    return ":".join([name, *(f"{option}={value}" for option, value in options.items())])

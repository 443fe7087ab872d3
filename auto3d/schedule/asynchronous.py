"""Asynchronous schedules: when they flush, and what a model and its training must satisfy for them."""

from collections.abc import Collection, Mapping, Sequence

from auto3d.partition.stage import Stage
from auto3d.plan import PlanError
from auto3d.schedule.operation import Schedule

MICRO_BATCHES_WITHOUT_FLUSH = 1024  # by default; a flush costs pp - 1 micro-batches


def iterations_between_flushes(micro_batches: int, options: Mapping[str, int | str]) -> int:
    """The iterations that an asynchronous schedule runs before its pipeline drains and fills again.

    They are its option ``iterations`` or, without it, as many as have about MICRO_BATCHES_WITHOUT_FLUSH micro-batches.
    """
    return int(options.get("iterations", max(1, MICRO_BATCHES_WITHOUT_FLUSH // micro_batches)))


def check_trainable(schedule: Schedule, stages: Sequence[Stage], trained: Collection[str], *, clip_norm: float) -> None:
    """Raise PlanError if ``schedule`` is asynchronous and cannot train ``stages``.

    ``trained`` has the names of the parameters that learn; ``clip_norm`` is the norm for gradient clipping, 0 for none.
    """
    if not schedule.weight_version:
        return
    if clip_norm > 0:
        raise PlanError(
            f"clip_norm: found {clip_norm:g}; schedule {schedule.name} needs 0: it updates each stage separately, "
            "so the norm of all gradients is never known"
        )
    versions = [
        [version for (stage, _), version in sorted(schedule.weight_version.items()) if stage == index]
        for index in range(schedule.stages)
    ]
    first_user: dict[str, int] = {}
    for stage in stages:
        for name in stage.state:
            first = first_user.setdefault(name, stage.index)
            if name in trained and versions[first] != versions[stage.index]:
                raise PlanError(
                    f"stages: {first} and {stage.index} share the parameter {name}, but schedule {schedule.name} runs "
                    "them on different versions of the weights; use a synchronous schedule"
                )

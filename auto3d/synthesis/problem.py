"""The problem of a synthesized schedule: stages on devices, times of operations, and bytes against memory."""

from dataclasses import dataclass, field
from math import inf

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.simulate.costs import Costs
from auto3d.simulate.work import recomputed_inside


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What an order of operations is sought for: one iteration of ``micro_batches``, as short as possible.

    An order has, for each micro-batch and stage, F and then B, or F, I and W; a stage that recomputes may have R before
    B or I, and otherwise recomputes inside them. Its time is the makespan of ``auto3d.simulate.simulate`` at ``costs``,
    with all syncs and updates at the end (``lazy``). On no device do activations ever exceed ``free``.

    Bytes are of one micro-batch on one stage, in any unit:

    - ``activation``: from the start of F to the end of B or I; on a stage that recomputes, from the start of R instead,
      or from the start of the B or I that recomputes inside itself.
    - ``kept``: what a stage that recomputes holds from the start of F to that start.
    - ``deferred``: from the end of I to the end of W.
    """

    micro_batches: int
    costs: Costs
    device_of: dict[tuple[int, int], int] = field(hash=False)  # (stage, pipe) -> device, as in Schedule
    activation: tuple[float, ...]  # per stage
    kept: tuple[float, ...]  # per stage
    deferred: tuple[float, ...]  # per stage
    free: tuple[float, ...]  # per device
    # Stages whose backward may be I and W instead of B, and stages that may recompute. Each does so for all its
    # micro-batches or for none.
    may_split: frozenset[int] = frozenset()
    may_recompute: frozenset[int] = frozenset()

    @property
    def stages(self) -> int:
        return len(self.activation)

    @property
    def devices(self) -> int:
        return len(self.free)

    @property
    def pipes(self) -> int:
        return 1 + max(pipe for _, pipe in self.device_of)

    @property
    def per_pipe(self) -> tuple[int, ...]:
        """The micro-batches of each pipe: equal numbers, one more on the first pipes if they do not divide."""
        whole, rest = divmod(self.micro_batches, self.pipes)
        return tuple(whole + (pipe < rest) for pipe in range(self.pipes))

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise InputError(f"problem: {self.micro_batches} micro-batches; there must be 1 or more")
        for name in ("activation", "kept", "deferred"):
            sizes = getattr(self, name)
            if len(sizes) != self.stages:
                raise InputError(f"problem: {name} has {len(sizes)} values; there are {self.stages} stages")
            for stage, size in enumerate(sizes):
                if not 0 <= size < inf:
                    raise InputError(f"problem: {name} of stage {stage} is {size:g}; it must be 0 or more")
        for stage, (kept, deferred, whole) in enumerate(zip(self.kept, self.deferred, self.activation, strict=True)):
            if max(kept, deferred) > whole:
                raise InputError(
                    f"problem: stage {stage} keeps {kept:g} and defers {deferred:g}; neither may exceed its "
                    f"activation, {whole:g}"
                )
        for device, size in enumerate(self.free):
            if not size >= 0:
                raise InputError(f"problem: device {device} has {size:g} free; it must be 0 or more")


def peaks(problem: Problem, schedule: Schedule) -> list[float]:
    """Per device, the largest sum of activations that ``schedule`` holds at a time; see Problem."""
    inside = recomputed_inside(schedule)
    largest, number = [], 0
    for operations in schedule.operations:
        held = most = 0.0
        for operation in operations:
            during, after = _changes(problem, schedule, operation, inside=number in inside)
            number += 1
            most = max(most, held + during)
            held += after
        largest.append(most)
    return largest


def exceeds(problem: Problem, schedule: Schedule) -> list[bool]:
    """Per device, whether ``schedule`` holds more than is free, by more than the rounding of sums."""
    return [most > free * (1 + 1e-9) for most, free in zip(peaks(problem, schedule), problem.free, strict=True)]


def _changes(problem: Problem, schedule: Schedule, operation: Operation, *, inside: bool) -> tuple[float, float]:
    """The change of what is held while ``operation`` runs, and after it."""
    stage, count = operation.stage, len(operation.micro_batches)
    if not count:
        return 0.0, 0.0
    whole, deferred = problem.activation[stage], problem.deferred[stage]
    kept = problem.kept[stage] if stage in schedule.recompute else whole
    again = whole - kept if inside else 0.0
    change = {
        Kind.FORWARD: (kept, kept),
        Kind.RECOMPUTE: (whole - kept, whole - kept),
        Kind.BACKWARD: (again, again - whole),
        Kind.BACKWARD_INPUT: (again, again - whole + deferred),
        Kind.BACKWARD_WEIGHT: (0.0, -deferred),
    }[operation.kind]
    return change[0] * count, change[1] * count

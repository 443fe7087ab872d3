"""The messages between ranks of two stages that split the same micro-batch among different numbers of replicas.

A stage with r replicas splits every micro-batch into r equal slices, in order: slice j is for its replica j. Under
sub-pipelining each replica has its slice as two tensors, for the two halves of its samples.
"""

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements that replica ``source`` of one stage sends to replica ``target`` of another.

    These are ``length`` elements along the dimension that is split, which begin at ``start`` in the source's tensor and
    at ``into`` in the target's. A ``length`` of None stands for the whole tensor. If replicas have tensors of several
    parts of their samples, they are in the tensor of ``source_part`` and go to the tensor of ``target_part``.
    """

    source: int
    target: int
    start: int
    into: int
    length: int | None
    source_part: int = 0
    target_part: int = 0

    def back(self) -> "Piece":
        """The same elements in the opposite direction, as their gradient travels."""
        return Piece(self.target, self.source, self.into, self.start, self.length, self.target_part, self.source_part)


def pieces(length: int | None, *, sources: int, targets: int, parts: int = 1) -> tuple[Piece, ...]:
    """The pieces by which ``length`` elements in ``sources`` equal slices become ``targets`` equal slices, in order.

    Each slice is in as many equal ``parts``.
    A ``length`` of None is a tensor of which all sources have the same copy. Each target then takes it from the source
    that has the target's first sample, with which it exchanges other values anyway.
    """
    if length is None:
        return tuple(Piece(target * sources // targets, target, 0, 0, None) for target in range(targets))
    per_source, per_target = length // (sources * parts), length // (targets * parts)
    overlaps = []
    for source, target in product(range(sources * parts), range(targets * parts)):
        first = max(source * per_source, target * per_target)
        last = min((source + 1) * per_source, (target + 1) * per_target)
        if first < last:
            start, into = first - source * per_source, first - target * per_target
            of_source, of_target = divmod(source, parts), divmod(target, parts)
            overlaps.append(Piece(of_source[0], of_target[0], start, into, last - first, of_source[1], of_target[1]))
    return tuple(overlaps)

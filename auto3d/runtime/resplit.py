"""Which rank sends what to which, where two stages split the same micro-batch in different numbers of parts.

A stage with r replicas splits every micro-batch in r equal parts, in order, part j on its j-th rank.
"""

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Piece:
    """What part ``source`` of one stage sends to part ``target`` of another.

    ``length`` elements along the dimension that is split, at ``start`` in the source's tensor and at ``into`` in the
    target's; None: the whole tensor.
    """

    source: int
    target: int
    start: int
    into: int
    length: int | None

    def back(self) -> "Piece":
        """The same elements on their way back, as a gradient is."""
        return Piece(self.target, self.source, self.into, self.start, self.length)


def pieces(length: int | None, *, sources: int, targets: int) -> tuple[Piece, ...]:
    """How ``length`` elements in ``sources`` equal parts become ``targets`` equal parts; in order of the elements.

    None is a tensor that all parts of the source have alike: each target takes it from one that it meets anyway, the
    one with its own first sample.
    """
    if length is None:
        return tuple(Piece(target * sources // targets, target, 0, 0, None) for target in range(targets))
    own, given = length // sources, length // targets
    found = []
    for source, target in product(range(sources), range(targets)):
        first = max(source * own, target * given)
        last = min((source + 1) * own, (target + 1) * given)
        if first < last:
            found.append(Piece(source, target, first - source * own, first - target * given, last - first))
    return tuple(found)

"""Atomic-level partitioning (RaNNC, section III-A): one non-constant operation each, with its own constant ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from auto3d.capture.graph import Graph


@dataclass(frozen=True, slots=True)
class Subcomponent:
    """Positions in the Graph; one constant operation is in every subcomponent that needs its result."""

    operation: int
    constants: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        return (*self.constants, self.operation)


def constant_operations(graph: Graph) -> list[bool]:
    """Whether each operation is constant: may be cloned instead of having its result sent.

    The paper calls constant what does not depend on the inputs of the model. Here, so is what depends on them alone and
    is cheap (masks, positions): every stage that uses it computes it anyway, see ``stage.cut``. An operation on a
    buffer that the model writes to is not, although no input may reach it: a clone would write twice, on which the
    paper is silent.
    """
    varying = set(graph.inputs)  # values that change from one micro-batch to the next
    constant = []
    for node in graph.nodes:
        varies = not varying.isdisjoint(node.reads) or not graph.written_buffers.isdisjoint(node.state)
        if varies:
            varying.update(value.name for value in node.outputs)
        constant.append(node.from_inputs or not varies)
    return constant


def atomic_subcomponents(graph: Graph) -> tuple[Subcomponent, ...]:
    """All of them, in the Graph's order, which is an order in which they can run.

    One forward pass does what the paper's forward and backward ones do: what an operation needs comes before it.
    """
    constant = constant_operations(graph)
    needed: list[frozenset[int]] = []  # by position: the constant operations that it needs, directly or through others
    for node in graph.nodes:
        makers = {graph.producer[name] for name in node.reads if name in graph.producer}
        own = {maker for maker in makers if constant[maker]}
        needed.append(frozenset(own.union(*(needed[maker] for maker in own))))
    return tuple(
        Subcomponent(position, tuple(sorted(needed[position])))
        for position in range(len(graph.nodes))
        if not constant[position]
    )


def stage_of_operations(graph: Graph, stages: Sequence[Iterable[Subcomponent]]) -> list[int]:
    """The stage of each operation of ``graph``, given the subcomponents of each stage.

    A Plan names each operation once, so a constant one belongs to the first stage that uses it; ``stage.cut`` copies it
    to the others or, where it depends on parameters, sends them its result. One that nothing uses is on the first.
    """
    found = [0] * len(graph.nodes)
    for stage in reversed(range(len(stages))):
        for sub in stages[stage]:
            for position in sub.positions:
                found[position] = stage
    return found

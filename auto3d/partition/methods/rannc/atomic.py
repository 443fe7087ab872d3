"""Atomic-level partitioning (RaNNC, section III-A): one non-constant operation, and constant operations for it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from auto3d.capture.graph import Graph


@dataclass(frozen=True, slots=True)
class Subcomponent:
    """Positions in the Graph. A constant operation belongs to every subcomponent that needs its result."""

    operation: int
    constants: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        return (*self.constants, self.operation)


def constant_operations(graph: Graph) -> list[bool]:
    """Whether each operation is constant: stages may clone it instead of sending its result.

    The paper calls an operation constant if it does not depend on the model's inputs. Here, cheap operations that
    depend on the inputs alone (masks, positions) are constant too: every stage that uses such an operation computes it
    anyway, see ``stage.cut``. An operation on a buffer that the model writes to is not constant even if no input
    reaches it: a clone would write twice. The paper is silent on such buffers.
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
    """All atomic subcomponents in the Graph's order, in which they can run.

    One forward pass replaces the paper's forward and backward pass, since every operation follows the operations that
    it needs.
    """
    constant = constant_operations(graph)
    needed: list[frozenset[int]] = []  # per operation: the constant operations it needs, directly or not
    for node in graph.nodes:
        makers = {graph.producer[name] for name in node.reads if name in graph.producer}
        direct = {maker for maker in makers if constant[maker]}
        needed.append(frozenset(direct.union(*(needed[maker] for maker in direct))))
    return tuple(
        Subcomponent(position, tuple(sorted(needed[position])))
        for position in range(len(graph.nodes))
        if not constant[position]
    )


def stage_of_operations(graph: Graph, stages: Sequence[Iterable[Subcomponent]]) -> list[int]:
    """The stage of each operation of ``graph``, given the subcomponents of each stage.

    A Plan names each operation once, so a constant operation belongs to the first stage that uses it. ``stage.cut``
    copies it to the other stages or, if it depends on parameters, sends them its result. Unused operations are on the
    first stage.
    """
    stage_of = [0] * len(graph.nodes)
    for stage in reversed(range(len(stages))):
        for sub in stages[stage]:
            for position in sub.positions:
                stage_of[position] = stage
    return stage_of

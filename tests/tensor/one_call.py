"""One call of an operator by itself, which a model has only among others."""

from collections.abc import Iterable, Mapping

from torch import fx

from auto3d.tensor.operations import analysed_calls
from auto3d.tensor.rules.call import Call, Rule, Way
from auto3d.tensor.ways import _Ways
from auto3d.tensor_placement import Split


def ways_of_call(call: Call, shards: int, possible: Mapping[fx.Node, Iterable[Split]]) -> tuple[Rule, tuple[Way, ...]]:
    """The rule of one call and all ways that it gives if its operands can be split as ``possible`` says."""
    program = analysed_calls([call])
    (operation,) = program.operations
    return operation.rule, _Ways(program, shards, {}, None).of_operation(operation, possible)

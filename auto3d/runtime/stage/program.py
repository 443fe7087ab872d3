"""A segment of the captured program as an executable module: on its device, seeded, optionally with split backward."""

import operator
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from auto3d.capture.autocast import copy_name
from auto3d.capture.describe import is_random
from auto3d.capture.model import CapturedModel
from auto3d.derived.model import Derived
from auto3d.partition.segment import Segment
from auto3d.partition.stage import Stage
from auto3d.runtime.randomness import Randomness, SeededOperation
from auto3d.runtime.stage.compiled import compiled
from auto3d.runtime.stage.constants import fold_constants
from auto3d.runtime.stage.fast_calls import drops_nothing
from auto3d.runtime.stage.target_counts import TargetCounts
from auto3d.runtime.weights.gradients import DeferredGradients, split_operation
from auto3d.runtime.weights.low_precision import UseOfCopy

_USE_OF_COPY = "use_of_copy"


class DerivedProgram(Protocol):
    """Runs the operators that a program has besides the operators of the model that it was derived from."""

    @property
    def model(self) -> Derived: ...

    def module_of(self, node: fx.Node, number: int, randomness: Randomness) -> nn.Module | None:
        """The module that replaces ``node``, operation ``number`` of the whole model; None if it runs as it is."""


@dataclass(frozen=True)
class ProgramOfStage:
    """A ``stage`` of the program ``captured``; ``derived`` runs the operators of a derived program."""

    stage: Stage
    captured: CapturedModel
    derived: DerivedProgram | None = None


def segment_program(
    segment: Segment,
    captured: CapturedModel,
    *,
    randomness: Randomness,
    deferred: DeferredGradients | None = None,
    per_user: Collection[str] = (),
    derived: DerivedProgram | None = None,
    targets: TargetCounts | None = None,
    compile: bool = False,
    leaf_copies: Collection[str] = (),
) -> tuple[fx.GraphModule, list[str], list[str]]:
    """The segment as a module, and the names of its arguments: of its state, then of the values that it takes.

    The module's arguments are the state and then the values; it returns the values that the segment gives. A name
    occurs once, except that a name in ``per_user`` occurs once for each operation that uses it, in the order of use.
    Of a parameter that operations use in low precision, the copy is an argument too, named by ``copy_name``; those in
    ``leaf_copies`` are leaves of autograd.
    With ``deferred``, the module's backward defers weight gradients to it, for the operators that support this. If
    ``captured`` is the program of a tensor-parallel rank or of a slice of the sequence, ``derived`` runs its further
    operators. Means over targets are counted by ``targets``. With ``compile``, its operators are compiled when they
    first run.
    """
    names = {**captured.exported.parameters, **captured.exported.buffers}
    order = {node: number for number, node in enumerate(captured.exported.program.nodes)}
    source = {node.name: node for node in order}
    copies = captured.exported.copies
    placeholder = {
        names.get(n.name, n.name): n
        for n in captured.exported.program.find_nodes(op="placeholder")
        if n.name not in copies
    }
    copies_by_name: dict[str, list[fx.Node]] = {}
    for place, parameter in copies.items():
        copies_by_name.setdefault(names[parameter], []).append(source[place])
    inside = set(segment.nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    env_of: dict[fx.Node, dict[fx.Node, fx.Node]] = {}  # user -> its private placeholders (see per_user)

    def add_placeholders(names: Sequence[str], node_of: Mapping[str, fx.Node], prefix: str) -> list[str]:
        """Add a placeholder for each of ``names``, or one for each of its users; returns the placeholders' names."""
        added: list[str] = []
        for name in names:
            node = node_of[name]
            of_copies = [user for copy in copies_by_name.get(name, ()) for user in copy.users]
            users = sorted({user for user in (*node.users, *of_copies) if user.name in inside}, key=order.__getitem__)
            for user in users if name in per_user else [None]:
                value = graph.placeholder(f"{prefix}_{len(added)}")
                value.meta = {"val": node.meta["val"]}
                added.append(name)
                if node.op == "call_function" and not node.meta["val"].is_contiguous():
                    value = graph.call_function(in_layout, (value, node.meta["val"].stride()))
                (env if user is None else env_of.setdefault(user, {}))[node] = value
        return added

    state = add_placeholders(segment.state, placeholder, "state")
    for name in segment.state:
        for low in copies_by_name.get(name, ()):
            if any(user.name in inside for user in low.users):
                env[low] = graph.placeholder(f"state_{len(state)}")
                env[low].meta = {"val": low.meta["val"]}
                state.append(copy_name(name, low.meta["val"].dtype))
    values = add_placeholders(segment.takes, source, "value")
    trained = {env[placeholder[name]] for name in state if name in captured.graph.parameters and name not in per_user}
    parameter_of = {source[place]: source[parameter] for place, parameter in copies.items()}

    whole = captured.graph if derived is None else derived.model.whole.graph
    operation_number = {node.name: number for number, node in enumerate(whole.nodes)}
    modules: dict[str, nn.Module] = {}
    for node in captured.exported.program.nodes:
        if node in env:
            continue
        if node.name not in inside and not (node.target is operator.getitem and node.args[0] in env):
            continue
        known = ChainMap(env_of.get(node, {}), env)
        copy = graph.node_copy(node, known.__getitem__)
        copy.args, copy.kwargs = _on_device((copy.args, copy.kwargs), randomness.device)
        parameters = {  # placeholder of a copy in low precision -> placeholder of its parameter
            env[used]: known[parameter_of[used]]
            for used in node.all_input_nodes
            if used in parameter_of
            and names[used.name] in captured.graph.trained
            and copy_name(names[used.name], used.meta["val"].dtype) not in leaf_copies
        }
        split = None
        number = operation_number.get(node.name, -1)  # a conversion has no number: it draws nothing
        if drops_nothing(node):
            pass  # it draws nothing, so nothing seeds it
        elif derived is not None and (replaced := derived.module_of(node, number, randomness)) is not None:
            modules[node.name] = replaced
        elif is_random(node):
            modules[node.name] = SeededOperation(node.target, number, randomness)
        elif deferred is not None:
            learned = trained | {low_copy for low_copy, parameter in parameters.items() if parameter in trained}
            if (split := split_operation(copy, learned, parameters, deferred)) is not None:
                modules[node.name] = split
        run = modules.get(node.name, node.target)
        if targets is not None and callable(run) and (weighted := targets.module_of(node, run)) is not None:
            modules[node.name] = weighted
        if node.name in modules:
            copy.op, copy.target = "call_module", node.name
        if split is None:
            _use_copies(copy, parameters)
        env[node] = copy
    graph.output([env[source[name]] for name in segment.gives])
    module = fx.GraphModule({**modules, _USE_OF_COPY: UseOfCopy()}, graph)
    fold_constants(module)
    return compiled(module) if compile else module, state, values


def _use_copies(node: fx.Node, parameters: Mapping[fx.Node, fx.Node]) -> None:
    """Let gradients that ``node`` returns to copies in low precision, the keys of ``parameters``, reach the values."""
    for copy, parameter in parameters.items():
        with node.graph.inserting_before(node):
            node.replace_input_with(copy, node.graph.call_module(_USE_OF_COPY, (parameter, copy)))


def in_layout(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``value`` laid out with ``strides``, since messages between stages arrive contiguous.

    Kernels iterate in memory order: with another layout a dropout would draw another mask, and a sum would round
    differently.
    """
    if value.stride() == strides or not _is_dense(value.shape, strides):
        return value
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(value.dim())])


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill memory without gaps and without overlaps."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _on_device(arguments: Any, device: torch.device) -> Any:
    """``arguments`` with ``device`` in place of the meta device, which the export gave operators that make tensors."""
    return tree_map_only(torch.device, lambda _: device, arguments)

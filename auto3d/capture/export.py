"""Export an unmodified module on the meta device: no weight is ever allocated.

The exported graph has a symbolic batch size, so one export serves every micro-batch size; ``specialize`` puts it
in.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from auto3d.errors import InputError

_TRACED_BATCH = 2  # a batch of 1 would be burned into the graph


class CaptureError(InputError):
    """A model that cannot be captured; the message names the line of the model's code where there is one."""


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """One keyword argument of the module's forward: ``shape`` is that of a single sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A model's program with symbolic batch size, and where its state comes from."""

    build: Callable[[], nn.Module]
    program: fx.Graph
    submodules: Mapping[str, fx.GraphModule]  # bodies that higher-order operators of ``program`` call
    parameters: Mapping[str, str]  # placeholder -> first name of the parameter: tied ones share it
    frozen: frozenset[str]  # names of parameters that do not require a gradient
    buffers: Mapping[str, str]  # placeholder -> name
    constants: Mapping[str, torch.Tensor]  # placeholder -> value
    inputs: Mapping[str, InputSpec]
    loss: str  # node name


def export(build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec]) -> ExportedModel:
    """Capture the module that ``build`` makes, in training mode, called with ``inputs`` as keyword arguments.

    Raises CaptureError if torch.export cannot follow the model, if it fixes the batch size, has no loss among its
    outputs, or writes in place to a tensor that has other views.
    """
    with torch.device("meta"):
        model = build()
    model.train()
    arguments = {
        name: torch.zeros((_TRACED_BATCH, *spec.shape), dtype=spec.dtype, device="meta")
        for name, spec in inputs.items()
    }
    try:
        exported = torch.export.export(
            model, (), arguments, strict=False, dynamic_shapes={name: {0: Dim.AUTO} for name in arguments}
        )
    except Exception as error:  # torch.export raises many kinds; each means that this model cannot be captured
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: {_first_line(error)}{_user_line(error)}"
        ) from error

    signature = exported.graph_signature
    program = exported.graph_module.graph
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    canonical = {name: first_name[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    _remove_assertions(program)
    _remove_in_place(program, set(signature.inputs_to_buffers))
    loss = _find_loss(model, exported)
    program.output_node().args = ((loss,),)
    program.eliminate_dead_code()  # what only other outputs need; writes to buffers stay
    for node in program.find_nodes(op="placeholder"):
        if node.name in inputs and not _is_free(node.meta["val"].shape[0]):
            raise CaptureError(
                f"{type(model).__name__} fixes the batch size of its input {node.name} to {_TRACED_BATCH}; "
                "its code must take the batch size from the tensor's shape"
            )
    return ExportedModel(
        build=build,
        program=program,
        submodules={
            node.target: exported.graph_module.get_submodule(node.target) for node in program.find_nodes(op="get_attr")
        },
        parameters={placeholder: canonical[name] for placeholder, name in signature.inputs_to_parameters.items()},
        frozen=frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        buffers=dict(signature.inputs_to_buffers),
        constants={
            placeholder: exported.constants[name]
            for placeholder, name in signature.inputs_to_lifted_tensor_constants.items()
        },
        inputs=dict(inputs),
        loss=loss.name,
    )


def _node_line(node: fx.Node) -> str:
    """`` at FILE:LINE`` of the model's code that made this node, or nothing."""
    frames = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")
    ]
    return f" at {frames[-1]}" if frames else ""


def _user_line(error: Exception) -> str:
    """The deepest line outside torch in the traceback: where the model's own code was."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/auto3d/" not in file:
            found = f" at File {file!r}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_free(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _remove_assertions(program: fx.Graph) -> None:
    """Checks of metadata hold by construction, and those of the traced device would not."""
    for node in reversed(program.nodes):
        if node.op == "call_function" and not node.users and "assert" in str(node.target):
            program.erase_node(node)


def _remove_in_place(program: fx.Graph, buffers: set[str]) -> None:
    """Write in-place operators on fresh values out of place, so that a graph may be cut anywhere.

    Those on buffers (batch statistics) stay: a buffer lives on one stage.
    """
    position = {node: index for index, node in enumerate(program.nodes)}
    for node in program.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        written = node.args[0]
        if written.name in buffers:
            continue
        namespace, name = node.target.namespace, node.target._schema.name.split("::")[1].removesuffix("_")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        earlier_users = [user for user in written.users if position[user] < position[node]]
        makes_view = [user for user in (written, *earlier_users) if _is_view(user)]
        if (
            packet is None
            or makes_view
            or written.op == "placeholder"
            or not hasattr(packet, node.target._overloadname)
        ):
            raise CaptureError(
                f"{node.target} writes in place to a tensor that has other views{_node_line(node)}; "
                "use the out-of-place form there"
            )
        node.target = getattr(packet, node.target._overloadname)
        for user in list(written.users):
            if position[user] > position[node]:
                user.replace_input_with(written, node)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _find_loss(model: nn.Module, exported: torch.export.ExportedProgram) -> fx.Node:
    """The node that is the loss: the output called ``loss``, else the first scalar."""
    outputs = exported.graph_module.graph.output_node().args[0]
    result: Any = pytree.tree_unflatten(list(outputs), exported.call_spec.out_spec)
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    candidates = [named] if named is not None else [node for node in outputs if isinstance(node, fx.Node)]
    for node in candidates:
        if node.meta["val"].dim() == 0 and node.meta["val"].is_floating_point():
            return node
    raise CaptureError(
        f"{type(model).__name__} returns no loss: its output must be a scalar, have a scalar first, or call one 'loss'"
    )

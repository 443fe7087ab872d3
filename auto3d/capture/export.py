"""Export an unmodified module on the meta device, at one micro-batch size: no weight is ever allocated."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from auto3d.capture.attributes import attribute_tensors
from auto3d.capture.errors import CaptureError, error_line, node_line
from auto3d.capture.masks import leave_masks_to_kernel
from auto3d.capture.rewrite import inline_regions, remove_in_place, written_buffers
from auto3d.capture.skeleton import skeleton
from auto3d.errors import InputError


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """One keyword argument of the module's forward: ``shape`` is that of a single sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A model's program for micro-batches of one size, and where its state comes from."""

    build: Callable[[], nn.Module]
    inputs: Mapping[str, InputSpec]
    micro_batch_size: int
    program: fx.Graph
    parameters: Mapping[str, str]  # placeholder -> first name of the parameter: tied ones share it
    trained: frozenset[str]  # names of parameters that a gradient reaches
    buffers: Mapping[str, str]  # placeholder -> first name; also tensors that modules keep as plain attributes
    written_buffers: frozenset[str]  # names of buffers that a forward writes to, such as batch statistics
    constants: Mapping[str, torch.Tensor]  # placeholder -> value
    loss: str  # node name

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that a run computes: operations with their arguments and shapes, names of state, constants."""
        digest = sha256(repr((self.parameters, sorted(self.trained), self.buffers, self.loss)).encode())
        for node in self.program.nodes:
            values = [
                (str(value.dtype), tuple(value.shape))
                for value in tree_leaves(node.meta.get("val"))
                if isinstance(value, torch.Tensor)
            ]
            digest.update(repr((node.op, node.name, str(node.target), node.args, node.kwargs, values)).encode())
        for name, constant in sorted(self.constants.items()):
            digest.update(repr((name, constant.tolist())).encode())
        return digest.hexdigest()[:16]


def export(build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], micro_batch_size: int) -> ExportedModel:
    """Export the module that ``build`` makes, in training mode, called with ``inputs`` as keyword arguments.

    Raises CaptureError if the module cannot be built, if it fails at this micro-batch size or torch.export cannot
    follow it, if its sizes depend on the data, if it has no loss among its outputs, keeps a tensor that is neither
    parameter nor buffer, or writes in place where other tensors see it.
    """
    try:
        model = skeleton(build).model
    except InputError:
        raise
    except Exception as error:  # of the model's own code
        raise CaptureError(f"the model cannot be built: {_first_line(error)}{error_line(error)}") from error
    model.train()
    arguments = {
        name: torch.zeros((micro_batch_size, *spec.shape), dtype=spec.dtype, device="meta")
        for name, spec in inputs.items()
    }
    try:
        exported = torch.export.export(model, (), arguments, strict=False)
    except Exception as error:  # torch.export raises many kinds; each means that this model cannot be captured
        raise CaptureError(
            f"{type(model).__name__} cannot be captured at micro-batch size {micro_batch_size}: "
            f"{_first_line(error)}{error_line(error)}"
        ) from error

    signature = exported.graph_signature
    program = exported.graph_module.graph
    parameters = _first_names(signature.inputs_to_parameters, model.named_parameters(remove_duplicate=False))
    buffers = _first_names(signature.inputs_to_buffers, model.named_buffers(remove_duplicate=False))
    lifted = {
        placeholder: exported.constants[name]
        for placeholder, name in signature.inputs_to_lifted_tensor_constants.items()
    }
    attributes = _as_buffers(model, lifted)
    buffers |= attributes
    constants = {placeholder: value for placeholder, value in lifted.items() if placeholder not in attributes}
    for placeholder, value in constants.items():
        if value.is_meta:
            name = signature.inputs_to_lifted_tensor_constants[placeholder]
            raise CaptureError(
                f"{type(model).__name__} keeps the tensor {name}, which is neither a parameter nor a buffer; "
                f"register it with register_buffer, persistent or not"
            )
    inline_regions(exported.graph_module, buffers.keys())
    _remove_assertions(program)
    remove_in_place(program, buffers.keys())
    leave_masks_to_kernel(program)
    loss = _find_loss(model, exported)
    program.output_node().args = ((loss,),)
    program.eliminate_dead_code()  # what only other outputs need; writes to buffers stay
    _check_sizes(program)
    _name_by_module(program)
    reached = {parameters[placeholder] for placeholder in _reached_by_gradient(loss) & parameters.keys()}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return ExportedModel(
        build=build,
        inputs=dict(inputs),
        micro_batch_size=micro_batch_size,
        program=program,
        parameters=parameters,
        trained=frozenset(reached & trainable),
        buffers=buffers,
        written_buffers=frozenset(buffers[placeholder] for placeholder in written_buffers(program, buffers.keys())),
        constants=constants,
        loss=loss.name,
    )


def _as_buffers(model: nn.Module, lifted: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Placeholder -> path, for those of ``lifted`` that modules keep as attributes: buffers in all but name.

    Raises CaptureError where one shows the memory of a parameter: it would not follow the training.
    """
    paths = {id(tensor): path for path, tensor in attribute_tensors(model).items()}
    found = {placeholder: paths[id(tensor)] for placeholder, tensor in lifted.items() if id(tensor) in paths}
    parameter_of = {parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()}
    for placeholder, path in found.items():
        if (name := parameter_of.get(lifted[placeholder].untyped_storage()._cdata)) is not None:
            raise CaptureError(
                f"{type(model).__name__} keeps {path}, a view of the parameter {name}, and uses it in its forward; "
                f"use the parameter there, which is what is trained"
            )
    return found


def _first_names(placeholders: Mapping[str, str], named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Placeholder -> the first name of its tensor: what the model holds under two names is one."""
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    return {placeholder: canonical[name] for placeholder, name in placeholders.items()}


def _reached_by_gradient(loss: fx.Node) -> set[str]:
    """Names of the nodes to which autograd takes the gradient of ``loss``."""
    reached: set[fx.Node] = set()
    pending = [loss]
    while pending:
        node = pending.pop()
        if node in reached or not any(is_differentiable(value) for value in tree_leaves(node.meta.get("val"))):
            continue
        reached.add(node)
        if node.target is not torch.ops.aten.detach.default:
            pending.extend(node.all_input_nodes)
    return {node.name for node in reached}


def module_path(node: fx.Node) -> str:
    """Of the module whose code made the node: "transformer.h.0.attn"."""
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()))[0] if stack else ""


def is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _remove_assertions(program: fx.Graph) -> None:
    """Checks of metadata hold by construction, and those of the traced device would not."""
    for node in reversed(program.nodes):
        if node.op == "call_function" and not node.users and "assert" in str(node.target):
            program.erase_node(node)


def _check_sizes(program: fx.Graph) -> None:
    for node in program.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
                raise CaptureError(f"{node.target} gives a size or a number that depends on the data{node_line(node)}")


def _name_by_module(program: fx.Graph) -> None:
    """Number operations within their module, so that a mask's, which may be others at another size, rename no other."""
    taken = {node.name for node in program.find_nodes(op="placeholder")}
    used: Counter[str] = Counter()
    for node in program.nodes:
        if node.op != "call_function":
            continue
        path = module_path(node).replace(".", "_")
        stem = re.sub(r"_\d+$", "", node.name)
        stem = f"{path}_{stem}" if path else stem
        name = stem
        while name in taken:
            used[stem] += 1
            name = f"{stem}_{used[stem]}"
        taken.add(name)
        node.name = name


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

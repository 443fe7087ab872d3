"""Export an unmodified module for the device that will run it, at one micro-batch size: no weight is ever allocated."""

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from io import StringIO
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves, tree_map_only

from auto3d.capture.empty import EmptyModel, empty_model, idle_copies_recorded, no_idle_conversions
from auto3d.capture.errors import (
    KEPT_ELSEWHERE,
    CaptureError,
    every_line_recorded,
    explain,
    failing_function,
    node_line,
)
from auto3d.capture.faithful import trace
from auto3d.capture.in_place import name_of, remove_in_place, written_buffers
from auto3d.capture.known_values import KnownValues
from auto3d.capture.masks import leave_masks_to_kernel
from auto3d.capture.regions import inline_regions
from auto3d.capture.traced_branches import answered_as_eager
from auto3d.errors import InputError

_META = torch.device("meta")


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
    device: str  # type of the device that the model's code saw: "cpu" or "cuda"
    program: fx.Graph
    parameters: Mapping[str, str]  # placeholder -> first name of the parameter: tied ones share it
    trained: frozenset[str]  # names of parameters that a gradient reaches
    buffers: Mapping[str, str]  # placeholder -> first name
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
            digest.update(repr((name, constant.dtype, tuple(constant.shape))).encode())
            digest.update(constant.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def export(
    build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], micro_batch_size: int, *, device: str = "cpu"
) -> ExportedModel:
    """Export the module that ``build`` makes, in training mode, called with ``inputs`` as keyword arguments.

    Its code sees tensors of device type ``device``, or of the CPU where torch was built without that. Raises
    CaptureError if the module cannot be built, if it fails at this micro-batch size or torch.export cannot follow it,
    if its sizes depend on the data, if it has no loss among its outputs, or writes in place where that cannot be
    followed.
    """
    told: set[CodeType] = set()  # functions that look at data unless they hear that they are traced
    while True:
        with answered_as_eager(but=told) as askers:
            try:
                return _export(build, inputs, micro_batch_size, device)
            except CaptureError as error:
                failed_in = failing_function(error)
        if failed_in in told or failed_in not in askers:
            break
        told.add(failed_in)
    with suppress(CaptureError):  # an eager branch taken earlier may be the cause
        return _export(build, inputs, micro_batch_size, device)
    with answered_as_eager(but=told), every_line_recorded():  # torch.export notes lines of functions called forward
        return _export(build, inputs, micro_batch_size, device)


def _export(
    build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], micro_batch_size: int, device: str
) -> ExportedModel:
    try:
        model = empty_model(build, device)
    except InputError:
        raise
    except Exception as error:  # of the model's own code
        raise CaptureError(f"the model cannot be built: {explain(error)}") from error
    module = model.module
    module.train()
    arguments = {name: model.zeros((micro_batch_size, *spec.shape), spec.dtype) for name, spec in inputs.items()}
    try:
        with _quiet_torch():
            exported = trace(module, lambda: _exported(module, arguments))
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises many kinds; each means that this model cannot be captured
        raise CaptureError(
            f"{type(module).__name__} cannot be captured at micro-batch size {micro_batch_size}: {explain(error)}"
        ) from error

    signature = exported.graph_signature
    program = exported.graph_module.graph
    parameters = _first_names(signature.inputs_to_parameters, module.named_parameters(remove_duplicate=False))
    buffers = _first_names(signature.inputs_to_buffers, module.named_buffers(remove_duplicate=False))
    held, constants = _held_and_constant(exported, model)
    buffers |= held
    inline_regions(exported.graph_module, model.mode, parameters.keys())
    _remove_assertions(program)
    remove_in_place(program, model.mode, buffers=buffers.keys(), inputs=inputs.keys())
    _forget_device(program)
    leave_masks_to_kernel(program)
    loss = _find_loss(module, exported)
    program.output_node().args = ((loss,),)
    program.eliminate_dead_code()  # what only other outputs need; writes to buffers stay
    _check_sizes(program)
    _check_constants(program, constants, module)
    _check_views(program, buffers, model)
    _name_by_module(program)
    reached = {parameters[placeholder] for placeholder in _reached_by_gradient(loss) & parameters.keys()}
    trained = frozenset(
        name for name, parameter in module.named_parameters() if parameter.requires_grad and name in reached
    )
    if not trained:
        raise CaptureError(
            f"{type(module).__name__} cannot be trained: its loss gives no gradient to any parameter{node_line(loss)}"
        )
    return ExportedModel(
        build=build,
        inputs=dict(inputs),
        micro_batch_size=micro_batch_size,
        device=device,
        program=program,
        parameters=parameters,
        trained=trained,
        buffers=buffers,
        written_buffers=frozenset(buffers[placeholder] for placeholder in written_buffers(program, buffers.keys())),
        constants={name: value for name, value in constants.items() if not isinstance(value, FakeTensor)},
        loss=loss.name,
    )


def _exported(module: nn.Module, arguments: Mapping[str, torch.Tensor]) -> torch.export.ExportedProgram:
    with KnownValues(), no_idle_conversions(), idle_copies_recorded():
        return torch.export.export(module, (), dict(arguments), strict=False)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep what torch prints of its own graphs, where it cannot follow code, from the user: the error says it."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch.export._trace")]
    levels, printed = [logger.level for logger in loggers], StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())  # the model's own
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _held_and_constant(
    exported: torch.export.ExportedProgram, model: EmptyModel
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Placeholder -> the place of a tensor that the model holds in a container, and placeholder -> value of a constant.

    A constant is made in forward, from numbers in the model's code.
    """
    held, constants = {}, {}
    for placeholder, name in exported.graph_signature.inputs_to_lifted_tensor_constants.items():
        value = exported.constants[name]
        place = model.place_of(value)
        if place is not None:
            held[placeholder] = place
        else:
            # Where there is a GPU, a trace makes tensors of numbers there for real.
            constants[placeholder] = value if isinstance(value, FakeTensor) else value.cpu()
    return held, constants


def _forget_device(program: fx.Graph) -> None:
    """Replace the device that the export burned into operators by the meta device: a run puts in its own."""
    for node in program.nodes:
        node.args, node.kwargs = tree_map_only(torch.device, lambda _: _META, (node.args, node.kwargs))


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
                raise CaptureError(
                    f"{name_of(node.target)} gives a size or a number that depends on the data{node_line(node)}; a "
                    "program has fixed sizes: use a mask or torch.where there, and tensors in the place of numbers"
                )


def _check_views(program: fx.Graph, buffers: Mapping[str, str], model: EmptyModel) -> None:
    """Raise CaptureError for an attribute that shows a parameter: as a buffer, it would not follow the training."""
    for node in program.find_nodes(op="placeholder"):
        place = buffers.get(node.name)
        if place in model.views and node.users:
            raise CaptureError(
                f"{type(model.module).__name__} keeps {place}, a view of the parameter {model.views[place]}, and uses "
                "it in its forward; use the parameter there, which is what is trained"
            )


def _check_constants(program: fx.Graph, constants: Mapping[str, torch.Tensor], module: nn.Module) -> None:
    for node in program.find_nodes(op="placeholder"):
        value = constants.get(node.name)
        if value is not None and node.users and (isinstance(value, FakeTensor) or value.is_meta):
            reason, remedy = KEPT_ELSEWHERE
            place = node_line(next(iter(node.users)))
            raise CaptureError(f"{type(module).__name__} cannot be captured: {reason}{place}; {remedy}")


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

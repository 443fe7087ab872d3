"""Export an unmodified module for the device that will run it, at one micro-batch size, without allocating weights."""

import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from io import StringIO
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from auto3d.capture.autocast import PRECISIONS, Autocast, active, share_weight_casts
from auto3d.capture.bookkeeping import quick_bookkeeping
from auto3d.capture.empty import EmptyModel, empty_model, has_values, idle_copies_recorded, no_idle_conversions
from auto3d.capture.errors import (
    KEPT_ELSEWHERE,
    CaptureError,
    every_line_recorded,
    explain,
    failing_function,
    node_line,
)
from auto3d.capture.expand import SideEffectError, expand
from auto3d.capture.faithful import trace
from auto3d.capture.held import parameters_in_containers
from auto3d.capture.in_place import memory_is_written, name_of, remove_in_place, written_buffers
from auto3d.capture.known_values import KnownValues
from auto3d.capture.masks import leave_masks_to_kernel
from auto3d.capture.regions import inline_regions
from auto3d.capture.repeats import RepeatedBlocks
from auto3d.capture.scripted import scripted_as_written
from auto3d.capture.traced_branches import answered_as_eager, misled
from auto3d.capture.traced_results import padding_as_nested, returning_tensors
from auto3d.errors import InputError

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """One keyword argument of the module's forward; ``shape`` is the shape of a single sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How the module runs, and what its program gives."""

    training: bool = True  # False: evaluation mode, without dropout and with running statistics
    outputs: tuple[str, ...] = ()
    """Entries of the module's result that the program gives too: keys, such as "logits", or places in a tuple, with
    dots between them where one holds the other, as in "hidden_states.0"."""
    loss: bool = True  # False: only ``outputs``, without the operations that only the loss needs


TRAINING = Mode()


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A model's program for micro-batches of one size, with the parameters, buffers and constants behind its inputs."""

    build: Callable[[], nn.Module]
    inputs: Mapping[str, InputSpec]
    micro_batch_size: int
    device: str  # device type that the model's code saw: "cpu" or "cuda"
    program: fx.Graph
    parameters: Mapping[str, str]  # placeholder -> first name of the parameter; tied parameters have one name
    trained: frozenset[str]  # names of the parameters that a gradient reaches
    buffers: Mapping[str, str]  # placeholder -> first name
    written_buffers: frozenset[str]  # names of the buffers that a forward writes to, such as batch statistics
    constants: Mapping[str, torch.Tensor]  # placeholder -> value
    loss: str  # name of the loss's node; in a program without a loss, of its first output
    mode: Mode = TRAINING
    outputs: Mapping[str, str] = field(default_factory=dict)  # output that ``mode`` names -> name of its node
    precision: str = "float32"  # precision of torch.autocast, one of autocast.PRECISIONS; float32: without autocast
    copies: Mapping[str, str] = field(default_factory=dict)
    """Placeholder of a parameter's copy in low precision -> placeholder of the parameter. Both have its name in
    ``parameters``; a run makes the copy once per update."""
    repeated_blocks: int = 0  # calls of repeated blocks whose operations were copied instead of traced
    told: frozenset[CodeType] = frozenset()
    """Functions of the model that must be told that they are traced; the others take their eager branches."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what a run computes: operations with their arguments and shapes, names of state, and constants."""
        digest = sha256(repr((self.parameters, sorted(self.trained), self.buffers, self.loss)).encode())
        if self.precision != "float32":
            digest.update(repr((self.precision, sorted(self.copies.items()))).encode())
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
    build: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
    micro_batch_size: int,
    *,
    device: str = "cpu",
    precision: str = "float32",
    mode: Mode = TRAINING,
    told: Collection[CodeType] = (),
) -> ExportedModel:
    """Export the module that ``build`` makes, in ``mode``, called with ``inputs`` as keyword arguments.

    Its code sees tensors of device type ``device``, or of the CPU if torch was built without support for ``device``.
    With a ``precision`` below float32 its program computes what the module does under torch.autocast for that device.
    ``told`` comes from another export of this module: it saves the tries that found these functions.
    Raises CaptureError if the module cannot be built, fails at this micro-batch size or cannot be traced, if its sizes
    depend on data, if it returns no loss or lacks an output, or if it writes in place in a way that cannot be
    rewritten.
    """
    return export_with(build, inputs, micro_batch_size, device, precision, mode, told=told, copy_repeats=True)


def export_with(
    build: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
    micro_batch_size: int,
    device: str,
    precision: str,
    mode: Mode,
    *,
    told: Collection[CodeType] = (),
    copy_repeats: bool,
) -> ExportedModel:
    """Export like ``export``. Without ``copy_repeats``, every block is traced; the result is the same."""

    aware = set(told)  # functions that read data unless they know that they are traced

    def once(askers: Mapping[CodeType, set[CodeType]] | None = None) -> ExportedModel:
        """One try. Where copies of blocks may be why it fails, and no function of ``askers``, it traces every block."""
        if copy_repeats:
            traces: list[RepeatedBlocks] = []
            try:
                return _export(build, inputs, micro_batch_size, device, precision, mode, traces)
            except (CaptureError, SideEffectError) as error:
                may_be_misled = askers is not None and misled(failing_function(error), askers, aware)
                if may_be_misled or not any(trace.repeated for trace in traces):
                    raise
        return _export(build, inputs, micro_batch_size, device, precision, mode, None)

    while True:
        with answered_as_eager(but=aware) as askers:
            try:
                return replace(once(askers), told=frozenset(aware))
            except CaptureError as error:
                failed_in = failing_function(error)
        if not (functions := misled(failed_in, askers, aware)):
            break
        aware |= functions
    with suppress(CaptureError):  # an earlier eager branch may be the cause
        return once()
    # By default, torch.export records lines only of functions that are called forward. Record all for the message.
    with answered_as_eager(but=aware), every_line_recorded():
        return once()


def _export(
    build: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
    micro_batch_size: int,
    device: str,
    precision: str,
    mode: Mode,
    traces: list[RepeatedBlocks] | None,
) -> ExportedModel:
    """The export at the first try. Adds the repeats that each trace finds to ``traces``; None: it traces all."""
    try:
        model = empty_model(build, device)
    except InputError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise CaptureError(f"the model cannot be built: {explain(error)}") from error
    module = model.module
    module.train(mode.training)
    autocast = None if precision == "float32" else Autocast(model.device.type, PRECISIONS[precision])
    arguments = {name: model.zeros((micro_batch_size, *spec.shape), spec.dtype) for name, spec in inputs.items()}
    try:
        with quiet_torch():
            exported = trace(module, lambda: _exported(module, arguments, autocast, traces))
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises errors of many kinds; each means that the model cannot be captured
        raise CaptureError(
            f"{type(module).__name__} cannot be captured at micro-batch size {micro_batch_size}: {explain(error)}"
        ) from error

    signature = exported.graph_signature
    program = exported.graph_module.graph
    parameters = _first_names(signature.inputs_to_parameters, module.named_parameters(remove_duplicate=False))
    buffers = _first_names(signature.inputs_to_buffers, module.named_buffers(remove_duplicate=False))
    held, constants = _held_and_constant(exported, model)
    buffers |= held
    inline_regions(exported.graph_module, model.mode, parameters.keys(), autocast)
    _remove_assertions(program)
    once_per_copy = memory_is_written(program, buffers.keys())  # each copy of a block writes to buffers of its own
    if not once_per_copy:
        remove_in_place(program, model.mode, buffers=buffers.keys(), inputs=inputs.keys())
    repeated = expand(program, autocast)
    copies = share_weight_casts(program, parameters) if autocast is not None else {}
    if once_per_copy:
        remove_in_place(program, model.mode, buffers=buffers.keys(), inputs=inputs.keys())
    _forget_device(program)
    _make_gradients_dense(program)
    leave_masks_to_kernel(program)
    loss = _find_loss(module, exported)
    outputs = {name: _find_output(module, exported, name) for name in mode.outputs}
    gradients = _reached_by_gradient(loss)
    if not mode.loss:
        loss = next(iter(outputs.values()))
    program.output_node().args = ((loss, *outputs.values()),)
    program.eliminate_dead_code()  # removes what only other outputs need; writes to buffers stay
    _check_sizes(program)
    _check_types(program)
    _check_constants(program, constants, module)
    _check_views(program, buffers, model)
    _name_by_module(program)
    copies = {node.name: copies[node.name] for node in _used_placeholders(program) if node.name in copies}
    parameters |= {copy: parameters[source] for copy, source in copies.items()}
    reached = {parameters[placeholder] for placeholder in gradients & parameters.keys()}
    trained = frozenset(
        name for name, parameter in module.named_parameters() if parameter.requires_grad and name in reached
    )
    if not trained:
        raise CaptureError(
            f"{type(module).__name__} cannot be trained: its loss gives no gradient to any parameter{node_line(loss)}; "
            "compute the loss from parameters that require a gradient, without detach or no_grad in between"
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
        mode=mode,
        outputs={name: node.name for name, node in outputs.items()},
        precision=precision,
        copies=copies,
        repeated_blocks=repeated,
    )


def _used_placeholders(program: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in program.find_nodes(op="placeholder") if node.users)


def _exported(
    module: nn.Module,
    arguments: Mapping[str, torch.Tensor],
    autocast: Autocast | None,
    traces: list[RepeatedBlocks] | None,
) -> torch.export.ExportedProgram:
    with ExitStack() as stack:
        stack.enter_context(quick_bookkeeping())
        if autocast is not None:
            stack.enter_context(active(*autocast.kind))
        known_values = stack.enter_context(KnownValues())
        repeats = RepeatedBlocks(known_values)
        if traces is not None:
            traces.append(repeats)
            stack.enter_context(repeats.found())
        for further in (
            no_idle_conversions(),
            idle_copies_recorded(),
            padding_as_nested(),
            scripted_as_written(),
            parameters_in_containers(module),
            returning_tensors(module),
        ):
            stack.enter_context(further)
        return torch.export.export(module, (), dict(arguments), strict=False)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Hide torch's prints and logs about code that it cannot trace: the CaptureError reports the cause."""
    names = ("torch.fx.experimental.symbolic_shapes", "torch.export._trace", "torch._subclasses.fake_tensor")
    loggers = [logging.getLogger(name) for name in names]
    levels, printed = [logger.level for logger in loggers], StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(printed), warnings.catch_warnings():
            # An attribute that forward sets is refused where a later forward reads it; torch need not say more.
            warnings.filterwarnings("ignore", r"The tensor attributes? self\.")
            yield
        sys.stderr.write(printed.getvalue())  # without an error, the output is the model's
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _held_and_constant(
    exported: torch.export.ExportedProgram, model: EmptyModel
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """(placeholder -> where the model holds the tensor, placeholder -> value of the constant).

    The first are tensors in containers of a module. The second are made in forward from numbers in the model's code.
    """
    held: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    for placeholder, name in exported.graph_signature.inputs_to_lifted_tensor_constants.items():
        value = exported.constants[name]
        place = model.place_of(value)
        if place is not None:
            held[placeholder] = place
        else:
            # On a machine with a GPU, a trace allocates such tensors on the GPU.
            constants[placeholder] = value if isinstance(value, FakeTensor) else value.cpu()
    return held, constants


def _forget_device(program: fx.Graph) -> None:
    """Replace the device that the export wrote into operators by the meta device; a run inserts its own device."""

    def forgotten(value: Any) -> Any:
        return _META if isinstance(value, torch.device) else value

    for node in program.nodes:
        if any(isinstance(leaf, torch.device) for leaf in (*node.args, *node.kwargs.values())):
            node.args = fx.node.map_aggregate(node.args, forgotten)
            node.kwargs = fx.node.map_aggregate(node.kwargs, forgotten)


def _make_gradients_dense(program: fx.Graph) -> None:
    """Let embeddings with ``sparse=True`` have gradients of all rows, which are zeros elsewhere.

    Ranks sum gradients that lie beside each other in one tensor. An update is the same where torch takes both kinds, by
    SGD without weight decay or by Adagrad; SparseAdam takes no other kind, and is refused.
    """
    aten = torch.ops.aten
    for target in (aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx):
        place = [argument.name for argument in target._schema.arguments].index("sparse")
        for node in program.find_nodes(op="call_function", target=target):
            if len(node.args) > place:
                node.update_arg(place, False)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "sparse"}


def _first_names(placeholders: Mapping[str, str], named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Placeholder -> the first name of its tensor, so that a tensor with two names in the model is one tensor."""
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    return {placeholder: canonical[name] for placeholder, name in placeholders.items()}


def _reached_by_gradient(loss: fx.Node) -> set[str]:
    """Names of the nodes that the gradient of ``loss`` reaches."""
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
    """Path of the module whose code made the node, for example "transformer.h.0.attn"."""
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()))[0] if stack else ""


def is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _remove_assertions(program: fx.Graph) -> None:
    """Remove assertions on metadata: they hold by construction, except that a run may use another device."""
    for node in reversed(program.nodes):
        if node.op == "call_function" and not node.users and "assert" in str(node.target):
            program.erase_node(node)


def _check_sizes(program: fx.Graph) -> None:
    for node in program.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
                raise CaptureError(
                    f"{name_of(node.target)} returns a size or a number that depends on data{node_line(node)}; a "
                    "captured program has fixed sizes: use a mask or torch.where there, and tensors instead of numbers"
                )


_aten = torch.ops.aten
_ONE_TYPE = (
    _aten.linear.default,
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.matmul.default,
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.convolution.default,
)
"""Operators whose tensors must be of one type, which torch says only where they have values."""


def _check_types(program: fx.Graph) -> None:
    """Raise CaptureError where tensors of several types are multiplied, as in a model of half() with float32 inputs."""
    for node in program.nodes:
        if node.op != "call_function" or node.target not in _ONE_TYPE:
            continue
        values = [operand.meta["val"] for operand in node.all_input_nodes]
        types = dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in values)
        if len(types) > 1:
            raise CaptureError(
                f"{name_of(node.target)} takes {' and '.join(types)}{node_line(node)}, and torch multiplies numbers of "
                "one type: convert the input there, or keep the model in float32, without half() or bfloat16()"
            )


def _check_views(program: fx.Graph, buffers: Mapping[str, str], model: EmptyModel) -> None:
    """Raise CaptureError for an attribute that is a view of a parameter: as a buffer, it would not be trained."""
    for node in program.find_nodes(op="placeholder"):
        place = buffers.get(node.name)
        if place is not None and place in model.views and node.users:
            raise CaptureError(
                f"{type(model.module).__name__} uses {place} in its forward, a view of the parameter "
                f"{model.views[place]} that would not be trained with it; use the parameter itself there"
            )


def _check_constants(program: fx.Graph, constants: Mapping[str, torch.Tensor], module: nn.Module) -> None:
    for node in program.find_nodes(op="placeholder"):
        value = constants.get(node.name)
        if value is not None and node.users and not has_values(value):
            reason, remedy = KEPT_ELSEWHERE
            place = node_line(next(iter(node.users)))
            raise CaptureError(f"{type(module).__name__} cannot be captured: {reason}{place}; {remedy}")


def _name_by_module(program: fx.Graph) -> None:
    """Number operations within their module.

    The operations that make a mask can differ between micro-batch sizes; this way, they rename no operation of another
    module.
    """
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
    """The node of the loss: the output called ``loss``, else the first scalar output."""
    named = _named_output(exported, "loss")
    outputs = exported.graph_module.graph.output_node().args[0]
    candidates = [named] if named is not None else [node for node in outputs if isinstance(node, fx.Node)]
    for node in candidates:
        if node.meta["val"].dim() == 0 and node.meta["val"].is_floating_point():
            return node
    raise CaptureError(
        f"{type(model).__name__} returns no loss; return a floating-point scalar, a tuple that has one, or a dict or "
        "object whose loss is one"
    )


def _find_output(model: nn.Module, exported: torch.export.ExportedProgram, name: str) -> fx.Node:
    """The node of the output called ``name``, a tensor that an operation makes."""
    node = _named_output(exported, name)
    if isinstance(node, fx.Node) and node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor):
        return node
    outputs = _result(exported)
    listed = f"it has {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else "it has none"
    raise CaptureError(
        f"{type(model).__name__} gives no output {name}: its result must be a dict, a tuple or an object with a tensor "
        f"of this name, which an operation of the model makes; {listed}"
    )


def _result(exported: torch.export.ExportedProgram) -> Any:
    """The module's result, with nodes in place of tensors."""
    return pytree.tree_unflatten(list(exported.graph_module.graph.output_node().args[0]), exported.call_spec.out_spec)


def _named_output(exported: torch.export.ExportedProgram, name: str) -> Any:
    """What the module's result holds under ``name``, with dots between the names or places of what holds what; None if
    it has no such entry."""
    held = _result(exported)
    for part in [name] if isinstance(held, Mapping) and name in held else name.split("."):
        if isinstance(held, Mapping):
            held = held.get(part)
        elif isinstance(held, tuple | list):
            held = held[int(part)] if part.isdecimal() and int(part) < len(held) else None
        else:
            held = getattr(held, part, None)
    return held

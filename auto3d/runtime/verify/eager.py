"""Compares a captured program with the eager module: loss, gradients and buffers after one micro-batch.

This finds differences that no rule of the capture foresees, such as code that takes another branch while it is traced.
Both run on equal weights and data, in training mode. Every random operation of ATen is seeded by its number in the
order of execution, so that both draw the same numbers.
"""

import inspect
import io
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.capture.autocast import PRECISIONS
from auto3d.capture.errors import CaptureError, is_model_code
from auto3d.capture.held import buffers_of, moved
from auto3d.capture.model import CapturedModel
from auto3d.capture.traced_branches import questions
from auto3d.data import Batches, DataSettings
from auto3d.partition.segment import segments
from auto3d.partition.stage import Stage, cut
from auto3d.plan import stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.module import Tensors
from auto3d.runtime.stage.program import DerivedProgram, ProgramOfStage, segment_program
from auto3d.runtime.weights.low_precision import with_copies

RELATIVE, ABSOLUTE = 1e-5, 1e-7  # the bounds of the parity tests, for float32
_QUESTIONS_NAMED = 3  # how many lines that ask whether they are traced an error names


@dataclass(frozen=True)
class Difference:
    """A tensor that differs by more than rounding; ``largest`` is the largest difference of two elements."""

    name: str
    largest: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.name} differs by {self.largest:.2g}; rounding explains {self.allowed:.2g}"


@dataclass(frozen=True)
class Computed:
    """What a forward and a backward of one micro-batch give."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]

    def difference(self, other: "Computed", wider: Mapping[str, float] | None = None) -> Difference | None:
        """The loss if it differs, otherwise the gradient that differs most, otherwise a buffer; None if all agree.

        ``wider`` has, for gradients that were rounded to a narrower type than their own, the factor of their bounds.
        """
        wider = wider or {}
        scale = max([1.0, *(float(g.abs().max()) for g in other.gradients.values() if g is not None and g.numel())])
        gradients = [
            difference
            for name, gradient in self.gradients.items()
            if (
                difference := difference_of(
                    f"the gradient of {name}", gradient, other.gradients[name], scale, wider.get(name, 1.0)
                )
            )
        ]
        gradients.sort(key=lambda difference: -difference.largest / difference.allowed)
        buffers = (
            difference_of(f"the buffer {name}", buffer, other.buffers[name], 1.0)
            for name, buffer in self.buffers.items()
        )
        loss = difference_of("the loss", self.loss, other.loss, 1.0)
        return next(filter(None, [loss, *gradients, *buffers]), None)


def check_against_eager(captured: CapturedModel, data: DataSettings, *, seed: int, device: torch.device) -> None:
    """Raise CaptureError unless ``captured`` gives the loss, gradients and buffers of its module on one micro-batch.

    The module is built with ``seed`` and runs twice, with the same buffers: if its second forward differs from the
    first, it keeps state that a captured program does not have. Two tensors a and b count as equal if
    max|a - b| <= 1e-5 max|b| + 1e-7 max(1, g), where g is the largest gradient: a gradient that is zero except for
    rounding has an error relative to g. For types narrower than float32 both bounds grow by the ratio of precisions.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # the default, all devices, warns
        torch.manual_seed(seed)
        model = moved(captured.exported.build(), device).train()
        batch = one_batch(captured, data, seed=seed, device=device)
        first_buffers = {name: buffer.clone() for name, buffer in buffers_of(model).items()}
        eager = _run_eager(captured, model, batch)
        _restore(model, first_buffers)
        again = _run_eager(captured, model, batch)
        name = type(model).__name__
        if (difference := again.difference(eager)) is not None:
            raise CaptureError(
                f"the second forward of {name} differs from the first on the same micro-batch ({difference}): it keeps "
                "state outside of its buffers or draws random numbers outside of torch; a captured program does neither"
            )
        _check_same_parameters(captured, model, eager)
        _restore(model, first_buffers)

        def difference_from_eager(other: CapturedModel) -> Difference | None:
            return _run_program(other, model, batch, device).difference(eager, _rounded(other))

        if (difference := difference_from_eager(captured)) is not None:
            _restore(model, first_buffers)
            place = _first_module_that_differs(captured, model, batch, device)
            place += _branch(captured, lambda other: not difference_from_eager(other))
            raise CaptureError(
                f"the captured program of {name} differs from the eager module: {difference}{place}; make both take "
                "the same branch, or set training.check_capture=false to train the program all the same"
            )


def _check_same_parameters(captured: CapturedModel, model: nn.Module, eager: Computed) -> None:
    """Raise CaptureError if only the program or only the module gives a parameter a gradient."""
    for name, gradient in eager.gradients.items():
        if (gradient is not None) != (name in captured.graph.trained):
            where = ("captured program", "eager module")
            has, lacks = where if gradient is None else reversed(where)
            raise CaptureError(
                f"the parameter {name} of {type(model).__name__} has a gradient in the {has} and none in the {lacks}"
                f"{_branch(captured)}; set its requires_grad to False, or training.check_capture=false to train anyway"
            )


def one_batch(
    captured: CapturedModel, data: DataSettings, *, seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    size = captured.graph.micro_batch_size
    batches = Batches(data, seed=seed, global_batch=size, micro_batch_size=size)
    return {name: value.to(device) for name, value in batches.micro_batch(0, 0, tuple(data.inputs)).items()}


class _SeededDraws(TorchDispatchMode):
    """Seeds each random operation with its number in the order of execution."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._number += 1
            torch.manual_seed(self._number)
        return func(*args, **(kwargs or {}))


def _run_eager(captured: CapturedModel, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Computed:
    model.zero_grad()
    with _SeededDraws(), autocast(captured, next(iter(batch.values())).device):
        loss = loss_of(model(**{name: value.clone() for name, value in batch.items()}))
    loss.backward()
    return Computed(
        loss.detach(),
        {name: None if p.grad is None else p.grad.to_dense().clone() for name, p in model.named_parameters()},
        {name: buffer.clone() for name, buffer in buffers_of(model).items()},
    )


def _rounded(captured: CapturedModel) -> dict[str, float]:
    """Parameter -> coarseness of its gradient, where several operations use its low-precision copy.

    torch.autocast adds their gradients in low precision; a program adds them in the parameter's own.
    """
    copies = captured.graph.copies
    uses = Counter(name for node in captured.graph.nodes for name in node.copies)
    return {name: coarseness(getattr(torch, copies[name].dtype)) for name, count in uses.items() if count > 1}


def autocast(captured: CapturedModel, device: torch.device) -> AbstractContextManager:
    """Eager code inside computes in the precision of ``captured``."""
    precision = captured.exported.precision
    return torch.autocast(device.type, PRECISIONS[precision], enabled=precision != "float32")


def loss_of(output: Any) -> torch.Tensor:
    """The output that a capture takes as the loss: the output called ``loss``, otherwise the first scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    leaves = tree_leaves(output) if named is None else [named]
    return next(
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.dim() and leaf.is_floating_point()
    )


def _restore(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers_of(model).items():
            if name in buffers:  # forward may have put further tensors into attributes
                buffer.copy_(buffers[name])


def _run_program(
    captured: CapturedModel, model: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device
) -> Computed:
    tensors = _tensors(captured, model, device)
    whole = ProgramOfStage(whole_stage(captured), captured)
    stage = build_stage([whole], tensors, loss_weight=1.0, randomness=randomness_of_one(device))
    with _SeededDraws():
        stage.forward(0, {}, {name: value.clone() for name, value in batch.items()})
    stage.backward(0, {})
    return Computed(
        stage.losses[0],
        {name: tensors[name].grad if name in tensors else None for name, _ in model.named_parameters()},
        {name: tensors[name] for name in captured.graph.written_buffers},
    )


def _tensors(captured: CapturedModel, model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the program: parameters that share memory with the model's, and copies of its buffers."""
    parameters = {
        name: parameter.detach().requires_grad_(name in captured.graph.trained)
        for name, parameter in model.named_parameters()
    }
    buffers = {name: buffer.clone() for name, buffer in buffers_of(model).items()}
    constants = {name: value.to(device) for name, value in captured.exported.constants.items()}
    return {**constants, **buffers, **parameters}


def built_state(captured: CapturedModel, device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the program: a new module's, whose initialiser draws what it needs, and its constants."""
    return _tensors(captured, moved(captured.exported.build(), device), device)


def whole_stage(captured: CapturedModel) -> Stage:
    """All of the program as one stage."""
    (stage,) = cut(captured.graph, stages_between([0, len(captured.graph.nodes)]))
    return stage


def randomness_of_one(device: torch.device) -> Randomness:
    """The randomness of one micro-batch."""
    return Randomness(0, first_micro_batch=0, micro_batches=1, device=device)


def difference_of(
    name: str, actual: torch.Tensor | None, expected: torch.Tensor | None, scale: float, wider: float = 1.0
) -> Difference | None:
    """The difference if it is larger than rounding explains; a tensor that is None counts as zeros.

    The bounds are ``wider`` times float32's, and no narrower than the bounds of the tensor's own type.
    """
    present = [tensor for tensor in (actual, expected) if tensor is not None]
    if not present or not present[0].numel():
        return None
    actual, expected = (torch.zeros_like(present[0]) if tensor is None else tensor for tensor in (actual, expected))
    actual, expected = actual.detach(), expected.detach()
    if expected.is_floating_point():
        wider = max(wider, coarseness(expected.dtype))
    actual, expected = actual.to(torch.complex128), expected.to(torch.complex128)
    if torch.equal(actual.isnan(), expected.isnan()):
        actual, expected = actual.nan_to_num(), expected.nan_to_num()
    largest = float((actual - expected).abs().max())
    allowed = wider * (RELATIVE * float(expected.abs().max()) + ABSOLUTE * scale)
    return None if largest <= allowed else Difference(name, largest, allowed)


def coarseness_of(captured: CapturedModel) -> float:
    """That of the narrowest floating-point type of any value."""
    types = {getattr(torch, value.dtype) for node in captured.graph.nodes for value in node.outputs}
    return max(coarseness(dtype) for dtype in types if dtype.is_floating_point)


def coarseness(dtype: torch.dtype) -> float:
    """The precision of a floating-point type relative to float32: more than 1 if it is coarser."""
    return torch.finfo(dtype).eps / torch.finfo(torch.float32).eps


def _first_module_that_differs(
    captured: CapturedModel, model: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device
) -> str:
    """``, first in the module NAME (CLASS at FILE, line N)``, whose output is no value of the program; or ""."""
    made = _values_by_module(captured, model, batch, device)
    places: list[str] = []

    def compare(path: str, module: nn.Module, output: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if places or not path or path not in made:
            return
        for tensor in outputs:
            if all(difference_of("", value, tensor, 1.0) for value in made[path] if value.shape == tensor.shape):
                places.append(f", first in the module {path}{_place_of(module)}")
                return

    hooks = [
        module.register_forward_hook(lambda module, _, output, path=path: compare(path, module, output))
        for path, module in model.named_modules()
    ]
    _run_eager(captured, model, batch)
    for hook in hooks:
        hook.remove()
    return places[0] if places else ""


def _values_by_module(
    captured: CapturedModel, model: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, list[torch.Tensor]]:
    """The values that each module's operations compute in the program, by the path of the module."""
    made: dict[str, list[torch.Tensor]] = {}
    with _SeededDraws():
        values = node_values(captured, _tensors(captured, model, device), batch, device)
    for node, value in values.items():
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            made.setdefault(path, []).extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return made


def node_values(
    captured: CapturedModel, state: Tensors, batch: Tensors, device: torch.device, derived: DerivedProgram | None = None
) -> dict[fx.Node, Any]:
    """What each node of the program computes; ``derived`` runs the operators that the program has of its own."""
    (segment,) = segments(captured.graph, whole_stage(captured), [(0, len(captured.graph.nodes))])
    randomness = randomness_of_one(device)
    program, names, given = segment_program(segment, captured, randomness=randomness, derived=derived)
    interpreter, state = fx.Interpreter(program, garbage_collect_values=False), with_copies(state, captured)
    with torch.no_grad():
        interpreter.run(*(state[name] for name in names), *(batch[name].clone() for name in given))
    return interpreter.env


def _place_of(module: nn.Module) -> str:
    kind = type(module)
    try:
        file, (_, line) = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind.forward)
    except (OSError, TypeError):
        return f" ({kind.__name__})"
    return f" ({kind.__name__} at {file}, line {line})" if is_model_code(file) else f" ({kind.__name__})"


def _branch(captured: CapturedModel, is_equal: Callable[[CapturedModel], bool] | None = None) -> str:
    """``; it takes another branch while it is traced at FILE, line N``, or the lines that ask whether it is; or ""."""
    asked = questions(captured.captured_again)
    for question in asked if is_equal is not None else []:
        # The other branch may need values of tensors, and torch.export then prints the whole program.
        with question.answered_no(), suppress(CaptureError), redirect_stdout(io.StringIO()):
            if is_equal is not None and is_equal(captured.captured_again()):
                return f"; the model takes another branch while it is traced{question.line}"
    lines = ",".join(question.line for question in asked[:_QUESTIONS_NAMED])
    return f"; the model asks whether it is traced{lines}" if lines else ""

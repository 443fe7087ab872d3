"""Custom torch.autograd.Functions: each call becomes one operation of the program that calls the Function itself.

A plain trace enters a Function's forward and drops its backward. Here the trace records the call instead, so that a run
executes the user's forward and, through autograd, the user's backward.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.export import custom_ops
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from auto3d.capture.errors import CaptureError, calling_line, error_line, node_line
from auto3d.capture.nodes import args_of

_BASE = torch.autograd.function._SingleLevelFunction
# Up to torch 2.13, Function.apply calls the apply of this class, even if it was bound earlier. From 2.14 on, Function
# has an apply in C, which calls nothing of Python's but the Function's forward.
_CALLS_BASE = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
_RECORDED = custom_ops._call_custom_autograd_function_in_pre_dispatch  # target that torch.export accepts for a call
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))
WAY_OUT = "write it with PyTorch's own operators there"


@dataclass(frozen=True, eq=False)
class AppliedFunction:
    """The target of an operation that calls ``function.apply``."""

    function: type[torch.autograd.Function]
    without_gradient: tuple[int, ...]  # numbers of the arguments for which its backward returns None
    not_differentiable: tuple[int, ...]  # numbers of the results that it marks as not differentiable
    views: tuple[int, ...]  # numbers of the arguments that a result is a view of

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def __name__(self) -> str:
        return self.function.__name__


@dataclass
class AutogradFunctions:
    """The Functions that a trace calls, in order."""

    applied: list[AppliedFunction] = field(default_factory=list)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls while a program is traced. Raises CaptureError for a call that cannot be recorded."""

        def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            original = super(_BASE, function).apply  # type: ignore[misc]  # the C base of Function has it
            if get_proxy_mode() is None:
                return original(*args, **kwargs)
            if function is CheckpointFunction:
                return _without_checkpoint(*args)
            if function.__module__ == CheckpointFunction.__module__:  # it marks a region and computes nothing
                return original(*args, **kwargs)
            return self._record(function, args, kwargs, original)

        def transformed(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            raise _refusal(function, "is called inside torch.func or torch.vmap")

        with (
            patch.object(_BASE if _CALLS_BASE else torch.autograd.Function, "apply", classmethod(apply), create=True),
            patch.object(torch.autograd.function, "custom_function_call", transformed),
            nullcontext() if _CALLS_BASE else self._recorded_if_bound_earlier(),
        ):
            yield

    def replace_calls(self, module: fx.GraphModule) -> None:
        """Replace the recorded calls in ``module`` and its regions by operations that call the Functions."""
        for region in module.modules():
            if isinstance(region, fx.GraphModule):
                for node in region.graph.find_nodes(op="call_function", target=_RECORDED):
                    _replace_call(region.graph, node, self.applied[int(node.args[0])])

    @contextmanager
    def _recorded_if_bound_earlier(self) -> Iterator[None]:
        """Record calls by an ``apply`` that was taken from its Function before, such as f = F.apply.

        Raises CaptureError for a Function with a ``setup_context``, whose forward could also have been called directly.
        """

        def attribute(function: type[torch.autograd.Function], name: str) -> Any:
            member = type.__getattribute__(function, name)
            if name != "forward" or get_proxy_mode() is None or function.__module__ == CheckpointFunction.__module__:
                return member

            def forward(*args: Any) -> Any:
                context = args[0] if args else None
                if isinstance(context, torch.autograd.function.BackwardCFunction):
                    return self._record(function, args[1:], {}, lambda *tensors: member(context, *tensors))
                if torch.autograd.function._is_setup_context_defined(function.setup_context):
                    name = function.__name__
                    raise _refusal(
                        function, f"is called by an apply that was taken from it before, not as {name}.apply"
                    )
                return member(*args)

            return forward

        with patch.object(torch.autograd.function.FunctionMeta, "__getattribute__", attribute, create=True):
            yield

    def _record(self, function: type, args: tuple, kwargs: dict, original: Callable) -> Any:
        if kwargs:
            raise _refusal(function, "is called with keyword arguments")
        for value in args:
            if not isinstance(value, torch.Tensor) and not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)):
                raise _refusal(function, f"has an argument of type {type(value).__name__}, which may contain tensors")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise _refusal(function, "is called under torch.autocast")
        mode = get_proxy_mode()
        assert mode is not None  # only calls inside a trace are recorded
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            applied = _probe(function, args)
            result = original(*args)
        tensors = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise _refusal(function, "returns a value that is not a tensor")
        proxies = [_proxy_of(arg, mode.tracer) if isinstance(arg, torch.Tensor) else arg for arg in args]
        call = mode.tracer.create_proxy(
            "call_function", _RECORDED, (str(len(self.applied)), *proxies), {}, name=function.__name__.lower()
        )
        self.applied.append(applied)
        return track_tensor_tree(result, call, constant=None, tracer=mode.tracer)


def _without_checkpoint(run: Callable, preserve_random_state: bool, *args: Any) -> Any:
    """The result of torch.utils.checkpoint. The Plan, not the model, decides which activations are recomputed."""
    if torch.is_grad_enabled() and not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        raise CaptureError(
            f"torch.utils.checkpoint with use_reentrant=True has no input that requires a gradient{calling_line()}, so "
            "nothing inside it would be trained; pass use_reentrant=False there"
        )
    return run(*args)


def _proxy_of(tensor: torch.Tensor, tracer: Any) -> fx.Proxy:
    if get_proxy_slot(tensor, tracer, None) is None:  # for a constant, an operator makes the trace hold it
        tensor = tensor.view_as(tensor)
    return get_proxy_slot(tensor, tracer).proxy


def _probe(function: type[torch.autograd.Function], args: tuple) -> AppliedFunction:
    """Run the forward and the backward of ``function`` once, on tensors without values, to learn its properties."""
    arguments = [
        arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args
    ]
    positions = [index for index, arg in enumerate(arguments) if isinstance(arg, torch.Tensor) and arg.requires_grad]
    watch = _Watch(function, [arg for arg in arguments if isinstance(arg, torch.Tensor)])
    versions = [arg._version for arg in arguments if isinstance(arg, torch.Tensor)]
    try:
        with torch.enable_grad(), watch:
            result = function.apply(*arguments)
            results = result if isinstance(result, tuple) else (result,)
            trained = [tensor for tensor in results if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
            ones = [torch.ones_like(tensor) for tensor in trained]
            gradients: tuple = ()
            if trained:
                gradients = torch.autograd.grad(trained, [arguments[i] for i in positions], ones, allow_unused=True)
    except CaptureError:
        raise
    except Exception as error:  # the user's code may raise anything
        problem = f"raises {type(error).__name__} on tensors without values{error_line(error)}"
        raise _refusal(function, problem) from error
    if versions != [arg._version for arg in arguments if isinstance(arg, torch.Tensor)]:
        raise _refusal(function, "writes to its arguments")
    shown = {tensor.untyped_storage()._cdata for tensor in results if isinstance(tensor, torch.Tensor)}
    return AppliedFunction(
        function=function,
        without_gradient=tuple(i for i, gradient in zip(positions, gradients, strict=False) if gradient is None),
        not_differentiable=tuple(
            i
            for i, tensor in enumerate(results)
            if positions and tensor.is_floating_point() and not tensor.requires_grad
        ),
        views=tuple(
            i
            for i, arg in enumerate(arguments)
            if isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata in shown
        ),
    )


class _Watch(TorchDispatchMode):
    """Refuses a Function that draws random numbers or reads a tensor that is not among its arguments."""

    def __init__(self, function: type, arguments: list[torch.Tensor]) -> None:
        super().__init__()
        self._function = function
        self._line = calling_line()
        self._known: dict[int, StorageWeakRef] = {}
        self._learn(arguments)

    def _learn(self, made: Any) -> None:
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._known[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refusal(self._function, "draws random numbers", self._line)
        for tensor in tree_leaves((args, kwargs)):
            if not isinstance(tensor, torch.Tensor):
                continue
            known = self._known.get(tensor.untyped_storage()._cdata)
            if (known is None or known.expired()) and tensor.dim():
                raise _refusal(self._function, "reads a tensor that is not one of its arguments", self._line)
        result = func(*args, **(kwargs or {}))
        self._learn(result)
        return result


def _refusal(function: type, problem: str, line: str | None = None) -> CaptureError:
    at = calling_line() if line is None else line
    return CaptureError(f"the autograd.Function {function.__name__}{at} {problem}; {WAY_OUT}")


def _replace_call(graph: fx.Graph, node: fx.Node, applied: AppliedFunction) -> None:
    node.target, node.args = applied, node.args[1:]
    for argument in (args_of(node)[i] for i in applied.views):
        schemas = (getattr(user.target, "_schema", None) for user in argument.users)
        if any(schema and schema.is_mutable for schema in schemas):
            raise CaptureError(
                f"the autograd.Function {applied.__name__}{node_line(node)} returns a view of an argument that is "
                "written in place; use the out-of-place form there"
            )
    args = list(args_of(node))
    for index in applied.without_gradient:
        with graph.inserting_before(node):
            args[index] = _detached(graph, args[index])
    node.args = tuple(args)
    results = {0: node}
    if not isinstance(node.meta["val"], torch.Tensor):
        results = {args_of(user)[1]: user for user in node.users if user.target is operator.getitem}
    for index in applied.not_differentiable:
        if index in results:
            result = results[index]
            with graph.inserting_after(result):
                detached = _detached(graph, result)
            _replace_other_uses(result, detached)


def _replace_other_uses(node: fx.Node, replacement: fx.Node) -> None:
    """Let all users of ``node`` use ``replacement``, except the replacement itself."""
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user is not replacement)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached

"""Automatic mixed precision on a captured program: the casts that torch.autocast adds to operators.

A trace under torch.autocast records the operators without their casts, so these are inserted afterwards. A cast of a
parameter becomes an input of the program instead: a run makes a low-precision copy of the weights once per update.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.capture.errors import CaptureError, node_line
from auto3d.capture.in_place import name_of
from auto3d.capture.nodes import is_tensor, target_of

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TO_COPY = torch.ops.aten._to_copy.default


@contextmanager
def active(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Run code under automatic mixed precision; unlike torch.autocast, also for CUDA on a machine without a GPU."""
    dtype = dtype or torch.get_autocast_dtype(device_type)
    before = (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
    caches = torch.is_autocast_cache_enabled()

    def set_to(enabled: bool, to: torch.dtype) -> None:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, to)

    set_to(True, dtype)
    torch.set_autocast_cache_enabled(False)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        set_to(*before)
        torch.set_autocast_cache_enabled(caches)


def share_weight_casts(program: fx.Graph, parameters: Mapping[str, str]) -> dict[str, str]:
    """Replace casts of parameters by placeholders of their own; returns placeholder -> that of the parameter."""
    copies: dict[str, str] = {}
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in program.find_nodes(op="call_function", target=TO_COPY):
        source, dtype = node.args[0], node.kwargs.get("dtype")
        if source.op != "placeholder" or source.name not in parameters or set(node.kwargs) != {"dtype"}:
            continue
        if (source, dtype) not in made:
            with program.inserting_after(source):
                copy = program.placeholder(f"{source.name}_{copy_name('', dtype)[1:]}")
            copy.meta = {"val": node.meta["val"]}
            copies[copy.name] = source.name
            made[source, dtype] = copy
        node.replace_all_uses_with(made[source, dtype])
        program.erase_node(node)
    return copies


def copy_name(parameter: str, dtype: torch.dtype) -> str:
    """Name of the copy of ``parameter`` in ``dtype``, as in ``head.weight:bfloat16``."""
    return f"{parameter}:{str(dtype).removeprefix('torch.')}"


class Autocast:
    """The casts that automatic mixed precision adds to the operators of a region."""

    def __init__(self, device_type: str, dtype: torch.dtype | None) -> None:
        self.kind = (device_type, dtype)
        self.cast_weights: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}  # autocast casts a weight once for all uses

    def casts(self, node: fx.Node, mode: FakeTensorMode) -> dict[fx.Node, torch.dtype]:
        """Argument of ``node`` -> the dtype that autocast casts it to.

        Runs the operator on fake tensors with mixed precision, and again without it on cast fake tensors. Raises
        CaptureError if the two runs differ by more than these casts.
        """
        arguments = [n for n in node.all_input_nodes if is_tensor(n) and n.meta["val"].is_floating_point()]
        fakes = {argument: argument.meta["val"].detach() for argument in arguments}
        wanted = [value.dtype for value in tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)]

        def run(values: Mapping[fx.Node, torch.Tensor]) -> "_Recorded":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta["val"]))
            with mode, torch.no_grad(), _Recorded() as recorded:
                result = target_of(node)(*args, **kwargs)
            recorded.dtypes = [value.dtype for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
            return recorded

        with active(*self.kind):
            seen = run(fakes)
        observed: dict[fx.Node, torch.dtype] = {}
        for argument, fake in fakes.items():
            to = {dtype for source, dtype in seen.casts if source is fake}
            if len(to) == 1:
                observed[argument] = to.pop()
        # A cast of a value in low precision may be the operator's own: attention may compute in float32.
        from_others = {argument: dtype for argument, dtype in observed.items() if fakes[argument].dtype != self.kind[1]}
        for dtypes in (from_others, observed) if from_others != observed else (observed,):
            with mode, suppress(RuntimeError):  # an operator may refuse to mix types
                without = run({argument: fake.to(dtypes.get(argument, fake.dtype)) for argument, fake in fakes.items()})
                explained = len(seen.casts) - len(dtypes) == len(without.casts) and seen.others == without.others
                if explained and without.dtypes == wanted:
                    return dtypes
        raise CaptureError(
            f"{name_of(node.target)} under torch.autocast cannot be rewritten as casts{node_line(node)}; "
            "disable autocast there and cast the arguments explicitly"
        )


class _Recorded(TorchDispatchMode):
    """Records the operators that run, with casts separate from the others, and the dtypes of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Any] = []
        self.casts: list[tuple[torch.Tensor, torch.dtype]] = []
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is TO_COPY and kwargs.get("dtype") is not None:
            self.casts.append((args[0], kwargs["dtype"]))
        elif func.namespace != "prim":  # prim has queries, such as that of a device
            self.others.append(func)
        return func(*args, **kwargs)

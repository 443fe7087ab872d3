"""Automatic mixed precision on a captured program: the casts that torch.autocast adds to operators.

A trace under torch.autocast records the operators without their casts, so these are inserted afterwards. A cast of a
parameter becomes an input of the program instead: a run makes a low-precision copy of the weights once per update.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.capture.alike import described
from auto3d.capture.nodes import is_tensor, target_of

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TO_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class AutocastState:
    """The state of torch.autocast in this thread. It keeps casts of weights, which go stale, while it is nested."""

    kinds: tuple[tuple[str, bool, torch.dtype], ...]  # (device type, whether it is enabled, its precision)
    caches: bool
    nesting: int

    @staticmethod
    def now() -> "AutocastState":
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        kinds = tuple([(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in ("cpu", "cuda")])
        return AutocastState(kinds, torch.is_autocast_cache_enabled(), nesting)

    def restore(self) -> None:
        for device_type, enabled, dtype in self.kinds:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.caches)
        for _ in range(self.nesting - (nesting := AutocastState.now().nesting)):
            torch.autocast_increment_nesting()
        for _ in range(nesting - self.nesting):
            torch.autocast_decrement_nesting()
        if not self.nesting:
            torch.clear_autocast_cache()


@contextmanager
def active(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Run code under automatic mixed precision; unlike torch.autocast, also for CUDA on a machine without a GPU."""
    before = AutocastState.now()
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype or torch.get_autocast_dtype(device_type))
    torch.set_autocast_cache_enabled(False)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        before.restore()


def share_weight_casts(program: fx.Graph, parameters: Mapping[str, str]) -> dict[str, str]:
    """Replace casts of parameters by placeholders of their own; returns placeholder -> placeholder of the parameter."""
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


@dataclass(frozen=True)
class Rewriting:
    """How an operator computes without automatic mixed precision what it computes with it."""

    casts: Mapping[fx.Node, torch.dtype]  # argument -> the dtype to which it is cast
    dtype: torch.dtype | None = None  # the operator's argument ``dtype``, if autocast sets it


class Autocast:
    """What automatic mixed precision adds to the operators of a region."""

    def __init__(self, device_type: str, dtype: torch.dtype | None) -> None:
        self.kind = (device_type, dtype)
        self.cast_weights: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}  # autocast casts a weight once for all uses
        self._found: dict[Hashable, tuple[list[torch.dtype | None], torch.dtype | None] | None] = {}
        """Calls of operators -> the dtypes to which their inputs are cast, and the argument ``dtype``."""

    def rewriting(self, node: fx.Node, mode: FakeTensorMode) -> Rewriting | None:
        """How ``node`` computes the same without autocast; None if casts and a ``dtype`` do not explain what it does.

        Of calls that are alike, a single call is tried.
        """
        inputs = node.all_input_nodes
        number = {operand: place for place, operand in enumerate(inputs)}

        def shown(operand: fx.Node) -> Hashable:
            leaves = tree_leaves(operand.meta["val"])
            devices = tuple(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
            return number[operand], described(operand.meta["val"], shown), devices

        call = node.target, described(node.args, shown), described(node.kwargs, shown), *_dtypes(node.meta["val"])
        if call not in self._found:
            tried = self._tried(node, mode)
            self._found[call] = (
                None if tried is None else ([tried.casts.get(operand) for operand in inputs], tried.dtype)
            )
        known = self._found[call]
        if known is None:
            return None
        return Rewriting(
            {operand: to for operand, to in zip(inputs, known[0], strict=True) if to is not None}, known[1]
        )

    def _tried(self, node: fx.Node, mode: FakeTensorMode) -> Rewriting | None:
        """``rewriting`` of ``node``: its operator runs on fake tensors under autocast, and again without, rewritten."""
        arguments = [n for n in node.all_input_nodes if is_tensor(n) and n.meta["val"].is_floating_point()]
        fakes = {argument: argument.meta["val"].detach() for argument in arguments}

        def run(values: Mapping[fx.Node, torch.Tensor], dtype: torch.dtype | None = None) -> "_Recorded":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta["val"]))
            if dtype is not None:
                kwargs = {**kwargs, "dtype": dtype}
            return _recorded(mode, lambda: target_of(node)(*args, **kwargs))

        with active(*self.kind):
            seen = run(fakes)
        if seen.dtypes != _dtypes(node.meta["val"]):
            return None
        observed: dict[fx.Node, torch.dtype] = {}
        for argument, fake in fakes.items():
            to = {dtype for source, dtype in seen.casts if source is fake}
            if len(to) == 1:
                observed[argument] = to.pop()
        # A cast of a value in low precision may be the operator's own: attention may compute in float32.
        from_others = {argument: dtype for argument, dtype in observed.items() if fakes[argument].dtype != self.kind[1]}
        candidates = [Rewriting(from_others), Rewriting(observed)] if from_others != observed else [Rewriting(observed)]
        if _takes_dtype(node):
            candidates.append(Rewriting({}, seen.dtypes[0]))
        for candidate in candidates:
            values = {argument: fake.to(candidate.casts.get(argument, fake.dtype)) for argument, fake in fakes.items()}
            with mode, suppress(RuntimeError):  # an operator may refuse to mix types
                without = run(values, candidate.dtype)
                cast = [fakes[argument] for argument in candidate.casts]
                own = [dtype for source, dtype in seen.casts if not any(source is fake for fake in cast)]
                if len(own) == len(without.casts) and without.does_the_same(seen):
                    return candidate
        return None

    def parts(self, node: fx.Node, mode: FakeTensorMode) -> fx.Graph | None:
        """The operators that ``node`` consists of, as they run under autocast; None if it is an operator of its own.

        The placeholders are the inputs of ``node``, in the order of ``all_input_nodes``. An example is
        cross_entropy_loss on a GPU: autocast leaves its logarithms in low precision and casts only what sums them.
        """
        target = target_of(node)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
            return None
        values = [operand.meta["val"] for operand in node.all_input_nodes]

        def call(function: Callable, values: Sequence[Any]) -> Any:
            of = dict(zip(node.all_input_nodes, values, strict=True))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), of.__getitem__)
            return function(*args, **kwargs)

        def run(*values: Any) -> Any:
            with torch._C.DisableTorchFunction():  # it would record the operator itself
                return call(target.decompose, values)

        with active(*self.kind):
            with mode, torch.no_grad():
                made = make_fx(run, pre_dispatch=True)(*values)
            seen = _recorded(mode, lambda: call(target, values))
            again = _recorded(mode, lambda: fx.Interpreter(made).run(*values))
        same = again.does_the_same(seen) and seen.dtypes == _dtypes(node.meta["val"])
        return made.graph if same else None


def _takes_dtype(node: fx.Node) -> bool:
    """Whether the operator has an argument ``dtype`` that is not given, as sums and softmax have."""
    for position, argument in enumerate(target_of(node)._schema.arguments):
        if argument.name == "dtype":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dtype")
            return given is None and (argument.kwarg_only or position >= len(node.args))
    return False


class _Recorded(TorchDispatchMode):
    """Records the operators that run, with casts separate from the others, and the dtypes of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Any] = []
        self.casts: list[tuple[torch.Tensor, torch.dtype]] = []
        self.dtypes: list[torch.dtype] = []

    def does_the_same(self, other: "_Recorded") -> bool:
        return self.others == other.others and self.dtypes == other.dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is TO_COPY and kwargs.get("dtype") is not None:
            self.casts.append((args[0], kwargs["dtype"]))
        elif func.namespace != "prim":  # prim has queries, such as for the device of a tensor
            self.others.append(func)
        return func(*args, **kwargs)


def _recorded(mode: FakeTensorMode, function: Callable[[], Any]) -> _Recorded:
    with mode, torch.no_grad(), _Recorded() as recorded:
        recorded.dtypes = _dtypes(function())
    return recorded


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

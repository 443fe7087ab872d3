"""Values for Python code that reads a tensor which does not depend on data, such as ``if mask.any():``.

A trace has no values, so it would stop there. If the mask is made only of numbers in the model's code, its value is the
same in every run, and the trace can continue with it.
"""

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from auto3d.capture.autocast import AutocastState
from auto3d.capture.nodes import target_of

_READING = {
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.equal,
    torch.equal,
    torch.allclose,
    torch.Tensor.allclose,
}
_LARGEST = 2**24  # most elements of a tensor that is evaluated
_CPU = torch.device("cpu")


class KnownValues(TorchFunctionMode):
    """Active during a trace: evaluates the traced operations where Python code reads the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0  # number of times that code read a value during the trace
        self._known: dict[fx.Node, Any] = {}
        self._seen: set[fx.Node] = set()
        self._autocast = AutocastState.now()  # after the last node that was evaluated
        self._overwritten: set[int] = set()  # memory of known values that was overwritten with data

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _READING and get_proxy_mode() is not None:
            self.readings += 1
            values = [self._value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            if all(value is not None for value in values):
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    return func(*values, **kwargs)
        return func(*args, **kwargs)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        mode = get_proxy_mode()
        assert mode is not None  # values are read only during a trace
        tracer: Any = mode.tracer
        slot = get_proxy_slot(tensor, tracer, None)
        if slot is None:
            return None
        outside = AutocastState.now()
        try:
            # The nodes include the begins and ends of autocast, of which some are still to come.
            self._autocast.restore()
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                for node in tracer.graph.nodes:
                    if node not in self._seen:
                        self._seen.add(node)
                        self._evaluate(node, tracer.root)
        finally:
            self._autocast = AutocastState.now()
            outside.restore()
        value = self._known.get(slot.proxy.node)
        return None if value is None or self._memory(value) & self._overwritten else value

    def _evaluate(self, node: fx.Node, root: torch.nn.Module) -> None:
        if node.op == "get_attr":
            value = getattr(root, target_of(node), None)
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not value.is_meta:
                self._known[node] = value.clone()
            return
        if node.op != "call_function":
            return
        operator = isinstance(node.target, torch._ops.OpOverload)
        known = all(used in self._known for used in node.all_input_nodes)
        if known and (not operator or self._may_run(node)):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._known.__getitem__)
            args, kwargs = tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
            try:
                self._known[node] = target_of(node)(*args, **kwargs)
                return
            except Exception:  # for example, an operator without a kernel for the CPU
                known = False
        if operator and target_of(node)._schema.is_mutable:
            for used in node.all_input_nodes:
                self._overwritten |= self._memory(self._known.get(used))

    @staticmethod
    def _may_run(node: fx.Node) -> bool:
        sizes = [leaf.numel() for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in target_of(node).tags
        return not random and all(isinstance(size, int) and size <= _LARGEST for size in sizes)

    @staticmethod
    def _memory(value: Any) -> set[int]:
        return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}

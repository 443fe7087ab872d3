"""The terms of a loss: means over targets, some of which a batch may ignore, means over all places, and others.

Training divides a global batch into micro-batches. Their losses add up to the loss of the whole batch only if each mean
is weighted by what it is a mean of. For a cross-entropy that is the number of its targets, which data decide. It must
reach the loss by operators that are linear, because only then does the weight of a term reach its gradients unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from auto3d.capture.describe import is_random
from auto3d.capture.export import ExportedModel
from auto3d.capture.nodes import args_of, kwargs_of, target_of

_MEAN = 1  # number of the reduction in torch
_IGNORED = -100  # a label that counts nowhere, as data have it: the default of torch's ignore_index
_OF_PAIRS = ("mm", "matmul", "linear", "einsum")  # products that can have an entry for each pair of samples
_CROSS_ENTROPIES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_MEANS_OF_ALL = frozenset(  # means over all elements unless their argument ``reduction`` says otherwise
    {"mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
)
_UNCHANGED = frozenset(
    {"alias", "clone", "contiguous", "to", "_to_copy", "view", "reshape", "squeeze", "unsqueeze", "neg"}
)
_MOVES = frozenset(  # their argument ``dim`` or ``dims`` says where elements are taken from or put, and adds up none
    {"unsqueeze", "squeeze", "permute", "cat", "concat", "stack", "slice", "select", "split", "split_with_sizes"}
    | {
        "chunk",
        "unbind",
        "index_select",
        "gather",
        "movedim",
        "narrow",
        "glu",
        "unflatten",
        "tensor_split",
        "flip",
        "roll",
    }
)
_PRODUCTS = frozenset({"matmul", "mm", "linear", "addmm", "mv", "dot", "vdot", "inner", "addmv", "outer", "ger"})
_COUNTS = frozenset(
    {"bincount", "histc", "unique", "_unique2", "unique_consecutive", "index_add", "scatter_add", "index_put"}
)
ACCEPTED = "a sum of torch's cross-entropies with reduction='mean', each times a number"


@dataclass(frozen=True, kw_only=True)
class TargetTerm:
    """A mean over the targets that are not ignored."""

    name: str  # name of its node
    ignore_index: int
    places: float  # number of targets of one micro-batch if no target is ignored
    has_class_weights: bool  # each target counts with the weight of its class
    counts_ignored: bool = False  # a target is made from a label of -100 and counts all the same
    is_alike: bool = False  # counts as if all places were filled where any is, so that all micro-batches weigh the same


@dataclass(frozen=True, kw_only=True)
class ScaledTerm:
    """Another term, which is multiplied by a number."""

    name: str  # name of its node
    factor: float


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The loss is a sum of these terms, each times a factor that is the same for all micro-batches."""

    counted: tuple[TargetTerm, ...] = ()
    constant: tuple[str, ...] = ()  # names of means over all places, whose number never changes
    other: tuple[str, ...] = ()  # names of terms of which nothing is known
    used: tuple[str, ...] = ()  # names of constant and other terms that something else than the loss depends on


def loss_terms(exported: ExportedModel) -> LossTerms:
    """The terms of the loss of ``exported``."""
    return _Analysis(exported).terms()


class _Analysis:
    def __init__(self, exported: ExportedModel) -> None:
        self._exported = exported
        self._loss = next(node for node in exported.program.nodes if node.name == exported.loss)
        written = {name for name, buffer in exported.buffers.items() if buffer in exported.written_buffers}
        self._from_samples: set[fx.Node] = set()
        for node in exported.program.nodes:
            is_source = node.op == "placeholder" and (node.name in exported.inputs or node.name in written)
            if is_source or is_random(node) or not self._from_samples.isdisjoint(node.all_input_nodes):
                self._from_samples.add(node)
        self._from_weights: set[fx.Node] = set()
        for node in exported.program.nodes:
            is_weight = node.op == "placeholder" and node.name in exported.parameters
            if is_weight or not self._from_weights.isdisjoint(node.all_input_nodes):
                self._from_weights.add(node)
        self._counted: dict[fx.Node, TargetTerm] = {}
        self._constant: dict[fx.Node, None] = {}
        self._other: dict[fx.Node, None] = {}
        self._linear: set[fx.Node] = set()  # nodes between the terms and the loss, which are linear in the terms

    def terms(self) -> LossTerms:
        self._walk(self._loss)
        path = {*self._linear, *self._counted}
        # A count changes the value of its term, which nothing but the loss may then use.
        private = all(user in path or user.op == "output" for node in path for user in node.users)
        counted = self._counted if private else {}
        other = [node for node in (*self._counted, *self._other) if node not in counted]
        used = [
            node for node in (*self._constant, *other) if any(u not in path and u.op != "output" for u in node.users)
        ]
        return LossTerms(
            counted=tuple(counted.values()),
            constant=tuple(node.name for node in self._constant),
            other=tuple(node.name for node in other),
            used=tuple(node.name for node in used),
        )

    def _walk(self, node: fx.Node) -> None:
        if any(node in group for group in (self._counted, self._constant, self._other, self._linear)):
            return
        summands = self._summands(node)
        if summands is not None:
            self._linear.add(node)
            for summand in summands:
                self._walk(summand)
        elif self._is_zero(node):
            self._linear.add(node)
        elif self._compares_samples(node):
            self._other[node] = None
        elif self._is_cross_entropy(node):
            self._counted[node] = self._target_term(node)
        elif node not in self._from_samples or self._is_mean_of_all(node):
            self._constant[node] = None
        else:
            self._other[node] = None

    def _summands(self, node: fx.Node) -> list[fx.Node] | None:
        """The scalars in which ``node`` is linear, with factors that do not depend on samples; None if it is not."""
        name, args = _operator(node), args_of(node)
        if name in _UNCHANGED:
            return [args[0]]
        if name in ("add", "sub", "rsub"):
            if any(not isinstance(summand, fx.Node) and summand != 0 for summand in args[:2]):
                return None
            return [summand for summand in args[:2] if isinstance(summand, fx.Node)]
        if name in ("mul", "div") and not kwargs_of(node):
            samples = [factor for factor in args[:2] if factor in self._from_samples]
            if len(samples) == 1 and (name == "mul" or samples[0] is args[0]):
                return samples
            return None
        if name in ("sum", "mean") and len(args) == 1:
            value = args[0]
            if _operator(value) == "stack" and value.meta["val"].dim() == 1:
                self._linear.add(value)
                return list(args_of(value)[0])
            return [value] if value.meta["val"].dim() == 0 else None
        return None

    def _compares_samples(self, node: fx.Node) -> bool:
        """Whether ``node`` is made from products of each sample with each other, as where others are its negatives."""
        pending, seen = list(node.all_input_nodes[:1]), set[fx.Node]()
        while pending:
            value = pending.pop()
            if value in seen or value not in self._from_samples or value.op == "placeholder":
                continue
            seen.add(value)
            inputs, made = value.all_input_nodes, value.meta["val"]
            if not isinstance(made, torch.Tensor) or made.dim() < 2:
                continue
            if _operator(value) in _OF_PAIRS:
                are_samples = len(inputs) > 1 and self._from_samples.issuperset(inputs[:2])
                if made.dim() == 2 and are_samples and not _is_of_each(value):
                    return True
                continue
            tensors = [operand for operand in inputs if isinstance(operand.meta["val"], torch.Tensor)]
            is_joined = _operator(value) == "cat"  # its parts are smaller
            pending += [tensor for tensor in tensors if is_joined or tensor.meta["val"].numel() == made.numel()]
        return False

    def _is_cross_entropy(self, node: fx.Node) -> bool:
        """Whether ``node`` is a mean over targets of the data, each of which counts the same in any batch."""
        if _operator(node) not in _CROSS_ENTROPIES or _argument(node, "reduction") != _MEAN:
            return False
        if _argument(node, "target").meta["val"].is_floating_point():
            return False
        if _argument(node, "target") not in self._from_samples or _argument(node, "weight") in self._from_samples:
            return False
        unweighted = self._from_samples - self._from_weights
        return not any(self._mixes(ancestor) for ancestor in _ancestors(node) if ancestor in unweighted)

    def _is_mean_of_all(self, node: fx.Node) -> bool:
        """Whether ``node`` is a mean over a number of places that is always the same."""
        name = _operator(node)
        probabilities = name == "cross_entropy_loss" and (
            _argument(node, "target").meta["val"].is_floating_point()
            or _argument(node, "target") not in self._from_samples
        )
        if not probabilities and (name not in _MEANS_OF_ALL or node.meta["val"].dim()):
            return False
        if name != "mean" and _argument(node, "reduction") != _MEAN:
            return False
        # A value that depends on several samples may be a number of targets, by which the model divides by itself.
        return not any(self._mixes(ancestor) for ancestor in _ancestors(node) if ancestor in self._from_samples)

    def _mixes(self, node: fx.Node) -> bool:
        """Whether an element of ``node``, which depends on samples, may depend on several: dimension 0 is samples'.

        Batch statistics of a layer, which are taken over a micro-batch by design, do not count.
        """
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            return False
        if not value.dim():
            return True
        name = _operator(node)
        several = [operand for operand in node.all_input_nodes if operand in self._from_samples and _rank(operand)]
        if name in _COUNTS:
            return True
        if name in _PRODUCTS:
            return any(operand in self._from_samples and _rank(operand) <= 2 for operand in args_of(node)[1:])
        target = target_of(node)
        if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
            return len({_rank(operand) for operand in several}) > 1  # their samples do not match
        return bool(several) and name not in _MOVES and _takes_dimension_0(node, _rank(several[0]))

    def _target_term(self, node: fx.Node) -> TargetTerm:
        ignored, target = int(_argument(node, "ignore_index")), _argument(node, "target")
        unlabelled = self._evaluated(target, label=_IGNORED)
        return TargetTerm(
            name=node.name,
            ignore_index=ignored,
            places=self._places(target, ignored),
            counts_ignored=unlabelled is None or bool((unlabelled != ignored).any()),
            has_class_weights=_argument(node, "weight") is not None,
        )

    def _places(self, target: fx.Node, ignored: int) -> int:
        """How many targets count if the labels ignore none: a causal model, for example, has none for a last token."""
        value = self._evaluated(target, label=0 if ignored == 1 else 1)
        if value is None:  # the target depends on weights
            return int(target.meta["val"].numel())
        return int((value != ignored).sum()) or int(target.meta["val"].numel())

    def _is_zero(self, node: fx.Node) -> bool:
        """Whether ``node`` is a number 0, with which code begins a sum."""
        if node in self._from_samples:
            return False
        value = self._evaluated(node, label=0)
        return value is not None and not value.any()

    def _evaluated(self, node: fx.Node, *, label: int) -> torch.Tensor | None:
        """The value of ``node`` where all inputs are ``label``; None if it depends on more than inputs."""
        values: dict[fx.Node, Any] = {}
        needed = {node, *_ancestors(node)}
        try:
            for current in self._exported.program.nodes:
                if current in needed:
                    values[current] = self._value(current, values, label)
        except (KeyError, IndexError, RuntimeError, ValueError):
            return None
        value: torch.Tensor = values[node]
        return value

    def _value(self, node: fx.Node, values: dict[fx.Node, Any], label: int) -> Any:
        """What ``node`` computes of ``values``; KeyError for a parameter or a buffer."""
        if node.op == "placeholder":
            if node.name in self._exported.inputs:
                like = node.meta["val"]
                return torch.full(like.shape, label, dtype=like.dtype)
            return self._exported.constants[node.name]
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        return target_of(node)(*args, **kwargs)


def _is_of_each(product: fx.Node) -> bool:
    """Whether ``product`` is an einsum with a dimension of its result in both factors, so each sample is apart."""
    if _operator(product) != "einsum":
        return False
    factors, _, result = str(args_of(product)[0]).replace(" ", "").partition("->")
    first, _, second = factors.partition(",")
    return not result or bool(set(first) & set(second) & set(result))


def _operator(node: fx.Node) -> str:
    """The name of the operator of ATen that ``node`` calls, without its overload; "" if it calls another operator."""
    target = target_of(node)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return target._schema.name.removeprefix("aten::")


def _argument(node: fx.Node, name: str) -> Any:
    """The argument ``name`` of ``node``, or its default."""
    for position, argument in enumerate(target_of(node)._schema.arguments):
        if argument.name == name:
            if position < len(node.args):
                return args_of(node)[position]
            return kwargs_of(node).get(name, argument.default_value)
    raise KeyError(name)


def _rank(node: fx.Node) -> int:
    """The number of dimensions of a tensor; 0 for a number."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _takes_dimension_0(node: fx.Node, rank: int) -> bool:
    """Whether ``node`` adds up, sorts or shifts along dimension 0 of a tensor of this rank, or along all of them."""
    target = target_of(node)
    names = {arg.name for arg in target._schema.arguments} if isinstance(target, torch._ops.OpOverload) else set()
    for name in names & {"dim", "dims"}:
        dims = _argument(node, name)
        if dims is None or dims == []:
            return True
        return any(dim in (0, -rank) for dim in (dims if isinstance(dims, (list, tuple)) else [dims]))
    return False


def _ancestors(node: fx.Node) -> Iterator[fx.Node]:
    seen: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        ancestor = pending.pop()
        if ancestor not in seen:
            seen.add(ancestor)
            yield ancestor
            pending.extend(ancestor.all_input_nodes)

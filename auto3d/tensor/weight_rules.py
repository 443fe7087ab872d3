"""Rules -> splits of weights: which rows or columns of each parameter a tensor-parallel rank has.

A rule names modules; what it means for a weight is read off the graph, not off the module's class. How a product uses
its weight says which dimension holds the output features, and how the model divides the product's result says where
fused weights have their blocks and how many attention heads there are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import gcd

import torch
from torch import fx, nn

from auto3d.capture.model import CapturedModel
from auto3d.plan import PlanError
from auto3d.tensor.feature_pieces import feature_blocks, input_units
from auto3d.tensor.known_rules import HEAD, HEADS, ROW, RULES_KEY, SHIPPED, STYLES, VOCABULARY, WHOLE
from auto3d.tensor_placement import Split

_VIEWS_OF_WEIGHTS = ("t", "transpose", "permute", "numpy_T", "mT", "alias", "detach", "to", "contiguous")


@dataclass(frozen=True, kw_only=True)
class WeightUse:
    """One product, convolution or embedding, and the parameters that it uses."""

    node: fx.Node
    modules: tuple[str, ...]  # the module that runs it, and the module that holds its weight
    weight: str
    input_dim: int | None  # dimension of the weight that the operation sums over; None for an embedding
    output_dim: int  # dimension of the weight with the output features
    feature_dim: int  # dimension of the operation's result with the output features
    input: fx.Node | None  # value whose last dimension is summed over, or channels of a convolution
    bias: str | None
    groups: int = 1  # groups of a convolution

    def __str__(self) -> str:
        return self.modules[0]


def known_rules(module: nn.Module) -> dict[str, str] | None:
    """The rules that are known for ``module``; None if none are, so that splits have to be derived.

    These are the ``tp_plan`` of a transformers model, or the rules in ``SHIPPED``. A plan with a style that is no split
    of one weight, as for experts, counts as none.
    """
    plan = getattr(module, "tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        if not all(style in STYLES for style in plan.values()):
            return None
        return {name: VOCABULARY if name == HEAD else STYLES[style] for name, style in plan.items()}
    return SHIPPED.get(getattr(getattr(module, "config", None), "model_type", ""))


@dataclass(frozen=True, kw_only=True)
class RuledSplits:
    """What rules say about the parameters of a model; it says nothing about parameters that no rule names."""

    pinned: dict[str, Split | None]  # None: whole
    by_user: frozenset[str]  # names in ``pinned`` that a user's rule matches
    impossible: dict[str, str]  # weights whose known rule is not possible -> the reason

    @property
    def splits(self) -> dict[str, Split]:
        return {name: split for name, split in self.pinned.items() if split is not None}


def weight_splits(
    captured: CapturedModel, shards: int, *, rules: Mapping[str, str], known: Mapping[str, str] | None = None
) -> RuledSplits:
    """How ``shards`` ranks split the parameters of ``captured`` by a user's ``rules``, and elsewhere by ``known``
    rules.

    A bias is split like the output features that it is added to. Raises PlanError, with the numbers, for a user's rule
    that matches no weight or that is not possible; a known rule that is not possible says nothing.
    """
    uses = list(weight_uses(captured))
    _check_patterns(rules, uses)
    ruled: dict[str, tuple[Split, WeightUse]] = {}
    whole: set[str] = set()
    by_user: set[str] = set()
    impossible: dict[str, str] = {}
    for use in uses:
        word, is_users = _rule(use, rules, known or {})
        if word is None:
            continue
        if word == WHOLE:
            names = {use.weight, *_biases(captured, use, captured.graph.parameters[use.weight].shape[use.output_dim])}
            whole |= names
            by_user |= names if is_users else set()
            continue
        try:
            splits = _splits(captured, use, word, shards)
            for name, split in splits.items():
                other = ruled.setdefault(name, (split, use))
                if other[0] != split:
                    raise _refused(
                        f"{use} and {other[1]} share {name}, but their rules split it differently; give them rules "
                        "that agree"
                    )
            by_user |= splits.keys() if is_users else set()
        except PlanError as error:
            if is_users:
                raise
            impossible[use.weight] = error.problem
    splits = {name: split for name, (split, _) in sorted(ruled.items()) if name not in impossible or name in by_user}
    pinned = splits | dict.fromkeys(sorted(whole))
    return RuledSplits(pinned=pinned, by_user=frozenset(by_user), impossible=impossible)


def weight_uses(captured: CapturedModel) -> Iterator[WeightUse]:
    """Each operation of the model that multiplies a parameter of two or more dimensions, or looks up its rows."""
    exported = captured.exported
    modules = {node.name: node.module for node in captured.graph.nodes}
    parameters = exported.parameters
    for node in exported.program.nodes:
        operator = _operator(node)
        if operator == "embedding":
            weight = _weight(node.args[0], parameters)
            if weight is not None and not weight[1]:
                yield _use(node, modules, weight[0], None, (None, 1), -1)
        elif operator in ("linear", "addmm", "mm", "matmul"):
            place = 2 if operator == "addmm" else 1
            weight = _weight(node.args[place], parameters)
            if weight is None or _rank(node.args[place]) != 2:
                continue
            inner, outer = (1, 0) if (operator == "linear") != weight[1] else (0, 1)
            bias_place = {"linear": 2, "addmm": 0}.get(operator)
            bias = node.args[bias_place] if bias_place is not None and len(node.args) > bias_place else None
            yield _use(node, modules, weight[0], bias, (inner, outer), -1, node.args[place - 1], parameters=parameters)
        elif operator in ("conv1d", "conv2d", "conv3d", "convolution"):
            weight = _weight(node.args[1], parameters)
            if weight is not None and not weight[1]:
                yield _use(
                    node,
                    modules,
                    weight[0],
                    node.args[2] if len(node.args) > 2 else None,
                    (1, 0),
                    1,
                    node.args[0],
                    parameters=parameters,
                    groups=_groups(node, operator),
                )


def _use(
    node: fx.Node,
    modules: Mapping[str, str],
    weight: str,
    bias: object,
    dims: tuple[int | None, int],
    feature_dim: int,
    entering: object = None,
    *,
    parameters: Mapping[str, str] = {},
    groups: int = 1,
) -> WeightUse:
    held_by = weight.rpartition(".")[0]
    return WeightUse(
        node=node,
        modules=tuple(dict.fromkeys([modules.get(node.name, held_by), held_by])),
        weight=weight,
        input_dim=dims[0],
        output_dim=dims[1],
        feature_dim=feature_dim,
        input=entering if isinstance(entering, fx.Node) else None,
        bias=parameters.get(bias.name) if isinstance(bias, fx.Node) else None,
        groups=groups,
    )


def _groups(node: fx.Node, operator: str) -> int:
    place = 8 if operator == "convolution" else 6
    groups = node.args[place] if len(node.args) > place else node.kwargs.get("groups", 1)
    assert isinstance(groups, int)
    return groups


def _weight(argument: object, parameters: Mapping[str, str]) -> tuple[str, bool] | None:
    """(name, whether it is transposed) of the parameter of two or more dimensions behind ``argument``, if it is one."""
    transposed = False
    while isinstance(argument, fx.Node) and argument.op == "call_function":
        if _operator(argument) not in _VIEWS_OF_WEIGHTS:
            return None
        transposed ^= _transposes(argument)
        argument = argument.args[0]
    if not isinstance(argument, fx.Node) or argument.name not in parameters or _rank(argument) < 2:
        return None
    return parameters[argument.name], transposed


def _transposes(node: fx.Node) -> bool:
    """Whether this view of a matrix swaps its dimensions."""
    if _operator(node) == "permute":
        return [place % 2 for place in node.args[1]] == [1, 0]  # type: ignore[union-attr, operator]
    if _operator(node) == "transpose":
        return node.args[1] % 2 != node.args[2] % 2  # type: ignore[operator]
    return _operator(node) in ("t", "numpy_T", "mT")


def _operator(node: fx.Node) -> str:
    """The name of the node's ATen operator without its overload; empty for other nodes."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return target.overloadpacket.__name__


def _rank(node: object) -> int:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _rule(use: WeightUse, rules: Mapping[str, str], known: Mapping[str, str]) -> tuple[str | None, bool]:
    """(word, whether a user's rule says it) for ``use``."""
    for source in (rules, known):
        words = [word for pattern, word in source.items() if _matches(pattern, use)]
        if words:
            return words[-1], source is rules
    return None, False


def _matches(pattern: str, use: WeightUse) -> bool:
    expression = ".*".join(map(re.escape, pattern.split("*")))
    return any(re.fullmatch(expression, module) for module in use.modules)


def _refused(problem: str) -> PlanError:
    return PlanError(problem, key=RULES_KEY)


def _check_patterns(rules: Mapping[str, str], uses: Sequence[WeightUse]) -> None:
    names = [re.sub(r"\d+", "*", module) for use in uses for module in use.modules]
    for pattern in rules:
        if not any(_matches(pattern, use) for use in uses):
            near = get_close_matches(pattern, names, n=1, cutoff=0)
            hint = f"; a pattern of this model is {near[0]}" if near else ""
            raise _refused(f"{pattern!r} matches no module that multiplies a weight or looks up its rows{hint}")


def _splits(captured: CapturedModel, use: WeightUse, word: str, shards: int) -> dict[str, Split]:
    """The splits of the weight and of the bias of ``use``; raises PlanError if ``word`` is not possible for it."""
    shape = captured.graph.parameters[use.weight].shape
    features = shape[use.output_dim]
    if word == VOCABULARY:
        if len(shape) != 2:
            raise _refused(f"{use} is a convolution, which has no vocabulary; it takes column or row")
        dim = 0 if use.input_dim is None else use.output_dim
        biases = [] if use.input_dim is None else _biases(captured, use, features)
        return {use.weight: Split(dim, (shape[dim],)), **{name: Split(0, (shape[dim],)) for name in biases}}
    if word == ROW:
        return {use.weight: _row(use, shape, shards)}
    blocks, added = feature_blocks(use.node, use.feature_dim, features, captured.exported.parameters)
    for block in blocks:
        if word == HEADS and not block.has_heads:
            raise _refused(f"the result of {use} is not divided into heads, so it takes column instead of heads")
        if block.units == 1 and block.size > 1 and not block.has_heads:
            raise _refused(f"the model reads parts of the result of {use} that overlap; it takes row or whole")
        units = gcd(block.units, use.groups) if use.groups > 1 else block.units
        if units % shards:
            what = "heads" if block.has_heads else "groups" if use.groups > 1 else "output features"
            raise _refused(f"{use} has {units} {what}, which do not divide into {shards} shards")
    sizes = tuple(block.size for block in blocks)
    biases = [*_own_bias(use), *added]
    return {use.weight: Split(use.output_dim, sizes), **{name: Split(0, sizes) for name in biases}}


def _row(use: WeightUse, shape: Sequence[int], shards: int) -> Split:
    if use.input_dim is None:
        raise _refused(f"{use} is an embedding, which takes vocabulary, column or whole, not row")
    if use.groups > 1:
        raise _refused(f"{use} is a convolution in groups, which takes column or whole, not row")
    size = shape[use.input_dim]
    units = input_units(use.input, size) if use.input is not None and use.feature_dim == -1 else None
    if (units or size) % shards:
        what = "heads in its input" if units else "input features"
        raise _refused(f"{use} has {units or size} {what}, which do not divide into {shards} shards")
    return Split(use.input_dim, (size,))


def _biases(captured: CapturedModel, use: WeightUse, features: int) -> list[str]:
    """Names of the biases that have one element for each output feature."""
    return [*_own_bias(use), *feature_blocks(use.node, use.feature_dim, features, captured.exported.parameters)[1]]


def _own_bias(use: WeightUse) -> list[str]:
    return [] if use.bias is None else [use.bias]

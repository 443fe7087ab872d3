"""A captured model as JSON and back: its Graph and its program, without anything that runs when it is read.

Operators stand under the names that torch.ops knows them by; the function that builds the model is not stored. What
nodes share, such as strides and lines of code, is written once. A program that calls a Function of the user's own
cannot be stored.
"""

import operator
from base64 import b64decode, b64encode
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from auto3d.capture.export import TRAINING, ExportedModel, InputSpec
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.capture.model import CapturedModel

_GETITEM = "getitem"
_OUTPUT = None  # stands for the target of the output
_PLAIN = (bool, int, float, str, type(None))
_LISTS, _DICTS = (list, immutable_list), (dict, immutable_dict)
_NAMED = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}
_DICT_FIELDS = ("parameters", "buffers", "copies")
_SET_FIELDS = ("trained", "written_buffers")
_FIELDS = ("micro_batch_size", "device", "loss", "precision")


class NotStorableError(Exception):
    """A program that has no form as JSON."""


def captured_to_json(captured: CapturedModel) -> dict[str, Any]:
    """``captured`` as lists, dicts, strings, numbers and Booleans; raises NotStorableError if that cannot be."""
    exported = captured.exported
    if exported.mode != TRAINING:
        raise NotStorableError("it is no training")
    return {
        "graph": graph_to_json(captured.graph),
        **{name: getattr(exported, name) for name in _FIELDS},
        **{name: dict(getattr(exported, name)) for name in _DICT_FIELDS},
        **{name: sorted(getattr(exported, name)) for name in _SET_FIELDS},
        "inputs": {name: [spec.shape, _name(spec.dtype)] for name, spec in exported.inputs.items()},
        "constants": {name: _constant_to_json(value) for name, value in exported.constants.items()},
        "program": _ProgramWriter().write(exported.program),
    }


def captured_from_json(content: Mapping[str, Any], build: Callable[[], nn.Module]) -> CapturedModel:
    """The captured model from which ``captured_to_json`` made ``content``; ``build`` makes its module.

    Raises an error, such as ValueError or LookupError, if ``content`` is of another form, if an operator is unknown
    here, or if the program has another fingerprint than it was written with.
    """
    fields: dict[str, Any] = {name: content[name] for name in (*_FIELDS, *_DICT_FIELDS)}
    fields |= {name: frozenset(content[name]) for name in _SET_FIELDS}
    exported = ExportedModel(
        build=build,
        inputs={name: _input(*row) for name, row in content["inputs"].items()},
        program=_ProgramReader(content["program"]).read(),
        constants={name: _constant_from_json(row) for name, row in content["constants"].items()},
        **fields,
    )
    graph = graph_from_json(content["graph"])
    if exported.fingerprint != graph.fingerprint:
        raise ValueError(f"the program's fingerprint is {exported.fingerprint}, its Graph's {graph.fingerprint}")
    return CapturedModel(graph=graph, exported=exported)


class _Table:
    """Different entries of one kind, by number."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, row: Callable[[], Any]) -> int:
        """The number of the entry ``key``; a new entry is what ``row`` returns."""
        if key not in self._numbers:
            made = row()  # it may add other entries
            self._numbers[key] = len(self.rows)
            self.rows.append(made)
        return self._numbers[key]


class _ProgramWriter:
    """Writes the nodes of one program."""

    def __init__(self) -> None:
        self._tables = {name: _Table() for name in ("targets", "modules", "lines", "traces", "storages", "values")}
        self._position: dict[fx.Node, int] = {}

    def write(self, program: fx.Graph) -> dict[str, Any]:
        rows = [self._node(node) for node in program.nodes]
        for row, node in zip(rows, program.nodes, strict=True):
            users = [self._position[user] for user in node.users]
            if users != sorted(users):  # a pass has inserted a user later
                row.append(users)
        return {"nodes": rows, **{name: table.rows for name, table in self._tables.items()}}

    def _node(self, node: fx.Node) -> list[Any]:
        args, kwargs = self._argument(node.args)["tuple"], self._argument(node.kwargs)["dict"]
        self._position[node] = len(self._position)
        paths = tuple(path for path, _ in (node.meta.get("nn_module_stack") or {}).values())
        lines = (node.meta.get("stack_trace") or "").split("\n")
        trace = tuple(self._number("lines", line) for line in lines)
        places = self._number("modules", paths), self._number("traces", trace)
        return [self._target(node), node.name, args, kwargs, self._value(node.meta.get("val")), *places]

    def _number(self, table: str, entry: Hashable) -> int:
        return self._tables[table].number(entry, lambda: entry)

    def _target(self, node: fx.Node) -> Any:
        if node.op == "output":
            return _OUTPUT
        if node.op == "placeholder":
            return str(node.target)
        target: Any = node.target
        if target is operator.getitem:
            return self._number("targets", _GETITEM)
        if isinstance(target, torch._ops.OpOverload) and _operator(str(target)) is target:
            return self._number("targets", str(target))
        raise NotStorableError(f"it calls {target}, which is not an operator of torch.ops")

    def _argument(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, fx.Node):
            return {"node": self._position[value]}
        if type(value) in _LISTS:
            return [self._argument(item) for item in value]
        if type(value) is tuple:
            return {"tuple": [self._argument(item) for item in value]}
        if type(value) in _DICTS and all(isinstance(key, str) for key in value):
            return {"dict": {key: self._argument(item) for key, item in value.items()}}
        if type(value) is torch.device:
            return {"device": str(value)}
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        for kind, of_type in _NAMED.items():
            if type(value) is of_type:
                return {kind: _name(value)}
        raise NotStorableError(f"an operator has an argument of type {type(value).__name__}")

    def _value(self, value: Any) -> Any:
        """The number of a tensor; a list for several, of which some may be None."""
        if value is None:
            return None
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise NotStorableError(f"an operator makes a value of type {type(value).__name__}")
        if value.is_conj() or value.is_neg():
            raise NotStorableError("an operator makes a view of conjugate or negative numbers")
        return self._tables["values"].number(id(value), lambda: self._tensor(value))  # the program keeps it alive

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        storage = value.untyped_storage()
        number = self._tables["storages"].number(storage._cdata, storage.nbytes)
        place = [value.shape, value.stride(), value.storage_offset()]
        return [number, _name(value.dtype), *place, value.requires_grad]


class _ProgramReader:
    """Reads what a ``_ProgramWriter`` wrote. Tensors are on the meta device."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._rows = content["nodes"]
        self._targets = [operator.getitem if name == _GETITEM else _operator(name) for name in content["targets"]]
        self._modules = [{str(depth): (path, "") for depth, path in enumerate(paths)} for paths in content["modules"]]
        lines = content["lines"]
        self._traces = ["\n".join(lines[number] for number in trace) for trace in content["traces"]]
        storages = [torch.UntypedStorage(size, device="meta") for size in content["storages"]]
        self._values = [_tensor(storages, row) for row in content["values"]]
        self._nodes: list[fx.Node] = []

    def read(self) -> fx.Graph:
        program = fx.Graph()
        for target, name, args, kwargs, value, modules, trace, *_ in self._rows:
            arguments = tuple(self._argument(item) for item in args)
            named = {key: self._argument(item) for key, item in kwargs.items()}
            if target is _OUTPUT:
                node = program.create_node("output", "output", arguments, named, name)
            elif isinstance(target, str):
                node = program.create_node("placeholder", target, arguments, named, name)
            else:
                node = program.create_node("call_function", self._targets[target], arguments, named, name)
            if node.name != name:
                node.name = name
            node.meta["val"] = self._value(value)
            node.meta["nn_module_stack"], node.meta["stack_trace"] = self._modules[modules], self._traces[trace]
            self._nodes.append(node)
        for node, row in zip(self._nodes, self._rows, strict=True):
            if len(row) > 7:
                node.users = {self._nodes[user]: None for user in row[7]}
        return program

    def _argument(self, value: Any) -> Any:
        if type(value) is list:
            return [self._argument(item) for item in value]
        if type(value) is not dict:
            return value
        ((kind, content),) = value.items()
        match kind:
            case "node":
                return self._nodes[content]
            case "tuple":
                return tuple(self._argument(item) for item in content)
            case "dict":
                return {key: self._argument(item) for key, item in content.items()}
            case "device":
                return torch.device(content)
            case "complex":
                return complex(*content)
        return _named(kind, content)

    def _value(self, value: Any) -> Any:
        if value is None:
            return None
        return tuple(self._value(item) for item in value) if isinstance(value, list) else self._values[value]


@cache
def _operator(name: str) -> torch._ops.OpOverload:
    """The operator that prints as ``name``, such as aten.view.default; raises ValueError if there is none."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    resolved = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    if not isinstance(resolved, torch._ops.OpOverload):
        raise ValueError(f"torch.ops has no operator {name}")
    return resolved


def _tensor(storages: Sequence[torch.UntypedStorage], row: Sequence[Any]) -> torch.Tensor:
    storage, dtype, shape, stride, offset, requires_grad = row
    tensor = torch.empty(0, dtype=_named("dtype", dtype), device="meta")
    tensor.set_(storages[storage], offset, shape, stride)
    return tensor.requires_grad_(requires_grad)


def _input(shape: Sequence[int], dtype: str) -> InputSpec:
    return InputSpec(shape=tuple(shape), dtype=_named("dtype", dtype))


def _constant_to_json(value: torch.Tensor) -> list[Any]:
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [_name(value.dtype), value.shape, value.stride(), b64encode(data).decode()]


def _constant_from_json(row: Sequence[Any]) -> torch.Tensor:
    dtype, shape, stride, text = row
    value = torch.empty_strided(shape, stride, dtype=_named("dtype", dtype))
    if prod(shape):
        value.copy_(torch.frombuffer(bytearray(b64decode(text)), dtype=value.dtype).view(shape))
    return value


def _name(value: Any) -> str:
    """torch's name of a dtype, a memory format or a layout, without the module."""
    return str(value).removeprefix("torch.")


def _named(kind: str, name: str) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, _NAMED[kind]):
        raise ValueError(f"torch has no {kind} {name}")
    return value

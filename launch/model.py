"""Recipe -> the user's model, unmodified: how to build it, the model captured, and its initial weights."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from auto3d.capture.errors import error_line
from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel, capture, without_collection
from launch.data import data_settings
from launch.output import stdout_to_stderr
from launch.recipe import RECIPES, LoadedRecipe
from launch.settings import device

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from their configuration; nothing is ever downloaded


def captured_model(recipe: LoadedRecipe, micro_batch_size: int) -> CapturedModel:
    """The recipe's model, captured for micro-batches of so many samples."""
    with stdout_to_stderr(), without_collection():
        build = build_function(recipe)
        try:
            specs = data_settings(recipe.values).input_specs()
            return capture(build, specs, micro_batch_size, device=device(recipe.values))
        except SystemExit as error:
            raise recipe.error("model", f"its code ended the program: {told(error)}") from None


def build_function(recipe: LoadedRecipe) -> Callable[[], nn.Module]:
    """A function that builds the recipe's model; raises RecipeError if there is no such model."""
    if recipe.values.model.factory is not None:
        return _factory(recipe)
    return _architecture(recipe)


class Weights(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, file: str) -> None:
        self._file = safe_open(file, framework="pt")
        self._names = dict.fromkeys(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())


def initial_weights(recipe: LoadedRecipe, graph: Graph) -> Weights | None:
    """The recipe's weights, if it has any; raises RecipeError, by names and shapes, unless they fit the model."""
    file = recipe.values.model.weights
    if file is None:
        return None
    try:
        weights = Weights(file)
    except (SafetensorError, OSError) as error:
        raise recipe.error("model.weights", f"found {file!r}, not a readable safetensors file: {error}") from None
    known = graph.parameters | graph.buffers
    for name in dict.fromkeys(name for node in graph.nodes for name in node.state if name in known):
        if name not in weights:
            if name in graph.parameters:
                near = get_close_matches(name, weights, n=1) or list(weights)[:1]
                hint = f"; it has {near[0]}" if near else ""
                raise recipe.error("model.weights", f"found {file!r}, which lacks the parameter {name}{hint}")
        elif weights.shape(name) != known[name].shape:
            shapes = f"{list(weights.shape(name))}, the model's has {list(known[name].shape)}"
            raise recipe.error("model.weights", f"found {file!r}, whose {name} has shape {shapes}")
    return weights


def _architecture(recipe: LoadedRecipe) -> Callable[[], nn.Module]:
    import transformers  # slow to import, and not needed for a factory

    transformers.logging.set_verbosity_error()
    name = recipe.values.model.architecture
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        near = get_close_matches(name, dir(transformers), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise recipe.error("model.architecture", f"found {name!r}; it takes a model class of transformers{hint}")
    known = model_class.config_class()
    values = dict(recipe.values.model.config)
    for key in values:
        if not hasattr(known, key):  # transformers itself would take any key without a word
            names = sorted(known.to_dict())
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise recipe.error(f"model.config.{key}", f"unknown; {hint}{name} takes {', '.join(names)}")
    if hasattr(known, "use_cache"):
        values.setdefault("use_cache", False)  # past keys and values are of no use in training
    try:
        config = model_class.config_class(**values)
    except Exception as error:  # each configuration class checks in its own way
        raise recipe.error("model.config", f"refused by {name}: {' '.join(str(error).split())}") from None
    _check_sizes(recipe, config)
    return lambda: model_class(config)


def _check_sizes(recipe: LoadedRecipe, config: object) -> None:
    """Sizes of the data that would be an index error deep inside the model."""
    data = recipe.values.data
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and data.sequence_length > positions:
        problem = f"found {data.sequence_length}; the model has {positions} positions: it takes at most that"
        raise recipe.error("data.sequence_length", problem)
    tokens = 256 if data.source == "text" else data.vocabulary_size
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int) and vocabulary < tokens:
        key = "model.config.vocab_size"
        raise recipe.error(key, f"found {vocabulary}; the data has {tokens} different tokens: it takes at least that")


def _factory(recipe: LoadedRecipe) -> Callable[[], nn.Module]:
    name = recipe.values.model.factory
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise recipe.error("model.factory", f"found {name!r}; it takes package.module:function")
    # A user's modules lie where auto3d is called or beside the recipe, the examples in recipes/. The folders stay, for
    # the ranks are forked from here, and a model may import more while it is built or run.
    folders = [os.getcwd(), str(recipe.folder), str(RECIPES.parent)]
    sys.path[:0] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # of the user's module: anything
        raise recipe.error("model.factory", f"found {name!r}, which cannot be imported: {told(error)}") from None
    if not callable(function):
        problem = f"found {name!r}, which is of type {type(function).__name__}; it takes a function"
        raise recipe.error("model.factory", problem)
    arguments = recipe.values.model.arguments
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise recipe.error("model.arguments", f"refused by {name}: {error}") from None
    except ValueError:  # it has no signature, being written in C
        pass

    def build() -> nn.Module:
        module = function(**arguments)
        if not isinstance(module, nn.Module):
            raise recipe.error("model.factory", f"{name} made a {type(module).__name__}; it must make an nn.Module")
        return module

    return build


def told(error: BaseException) -> str:
    """Kind, first line and place of an error of the user's code."""
    error = error.with_traceback(error.__traceback__.tb_next)  # without our own frame
    text, place = str(error), error_line(error)
    if isinstance(error, SyntaxError):  # of a module that never ran
        text, place = error.msg, f" at {error.filename}, line {error.lineno}"
    words = next((line for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}{': ' if words else ''}{words}{place}"

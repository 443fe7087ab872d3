"""Recipe -> the user's model, unmodified: how to build it, and its initial weights."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from launch.recipe import RECIPES, LoadedRecipe

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from their configuration; nothing is ever downloaded


def build_function(recipe: LoadedRecipe) -> Callable[[], nn.Module]:
    """A function that builds the recipe's model; raises RecipeError if there is no such model."""
    if recipe.values.model.factory is not None:
        return _factory(recipe)
    return _architecture(recipe)


class Weights(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, recipe: LoadedRecipe) -> None:
        try:
            self._file = safe_open(recipe.values.model.weights, framework="pt")
        except SafetensorError as error:
            raise recipe.error("model.weights", f"not a safetensors file: {error}") from None
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
    folders = [
        os.getcwd(),
        str(RECIPES.parent),
    ]  # a user's own package lies beside the recipe, the examples in recipes/
    sys.path[:0] = folders
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise recipe.error("model.factory", f"found {name!r}, which cannot be imported: {error}") from None
    finally:
        del sys.path[: len(folders)]

    def build() -> nn.Module:
        module = function(**recipe.values.model.arguments)
        if not isinstance(module, nn.Module):
            raise recipe.error("model.factory", f"{name} made a {type(module).__name__}; it must make an nn.Module")
        return module

    try:
        with torch.device("meta"):
            build()
    except TypeError as error:
        raise recipe.error("model.arguments", f"refused by {name}: {error}") from None
    return build

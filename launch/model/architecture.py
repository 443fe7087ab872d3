"""Recipe -> a model class of transformers and its configuration, whose keys are all checked."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from auto3d.data import SEQUENCE_KINDS, DataSettings
from auto3d.errors import InputError
from launch.model.config_keys import (
    IMPLEMENTATIONS,
    OF_CHECKPOINTS,
    class_inside,
    keys_of,
    of_generation,
    sub_configurations,
    undeclared_keys,
    without_checkpoint_keys,
)
from launch.recipe.data import data_settings
from launch.recipe.load import LoadedRecipe

_TYPO = 0.9  # names that are at least this similar are taken for a typing error


def architecture(recipe: LoadedRecipe) -> Callable[[], nn.Module]:
    """A function that builds the recipe's model; raises RecipeError if there is no such model or configuration."""
    name = recipe.values.model.architecture
    assert name is not None
    try:
        import transformers  # it is slow to import, and a factory does without it

        transformers.logging.set_verbosity_error()
        model_class: type[Any] | None = getattr(transformers, name, None)
    except ImportError as error:  # a package that it needs is missing
        raise InputError(f"transformers cannot be imported: {error}; `make setup` installs what it needs") from None
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        near = get_close_matches(name, dir(transformers), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise recipe.error("model.architecture", f"found {name!r}; it takes a model class of transformers{hint}")
    config = _configuration(recipe, model_class)
    data = data_settings(recipe.values)
    _check_arguments(recipe, model_class, data)
    _check_sizes(recipe, config, data)
    return lambda: model_class(config)


def base_prefix(recipe: LoadedRecipe) -> str:
    """The name under which a model class of transformers has the model without its head; empty for other models."""
    name = recipe.values.model.architecture
    if name is None:
        return ""
    import transformers

    return getattr(getattr(transformers, name), "base_model_prefix", "")


def unset_key(recipe: LoadedRecipe, message: str) -> str | None:
    """A key of the configuration that has no value and that ``message``, an error of the model's code, names."""
    import transformers

    model_class = getattr(transformers, recipe.values.model.architecture or "", None)
    if model_class is None:
        return None
    config, known = _configuration(recipe, model_class), keys_of(model_class.config_class)
    return next((word for word in re.findall(r"\w+", message) if word in known and not _has(config, word)), None)


def _has(config: Any, key: str) -> bool:
    return getattr(config, key, None) is not None


# The configuration


def _configuration(recipe: LoadedRecipe, model_class: type[Any]) -> Any:
    given, config_class = deepcopy(recipe.values.model.config), model_class.config_class  # it may change nested values
    _check_keys(recipe, "model.config", config_class, given, model_class.__name__)
    keys = without_checkpoint_keys(config_class, given)
    _check_implementations(recipe, model_class, keys)
    values = _declared_names(config_class, keys)
    try:
        config = config_class(**_over(_stored_configuration(recipe, model_class), values))
    except Exception as error:  # each configuration class checks in its own way
        problem = f"refused by {model_class.__name__}: {' '.join(str(error).split())}"
        raise recipe.error("model.config", problem) from None
    _check_kept(recipe, config, keys)
    for part, part_keys in _with_sub_configurations(config, keys):
        if hasattr(part, "use_cache") and "use_cache" not in part_keys:
            part.use_cache = False  # training does not use past keys and values
    return config


def _stored_configuration(recipe: LoadedRecipe, model_class: type[Any]) -> dict[str, Any]:
    """The configuration in the folder of the recipe's weights; empty if there is none, or if it is another model's."""
    folder = recipe.values.model.weights
    if folder is None or not Path(folder, "config.json").is_file():
        return {}
    try:
        stored, _ = model_class.config_class.get_config_dict(folder)
    except Exception as error:  # transformers raises several types for a damaged file
        raise recipe.error("model.weights", f"found {folder!r}: {' '.join(str(error).split())}") from None
    if stored.get("model_type") != model_class.config_class.model_type:
        problem = f"found {folder!r}, the weights of a {stored.get('model_type')}; {model_class.__name__} takes those "
        raise recipe.error("model.weights", f"{problem}of a {model_class.config_class.model_type}")
    kept = without_checkpoint_keys(model_class.config_class, stored)
    return _declared_names(model_class.config_class, {k: v for k, v in kept.items() if k != "model_type"})


def _over(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``stored`` with the keys of ``given``, also inside configurations within them."""
    merged = dict(stored)
    for key, value in given.items():
        inner = merged.get(key)
        merged[key] = _over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _check_keys(recipe: LoadedRecipe, where: str, config_class: type[Any], given: Mapping[str, Any], name: str) -> None:
    """Raise RecipeError for a key that neither ``config_class`` nor its models know: transformers would keep it.

    A published configuration, which has the version of transformers that wrote it, may have keys of its author's own
    code. Of its unknown keys only typing errors are refused.
    """
    known = keys_of(config_class)
    inside = sub_configurations(config_class)
    published = "transformers_version" in recipe.values.model.config
    undeclared = undeclared_keys(config_class) if given.keys() - known - {"model_type", *OF_CHECKPOINTS} else set()
    for key, value in given.items():
        if key in known or key in undeclared or key in OF_CHECKPOINTS:
            pass
        elif key != "model_type":
            near = get_close_matches(str(key), known | undeclared, n=1, cutoff=_TYPO if published else 0.6)
            if published and not near:
                continue
            hint = f"did you mean {near[0]}? " if near else ""
            raise recipe.error(f"{where}.{key}", f"unknown; {hint}{name} takes {', '.join(sorted(known))}")
        elif value != config_class.model_type:
            raise recipe.error(
                f"{where}.{key}", f"found {value!r}; {name} has {config_class.model_type!r}: leave it out"
            )
        other = config_class.attribute_map.get(key, key)
        if other != key and given.get(other, value) != value:
            raise recipe.error(f"{where}.{key}", f"found {value!r}; it is {other}, which is {given[other]!r}: give one")
        if key not in inside or value is None:
            continue
        if not isinstance(value, dict):
            raise recipe.error(f"{where}.{key}", f"found {value!r}; it takes the keys of a configuration")
        inner = class_inside(inside[key], value)
        if inner is None:
            problem = f"found {value.get('model_type')!r}; it takes a model type of transformers, such as llama"
            raise recipe.error(f"{where}.{key}.model_type", problem)
        _check_keys(recipe, f"{where}.{key}", inner, value, inner.__name__)


def _declared_names(config_class: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys under their declared names: transformers would set an alias too late."""
    declared = {item.name for item in fields(config_class)} if is_dataclass(config_class) else set()
    names = {key: config_class.attribute_map.get(key, key) for key in given}
    return {key if key in declared else names[key]: value for key, value in given.items()}


def _check_kept(recipe: LoadedRecipe, config: Any, given: Mapping[str, Any]) -> None:
    """Make sure that no key is lost: transformers drops keys of generation, and a class may override some keys.

    Raises RecipeError for a key that has no effect.
    """
    for key, value in given.items():
        if key in IMPLEMENTATIONS or value is None or isinstance(value, (dict, list)):  # null leaves the choice open
            continue
        if not hasattr(config, key) and of_generation(key):
            setattr(config, key, value)  # a model's code may still read it
        if getattr(config, key, value) == value:
            continue
        rest = {name: other for name, other in given.items() if name != key}
        if (
            type(config)(**_declared_names(type(config), rest)).to_dict()
            == type(config)(**_declared_names(type(config), given)).to_dict()
        ):
            problem = f"found {value!r}, which changes nothing: {type(config).__name__} sets {getattr(config, key)!r}"
            raise recipe.error(f"model.config.{key}", f"{problem}; leave it out")


def _with_sub_configurations(config: Any, given: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """``config`` and the configurations inside it, each with the keys that the recipe gives for it."""
    yield config, given
    for key in sub_configurations(type(config)):
        inner = getattr(config, key, None)
        if inner is not None:
            yield from _with_sub_configurations(inner, given.get(key) or {})


def _check_implementations(recipe: LoadedRecipe, model_class: type[Any], given: Mapping[str, Any]) -> None:
    for key, choices in zip(IMPLEMENTATIONS, (attentions(model_class), experts(model_class)), strict=True):
        wanted = given.get(key)
        for value in wanted.values() if isinstance(wanted, dict) else [wanted]:
            if value is not None and value not in choices:
                takes = (
                    f"it takes {', '.join(choices)}" if choices else "its experts have one implementation: leave it out"
                )
                raise recipe.error(f"model.config.{key}", f"found {value!r}; of {model_class.__name__} {takes}")


def attentions(model_class: type[Any]) -> list[str]:
    """The implementations of attention that the class supports on this machine."""
    from transformers.utils import is_flash_attn_2_available

    supported = {
        "sdpa": model_class._supports_sdpa,
        "flex_attention": model_class._supports_flex_attn,
        "flash_attention_2": model_class._supports_flash_attn and is_flash_attn_2_available(),
    }
    return ["eager", *(name for name, present in supported.items() if present)]


def experts(model_class: type[Any]) -> list[str]:
    """The implementations of mixtures of experts that the class supports; empty if there is no choice."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ["eager", *sorted(ALL_EXPERTS_FUNCTIONS.keys())] if model_class._can_set_experts_implementation() else []


# The data


def _check_arguments(recipe: LoadedRecipe, model_class: type[Any], data: DataSettings) -> None:
    """Raise RecipeError for an input or a constant argument that the model's forward does not take."""
    parameters = inspect.signature(model_class.forward).parameters
    known = [name for name in parameters if name != "self"]
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [(f"data.inputs.{name}" if recipe.values.data.inputs else "data.inputs", name) for name in data.inputs]
    for key, name in [*named, *((f"model.forward.{name}", name) for name in recipe.values.model.forward)]:
        near = get_close_matches(name, known, n=1, cutoff=_TYPO if takes_more else 0.6)
        if name in known or (takes_more and not near and key != "data.inputs"):
            continue
        problem = "unknown; " if key != "data.inputs" else f"none given, and the default {name} is unknown; "
        hint = f"did you mean {near[0]}? " if near and key != "data.inputs" else ""
        raise recipe.error(key, f"{problem}{hint}the forward of {model_class.__name__} takes {', '.join(known)}")


def _check_sizes(recipe: LoadedRecipe, config: Any, data: DataSettings) -> None:
    """Raise RecipeError for sizes of the data that would cause an index error deep inside the model."""
    text = _of_text(config)
    vocabulary, positions = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    tokens = {name: field for name, field in data.inputs.items() if field.kind in SEQUENCE_KINDS}
    if tokens and isinstance(positions, int) and data.sequence_length > positions:
        problem = f"found {data.sequence_length}; it must be at most {positions}: the model has {positions} positions"
        raise recipe.error("data.sequence_length", problem)
    if not isinstance(vocabulary, int):
        return
    if tokens and data.num_tokens is not None and vocabulary < data.num_tokens:
        problem = (
            f"found {vocabulary}; it must be at least {data.num_tokens}, the number of different tokens in the data"
        )
        raise recipe.error(_key_of_text(config, text, "vocab_size"), problem)
    for name, field in data.inputs.items():
        if name.endswith("input_ids") and field.largest is not None and field.largest >= vocabulary:
            problem = (
                f"found ids up to {field.largest}; they must be below {vocabulary}, the number of tokens of the model"
            )
            raise recipe.error(f"data.inputs.{name}", problem)
    start = getattr(config, "decoder_start_token_id", None)
    if config.is_encoder_decoder and isinstance(start, int) and start >= vocabulary:
        problem = f"found {start}; the model has {vocabulary} tokens: it takes the id of one, such as 0"
        raise recipe.error("model.config.decoder_start_token_id", problem)


def _of_text(config: Any) -> Any:
    """The configuration that describes tokens: ``config`` itself, or a configuration inside it."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # there are several such parts
        return config


def _key_of_text(config: Any, text: Any, key: str) -> str:
    inside = next((name for name in sub_configurations(type(config)) if getattr(config, name, None) is text), None)
    return f"model.config.{inside}.{key}" if inside else f"model.config.{key}"

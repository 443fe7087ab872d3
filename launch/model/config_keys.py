"""The keys of a configuration of transformers: those that its class takes, and those that only code of models reads."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
# Keys that models read from their configuration, although not every configuration class declares them.
READ_BY_MODELS = (
    *("bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
    *("is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_word_embeddings"),
)
# Keys of a published config.json that describe its checkpoint. They say nothing about a model that is trained here: its
# number format is training.precision, and its weights are not quantized.
OF_CHECKPOINTS = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "quantization_config", "transformers_version"),
    *("name_or_path", "_name_or_path", "_commit_hash"),
)
_FROM_KWARGS = re.compile(r"""kwargs(?:\.pop\(|\.get\(|\[)\s*["'](\w+)["']""")
_READ_BY_CODE = r"""(?<![\w.])(?:{of}\.(\w+)\b(?!\()|getattr\(\s*{of},\s*["'](\w+)["'])"""
_READS = {  # part of a module's name -> reads of a configuration in such a module
    "configuration_": re.compile(_READ_BY_CODE.format(of="self")),
    "modeling_": re.compile(_READ_BY_CODE.format(of=r"(?:self\.)?config")),
}


def keys_of(config_class: type[Any]) -> set[str]:
    """The keys that ``config_class`` takes: declared keys, their aliases, and those that it takes from ``**kwargs``."""
    keys = {*READ_BY_MODELS, *IMPLEMENTATIONS, *config_class.attribute_map, *sub_configurations(config_class)}
    if is_dataclass(config_class):
        keys |= {item.name for item in fields(config_class)}
    for base in inspect.getmro(config_class):
        for name, member in vars(base).items():
            if isinstance(member, property) and member.fset is not None:
                keys.add(name)
            elif name in ("__init__", "__post_init__", "convert_rope_params_to_dict"):
                keys |= _taken_by(member)
    return {name for name in keys if not name.startswith("_")} - {*OF_CHECKPOINTS}


def undeclared_keys(config_class: type[Any]) -> set[str]:
    """Further keys that have an effect: those that the class sets, keys of generation, and those that the code reads.

    It is the code of the class and of the models beside it, as in ``getattr(config, "head_dim", …)``.
    """
    import transformers

    generation = {name for name in transformers.GenerationConfig().to_dict() if not name.startswith("_")}
    return (_made_by(config_class) | generation | _read_by_code(config_class)) - {*OF_CHECKPOINTS}


def of_generation(key: str) -> bool:
    """Whether ``key`` is a key of generation, which transformers drops from configurations."""
    import transformers

    return not key.startswith("_") and key in transformers.GenerationConfig().to_dict()


def sub_configurations(config_class: type[Any]) -> Mapping[str, Any]:
    """The keys that hold another configuration, such as text_config, and how transformers describes each key."""
    return getattr(config_class, "sub_configs_defaults", None) or config_class.sub_configs


def class_inside(spec: Any, values: Mapping[str, Any]) -> type[Any] | None:
    """The class of a configuration inside another; None if it is not known."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    config_class = getattr(spec, "config_class", spec)
    if isinstance(config_class, type) and issubclass(config_class, PreTrainedConfig):
        return config_class
    try:
        return CONFIG_MAPPING[values.get("model_type", getattr(spec, "model_type", None))]
    except KeyError:
        return None


def without_checkpoint_keys(config_class: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` without the keys that describe a checkpoint, also inside configurations within it."""
    inside = sub_configurations(config_class)
    kept = {key: value for key, value in given.items() if key not in OF_CHECKPOINTS}
    for key in kept.keys() & inside.keys():
        inner = class_inside(inside[key], kept[key]) if isinstance(kept[key], dict) else None
        if inner is not None:
            kept[key] = without_checkpoint_keys(inner, kept[key])
    return kept


def unquantized(given: Mapping[str, Any]) -> str | None:
    """What becomes of quantized weights that the configuration ``given`` describes; None if it describes none."""
    if not given.get("quantization_config"):
        return None
    return "model.config.quantization_config is ignored: it describes stored weights, and training quantizes none"


def _made_by(config_class: type[Any]) -> set[str]:
    """The keys that the class sets itself, which its saved configurations therefore hold."""
    try:
        return {name for name in vars(config_class()) if not name.startswith("_")}
    except Exception:  # not all of its arguments have defaults
        return set()


def _taken_by(function: Callable) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
        popped = _FROM_KWARGS.findall(inspect.getsource(function))
    except (ValueError, OSError, TypeError):  # the function has no Python source
        return set()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        *popped,
        *(parameter.name for parameter in parameters if parameter.kind not in variadic and parameter.name != "self"),
    }


def _read_by_code(config_class: type[Any]) -> set[str]:
    """The attributes that the modules of the class, and of the models beside it, read from the configuration.

    A module may hold models of several configurations, so an attribute of a configuration inside this one is not its
    own. Methods and other attributes of the class are no keys.
    """
    attributes: set[str] = set()
    for base in inspect.getmro(config_class):
        for part, reads in _READS.items():
            module = sys.modules.get(base.__module__.replace("configuration_", part))
            if "configuration_" in base.__module__ and module is not None:
                attributes |= {first or other for first, other in reads.findall(inspect.getsource(module))}
    for key, spec in sub_configurations(config_class).items():
        inner = class_inside(spec, {})
        attributes -= keys_of(inner) | _read_by_code(inner) if inner is not None else {key}
    return {name for name in attributes if not name.startswith("_") and not hasattr(config_class, name)}

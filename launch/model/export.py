"""A checkpoint -> a folder that Hugging Face's from_pretrained loads; without ranks, one file in memory at a time."""

import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from json import dumps
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import nn

from auto3d.capture.skeleton import skeleton
from auto3d.errors import InputError
from auto3d.runtime.checkpoint.format import CheckpointError
from auto3d.runtime.checkpoint.reading import CheckpointReader
from auto3d.runtime.weights.files import INDEX, Weights
from auto3d.runtime.weights.materialize import materialize
from launch.model.architecture import base_prefix
from launch.model.build import build_function
from launch.recipe.load import LoadedRecipe

LARGEST_FILE_BYTES = 5 * 10**9  # Hugging Face's own limit
WEIGHTS, ADAPTER = "model{suffix}.safetensors", "adapter_model{suffix}.safetensors"  # patterns of files' names
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "preprocessor_config.json"),
)


def export(recipe: LoadedRecipe, source: Path, target: Path, *, largest_bytes: int = LARGEST_FILE_BYTES) -> str:
    """Write the weights of the checkpoint in ``source`` to the new folder ``target``; returns a line about it.

    A model of transformers gets its configuration and, where there are some, the files of its tokenizer; a PeftModel
    gets its adapter alone, as its save_pretrained writes it; of another module there are only the weights. Raises
    InputError if ``target`` exists, or if the checkpoint belongs to another model.
    """
    if target.exists():
        raise InputError(f"{target}: it exists; give the name of a new folder")
    with CheckpointReader(source) as reader:
        build = build_function(recipe)
        model = skeleton(build).model
        wanted, pattern, write_rest, what = _kind(recipe, model)
        unfinished = target.with_name(f".{target.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_rest(unfinished)
        tensor_of = _tensors(recipe, build, model, reader, source)
        # peft reads one file only.
        _write(wanted, tensor_of, pattern, unfinished, sys.maxsize if pattern == ADAPTER else largest_bytes)
        unfinished.rename(target)
    return f"{target}: {what}, after iteration {reader.checkpoint.iteration}"


Kind = tuple[dict[str, torch.Tensor], str, Callable[[Path], object], str]


def _kind(recipe: LoadedRecipe, model: nn.Module) -> Kind:
    """The tensors to write by their names in the files, a pattern of the files' names, what else to write, and a word.

    The tensors are ``model``'s, on the meta device.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import PreTrainedModel

    if isinstance(model, PeftModel):
        adapters = list(model.peft_config)
        if len(adapters) != 1:
            raise InputError(f"model.factory: its model has {len(adapters)} adapters; auto3d export takes one")
        tensors = get_peft_model_state_dict(model, state_dict=model.state_dict(keep_vars=True))
        config = deepcopy(model.peft_config[adapters[0]])
        config.inference_mode = True

        def write_configuration(folder: Path) -> None:
            config.save_pretrained(str(folder))

        return tensors, ADAPTER, write_configuration, "the adapter, for PeftModel"
    tensors = _untied(model)
    if not isinstance(model, PreTrainedModel):
        return tensors, WEIGHTS, lambda folder: None, "the weights alone: it has no configuration"

    def write_rest(folder: Path) -> None:
        config = deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], model.dtype
        if "use_cache" not in recipe.values.model.config and hasattr(config, "use_cache"):
            config.use_cache = True  # training has switched it off
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            for source in filter(None, (recipe.values.data.tokenizer, recipe.values.model.weights)):
                if (file := Path(source, name)).is_file() and not (folder / name).exists():
                    shutil.copyfile(file, folder / name)

    return tensors, WEIGHTS, write_rest, f"{type(model).__name__} for from_pretrained"


def _untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and stored buffers, each once, under the name that from_pretrained looks for."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or [])
    chosen: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name not in ignored and (id(tensor) not in chosen or chosen[id(tensor)] in tied):
            chosen[id(tensor)] = name
    return {name: tensors[name] for name in chosen.values()}


def _tensors(
    recipe: LoadedRecipe, build: Callable[[], nn.Module], model: nn.Module, reader: CheckpointReader, source: Path
) -> Callable[[Collection[torch.Tensor]], list[torch.Tensor]]:
    """A function that gives the values of tensors of ``model``: trained, or initial where the loss lacks them."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    all_names = {name for group in names.values() for name in group}
    stored = {name.removeprefix("model.") for name in reader.checkpoint.tensors if name.startswith("model.")}
    registered = all_names | {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if unknown := sorted(stored - registered):
        raise CheckpointError(f"{source}: it belongs to another model: it has {unknown[0]}, which this model lacks")

    def values(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
        stored_names = {id(tensor): next((n for n in names[id(tensor)] if n in stored), None) for tensor in tensors}
        unused = [names[key][0] for key, name in stored_names.items() if name is None]
        initial = materialize(build, unused, seed=int(reader.checkpoint.learnt["seed"]), state=_given(recipe, unused))
        result = []
        for tensor in tensors:
            name = stored_names[id(tensor)]
            value = initial[names[id(tensor)][0]] if name is None else reader.whole(f"model.{name}")
            if value.shape != tensor.shape:
                shapes = f"{list(value.shape)} in it, and {list(tensor.shape)} in this model"
                raise CheckpointError(f"{source}: it belongs to another model: {name} has shape {shapes}")
            result.append(value)
        return result

    return values


def _given(recipe: LoadedRecipe, names: Collection[str]) -> Mapping[str, torch.Tensor] | None:
    """The recipe's initial weights if they have the tensors called ``names``."""
    if recipe.values.model.weights is None or not names:
        return None
    weights = Weights(recipe.values.model.weights)
    weights.name_as(dict.fromkeys(names), base_prefix(recipe))
    return weights if all(name in weights for name in names) else None


def _write(
    wanted: Mapping[str, torch.Tensor],
    tensors_of: Callable[[Collection[torch.Tensor]], list[torch.Tensor]],
    pattern: str,
    folder: Path,
    largest_bytes: int,
) -> None:
    """Write ``wanted`` in files of at most ``largest_bytes``, and an index if there are several."""
    split = split_state_dict_into_shards_factory(
        dict(wanted), get_storage_size=_bytes, filename_pattern=pattern, max_shard_size=largest_bytes
    )
    for file, names in split.filename_to_tensors.items():
        values = dict(zip(names, tensors_of([wanted[name] for name in names]), strict=True))
        save_file(values, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index: dict[str, Any] = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(dumps(index, indent=2, sort_keys=True) + "\n")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes

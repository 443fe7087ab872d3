"""Recipes: YAML files that users write, which are read, merged and checked against the schema.

``load`` refuses what it does not understand in one line: the file, the key, the value and what is accepted.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache, cached_property
from glob import glob
from json import loads
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from auto3d.errors import ProblemKind
from auto3d.runtime.settings import OPTIMIZERS
from auto3d.search.axes import DEFAULTS_OF_SHARDS
from auto3d.words import counted
from launch.peers.limits import DEEPSPEED
from launch.recipe.cluster_schema import AcceleratorRecipe, LinkRecipe
from launch.recipe.data_schema import FOLDERS, INPUT_KEYS, SOURCES, TOKEN_KINDS, InputRecipe
from launch.recipe.error import COMMAND_LINE, RecipeError
from launch.recipe.keys import accepted, accepts, group_schema, groups, inner_schema, schema_of
from launch.recipe.links import SIDES, AssumedLink, complete_links
from launch.recipe.overrides import KeyPath, file_names, nested, read_overrides, read_path, replaced, write_path
from launch.recipe.schema import Recipe
from launch.recipe.schema_key import AUTO
from launch.recipe.shipped import RECIPES

_GROUPS = ", ".join(groups())
_ON_RUNS = ("status", "logs", "cancel", "resume")  # they take paper-ITEM, the name of an item's runs
NAMED_GROUPS = {"model": "models", "cluster": "clusters"}  # group -> folder of recipes/ with files that it may name


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that has passed the checks of ``load``, and the source of each of its values."""

    name: str
    values: Recipe
    written: str  # the recipe's name as the user wrote it
    overrides: tuple[str, ...]
    folder: Path  # folder of the user's file, which may hold modules of their own
    assumed_links: tuple[AssumedLink, ...]  # figures of links that the recipe left out and ``values`` has
    _sources: "_Sources"
    paper: tuple[str, ...] = ()  # of a paper's row: the words after `auto3d paper`, ITEM and the user's overrides

    def error(self, key: str, problem: str, *, kind: ProblemKind = "other") -> RecipeError:
        """An error about ``key`` for checks after ``load``; its message names the file that set the key."""
        return RecipeError(self._sources.of(key), key, problem, kind=kind)

    @property
    def code_folders(self) -> list[str]:
        """Folders of the modules of a user's factory: the working folder, the recipe's, and the parent of recipes/."""
        return list(dict.fromkeys([os.getcwd(), str(self.folder), str(RECIPES.parent)]))

    def accelerator(self, key: str, name: str) -> tuple[Path, AcceleratorRecipe]:
        """The file of recipes/accelerators/ that ``name``, the value of ``key``, stands for, and its content."""
        file = _find(self._sources.of(key), name, folder="accelerators", key=key)
        return file, _read_accelerator(file)

    def overrides_of(self, group: str) -> list[str]:
        return [override for override in self.overrides if re.split(r"[.=[]", override, maxsplit=1)[0] == group]

    def command(self, verb: str, *options: str, without: str = "") -> str:
        """The shell command that runs ``verb`` on this recipe as the user wrote it.

        Overrides of the group ``without`` are left out. Overrides among the ``options`` replace the user's own. A row
        of a paper has no recipe that commands take: its item is predicted for `plan`, and else measured.
        """
        dropped = self.overrides_of(without)
        kept = [override for override in self.overrides if override not in dropped]
        changes = [option for option in options if "=" in option and not option.startswith("-")]
        others = [option for option in options if option not in changes]
        on_path = shutil.which("auto3d") or Path(sys.argv[0]).name != "auto3d"
        program = "auto3d" if on_path else sys.argv[0]
        if self.paper and verb not in _ON_RUNS:
            item, *kept = self.paper
            runs = [] if verb == "plan" else ["--run"]
            return shlex.join([program, "paper", item, *replaced(kept, changes), *runs, *others])
        return shlex.join([program, verb, self.written, *replaced(kept, changes), *others])

    def changed(self, overrides: Sequence[str]) -> "LoadedRecipe":
        """This recipe with further ``overrides``, which replace the user's own overrides of the same keys."""
        return load(self.written, replaced(self.overrides, overrides))

    def follow_up(self, verb: str, *options: str) -> str:
        """The shell command that runs ``verb`` on the last run of this recipe, whatever its overrides were."""
        return replace(self, overrides=()).command(verb, *options)

    @cached_property  # it takes 20 ms, and every trial stores it
    def text(self) -> str:
        """The whole recipe as YAML, with defaults; ``load`` reads it back."""
        return OmegaConf.to_yaml(OmegaConf.structured(self.values))

    @property
    def cluster_name(self) -> str:
        """The name of the file that describes the cluster, which may be the recipe itself."""
        return self._sources.named.get("cluster", self._sources.file).stem

    @property
    def shipped(self) -> bool:
        """Whether the recipe is a file of recipes/, which `make` finds by its name."""
        return self.folder in (Path("recipes").resolve(), RECIPES)


def load(name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe called ``name`` (of recipes/, or a path) with ``overrides`` such as ``training.global_batch=32``.

    Raises RecipeError for an unknown key, a value of the wrong type or out of range, and keys that contradict each
    other.
    """
    file = _find(COMMAND_LINE, name, folder="", key="recipe")
    return _loaded(file.stem, name, file, read_yaml(file), overrides)


def load_groups(name: str, file: Path, base: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe ``name`` that ``file`` declares among other things: groups, or the name of another recipe."""
    if isinstance(base, str):
        base = read_yaml(_find(file, base, folder="", key="base"))
    return _loaded(name, name, file, dict(base), overrides)


def _loaded(name: str, written: str, file: Path, raw: dict[Any, Any], overrides: Sequence[str]) -> LoadedRecipe:
    recipe, sources = _typed(file, raw, read_overrides(overrides))
    _check_values(recipe, sources)
    _check_together(recipe, sources)
    files = _name_accelerators(recipe, sources)
    assumed = complete_links(recipe.cluster, lambda number, _: _read_accelerator(files[number]))
    return LoadedRecipe(name, recipe, written, tuple(overrides), file.resolve().parent, assumed, sources)


def data_files(recipe: Recipe) -> list[str]:
    """The files that match data.files, in order; empty stands for the source code of Python's standard library."""
    return [file for pattern in recipe.data.files for file in sorted(glob(pattern))]


# Reading


def read_yaml(file: Path) -> dict[Any, Any]:
    """The mapping that a YAML file holds; raises RecipeError if it holds none."""
    try:
        raw = OmegaConf.to_container(OmegaConf.load(file))
    except OSError as error:
        raise RecipeError(file, "", error.strerror or f"holds no keys; a recipe has the groups {_GROUPS}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", error)).splitlines()[0]
        raise RecipeError(file, "", f"not YAML{where}: {problem}") from None
    except (OmegaConfBaseException, RecursionError) as error:  # a type of key or value that no recipe has
        raise RecipeError(file, "", f"not readable: {str(error).splitlines()[0]}") from None
    if not isinstance(raw, dict):
        raise RecipeError(file, "", f"holds a list; a recipe has the groups {_GROUPS}")
    return raw


def _typed(file: Path, raw: dict[Any, Any], overrides: Mapping[KeyPath, Any]) -> tuple[Recipe, "_Sources"]:
    """Merge the schema's defaults, named files, the recipe and the overrides, and check each against the schema.

    Overrides that name a file come first, overrides that set items of lists last.
    """
    names = file_names(overrides)
    items = {path: value for path, value in overrides.items() if any(isinstance(part, int) for part in path)}
    rest = {path: value for path, value in overrides.items() if path not in items}
    keys = {path: value for path, value in rest.items() if len(path) > 1 or path[0] not in names}
    sources = _Sources(file, overrides)
    defaults = _recipe_schema()
    typed = {group: None if defaults[group] is None else _defaults(group) for group in groups()}
    for where, layer in ((file, raw), (COMMAND_LINE, names), (COMMAND_LINE, nested(keys))):
        for group, content in layer.items():
            if group not in groups():
                raise _unknown(where, str(group), groups())
            if typed[group] is None and content is None:
                continue  # an optional group that is explicitly left out
            if group in NAMED_GROUPS and isinstance(content, str):
                sources.named[group] = _find(where, content, folder=NAMED_GROUPS[group], key=group)
                typed[group] = _merge(sources.named[group], group, _defaults(group), read_yaml(sources.named[group]))
                continue
            if not isinstance(content, dict):
                raise RecipeError(where, group, f"found {content!r}; it takes the keys of this group")
            typed[group] = _merge(where, group, typed[group] or _defaults(group), content)
    for path, value in items.items():
        _set_item(typed, path, value)
    whole = OmegaConf.create({group: present for group, present in typed.items() if present is not None})
    try:
        OmegaConf.resolve(whole)  # this comes last, because ${…} may refer to any key
        recipe = OmegaConf.to_object(OmegaConf.merge(defaults, whole))
        assert isinstance(recipe, Recipe)
        return recipe, sources
    except OmegaConfBaseException as error:
        full_key = str(error.full_key or "")
        raise RecipeError(sources.of(full_key), full_key, str(error).splitlines()[0]) from None
    except RecursionError:
        raise RecipeError(file, "", "a value refers to itself, or is nested too deeply") from None


def _name_accelerators(recipe: Recipe, sources: "_Sources") -> dict[int, Path]:
    """Kind of nodes -> file of its accelerator, by whose name the recipe calls it from here on."""
    files = {}
    for number, kind in enumerate((recipe.cluster, *recipe.cluster.more)):
        if kind.accelerator is None:
            continue
        key = f"cluster.more[{number - 1}].accelerator" if number else "cluster.accelerator"
        files[number] = _find(sources.of(key), kind.accelerator, folder="accelerators", key=key)
        if kind.accelerator.casefold() == files[number].stem.casefold():
            kind.accelerator = files[number].stem
    return files


def _read_accelerator(file: Path) -> AcceleratorRecipe:
    values: DictConfig = OmegaConf.structured(AcceleratorRecipe)
    for item, value in read_yaml(file).items():
        try:
            values = _merged(values, {item: value})
        except (OmegaConfBaseException, TypeError) as error:
            if isinstance(error, ConfigKeyError):
                schema = LinkRecipe if item in SIDES else AcceleratorRecipe
                raise _unknown(file, str(error.full_key), [declared.name for declared in fields(schema)]) from None
            problem = f"found {value!r}; it takes {accepted(AcceleratorRecipe, str(item))}"
            raise RecipeError(file, str(item), problem) from None
    accelerator = OmegaConf.to_object(values)
    assert isinstance(accelerator, AcceleratorRecipe)
    _check_group(accelerator, "", _Sources(file, {}))
    for item in ("matrix_efficiency", "half_gflops"):
        value = getattr(accelerator, item)
        if isinstance(value, dict) and value.keys() != accelerator.peak_tflops.keys():
            problem = f"found {value!r}; it takes {accepted(AcceleratorRecipe, item)}"
            precisions = ", ".join(accelerator.peak_tflops) or "none"
            raise RecipeError(file, item, f"{problem}, which has {precisions}")
    for side in SIDES:
        link: LinkRecipe | None = getattr(accelerator, side)
        if link is not None and None in (link.gbit_per_s, link.latency_us):
            raise RecipeError(file, side, "lacks gbit_per_s or latency_us; a usual link has both")
    return accelerator


@cache  # it takes 5 ms; merging copies it
def _defaults(group: str) -> DictConfig:
    return OmegaConf.structured(group_schema(group))


@cache
def _recipe_schema() -> DictConfig:
    return OmegaConf.structured(Recipe)


def _merge(where: Path | str, group: str, present: DictConfig, layer: dict[Any, Any]) -> DictConfig:
    with suppress(OmegaConfBaseException, TypeError, RecursionError):
        return _merged(present, layer)
    for name, value in layer.items():  # key by key, to say which is wrong
        full_key = f"{group}.{name}"
        try:
            present = _merged(present, {name: value})
        except (OmegaConfBaseException, TypeError, RecursionError) as error:
            full_key = f"{group}.{_wrong_key(group_schema(group), name, value, error)}"
            wrong_value = OmegaConf.select(OmegaConf.create({group: layer}), full_key)
            raise _refused(where, full_key, wrong_value, error) from None
    return present


def _wrong_key(schema: type, name: str, value: Any, error: Exception) -> str:
    """The key, in ``schema``, of what is wrong with ``value`` of the key ``name``."""
    item_schema = inner_schema(schema, name) if isinstance(value, list) else None
    for number, item in enumerate(value if item_schema else ()):  # the error does not say which item it is
        if not isinstance(item, dict):
            return f"{name}[{number}]"
        try:
            OmegaConf.merge(OmegaConf.structured(item_schema), item)
        except OmegaConfBaseException as wrong:
            return f"{name}[{number}].{wrong.full_key}" if wrong.full_key else f"{name}[{number}]"
    full_key = error.full_key if isinstance(error, OmegaConfBaseException) else None
    return full_key or name


def _merged(present: DictConfig, layer: dict[Any, Any]) -> DictConfig:
    merged = OmegaConf.merge(present, layer)
    assert isinstance(merged, DictConfig)
    return merged


def _set_item(typed: dict[str, DictConfig | None], path: KeyPath, value: Any) -> None:
    """Apply an override of one item of a list; the list must have that item."""
    group = str(path[0])
    place, index = next((place, part) for place, part in enumerate(path) if isinstance(part, int))
    if group not in groups():
        raise _unknown(COMMAND_LINE, group, groups())
    full_key, list_key = write_path(path), write_path(path[:place])
    present = deepcopy(typed[group] or _defaults(group))
    items = OmegaConf.select(present, write_path(path[1:place])) if place > 1 else None
    if not isinstance(items, ListConfig) or index >= len(items):
        size = f"has {counted(len(items), 'item')}" if isinstance(items, ListConfig) else "is not a list"
        problem = f"there is no such item; {list_key} {size}: give the whole list, as in {list_key}=[…]"
        raise RecipeError(COMMAND_LINE, full_key, problem)
    try:
        OmegaConf.update(present, full_key.removeprefix(f"{group}."), value)
    except (OmegaConfBaseException, TypeError) as error:
        raise _refused(COMMAND_LINE, full_key, value, error) from None
    typed[group] = present


def _refused(where: Path | str, full_key: str, value: Any, error: Exception) -> RecipeError:
    if isinstance(error, ConfigKeyError):
        return _unknown(where, full_key, [item.name for item in fields(schema_of(full_key)[0])])
    return RecipeError(where, full_key, f"found {value!r}; it takes {accepted(*schema_of(full_key))}")


_LEAST = " (of at least these lines: `peak_tflops: {bfloat16: 989}`, `memory_gib: 76`, `memory_gb_per_s: 3350`)"


def _find(where: Path | str, name: str, *, folder: str, key: str) -> Path:
    """The file ``name``: a path, or a name in recipes/``folder`` of this folder or of the installation.

    A name may be written in any case, if only one file has it then.
    """
    folders = [Path("recipes") / folder, RECIPES / folder]
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if path.suffix in (".yaml", ".yml") and path.is_file():
            return path
    files = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    in_any_case = [stem for stem in files if stem.casefold() == name.casefold()]
    if len(in_any_case) == 1:
        return files[in_any_case[0]]
    known = sorted(files)
    folded = {stem.casefold(): stem for stem in known}
    near = get_close_matches(name.casefold(), folded, n=1)
    hint = f"; did you mean {folded[near[0]]}?" if near else ""
    file = f"a .yaml file{_LEAST if folder == 'accelerators' else ''}"
    raise RecipeError(where, key, f"there is no {name!r}; give {file}, or one of {', '.join(known)}{hint}")


def _unknown(where: Path | str, full_key: str, known: Sequence[str]) -> RecipeError:
    near = get_close_matches(full_key.split(".")[-1], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return RecipeError(where, full_key, f"unknown; {hint}it takes {', '.join(known)}")


class _Sources:
    """The sources of values, which messages name: files, or the command line."""

    def __init__(self, file: Path, overrides: Mapping[KeyPath, Any]) -> None:
        self.file = file
        self.named: dict[str, Path] = {}
        self._overrides = overrides

    def of(self, full_key: str) -> Path | str:
        key, names = read_path(full_key), file_names(self._overrides)
        for path in self._overrides:
            if path[: len(key)] == key or (key[: len(path)] == path and not (len(path) == 1 and path[0] in names)):
                return COMMAND_LINE
        return self.named.get(str(key[0]), self.file) if key else self.file


# Checking


def _check_values(recipe: Recipe, sources: _Sources) -> None:
    """Check each value against the choices and limits of its key."""
    for group in groups():
        if getattr(recipe, group) is not None:
            _check_group(getattr(recipe, group), group, sources)
    for name, description in recipe.data.inputs.items():
        _check_group(description, f"data.inputs.{name}", sources)
    if len(recipe.training.betas) != 2:
        full_key = "training.betas"
        raise RecipeError(sources.of(full_key), full_key, f"found {recipe.training.betas}; it takes two numbers")


def _check_group(holder: Any, prefix: str, sources: _Sources) -> None:
    for item in fields(holder):
        value = getattr(holder, item.name)
        inside = [value] if is_dataclass(value) else value if isinstance(value, list) else []
        for number, inner in enumerate(inside):
            if is_dataclass(inner):
                where = f"{prefix}.{item.name}{'' if inner is value else f'[{number}]'}"
                _check_group(inner, where, sources)
        if is_dataclass(value) or (inside and is_dataclass(inside[0])):
            continue
        if not accepts(type(holder), item.name, value):
            full_key = f"{prefix}.{item.name}".lstrip(".")
            problem = f"found {value!r}; it takes {accepted(type(holder), item.name)}"
            raise RecipeError(sources.of(full_key), full_key, problem)


def _check_together(recipe: Recipe, sources: _Sources) -> None:
    """Check values against each other, and files against the disk."""
    model = recipe.model
    if model.architecture is None and model.factory is None and model.layers is None and model.weights is not None:
        model.architecture = _architecture_of(model.weights, sources)
    given = [name for name in ("architecture", "factory", "layers") if getattr(model, name) is not None]
    if len(given) != 1:
        names = " and ".join(given) or "none of them"
        raise RecipeError(sources.of("model"), "model", f"found {names}; it takes one of architecture, factory, layers")
    for name, of, other in (("arguments", "factory", "architecture"), ("config", "architecture", "factory")):
        if getattr(model, name) and getattr(model, of) is None:
            full_key = f"model.{name}"
            raise RecipeError(
                sources.of(full_key), full_key, f"belongs to {of}, but the model has {other}: leave it out"
            )
    if recipe.emulation is not None and recipe.training.compute != "emulated":
        problem = f"belongs to training.compute: emulated, but that is {recipe.training.compute}: leave it out"
        raise RecipeError(sources.of("emulation"), "emulation", problem)
    predicted, trained = recipe.prediction.precision, recipe.training.precision
    if trained != "float32" and predicted not in (AUTO, trained):
        problem = f"found {predicted!r}, but training.precision is {trained}; it takes auto"
        raise RecipeError(sources.of("prediction.precision"), "prediction.precision", problem)
    optimizers = {"training.optimizer": recipe.training.optimizer}
    for number, parameter_group in enumerate(recipe.training.parameter_groups):
        group = f"training.parameter_groups[{number}]"
        if parameter_group.optimizer is not None:
            optimizers[f"{group}.optimizer"] = parameter_group.optimizer
        elif parameter_group.optimizer_arguments:
            full_key = f"{group}.optimizer_arguments"
            problem = f"belongs to {group}.optimizer, which is not given: give it, or leave this out"
            raise RecipeError(sources.of(full_key), full_key, problem)
    for full_key, optimizer in optimizers.items():
        if optimizer not in OPTIMIZERS and not re.search(r"\w[.:]\w", optimizer):
            words = f"{', '.join(OPTIMIZERS)}, torch.optim.Class or package.module:Class"
            raise RecipeError(sources.of(full_key), full_key, f"found {optimizer!r}; it takes {words}")
    if recipe.training.offload_optimizer and recipe.cluster.device == "cpu" and recipe.training.compute == "real":
        problem = "found true, but ranks on CPUs hold the optimizer's state on the host anyway; use false"
        raise RecipeError(sources.of("training.offload_optimizer"), "training.offload_optimizer", problem)
    engines = recipe.search.engine
    if recipe.measure.communication and engines != AUTO and not set(engines).intersection(DEEPSPEED):
        problem = f"found true, but only DeepSpeed logs it; use false, or add to search.engine: {', '.join(DEEPSPEED)}"
        raise RecipeError(sources.of("measure.communication"), "measure.communication", problem)
    if recipe.search.subgraphs is not None and model.layers is not None:
        problem = (
            f"found {recipe.search.subgraphs}, but stages are cut between the layers of model.layers; leave it out"
        )
        raise RecipeError(sources.of("search.subgraphs"), "search.subgraphs", problem)
    if recipe.plan is not None and recipe.plan.tp == 1:
        for name, default in DEFAULTS_OF_SHARDS.items():
            if (value := getattr(recipe.plan, name)) != default:
                full_key = f"plan.{name}"
                problem = f"found {value!r}, but plan.tp is 1; it needs tensor parallelism: plan.tp of 2 or more"
                raise RecipeError(sources.of(full_key), full_key, problem)
    for name, field in recipe.data.inputs.items():
        if mistake := _mistake_in_input(field, recipe.data.sequence_length):
            full_key = f"data.inputs.{name}.{mistake[0]}"
            raise RecipeError(sources.of(full_key), full_key, mistake[1])
    for name in recipe.model.forward:
        if name in recipe.data.inputs:
            full_key = f"model.forward.{name}"
            raise RecipeError(sources.of(full_key), full_key, "is also one of data.inputs; give only one of them")
    if recipe.data.source not in SOURCES and ":" not in recipe.data.source:
        problem = f"found {recipe.data.source!r}; it takes one of {', '.join(SOURCES)}, or package.module:function"
        raise RecipeError(sources.of("data.source"), "data.source", problem)
    _check_data_files(recipe, sources.of("data.files"))
    if (tokenizer := recipe.data.tokenizer) is not None and not Path(tokenizer).is_dir():
        problem = f"found {tokenizer!r}; there is no such folder"
        raise RecipeError(sources.of("data.tokenizer"), "data.tokenizer", problem)
    if model.weights is not None and not Path(model.weights).exists():
        problem = f"found {model.weights!r}; there is no such file or folder"
        raise RecipeError(sources.of("model.weights"), "model.weights", problem)


def stored_configuration(weights: str | None) -> Any:
    """The content of config.json in the folder ``weights``; None if that is no folder, or has no such file."""
    try:
        return None if weights is None else loads(Path(weights, "config.json").read_bytes())
    except (OSError, ValueError):
        return None


def _architecture_of(folder: str, sources: _Sources) -> str:
    """The model class that config.json names, beside the weights in ``folder``."""
    try:
        (name,) = stored_configuration(folder)["architectures"]
    except (ValueError, KeyError, TypeError):
        problem = f"found {folder!r}, whose config.json names no model class; give model.architecture or model.factory"
        raise RecipeError(sources.of("model.weights"), "model.weights", problem) from None
    return str(name)


def _mistake_in_input(field: InputRecipe, sequence_length: int) -> tuple[str, str] | None:
    """A key of the input that contradicts the others, and the reason; None if all fit."""
    default = InputRecipe()
    for name in vars(field):
        if name != "kind" and name not in INPUT_KEYS[field.kind] and getattr(field, name) != getattr(default, name):
            takes = ", ".join(INPUT_KEYS[field.kind])
            return name, f"found {getattr(field, name)!r}, but the kind is {field.kind}, which takes {takes}"
    if field.low >= field.high:
        return "low", f"found {field.low}; it must be below high, which is {field.high}"
    if field.kind == "mask" and field.count > prod(field.shape):
        places = prod(field.shape)
        return "count", f"found {field.count}; it must be at most {places}, the number of places in shape"
    places = field.shape[0] if field.shape else 0 if field.kind == "integers" else sequence_length
    if field.prefix_length > places:
        return "prefix_length", f"found {field.prefix_length}; it must be at most {places}, the number of places"
    return None


def _check_data_files(recipe: Recipe, where: Path | str) -> None:
    for pattern in recipe.data.files:
        if not glob(pattern):
            raise RecipeError(where, "data.files", f"found {pattern!r}; there is no such file")
    files = [Path(file) for file in data_files(recipe)]
    if recipe.data.source in FOLDERS:
        for file in files:
            if not file.is_dir():
                problem = f"found {str(file)!r}; source {recipe.data.source} takes folders that save_to_disk wrote"
                raise RecipeError(where, "data.files", problem)
        return
    for file in files:
        if not file.is_file():
            raise RecipeError(
                where,
                "data.files",
                f"found {str(file)!r}, which is not a file; for the files of a folder give folder/*",
            )
    total, least = sum(file.stat().st_size for file in files), recipe.data.sequence_length + 1
    reads = not recipe.data.inputs or any(field.kind in TOKEN_KINDS for field in recipe.data.inputs.values())
    if files and reads and recipe.data.source == "text" and total < least:
        sizes = f"found {counted(total, 'byte')} in {counted(len(files), 'file')}"
        problem = f"{sizes}; one sample needs {least}: data.sequence_length + 1"
        raise RecipeError(where, "data.files", problem)

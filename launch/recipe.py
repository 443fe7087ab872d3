"""Recipes: the one YAML file that a user writes, read, merged and checked against the schema.

``load`` refuses what it does not understand with one line: the file, the key, the value and what is accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from glob import glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from auto3d.errors import InputError
from auto3d.plan import PlanError, check_degrees
from launch.schema import AUTO, PlanRecipe, Recipe, accepted, group_schema, groups, is_axis, schema_of

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
COMMAND_LINE = "command line"
NAMED_GROUPS = {"model": "models", "cluster": "clusters"}  # groups that may name a file of recipes/


class RecipeError(InputError):
    """A recipe that cannot be used; the message is one line for its author."""

    def __init__(self, file: Path | str, key: str, problem: str) -> None:
        super().__init__(f"{file}: {key}: {problem}" if key else f"{file}: {problem}")


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed all checks of its own, and where each of its values came from."""

    name: str
    values: Recipe
    _sources: "_Sources"

    def error(self, key: str, problem: str) -> RecipeError:
        """An error about ``key``, found later than here, with the file that gave its value."""
        return RecipeError(self._sources.of(key), key, problem)


def load(name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe called ``name`` (of recipes/, or a path) with ``overrides`` such as ``training.global_batch=32``.

    Raises RecipeError if anything in it is unknown, of a wrong type, impossible by itself or together.
    """
    file = find(name)
    recipe, sources = _typed(file, _read(file), _parse_overrides(overrides))
    _check_values(recipe, sources)
    _check_together(recipe, sources)
    return LoadedRecipe(file.stem, recipe, sources)


def find(name: str) -> Path:
    """The file of recipe ``name``: a path, or the name of a file of recipes/, here or where auto3d is installed."""
    folders = [Path("recipes"), RECIPES]
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if path.is_file() and path.suffix in (".yaml", ".yml"):
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(name, "", f"no such recipe; give a .yaml file or one of {', '.join(known)}{hint}")


def save(recipe: Recipe, file: Path) -> None:
    """Write the whole recipe, defaults included, so that ``load`` gives it back."""
    OmegaConf.save(OmegaConf.structured(recipe), file)


# Reading


def _read(file: Path) -> DictConfig:
    try:
        raw = OmegaConf.load(file)
    except OSError as error:
        raise RecipeError(file, "", error.strerror) from None
    except (YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(file, "", f"not YAML{where}: {getattr(error, 'problem', error)}") from None
    if not isinstance(raw, DictConfig):
        raise RecipeError(file, "", f"holds a list; a recipe has the groups {', '.join(groups())}")
    return raw


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        if "=" not in override:
            raise RecipeError(COMMAND_LINE, override, "not an override; write group.key=value")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise RecipeError(COMMAND_LINE, " ".join(overrides), f"not readable: {str(error).splitlines()[0]}") from None


def _typed(file: Path, raw: DictConfig, overrides: DictConfig) -> tuple[Recipe, "_Sources"]:
    """Merge the schema's defaults, named files, the recipe and the overrides, each checked against the schema."""
    sources = _Sources(file, overrides)
    typed = OmegaConf.structured(Recipe)
    for where, layer in ((file, raw), (COMMAND_LINE, overrides)):
        for group in layer:
            if group not in groups():
                raise _unknown(where, str(group), groups())
            content = layer._get_node(group)
            if typed[group] is None and content._is_none():
                continue  # an optional group, left out in so many words
            if group in NAMED_GROUPS and isinstance(_plain(content), str):
                named = _named_file(where, group, _plain(content))
                sources.named[group] = named
                typed[group] = OmegaConf.structured(group_schema(group))
                typed[group] = _merge(named, group, typed[group], _read(named))
                continue
            if not isinstance(content, DictConfig) or content._is_none():
                raise RecipeError(where, group, f"found {_plain(content)!r}; it takes the keys of this group")
            present = typed[group] if typed[group] is not None else OmegaConf.structured(group_schema(group))
            typed[group] = _merge(where, group, present, content)
    return OmegaConf.to_object(typed), sources


def _merge(where: Path | str, group: str, present: DictConfig, layer: DictConfig) -> DictConfig:
    try:
        return OmegaConf.merge(present, OmegaConf.create(OmegaConf.to_container(layer, resolve=True)))
    except OmegaConfBaseException as error:
        full_key = str(error.full_key or group)
        if full_key == group or isinstance(error, InterpolationResolutionError):
            raise RecipeError(where, full_key, str(error).splitlines()[0]) from None
        schema, name = schema_of(full_key)
        if isinstance(error, ConfigKeyError):
            raise _unknown(where, full_key, [item.name for item in fields(schema)]) from None
        value = _plain(OmegaConf.select(OmegaConf.create({group: layer}), full_key))
        raise RecipeError(where, full_key, f"found {value!r}; it takes {accepted(schema, name)}") from None


def _named_file(where: Path | str, group: str, name: str) -> Path:
    folders = [folder / NAMED_GROUPS[group] for folder in (Path("recipes"), RECIPES)]
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if path.is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise RecipeError(
        where, group, f"there is no {name!r}; give a file, one of {', '.join(known)}, or the keys themselves"
    )


def _unknown(where: Path | str, full_key: str, known: Sequence[str]) -> RecipeError:
    near = get_close_matches(full_key.split(".")[-1], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return RecipeError(where, full_key, f"unknown; {hint}it takes {', '.join(known)}")


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else getattr(node, "_value", lambda: node)()


class _Sources:
    """Which file a key's value came from, for messages."""

    def __init__(self, file: Path, overrides: DictConfig) -> None:
        self.file = file
        self.named: dict[str, Path] = {}
        self._overrides = overrides

    def of(self, full_key: str) -> Path | str:
        if OmegaConf.select(self._overrides, full_key) is not None:
            return COMMAND_LINE
        return self.named.get(full_key.split(".")[0], self.file)


# Checking


def _check_values(recipe: Recipe, sources: _Sources) -> None:
    """Each value by itself, against its key's choices and least value."""
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
        if is_axis(type(holder), item.name):
            kind = str if item.metadata["choices"] else int
            fine = value == AUTO or (isinstance(value, list) and value and all(type(one) is kind for one in value))
        else:
            fine = True
        for one in value if isinstance(value, list) else [value]:
            if one is None or one == AUTO or isinstance(one, dict) or not fine:
                continue
            if item.metadata["choices"]:
                fine = one in item.metadata["choices"]
            if item.metadata["least"] is not None:
                fine = one >= item.metadata["least"]  # not true of nan either
        if not fine:
            full_key = f"{prefix}.{item.name}"
            problem = f"found {value!r}; it takes {accepted(type(holder), item.name)}"
            raise RecipeError(sources.of(full_key), full_key, problem)


def _check_together(recipe: Recipe, sources: _Sources) -> None:
    """What no value shows by itself."""
    model = recipe.model
    if (model.architecture is None) == (model.factory is None):
        found = "neither" if model.factory is None else "both"
        raise RecipeError(sources.of("model"), "model", f"found {found}; it takes either architecture or factory")
    for pattern in recipe.data.files:
        if not glob(pattern):
            raise RecipeError(sources.of("data.files"), "data.files", f"found {pattern!r}; there is no such file")
    if model.weights is not None and not Path(model.weights).is_file():
        problem = f"found {model.weights!r}; there is no such file"
        raise RecipeError(sources.of("model.weights"), "model.weights", problem)


def plan_of(recipe: LoadedRecipe) -> PlanRecipe:
    """The recipe's own plan; raises RecipeError if it has none, or one that does not fit its batch or its cluster.

    Only training asks for it: a sweep makes its own plans.
    """
    plan, cluster = recipe.values.plan, recipe.values.cluster
    if plan is None:
        problem = "the recipe has none; give --plan FILE, or plan.dp=… plan.pp=… plan.micro_batch_size=…"
        raise recipe.error("plan", problem)
    if plan.tp != 1:
        raise recipe.error("plan.tp", f"found {plan.tp}; this build does not run tensor parallelism: it takes 1")
    ranks, devices = plan.dp * plan.tp * plan.pp, cluster.nodes * cluster.devices_per_node
    if ranks > devices:
        problem = (
            f"dp × tp × pp = {plan.dp} × {plan.tp} × {plan.pp} needs {ranks} devices; "
            f"the cluster has {cluster.nodes} × {cluster.devices_per_node} = {devices}"
        )
        raise recipe.error("plan", problem)
    try:
        check_degrees(
            dp=plan.dp,
            tp=plan.tp,
            pp=plan.pp,
            global_batch=recipe.values.training.global_batch,
            micro_batch_size=plan.micro_batch_size,
        )
    except PlanError as error:
        raise recipe.error("plan", str(error)) from None
    return plan

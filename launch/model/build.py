"""Recipe -> the user's unmodified model: a function that builds it, its capture, and its initial weights."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from auto3d.capture.errors import CaptureError, error_line
from auto3d.capture.model import CapturedModel, capture
from auto3d.garbage import garbage_collection_paused
from auto3d.plan import Plan
from auto3d.runtime.process.world import World
from auto3d.runtime.replicas import capture_slices
from auto3d.schedule import samples_at_once
from launch.model.architecture import architecture, unset_key
from launch.model.stored_programs import store_program, stored_program
from launch.recipe.data import data_settings
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.run.devices import hide_devices
from launch.run.streams import stdout_to_stderr

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configurations; nothing is downloaded


def captured_model(
    recipe: LoadedRecipe,
    micro_batch_size: int,
    *,
    folder: Path | None = None,
    fresh: bool = False,
    told: Collection[CodeType] = (),
) -> CapturedModel:
    """The recipe's model, captured for micro-batches of ``micro_batch_size`` samples.

    It is read from its copy in ``folder``, or from the cache. If neither has a valid capture, or with ``fresh``, it is
    captured, with ``told`` as for ``export``, and stored in the cache.
    """
    if device(recipe.values) == "cpu":
        hide_devices()
    with stdout_to_stderr(), garbage_collection_paused():
        build = build_function(recipe)
        captured = None if fresh else stored_program(recipe, micro_batch_size, build, folder)
        if captured is None:
            captured = _captured_now(recipe, build, micro_batch_size, told)
            store_program(recipe, captured)
    at_size = partial(captured_model, recipe, folder=folder, fresh=fresh, told=captured.exported.told)
    return replace(captured, at_size=at_size)


def stored_model(recipe: LoadedRecipe, micro_batch_size: int, *, folder: Path | None = None) -> CapturedModel | None:
    """As ``captured_model``, but None instead of a capture; the model's code is neither imported nor run.

    So a process may read it on a machine with GPUs and fork ranks that use them.
    """

    def build() -> nn.Module:
        return build_function(recipe)()

    with garbage_collection_paused():
        stored = stored_program(recipe, micro_batch_size, build, folder)
    return None if stored is None else replace(stored, at_size=partial(captured_model, recipe, folder=folder))


def _captured_now(
    recipe: LoadedRecipe, build: Callable[[], nn.Module], micro_batch_size: int, told: Collection[CodeType]
) -> CapturedModel:
    try:
        specs = data_settings(recipe.values).input_specs()
        precision = recipe.values.training.precision
        return capture(build, specs, micro_batch_size, device=device(recipe.values), precision=precision, told=told)
    except CaptureError as error:
        if recipe.values.model.architecture and (key := unset_key(recipe, str(error))):
            problem = f"none given, and the model needs it: give a value, such as 0 for the id of a token ({error})"
            raise recipe.error(f"model.config.{key}", problem) from None
        raise
    except SystemExit as error:
        raise recipe.error("model", f"its code ended the program: {_summary(error)}") from None


class RankCaptures:
    """The recipe's captured model for ranks that this process forks; each size is read or captured once.

    A copy in ``folder`` comes before the cache.
    """

    def __init__(self, recipe: LoadedRecipe, folder: Path | None = None) -> None:
        self._recipe = recipe
        self._captured_at = cache(partial(captured_model, recipe, folder=folder))
        self._stored_at = cache(partial(stored_model, recipe, folder=folder))

    def of_plan(self, plan: Plan) -> Callable[[World], CapturedModel]:
        """A function that gives a rank the model, captured for the samples that ``plan`` runs at once.

        For a CPU it is captured here, also for the slices of replicas, and the forked ranks share it. For a GPU they
        share what is stored; if nothing is, each captures the model: a capture asks the device and runs backwards, and
        ranks forked after that could not use a GPU.
        """
        size = samples_at_once(plan)
        if device(self._recipe.values) == "cpu":
            captured = self._captured_at(size)
            capture_slices(captured, plan)
            return lambda world: captured
        stored = self._stored_at(size)

        def capture(world: World) -> CapturedModel:
            use_device(world.device("cuda"))
            return stored or captured_model(self._recipe, size)

        return capture


def use_device(own: torch.device) -> None:
    """Make ``own`` the GPU that a capture uses: on another GPU it would take memory from the rank there."""
    if torch.backends.cuda.is_built():  # otherwise the capture runs on the CPU
        torch.cuda.set_device(own)


def build_function(recipe: LoadedRecipe) -> Callable[[], nn.Module]:
    """A function that builds the recipe's model; raises RecipeError if there is no such model."""
    # The folders stay in sys.path: ranks are forked from this process, and a model may import more while it is built or
    # runs; so may training.optimizer.
    sys.path[:0] = [folder for folder in recipe.code_folders if folder not in sys.path]
    make = architecture(recipe) if recipe.values.model.factory is None else _factory(recipe)
    plain = recipe.values.model.forward
    if not plain:
        return make

    def build() -> nn.Module:
        module = make()
        module.forward = partial(module.forward, **plain)
        return module

    return build


def _factory(recipe: LoadedRecipe) -> Callable[[], nn.Module]:
    name = recipe.values.model.factory
    assert name is not None
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise recipe.error("model.factory", f"found {name!r}; it takes package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # the user's module can raise anything
        raise recipe.error("model.factory", f"found {name!r}, which cannot be imported: {_summary(error)}") from None
    if not callable(function):
        problem = f"found {name!r}, which is of type {type(function).__name__}; it takes a function"
        raise recipe.error("model.factory", problem)
    arguments = recipe.values.model.arguments
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise recipe.error("model.arguments", f"refused by {name}: {error}") from None
    except ValueError:  # functions written in C have no signature
        pass

    def build() -> nn.Module:
        module = function(**deepcopy(arguments))  # it may change what it is given, which names the model
        if not isinstance(module, nn.Module):
            raise recipe.error(
                "model.factory",
                f"{name} returned an object of type {type(module).__name__}; it must return an nn.Module",
            )
        return module

    return build


def _summary(error: BaseException) -> str:
    """Type, first line and place of an error in the user's code."""
    assert error.__traceback__ is not None
    error = error.with_traceback(error.__traceback__.tb_next)  # without our own frame
    text, place = str(error), error_line(error)
    if isinstance(error, SyntaxError):  # the module has never run
        text, place = error.msg, f" at {error.filename}, line {error.lineno}"
    first_line = next((line for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}{': ' if first_line else ''}{first_line}{place}"

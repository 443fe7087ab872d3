"""The comparison of a captured program with its eager module, its shards or its slices, in a process of its own."""

import os
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from auto3d.capture.model import CapturedModel
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import Status
from auto3d.runtime.process.arithmetic import set_arithmetic
from auto3d.runtime.replicas import rank_program
from auto3d.runtime.verify.eager import check_against_eager
from auto3d.runtime.verify.shards import check_shards
from auto3d.runtime.verify.slices import check_slices
from launch.model.build import captured_model
from launch.model.data import training_data
from launch.recipe.load import LoadedRecipe
from launch.run.diagnosis import Ending
from launch.run.ranks import Outcome, die_with_parent, run_ranks
from launch.run.streams import stdout_to_stderr


def compare_forked(
    recipe: LoadedRecipe, captured: CapturedModel, plan: Plan | None = None, *, limit_s: float
) -> Outcome:
    """Compare ``captured`` on the CPU with its eager module or, with ``plan``, with its shards or slices under it.

    Raises InputError if they differ.
    """

    def compare(*_: object) -> None:
        _compare_here(recipe, captured, plan, torch.device("cpu"))

    return run_ranks(1, compare, limit_s=limit_s)


def _compare_here(recipe: LoadedRecipe, captured: CapturedModel, plan: Plan | None, device: torch.device) -> None:
    data, seed = training_data(recipe), recipe.values.training.seed
    if plan is None:
        check_against_eager(captured, data, seed=seed, device=device)
        return
    program = rank_program(captured, plan, 1)
    assert program.derived is not None  # other plans have neither slices nor shards
    check_derived = check_shards if program.derived.share.tp > 1 else check_slices
    check_derived(program.derived, data, seed=seed, device=device)


def compare_on_gpu(recipe: LoadedRecipe, micro_batch_size: int, plan: Plan | None = None, *, limit_s: float) -> Outcome:
    """Capture the recipe's model and compare it as ``compare_forked`` does, on the first GPU.

    Raises InputError if the two differ.
    The process is spawned: this process may have captured a model, and its forks could then not use a GPU.
    """
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_compare, args=(there, recipe, micro_batch_size, plan, os.getpid()))
    process.start()
    there.close()
    try:
        if not here.poll(limit_s):
            return Outcome(Status.TIMEOUT, error=f"it was not done after {limit_s:g} s")
        refused, status, error = here.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        assert code is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Outcome(Status.FAILED, error=f"its process {how}", ending=Ending.DIED)
    finally:
        process.kill()
        process.join()
    if refused:
        raise InputError(error)
    return Outcome(status, error=error)


def _compare(pipe: Connection, recipe: LoadedRecipe, micro_batch_size: int, plan: Plan | None, parent: int) -> None:
    """Main function of the process; it sends (whether the model was refused, status, error)."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    on = torch.device("cuda", 0)
    # The backward of flash attention, among others, adds in an order that changes: two equal runs would differ.
    set_arithmetic(on, tf32=False, deterministic=True, only_warn=True)
    try:
        with stdout_to_stderr():
            _compare_here(recipe, captured_model(recipe, micro_batch_size), plan, on)
    except InputError as error:
        pipe.send((True, Status.FAILED, str(error)))
    except Exception as error:
        pipe.send((False, Status.FAILED, f"{type(error).__name__}: {error}"))
    else:
        pipe.send((False, Status.OK, ""))

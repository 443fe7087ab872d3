"""The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes, and which of them a trial gets.

Nothing here starts CUDA in this process, whose forked ranks could not use it then.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launch.recipe.load import LoadedRecipe, RecipeError
from launch.recipe.settings import device

VARIABLE = "CUDA_VISIBLE_DEVICES"
COMMAND_S = (
    60.0  # limit for nvidia-smi, which takes seconds where the driver is not loaded yet, and for a child's torch
)
# cuInit opens this file in every process that starts CUDA; NVML, which does not disturb a fork, opens others.
STARTED_BY_CUDA = "/dev/nvidia-uvm"

# What NVIDIA documents of MIG: a process of CUDA sees a single instance, however many CUDA_VISIBLE_DEVICES names, and
# instances have no peer-to-peer access. NCCL tells GPUs apart by their PCI bus, which the instances of a GPU share:
# most releases refuse them as "Duplicate GPU", and the newest connect them as an experiment, through host memory.
_INSTANCE = "MIG-"
_WHOLE = "GPU-"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver lists, and the MIG instances that it is split into, if it is; both by UUID."""

    uuid: str
    instances: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return self.instances or (self.uuid,)


def is_instance(name: str) -> bool:
    """Whether ``name`` is that of an instance of MIG."""
    return name.startswith(_INSTANCE)


def visible_devices() -> tuple[str, ...]:
    """The names of the devices that this process may use, in CUDA's order; an instance of MIG is a device."""
    value = os.environ.get(VARIABLE)
    named = None if value is None else named_in(value)
    if named == ():
        return ()
    gpus = _gpus_of_this_machine()
    if gpus:
        return present(named, gpus)
    count = count_of_torch()  # only those that the variable names
    return (named or tuple(map(str, range(count))))[:count]


def named_in(value: str) -> tuple[str, ...]:
    """The devices that a value of CUDA_VISIBLE_DEVICES names, as CUDA reads it.

    They are indices or UUIDs, or the first characters of UUIDs, all of one kind. They end before the first that is of
    another kind or is negative; none is left where one comes twice.
    """
    prefix = next((prefix for prefix in (_WHOLE, _INSTANCE) if value.startswith(prefix)), "")
    names: list[str] = []
    for part in map(str.strip, value.split(",")):
        if prefix:
            name = part if part.startswith(prefix) else None
        else:
            number = re.match(r"\+?\d+", part)  # CUDA reads "1st" as 1
            name = str(int(number[0])) if number else None
        if name is None:
            break
        if name in names:
            return ()
        names.append(name)
    return tuple(names)


def present(named: Sequence[str] | None, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The devices of ``gpus`` that are ``named``, up to the first that is not there; all if None.

    A GPU that is split into instances of MIG stands for all of them.
    """
    if named is None:
        return tuple(name for gpu in gpus for name in gpu.devices)
    found: list[str] = []
    for name in named:
        if is_instance(name):
            matches = [(one,) for gpu in gpus for one in gpu.instances if one == name]
        elif name.startswith(_WHOLE):
            matches = [gpu.devices for gpu in gpus if gpu.uuid.startswith(name)]
        else:
            # Not its UUID: CUDA counts the fastest GPU first, and nvidia-smi by the place on the PCI bus.
            matches = [gpu.instances or (name,) for gpu in gpus[int(name) : int(name) + 1]]
        if len(matches) != 1:
            break
        found += matches[0]
    return tuple(dict.fromkeys(found))


def listed(text: str) -> list[Gpu]:
    """The GPUs in what `nvidia-smi -L` prints: a line for each, and below it an indented one for each MIG instance."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        uuid = re.search(r"\(UUID: (\S+)\)", line)
        if uuid is None:
            continue
        if is_instance(uuid[1]) and gpus:
            gpus[-1] = Gpu(gpus[-1].uuid, (*gpus[-1].instances, uuid[1]))
        elif uuid[1].startswith(_WHOLE):
            gpus.append(Gpu(uuid[1]))
    return gpus


def _gpus_of_this_machine() -> list[Gpu]:
    """None are listed where there is no nvidia-smi, as in some containers."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed(done.stdout) if done.returncode == 0 else []


def torch_has_cuda() -> bool:
    """Whether this torch was built with CUDA."""
    import torch  # here, for commands that only plan do without the seconds of this import

    return torch.backends.cuda.is_built()


def count_of_torch() -> int:
    """How many of the devices that this process may use torch can use; a process of its own asks it."""
    if not torch_has_cuda():
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        return 0
    words = done.stdout.split()
    return int(words[-1]) if done.returncode == 0 and words else 0


def hide_devices() -> None:
    """Let this process and those that it starts see no GPU.

    Where torch sees one, the first backward of a process starts a thread for it, and a rank that is forked after that
    cannot run any; a capture runs some.
    """
    if torch_has_cuda():
        os.environ[VARIABLE] = ""


def show_devices(names: Collection[str]) -> None:
    """Let this process, in which CUDA must not have started, and those that it starts see these devices alone."""
    os.environ[VARIABLE] = ",".join(names)


def seeing(names: Collection[str], target: Callable[..., Result]) -> Callable[..., Result]:
    """``target`` as a rank runs it that sees these devices alone."""

    def run(*arguments: Any) -> Result:
        show_devices(names)
        return target(*arguments)

    return run


def cuda_has_started(process: Path = Path("/proc/self")) -> bool:
    """Whether anything has started CUDA in this process, torch or not."""
    for file in (process / "fd").iterdir():
        try:
            if str(file.readlink()) == STARTED_BY_CUDA:
                return True
        except OSError:  # it was closed just now
            continue
    return False


def check_fork() -> None:
    """Raise RuntimeError where ranks that are forked from this process could not use their GPUs."""
    if cuda_has_started():
        raise RuntimeError(
            "CUDA has started in the process that starts the ranks, and cannot be used in processes forked from it; "
            "a model's module must not use CUDA when it is imported"
        )


class Pool:
    """Devices of trials: each takes its own when it starts, and gives them back at its end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._free = set(names)

    def most(self) -> int:
        """The ranks that the largest trial can have: one device each, and one rank alone on an instance of MIG."""
        return max(sum(not is_instance(name) for name in self._names), min(1, len(self._names)))

    def take(self, ranks: int) -> tuple[str, ...] | None:
        """A device for each rank, or None until enough are free. A single rank gets an instance where one is free."""
        free = [name for name in self._names if name in self._free and (ranks == 1 or not is_instance(name))]
        free.sort(key=lambda name: not is_instance(name))
        if len(free) < ranks:
            return None
        taken = tuple(free[:ranks])
        self._free -= set(taken)
        return taken

    def give_back(self, names: Collection[str]) -> None:
        self._free |= set(names)


def pool_of(recipe: LoadedRecipe, ranks: int) -> Pool:
    """This machine's devices for runs of at most so many ranks on GPUs; raises RecipeError if there are not enough."""
    names = visible_devices() if ranks else ()
    pool = Pool(names)
    if ranks > pool.most():
        if len(names) >= ranks:
            raise _instances_refused(recipe, ranks)
        found = f"this machine has {len(names)}"
        if VARIABLE in os.environ:
            found = f"this process may use {len(names)}, by {VARIABLE}={os.environ[VARIABLE]}"
        need = "ranks need" if ranks > 1 else "rank needs"
        raise recipe.error("cluster.device", f"found 'cuda'; {ranks} {need} a GPU each, and {found}")
    return pool


def devices_for(recipe: LoadedRecipe, ranks: int, *, size: int) -> tuple[str, ...]:
    """A device of this machine for each of so many of a run's ``size`` ranks; none if they compute on the CPU.

    Raises RecipeError if there are not enough, or if NCCL would not connect them.
    """
    if device(recipe.values) != "cuda":
        return ()
    names = pool_of(recipe, ranks).take(ranks)
    if size > 1 and any(map(is_instance, names)):
        raise _instances_refused(recipe, size)
    return names


def check_joined_device(recipe: LoadedRecipe, *, local_rank: int, size: int) -> None:
    """Raise RecipeError unless this process, one of ``size`` ranks that a launcher started, has a device of its own.

    That is the only one that it sees, as the launcher bound it, or the one of its place among the node's ranks.
    """
    if device(recipe.values) != "cuda":
        return
    check_torch(recipe)
    names = visible_devices()
    if size > 1 and any(map(is_instance, names)):
        raise _instances_refused(recipe, size)
    if len(names) != 1 and local_rank >= len(names):
        problem = f"rank {local_rank} of its node sees {len(names)} GPUs; it takes all of its node's, or its own alone"
        raise recipe.error("cluster.device", f"found 'cuda'; {problem}")


def _instances_refused(recipe: LoadedRecipe, ranks: int) -> RecipeError:
    problem = f"{ranks} ranks cannot run on instances of MIG, which NCCL does not connect"
    return recipe.error("cluster.device", f"found 'cuda'; {problem}: give whole GPUs, or a plan of 1 rank")


def check_torch(recipe: LoadedRecipe) -> None:
    """Raise RecipeError where this torch cannot use GPUs."""
    if not torch_has_cuda():
        raise recipe.error("cluster.device", "found 'cuda'; this torch was built without CUDA: install one that has it")

"""The GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES, and their allocation to trials.

Nothing here starts CUDA in this process, because ranks forked from it could then not use CUDA.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from auto3d.words import counted
from launch.recipe.load import LoadedRecipe, RecipeError
from launch.recipe.settings import device
from launch.run.scaled_down import what_helps

VARIABLE = "CUDA_VISIBLE_DEVICES"
COMMAND_S = 60.0  # limit of nvidia-smi, which loads the driver first, and of a child process that imports torch
# Every process that starts CUDA opens this file, in cuInit. NVML, which is safe before a fork, opens other files only.
STARTED_BY_CUDA = "/dev/nvidia-uvm"

# NVIDIA's documentation of MIG: a CUDA process sees a single instance, however many CUDA_VISIBLE_DEVICES names, and
# instances have no peer-to-peer access. NCCL distinguishes GPUs by their PCI bus, which the instances of a GPU share:
# most releases refuse them as "Duplicate GPU", and the newest connect them experimentally, through host memory.
_INSTANCE = "MIG-"
_WHOLE = "GPU-"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver lists, and its MIG instances if it is split. Both are named by UUID."""

    uuid: str
    instances: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The instances if there are any, else the GPU."""
        return self.instances or (self.uuid,)


def is_instance(name: str) -> bool:
    """Whether ``name`` names a MIG instance."""
    return name.startswith(_INSTANCE)


def visible_devices() -> tuple[str, ...]:
    """Names of the devices that this process may use, in CUDA's order; a MIG instance counts as a device."""
    value = os.environ.get(VARIABLE)
    named = None if value is None else parse_visible_devices(value)
    if named == ():
        return ()
    gpus = _gpus_of_this_machine()
    if gpus:
        return present_devices(named, gpus)
    count = torch_device_count()  # torch counts only devices that the variable names
    return (named or tuple(map(str, range(count))))[:count]


def parse_visible_devices(value: str) -> tuple[str, ...]:
    """The devices that ``value`` of CUDA_VISIBLE_DEVICES names, by CUDA's rules.

    Entries are indices, UUIDs or leading characters of UUIDs, all of one kind. CUDA ignores everything from the first
    entry of another kind or negative index on, and sees no device if an entry occurs twice.
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


def present_devices(named: Sequence[str] | None, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The ``named`` devices of ``gpus``, up to the first that is absent; all devices of ``gpus`` if None.

    The name of a GPU that is split into MIG instances stands for all of its instances.
    """
    if named is None:
        return tuple(name for gpu in gpus for name in gpu.devices)
    present: list[str] = []
    matches: list[tuple[str, ...]]
    for name in named:
        if is_instance(name):
            matches = [(instance,) for gpu in gpus for instance in gpu.instances if instance == name]
        elif name.startswith(_WHOLE):
            matches = [gpu.devices for gpu in gpus if gpu.uuid.startswith(name)]
        else:
            # Keep the index: CUDA numbers the fastest GPU first, nvidia-smi numbers GPUs by their PCI bus.
            matches = [gpu.instances or (name,) for gpu in gpus[int(name) : int(name) + 1]]
        if len(matches) != 1:
            break
        present += matches[0]
    return tuple(dict.fromkeys(present))


def parse_gpu_list(text: str) -> list[Gpu]:
    """The GPUs in ``text``, the output of `nvidia-smi -L`.

    It has a line per GPU, each followed by an indented line per MIG instance.
    """
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
    """The GPUs that nvidia-smi lists; empty if there is no nvidia-smi, as in some containers."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpu_list(done.stdout) if done.returncode == 0 else []


def torch_has_cuda() -> bool:
    """Whether this torch was built with CUDA."""
    import torch  # imported here because it takes seconds, and planning commands do not need it

    return torch.backends.cuda.is_built()


def torch_device_count() -> int:
    """Number of this process's devices that torch can use. A child process asks torch, because this may start CUDA."""
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
    """Hide all GPUs from this process and its children.

    If torch sees a GPU, the first backward of a process starts a thread for it, and a rank forked after that cannot run
    a backward. A capture runs backwards. It also makes torch see a GPU where there is none, for its fake tensors; so a
    backward is run here.
    """
    if torch_has_cuda():
        import torch

        os.environ[VARIABLE] = ""
        torch.zeros((), requires_grad=True).backward()


def show_devices(names: Collection[str]) -> None:
    """Show only the devices ``names`` to this process and its children. CUDA must not have started in this process."""
    os.environ[VARIABLE] = ",".join(names)


def showing_devices(names: Collection[str], target: Callable[..., Result]) -> Callable[..., Result]:
    """A function that shows only the devices ``names`` to its process, and then calls ``target``."""

    def run(*arguments: Any) -> Result:
        show_devices(names)
        return target(*arguments)

    return run


def cuda_has_started(process: Path = Path("/proc/self")) -> bool:
    """Whether torch or any other library has started CUDA in this process."""
    for file in (process / "fd").iterdir():
        try:
            if str(file.readlink()) == STARTED_BY_CUDA:
                return True
        except OSError:  # the file has been closed meanwhile
            continue
    return False


def check_fork() -> None:
    """Raise RuntimeError if ranks forked from this process could not use their GPUs."""
    if cuda_has_started():
        raise RuntimeError(
            "CUDA has started in the process that starts the ranks, so ranks forked from it cannot use CUDA; "
            "a model's module must not use CUDA when it is imported"
        )


class DevicePool:
    """Devices for trials: a trial takes devices when it starts and returns them when it ends."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._free = set(names)

    def max_ranks(self) -> int:
        """Number of ranks of the largest possible trial.

        Each rank needs a device, and a MIG instance serves only a trial of one rank.
        """
        return max(sum(not is_instance(name) for name in self._names), min(1, len(self._names)))

    def take(self, ranks: int) -> tuple[str, ...] | None:
        """A device for each of ``ranks`` ranks, or None if too few are free. A single rank prefers a MIG instance."""
        free = [name for name in self._names if name in self._free and (ranks == 1 or not is_instance(name))]
        free.sort(key=lambda name: not is_instance(name))
        if len(free) < ranks:
            return None
        taken = tuple(free[:ranks])
        self._free -= set(taken)
        return taken

    def give_back(self, names: Collection[str]) -> None:
        self._free |= set(names)


def device_pool(recipe: LoadedRecipe, ranks: int, verb: str = "") -> DevicePool:
    """This machine's devices, for runs of at most ``ranks`` ranks on GPUs.

    Raises RecipeError if there are too few. Of a command ``verb``, the error names others that help.
    """
    names = visible_devices() if ranks else ()
    pool = DevicePool(names)
    if ranks > pool.max_ranks():
        if len(names) >= ranks:
            raise _instances_refused(recipe, ranks)
        available = f"this machine has {len(names)}"
        if VARIABLE in os.environ:
            available = f"this process may use {len(names)}, by {VARIABLE}={os.environ[VARIABLE]}"
        need = "ranks need" if ranks > 1 else "rank needs"
        problem = f"found 'cuda'; {ranks} {need} a GPU each, and {available}"
        raise recipe.error("cluster.device", f"{problem}: {what_helps(recipe, verb)}" if verb else problem)
    return pool


def devices_for(recipe: LoadedRecipe, ranks: int, *, size: int) -> tuple[str, ...]:
    """A device for each of the ``ranks`` ranks on this machine; empty on CPUs.

    The run has ``size`` ranks in total. Raises RecipeError if there are too few devices or NCCL cannot connect them.
    """
    if device(recipe.values) != "cuda":
        return ()
    names = device_pool(recipe, ranks).take(ranks)
    assert names is not None, "the pool is large enough, and nobody else takes from it"
    if size > 1 and any(map(is_instance, names)):
        raise _instances_refused(recipe, size)
    return names


def check_joined_device(recipe: LoadedRecipe, *, local_rank: int, size: int) -> None:
    """Raise RecipeError unless this process, one of ``size`` ranks that a launcher started, has its own device.

    The device is the only visible device if the launcher bound it, or else the device whose index is ``local_rank``.
    """
    if device(recipe.values) != "cuda":
        return
    check_torch(recipe)
    names = visible_devices()
    if size > 1 and any(map(is_instance, names)):
        raise _instances_refused(recipe, size)
    if len(names) != 1 and local_rank >= len(names):
        gpus = counted(len(names), "GPU")
        problem = f"rank {local_rank} of its node sees {gpus}; it must see all GPUs of its node, or only its own"
        raise recipe.error("cluster.device", f"found 'cuda'; {problem}")


def _instances_refused(recipe: LoadedRecipe, ranks: int) -> RecipeError:
    problem = f"{ranks} ranks cannot run on MIG instances, which NCCL does not connect"
    return recipe.error("cluster.device", f"found 'cuda'; {problem}: use whole GPUs, or a plan of 1 rank")


def check_torch(recipe: LoadedRecipe) -> None:
    """Raise RecipeError if this torch cannot use GPUs."""
    if not torch_has_cuda():
        raise recipe.error(
            "cluster.device", "found 'cuda'; this torch was built without CUDA: install a torch with CUDA"
        )

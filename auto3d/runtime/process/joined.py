"""Detect whether torchrun, srun or mpirun started this process as one of several ranks."""

import os
import socket
from collections.abc import Mapping

from auto3d.errors import InputError
from auto3d.runtime.process.world import World


class JoinError(InputError):
    """The environment names a rank, but the rendezvous is missing or makes no sense."""


def joined_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """This process's rank among those that a launcher started; None if it was started as a single process."""
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return _world(environment, rank="RANK", size="WORLD_SIZE", local_rank="LOCAL_RANK")
    # mpirun comes before SLURM: in an allocation it starts helpers with srun, whose step variables its ranks inherit.
    # PMI_RANK does not distinguish the two, because `srun --mpi=pmi2` sets it too; only mpirun sets these two.
    if "OMPI_COMM_WORLD_RANK" in environment or "MPI_LOCALRANKID" in environment:
        return _mpi_world()
    # SLURM_PROCID, SLURM_NTASKS and even SLURM_STEP_ID are also set without ranks: in a batch script, in salloc's shell
    # (a step of one task), and in jobs submitted from there, which inherit them. Ranks are a step of several tasks.
    if _number(environment, "SLURM_STEP_NUM_TASKS", absent="1") > 1:
        return _world(environment, rank="SLURM_PROCID", size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID")
    if "PMI_RANK" in environment and "SLURM_STEP_ID" not in environment:
        return _mpi_world()
    return None


def _world(environment: Mapping[str, str], *, rank: str, size: str, local_rank: str) -> World:
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not address or not port:
        raise JoinError(
            f"{rank} is set, so a launcher started this process; MASTER_ADDR and MASTER_PORT must be set too"
        )
    world = World(
        rank=_number(environment, rank),
        size=_number(environment, size),
        local_rank=_number(environment, local_rank),
        meeting_point=f"tcp://{address}:{_number(environment, 'MASTER_PORT')}",
    )
    if world.rank >= world.size:
        raise JoinError(f"{rank} is {world.rank}, but {size} is {world.size}; a rank is less than the number of ranks")
    return world


def _number(environment: Mapping[str, str], name: str, *, absent: str = "") -> int:
    value = environment.get(name, absent)
    if not value.isdecimal():
        raise JoinError(f"{name} is {value!r} in the environment; it must be a whole number")
    return int(value)


def _mpi_world() -> World:
    """The rank according to MPI. Rank 0 chooses a free port for the rendezvous and broadcasts it."""
    try:
        from mpi4py import MPI  # needs an MPI library, which only a machine with mpirun has
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise JoinError(f"the environment is that of a rank of mpirun, but MPI cannot be used: {reason}") from None

    everyone = MPI.COMM_WORLD
    meeting_point = None
    if everyone.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            meeting_point = f"tcp://{socket.gethostname()}:{probe.getsockname()[1]}"
    return World(
        rank=everyone.rank,
        size=everyone.size,
        local_rank=everyone.Split_type(MPI.COMM_TYPE_SHARED).rank,
        meeting_point=everyone.bcast(meeting_point, root=0),
    )

"""``init``: how the processes of a script share the training, said once, before anything else of this package."""

import atexit
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any

import torch.distributed as dist

from auto3d.cluster import Cluster
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.process.joined import joined_world
from auto3d.runtime.process.world import World, leave_or_end, meet
from auto3d.runtime.waiting import PeerLostError, waiting_up_to
from auto3d.schedule import SCHEDULES, parse_schedule
from auto3d.search.axes import Candidate
from auto3d.search.space import SearchSpace
from auto3d.trainer.random_states import go_on_with_those_of_rank_0
from auto3d.trainer.together import ENDED, TOGETHER

AUTO = "auto"
MEET_S = 1800.0  # time for all ranks to call ``init``, as long as transformers gives them to join
OTHERS_S = 1.0  # time in which a launcher ends the other ranks after one has failed
FAILED = 1  # exit code after an exception, as Python's
EXIT_CODES = ((InputError, 2), (KeyboardInterrupt, 130))  # the command line has the same
CHOICES = tuple(
    name for name in Candidate.__dataclass_fields__ if name not in ("dp", "tp", "pp", "micro_batch_size", "engine")
)
"""Further choices of a Plan that ``init`` takes, with the meaning that they have in a Candidate."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What ``init`` was called with, and this process among all ranks."""

    world: World
    degrees: tuple[int, int, int] | None = None  # dp, tp, pp; None with a plan of a file or a search
    choices: Mapping[str, Any] = field(default_factory=dict)  # further choices of a Candidate
    plan: Plan | None = None  # plan of a file
    plan_file: str = ""
    cluster: Cluster | None = None  # the cluster to search for; None: described from this machine
    space: SearchSpace | None = None  # the space to search

    @property
    def searches(self) -> bool:
        return self.degrees is None and self.plan is None


_setup: Setup | None = None
_store: dist.Store | None = None  # rank 0 serves it to the others, which may read it later
_rank, _ranks = 0, 1
_failed = False  # an exception reached the top of the script


def init(
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    *,
    plan: str | os.PathLike[str] | Plan | None = None,
    cluster: Cluster | None = None,
    space: SearchSpace | None = None,
    **choices: Any,
) -> None:
    """Say how the processes share the training; every process calls it once, before it makes TrainingArguments.

    Either degrees: ``dp`` pipelines, each of ``pp`` stages, each on ``tp`` ranks, with further ``choices`` of a
    Candidate, such as schedule="chimera", recompute="full", partition="autopipe". Or ``plan``: a Plan, the file of one,
    or "auto" for the fastest of ``space`` on ``cluster``. A launcher (torchrun, srun, mpirun) starts one process for
    each rank. Raises InputError if the processes are not those that the degrees or the plan need.

    From here on the generators of torch, numpy and Python are alike on all ranks: they go on from the states of rank 0.

    An InputError that reaches the top of the script is printed as one line, and the exit code is 2.
    """
    global _setup, _store, _rank, _ranks
    sys.excepthook = _report
    world = joined_world() or _alone()
    _rank, _ranks = world.rank, world.size
    if _setup is not None:
        raise InputError("auto3d.init: called twice; a process trains under one plan")
    given = {name: value for name, value in {"dp": dp, "tp": tp, "pp": pp}.items() if value is not None}
    if plan is not None and (given or choices):
        first = next(iter({**given, **choices}))
        raise InputError(f"auto3d.init: {first}: a plan decides it; give either plan or degrees and choices")
    if plan != AUTO and (cluster is not None or space is not None):
        raise InputError(f'auto3d.init: {"space" if cluster is None else "cluster"}: only for plan="auto"')
    for name in choices:
        if name not in CHOICES:
            raise InputError(f"auto3d.init: {name}: unknown; it takes dp, tp, pp, plan, {', '.join(CHOICES)}")
    if plan == AUTO:
        _setup = Setup(world=world, cluster=cluster, space=space)
    elif plan is not None:
        read, file = (plan, "the plan") if isinstance(plan, Plan) else (_read(plan), os.fspath(plan))
        _check_processes(world, read.ranks, f"plan: {file}")
        _check_synchronous(read.schedule)
        _setup = Setup(world=world, plan=read, plan_file=file)
    else:
        degrees = (given.get("dp", 1), given.get("tp", 1), given.get("pp", 1))
        for name, value in given.items():
            if type(value) is not int or value < 1:
                raise InputError(f"auto3d.init: {name}: found {value!r}; it takes a whole number from 1 on")
        _check_processes(world, degrees[0] * degrees[1] * degrees[2], "dp={} × tp={} × pp={}".format(*degrees))
        if "schedule" in choices:
            _check_synchronous(parse_schedule(choices["schedule"])[0])
        _setup = Setup(world=world, degrees=degrees, choices=choices)
    if world.size > 1:
        with waiting_up_to(MEET_S):
            _store = meet(world)
        go_on_with_those_of_rank_0(_store, world.rank)
    atexit.register(_leave)


def setup() -> Setup:
    """What ``init`` was called with; raises InputError if it was not called."""
    if _setup is None:
        raise InputError('auto3d.init: not called; call auto3d.init(dp=, tp=, pp=), or auto3d.init(plan="auto"), first')
    return _setup


def _alone() -> World:
    """The world of a process that no launcher started."""
    folder = tempfile.mkdtemp(prefix="auto3d-")  # only this user can write to it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return World(rank=0, size=1, local_rank=0, meeting_point=f"file://{folder}/meeting-point")


def _read(file: str | os.PathLike[str]) -> Plan:
    try:
        return Plan.from_json(Path(file).read_bytes())
    except OSError as error:
        raise InputError(f"auto3d.init: plan: {os.fspath(file)}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"auto3d.init: plan: {os.fspath(file)}: {error}") from None


def _check_processes(world: World, needed: int, what: str) -> None:
    if world.size == needed:
        return
    here = "1 process" if world.size == 1 else f"{world.size} processes"
    script = Path(sys.argv[0]).name or "script.py"
    processes = "1 process" if needed == 1 else f"{needed} processes"
    remedy = f"start it with: torchrun --nproc-per-node={needed} {script}" if needed > 1 else f"run: python {script}"
    raise InputError(f"auto3d.init: {what} needs {processes}, one per rank; this is {here}; {remedy}")


def _check_synchronous(schedule: str) -> None:
    if schedule in SCHEDULES and SCHEDULES[schedule].asynchronous:
        raise InputError(
            f"auto3d.init: schedule: {schedule} is asynchronous, so there is no moment after each step at which a "
            "Trainer could log, evaluate and save; take a synchronous one, such as 1f1b, or `auto3d train`"
        )


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: an InputError is one line and exit code 2, the loss of another rank one line and exit code 1;
    anything else keeps its traceback and its exit code.

    All ranks raise most of them. So ranks other than 0 wait first, in which their launcher ends them if rank 0 failed.
    """
    global _failed
    _failed = True
    code = next((code for of_kind, code in EXIT_CODES if isinstance(error, of_kind)), FAILED)
    if isinstance(error, InputError | PeerLostError):
        if _rank:
            sleep(OTHERS_S)
        rank = f"rank {_rank}: " if _rank else ""
        why = "" if isinstance(error, InputError) else "; the error of the rank that ended says why"
        text = f"auto3d: {rank}{error}{why}\n"
    else:
        prefix = f"[rank{_rank}]: " if _ranks > 1 else ""
        lines = "".join(traceback.format_exception(kind, error, trace)).splitlines(keepends=True)
        text = "".join(prefix + line for line in lines)
    # torch's own hook, set when the ranks join, catches sys.stderr and would lose the text by an exit in here.
    print(text, end="", file=sys.__stderr__, flush=True)
    if hasattr(sys, "ps1") or sys.flags.interactive:  # an interactive session goes on
        return
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads of the script, as Python does first
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # Python's shutdown would destroy the process groups, which may abort the process or never end


def _leave() -> None:
    """At the end of the process: leave the other ranks, unless this one failed and they may wait for it."""
    if not _failed:
        with suppress(RuntimeError):  # the rank that has the store of all may be gone
            TOGETHER.mark(ENDED)
        leave_or_end()

"""Scripts run as processes run them, in the pool's processes: the imports of torch and transformers are paid once."""

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from auto3d import init
from auto3d.runtime.process.world import World
from auto3d.trainer import setup
from tests.trainer.captures import share_captures

EXAMPLES = Path(__file__).parents[2] / "examples"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_rank(world: World, port: int | None) -> None:
    """Make this process one of a launcher's, or of none, in which ``init`` was not called yet."""
    names = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank, "MASTER_PORT": port}
    for name, value in names.items():
        os.environ.pop(name, None)
        if port is not None:
            os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    setup._setup = None


def run_script(world: World, script: Path, folder: Path, port: int | None) -> dict[str, Any]:
    """Run ``script`` in ``folder`` as a rank, or without a launcher if ``port`` is None; returns its variables that
    can travel."""
    as_rank(world, port)
    os.chdir(folder)
    output, sys.stdout = sys.stdout, sys.stderr
    try:
        variables = runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout = output
    trainer = variables["trainer"]
    return {
        "log": trainer.state.log_history,
        "step": trainer.state.global_step,
        "best": trainer.state.best_global_step,
        "weights": {name: tensor.detach().numpy() for name, tensor in trainer.model.named_parameters()},
        "process_zero": trainer.is_world_process_zero(),
    }


def begin(world, folder, port, *, ours=True, **degrees):
    """Be a rank that works in ``folder``; of a pipeline over all ranks unless ``degrees`` say more."""
    share_captures()
    as_rank(world, port)
    os.chdir(folder)
    if ours:
        init(**degrees or {"pp": world.size})

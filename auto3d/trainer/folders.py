"""checkpoint-N: what transformers writes, with the state of all ranks in place of one process's optimizer.

A folder is complete if the state of its step and its trainer_state.json are there; training goes on from no other.
"""

import json
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from auto3d.errors import InputError
from auto3d.runtime.checkpoint.format import Checkpoints, checkpoint_folder, learnt_by, newest
from auto3d.runtime.checkpoint.reading import CheckpointReader
from auto3d.runtime.checkpoint.writing import CheckpointWriter
from auto3d.runtime.training import Training
from auto3d.trainer.gather import PREFIX
from auto3d.trainer.pipeline import Pipeline
from auto3d.trainer.rank_zero import of_rank_0

TRAINER_STATE = "trainer_state.json"


def write_state(folder: Path, pipeline: Pipeline) -> None:
    """Write the state of all ranks into ``folder``; any rank may read it then. All ranks must call it."""
    training = pipeline.training
    assert training is not None, "checkpoints are written while it trains"
    writer = CheckpointWriter(
        Checkpoints(folder=folder, every=None, keep=1),
        learnt_by(training.rank.common.plan, pipeline.settings.optimizer),
    )
    writer.save(pipeline.state, iteration=training.done, numbers=training.rank.numbers())
    if dist.get_rank():
        writer.finish()
    of_rank_0(writer.finish, "to complete the checkpoint")


def load_weights(folder: Path, training: Training) -> None:
    """Copy the weights of the checkpoint in ``folder`` into this rank."""
    step = newest(folder)
    if step is None:
        raise InputError(f"{folder}: it has no state of the ranks, so the best model cannot be loaded from it")
    state = {name: part for name, part in training.rank.state().items() if name.startswith(PREFIX)}
    with CheckpointReader(checkpoint_folder(folder, step)) as reader:
        reader.load(state)


def folder_to_resume(given: str | bool | None, output_dir: str) -> str | None:
    """The checkpoint from which to train, on which rank 0 decides: ``given``, or if that is True, the last one."""
    if not given:
        return None
    choose = partial(_last_complete, Path(output_dir)) if given is True else partial(_check_complete, Path(given))
    return str(of_rank_0(choose, "to say which checkpoint to resume from"))


def _last_complete(output_dir: Path) -> Path:
    """The newest complete checkpoint-N in ``output_dir``; raises InputError if there is none."""
    folders = [path for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        if _is_complete(folder):
            return folder
    raise InputError(f"Trainer.train: resume_from_checkpoint: {output_dir} has no complete checkpoint")


def _check_complete(folder: Path) -> Path:
    """``folder``, from which a training may go on; raises InputError if it may not."""
    if not _is_complete(folder):
        raise InputError(
            f"Trainer.train: resume_from_checkpoint: {folder} is no complete checkpoint of an auto3d.Trainer: it lacks "
            f"the state of the ranks or {TRAINER_STATE}"
        )
    return folder


def _is_complete(folder: Path) -> bool:
    try:
        step = TrainerState.load_from_json(str(folder / TRAINER_STATE)).global_step
    except (OSError, json.JSONDecodeError, TypeError):
        return False
    return newest(folder) == step

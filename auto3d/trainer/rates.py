"""The schedule of a script's optimizer, and the numbers in its groups that schedules and callbacks change."""

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers.optimization import GreedyLR

from auto3d.errors import InputError
from auto3d.trainer.optimizer import numbers_of

FILE = "rates.json"  # in checkpoint-N


def follows_metric(schedule: Any) -> bool:
    """Whether ``schedule`` makes its steps at evaluations."""
    return isinstance(schedule, (ReduceLROnPlateau, GreedyLR))


def check_rates(optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Raise InputError unless ``schedule`` sets the rates of ``optimizer``."""
    if not isinstance(schedule, (LRScheduler, GreedyLR)):
        raise InputError(
            f"Trainer: its lr_scheduler is a {type(schedule).__name__}; it takes one of torch.optim.lr_scheduler"
        )
    if schedule.optimizer is not optimizer:
        raise InputError("Trainer: its lr_scheduler is that of another optimizer; make it of the one that trains")


def check_saved(schedule: Any) -> None:
    """Raise InputError unless a checkpoint can hold what ``schedule`` keeps."""
    state = schedule.state_dict()
    is_held = False
    with suppress(TypeError, ValueError):  # JSON raises them for other objects than numbers, text and collections
        is_held = _unpacked(json.loads(json.dumps(_packed(state)))) == state
    if not is_held:
        raise InputError(
            f"Trainer: its lr_scheduler, a {type(schedule).__name__}, keeps what a checkpoint cannot hold; keep "
            'numbers there, or train with save_strategy="no"'
        )


def write_rates(folder: Path, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Write what ``schedule`` keeps and the numbers in the groups of ``optimizer`` into ``folder``."""
    saved = {"schedule": schedule.state_dict(), "groups": numbers_of(optimizer)}
    (folder / FILE).write_text(json.dumps(_packed(saved)))


def load_rates(folder: Path, optimizer: torch.optim.Optimizer, schedule: Any, *, steps: int) -> None:
    """Give both what they had when the checkpoint in ``folder`` was written, after ``steps`` steps.

    Checkpoints of auto3d 0.2.0 have no rates: they follow from the number of steps.
    """
    if not (folder / FILE).exists():
        for _ in range(steps):
            schedule.step()
        return
    saved = _unpacked(json.loads((folder / FILE).read_text()))
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise InputError(
            f"Trainer.train: resume_from_checkpoint: {folder}: its optimizer had {len(saved['groups'])} groups; it has "
            f"{len(optimizer.param_groups)} here; make the same groups"
        )
    schedule.load_state_dict(saved["schedule"])
    for group, numbers in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(numbers)


def _packed(value: Any) -> Any:
    """``value`` for JSON, which has neither tuples nor keys that are numbers, such as the milestones of MultiStepLR."""
    if type(value) in (dict, Counter):
        return {type(value).__name__: [[_packed(key), _packed(entry)] for key, entry in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: list(map(_packed, value))}
    return value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("dict", "Counter"):
        pairs = {_unpacked(key): _unpacked(entry) for key, entry in content}
        return Counter(pairs) if kind == "Counter" else pairs
    return (tuple if kind == "tuple" else list)(map(_unpacked, content))

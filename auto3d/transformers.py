"""transformers, with the Trainer and the TrainingArguments of auto3d and ``init``: a script imports from here instead.

``from auto3d.transformers import AutoModelForCausalLM, Trainer, TrainingArguments, init``. Modules in it, such as
transformers.trainer_utils, are imported from transformers.
"""

from typing import Any

import transformers

from auto3d.errors import InputError
from auto3d.trainer.arguments import TrainingArguments as TrainingArguments
from auto3d.trainer.setup import init as init
from auto3d.trainer.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    """What transformers has by this name; raises InputError for another Trainer, which would have no pipeline."""
    if name.startswith("__"):  # such as __path__, by which Python would run transformers' files a second time
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(transformers, name)
    for ours in (Trainer, TrainingArguments):
        if isinstance(attribute, type) and issubclass(attribute, getattr(transformers, ours.__name__)):
            raise InputError(f"auto3d.transformers: {name} trains in one process only; use {ours.__name__}")
    return attribute

"""The TrainingArguments of transformers for a process that is one rank of a Plan, with a few arguments more."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, PartialState
from transformers.training_args import ParallelMode

from auto3d.runtime.process.world import join
from auto3d.runtime.settings import LOSS_MEANS
from auto3d.runtime.waiting import waiting_for
from auto3d.trainer.setup import setup

# accelerate takes a process for one of several if the environment has any of these.
_OF_LAUNCHERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "SLURM_")


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' arguments, with the meaning that they have for one process, and these.

    ``per_device_train_batch_size`` is the micro-batch size, ``gradient_accumulation_steps`` the number of micro-batches
    of each pipeline. Their product times dp is the global batch: what the script trains under plain data parallelism.
    """

    sequence_length: int | None = field(
        default=None, metadata={"help": "Tokens to which every sample is padded; needed if samples differ in length."}
    )
    threads_per_rank: int | None = field(
        default=None, metadata={"help": "Threads with which a CPU rank computes; default: those that torch has."}
    )

    loss_mean: str | None = field(
        default=None,
        metadata={
            "help": "What a loss is the mean of: targets, or micro-batches. Default: what transformers takes, which "
            "follows from whether the model's forward takes num_items_in_batch, and its loss divides by that.",
            "choices": LOSS_MEANS,
        },
    )

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Join the other ranks. To transformers and accelerate this process is alone: our engine is all that parts."""
        world, kind = setup().world, "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"
        device = world.device(kind)
        join(world, device=device, timeout_s=self.ddp_timeout)
        AcceleratorState._reset_state(reset_partial_state=True)
        with as_one_process():
            self.distributed_state = PartialState(cpu=True)
        self._n_gpu = int(kind == "cuda")
        return device

    @property
    def place_model_on_device(self) -> bool:
        return False  # the ranks place the parameters of their stages

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.NOT_PARALLEL  # transformers itself sends nothing

    @property
    def world_size(self) -> int:
        return setup().world.size

    @property
    def process_index(self) -> int:
        return setup().world.rank

    @property
    def local_process_index(self) -> int:
        return setup().world.local_rank

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the body on rank 0 (``local``: on the first rank of each node) before the other ranks run it."""
        first = (self.local_process_index if local else self.process_index) == 0
        waits = f"the first process to {desc}" if not first else "the other processes to arrive"
        if not first:
            with waiting_for(waits):
                dist.barrier()
        try:
            yield
        finally:
            if first:
                with waiting_for(waits):
                    dist.barrier()


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, the environment does not say that a launcher started this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    with patch.dict(os.environ, kept, clear=True):
        yield

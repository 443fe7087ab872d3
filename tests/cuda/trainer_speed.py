"""Times a Trainer on GPT-2 on one GPU: python -m tests.cuda.trainer_speed MICRO_BATCH [auto3d]

GPT-2 of 124 million parameters in bfloat16, 32 sequences of 1,024 tokens per step. Without the second argument it is
transformers' Trainer. Prints a line: seconds of a step (median), GiB of live tensors at the peak, the mean loss.
"""

import os
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import auto3d

WARMUP, STEPS, SAMPLES, LENGTH, VOCABULARY = 3, 12, 32, 1024, 50257


class Clock(transformers.TrainerCallback):
    """Takes the time at the begin of each step and after the last."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        torch.cuda.synchronize()
        self.times.append(time.monotonic())

    on_train_end = on_step_begin


def main() -> None:
    micro_batch, ours = int(sys.argv[1]), sys.argv[2:] == ["auto3d"]
    if ours:
        auto3d.init(pp=1)
    classes = auto3d if ours else transformers
    transformers.set_seed(0)
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**dropped))
    tokens = torch.randint(0, VOCABULARY, (SAMPLES * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = classes.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=SAMPLES // micro_batch,
            max_steps=STEPS,
            bf16=True,
            logging_steps=STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = classes.Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[clock],
        )
        trainer.train()
    durations = [after - before for before, after in pairwise(clock.times)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    name = "auto3d" if ours else "transformers"
    print(f"{name}, micro-batch {micro_batch}: {median(durations[WARMUP:]):.4f} s, {peak:.2f} GiB, mean loss {loss}")


if __name__ == "__main__":
    main()

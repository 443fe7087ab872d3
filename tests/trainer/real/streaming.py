"""A causal model on lines of files that are streamed."""

import argparse

from datasets import load_dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(11)
lines = load_dataset("text", data_files=argparse.__file__, split="train", streaming=True)
lines = lines.filter(lambda row: len(row["text"]) >= 40).map(
    lambda row: {"input_ids": list(row["text"].encode()[:40]), "labels": list(row["text"].encode()[:40])},
    remove_columns=["text"],
)
none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
trainer = Trainer(
    model=GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=256, n_positions=40, **none)),
    args=TrainingArguments(
        output_dir="out",
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=3e-3,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=lines.shuffle(seed=5, buffer_size=20),
    eval_dataset=lines.take(10),
)
trainer.train()
metrics = trainer.evaluate()

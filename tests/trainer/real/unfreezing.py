"""A BERT that classifies texts: its layers thaw one by one, and the rate follows the validation loss."""

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(13)
generator = torch.Generator().manual_seed(13)


def texts(count):
    tokens = torch.randint(1, 60, (count, 16), generator=generator)
    labels = (tokens[:, :8].sum(1) > tokens[:, 8:].sum(1)).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


class Thaws(TrainerCallback):
    """Trains the head alone, and one layer more from each epoch on."""

    def on_train_begin(self, args, state, control, model=None, **_):
        model.bert.requires_grad_(False)

    def on_epoch_begin(self, args, state, control, model=None, **_):
        layers = model.bert.encoder.layer
        for layer in layers[len(layers) - round(state.epoch or 0) :]:
            layer.requires_grad_(True)
        print(state.global_step, sum(each.numel() for each in model.parameters() if each.requires_grad))


class Follows(TrainerCallback):
    """Halves the rate where the validation loss does not fall."""

    def __init__(self):
        self.best, self.halved = float("inf"), 0

    def on_evaluate(self, args, state, control, metrics=None, lr_scheduler=None, **_):
        if metrics["eval_loss"] > 0.999 * self.best:
            lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]
            self.halved += 1
        self.best = min(self.best, metrics["eval_loss"])


def compute_metrics(predicted):
    return {"accuracy": float(np.mean(predicted.predictions.argmax(-1) == predicted.label_ids))}


follows = Follows()
trainer = Trainer(
    model=BertForSequenceClassification(
        BertConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32, num_labels=2,
        )
    ),
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=4,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=texts(32),
    eval_dataset=texts(12),
    compute_metrics=compute_metrics,
    callbacks=[Thaws(), follows],
)  # fmt: skip
trainer.train()
trainer.save_model("trained")
metrics = trainer.evaluate() | {"halved": follows.halved}
assert follows.halved

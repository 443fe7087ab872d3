"""DistilBERT that rates sentences with a number; epochs and evaluations end with a batch in part."""

import numpy as np
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(5)
generator = torch.Generator().manual_seed(5)


class Ratings(torch.utils.data.Dataset):
    def __init__(self, size):
        self.tokens = torch.randint(1, 50, (size, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.float().mean() / 25 - 1,
        }


config = DistilBertConfig(
    vocab_size=50, dim=32, hidden_dim=64, n_layers=4, n_heads=2, max_position_embeddings=16, dropout=0.0,
    attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=1, problem_type="regression",
)  # fmt: skip


def compute_metrics(predicted):
    return {"mse": float(np.mean((predicted.predictions.squeeze() - predicted.label_ids) ** 2))}


trainer = Trainer(
    model=DistilBertForSequenceClassification(config),
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=8,
        learning_rate=3e-3,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=Ratings(45),
    eval_dataset=Ratings(13),
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()

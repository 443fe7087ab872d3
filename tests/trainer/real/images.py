"""ViT on pictures of which each reading draws a crop and a flip (set_transform)."""

import numpy as np
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

set_seed(7)
random = np.random.default_rng(7)
labels = random.integers(0, 4, 70)
pictures = random.normal(0, 0.3, (70, 3, 20, 20)).astype(np.float32)
for picture, label in zip(pictures, labels, strict=True):
    picture[:, 5 * (label // 2) : 5 * (label // 2) + 5, :] += 2 if label % 2 else -2


def of_training(batch):
    made = []
    for picture in batch["picture"]:
        at, flip = torch.randint(0, 5, (2,)), torch.rand(()) < 0.5
        cut = torch.tensor(np.array(picture))[:, at[0] : at[0] + 16, at[1] : at[1] + 16]
        made.append(cut.flip(-1) if flip else cut)
    return {"pixel_values": made, "label": batch["label"]}


def of_evaluation(batch):
    return {
        "pixel_values": [torch.tensor(np.array(each))[:, 2:18, 2:18] for each in batch["picture"]],
        "label": batch["label"],
    }


def collate(examples):
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "labels": torch.tensor([example["label"] for example in examples]),
    }


rows = Dataset.from_dict({"picture": pictures, "label": labels}).train_test_split(test_size=20, seed=0)
rows["train"].set_transform(of_training)
rows["test"].set_transform(of_evaluation)
config = ViTConfig(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
)  # fmt: skip


def compute_metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}


trainer = Trainer(
    model=ViTForImageClassification(config),
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=8,
        learning_rate=3e-3,
        remove_unused_columns=False,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=rows["train"],
    eval_dataset=rows["test"],
    data_collator=collate,
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()

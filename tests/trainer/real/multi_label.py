"""BERT that gives texts several labels at once."""

import numpy as np
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments, set_seed

set_seed(6)
random = np.random.default_rng(6)
tokens = random.integers(1, 60, (61, 10))
labels = np.stack([(tokens < 10).any(1), (tokens > 50).any(1), tokens.sum(1) > 300], axis=1).astype(np.float32)
rows = Dataset.from_dict({"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": labels})
parts = rows.train_test_split(test_size=15, seed=0)
config = BertConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    problem_type="multi_label_classification",
)  # fmt: skip


def compute_metrics(p: EvalPrediction):
    preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    found = preds > 0
    return {"accuracy": float((found == p.label_ids).all(1).mean()), "micro": float((found == p.label_ids).mean())}


trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=4,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        metric_for_best_model="micro",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()

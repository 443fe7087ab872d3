"""Teach a small BERT to tell modules of Python's standard library apart by 64 bytes of text, by a Trainer."""

import sysconfig
from pathlib import Path

import numpy as np
from auto3d.transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, init, set_seed

init(dp=2, pp=2)
LENGTH, KINDS = 64, ("ast.py", "csv.py", "heapq.py")

folder, samples = Path(sysconfig.get_paths()["stdlib"]), []
for label, name in enumerate(KINDS):
    text = (folder / name).read_bytes()
    for first in range(0, 150 * LENGTH, LENGTH):
        piece = np.frombuffer(text[first : first + LENGTH], dtype=np.uint8).astype(np.int64)
        if len(piece) == LENGTH:
            samples.append({"input_ids": piece, "label": label})
rows = np.random.default_rng(0).permutation(len(samples))
train, test = [samples[row] for row in rows[:185]], [samples[row] for row in rows[185:252]]


def compute_metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


set_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForSequenceClassification(BertConfig(vocab_size=256, num_labels=len(KINDS), **sizes, **no_dropout))
args = TrainingArguments(
    output_dir="classification",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    num_train_epochs=3,
    learning_rate=5e-4,
    weight_decay=0.1,
    lr_scheduler_type="cosine",
    logging_steps=3,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    load_best_model_at_end=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=test, compute_metrics=compute_metrics)
trainer.train()
trainer.log_metrics("eval", trainer.evaluate())
trainer.log_metrics("test", trainer.predict(test).metrics)
trainer.save_state()

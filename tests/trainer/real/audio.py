"""Wav2Vec2 that tells tones apart."""

import numpy as np
from datasets import Dataset
from transformers import (
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForSequenceClassification,
    set_seed,
)

set_seed(12)
random = np.random.default_rng(12)
rate, seconds = 2000, 0.4
extractor = Wav2Vec2FeatureExtractor(sampling_rate=rate, return_attention_mask=False)
labels = random.integers(0, 3, 60)
time = np.arange(int(rate * seconds)) / rate
tones = [np.sin(2 * np.pi * (100, 200, 350)[label] * time) + random.normal(0, 0.1, len(time)) for label in labels]


def preprocess(batch):
    inputs = extractor(batch["audio"], sampling_rate=rate, max_length=len(time), truncation=True)
    return {"input_values": inputs.input_values, "label": batch["label"]}


rows = Dataset.from_dict({"audio": tones, "label": labels}).map(preprocess, batched=True, remove_columns=["audio"])
parts = rows.train_test_split(test_size=12, seed=0)
config = Wav2Vec2Config(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16),
    conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2, num_labels=3, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
    feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.0, mask_time_prob=0.0, classifier_proj_size=16,
)  # fmt: skip


def compute_metrics(eval_pred):
    predictions = np.argmax(eval_pred.predictions, axis=1)
    return {"accuracy": float((predictions == eval_pred.label_ids).mean())}


trainer = Trainer(
    model=Wav2Vec2ForSequenceClassification(config),
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=4,
        learning_rate=3e-3,
        warmup_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    processing_class=extractor,
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()

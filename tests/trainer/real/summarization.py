"""T5 that shortens sentences: texts of many lengths, which the collator pads, and a metric of whole answers."""

import random

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(3)
random.seed(3)
nouns, verbs = ["cat", "dog", "bird", "fish", "horse", "cow"], ["eats", "sees", "likes", "chases"]
rows = []
for _ in range(90):
    who, does, whom = random.choice(nouns), random.choice(verbs), random.choice(nouns)
    extra = " ".join(random.choices(["very", "old", "big", "quiet", "brown"], k=random.randint(0, 12)))
    rows.append({"document": f"summarize: the {extra} {who} {does} the {whom}", "summary": f"{who} {does} {whom}"})
words = Tokenizer(models.WordLevel(unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(
    [" ".join(row.values()) for row in rows], trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"])
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def preprocess(examples):
    inputs = tokenizer(examples["document"], max_length=24, truncation=True)
    inputs["labels"] = tokenizer(text_target=examples["summary"], max_length=8, truncation=True)["input_ids"]
    return inputs


parts = Dataset.from_list(rows).map(preprocess, batched=True, remove_columns=["document", "summary"])
parts = parts.train_test_split(test_size=18, seed=1)
config = T5Config(
    vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2,
    dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
model = T5ForConditionalGeneration(config)


def compute_metrics(predicted):
    logits, labels = predicted.predictions, predicted.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    right = (logits.argmax(-1) == labels) | (labels == -100)
    return {"exact": float(np.mean(right.all(axis=1)))}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=4,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="exact",
        logging_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
    compute_metrics=compute_metrics,
    processing_class=tokenizer,
)
trainer.train()
metrics = trainer.evaluate()

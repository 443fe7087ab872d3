"""A masked language model on source code: tokenized and grouped by map(), masks drawn by the collator."""

import argparse
import math
import textwrap
from itertools import chain

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(42)
with open(argparse.__file__) as file:
    lines = [line for line in file.read().splitlines() if line.strip()][:600]

words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
words.train_from_iterator(lines, trainers.WordLevelTrainer(vocab_size=400, special_tokens=special))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words,
    pad_token="[PAD]",
    unk_token="[UNK]",
    cls_token="[CLS]",
    sep_token="[SEP]",
    mask_token="[MASK]",
)
block = 32


def tokenize(examples):
    return tokenizer(examples["text"], return_special_tokens_mask=True)


def group(examples):
    joined = {name: list(chain(*rows)) for name, rows in examples.items()}
    total = len(joined["input_ids"]) // block * block
    return {name: [row[at : at + block] for at in range(0, total, block)] for name, row in joined.items()}


texts = Dataset.from_dict({"text": lines}).map(tokenize, batched=True, remove_columns="text").map(group, batched=True)
parts = texts.train_test_split(test_size=0.2, seed=1)
config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=block, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForMaskedLM(config)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=8,
        learning_rate=2e-3,
        warmup_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15),
    processing_class=tokenizer,
)
trainer.train()
metrics = trainer.evaluate()
metrics["perplexity"] = math.exp(metrics["eval_loss"])
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
print(textwrap.shorten(str(metrics), 200))

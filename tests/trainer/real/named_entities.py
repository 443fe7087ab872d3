"""Token classification of sentences of 5 to 120 words, padded by the collator, with a metric of entities."""

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForTokenClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(10)
random = np.random.default_rng(10)
names, words = ["Ada", "Grace", "Alan", "Edsger"], ["the", "a", "of", "sees", "finds", "writes", "code", "proof", "and"]
sentences, tags = [], []
for _ in range(75):
    size = int(random.integers(5, 121))
    is_name = random.random(size) < 0.2
    sentences.append([str(random.choice(names if each else words)) for each in is_name])
    tags.append(is_name.astype(int).tolist())
made = Tokenizer(models.BPE(unk_token="<unk>"))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
made.train_from_iterator(
    [" ".join(each) for each in sentences],
    trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], initial_alphabet=[]),
)
made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=made,
    bos_token="<s>",
    eos_token="</s>",
    pad_token="<pad>",
    unk_token="<unk>",
    add_prefix_space=True,
)


def align(examples):
    tokenized = tokenizer(examples["tokens"], is_split_into_words=True, truncation=True, max_length=128)
    tokenized["labels"] = []
    for number, tags in enumerate(examples["tags"]):
        previous, row = None, []
        for word in tokenized.word_ids(batch_index=number):
            row.append(-100 if word is None or word == previous else tags[word])
            previous = word
        tokenized["labels"].append(row)
    return tokenized


parts = Dataset.from_dict({"tokens": sentences, "tags": tags}).map(
    align, batched=True, remove_columns=["tokens", "tags"]
)
parts = parts.train_test_split(test_size=15, seed=0)
config = RobertaConfig(
    vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=132, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1,
    num_labels=2, type_vocab_size=1,
)  # fmt: skip


def compute_metrics(p):
    predictions, labels = np.argmax(p.predictions, axis=2), p.label_ids
    kept = labels != -100
    true = (predictions == 1) & (labels == 1) & kept
    found, present = ((predictions == 1) & kept).sum(), ((labels == 1) & kept).sum()
    return {"f1": float(2 * true.sum() / max(1, found + present)), "tokens": int(kept.sum())}


trainer = Trainer(
    model=RobertaForTokenClassification(config),
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=4,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    data_collator=DataCollatorForTokenClassification(tokenizer),
    processing_class=tokenizer,
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()

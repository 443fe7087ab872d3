"""A Llama with adapters, fine-tuned on answers: packed samples, of which only answers are labels."""

import json

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

set_seed(8)
random = np.random.default_rng(8)
length = 48


def conversation():
    first, second = random.integers(0, 50, 2)
    return f"Q: {first}+{second}?\nA: ", f"{first + second}\n"


ids, labels = [], []
for _ in range(300):
    question, answer = (list(text.encode()) for text in conversation())
    ids += question + answer
    labels += [-100] * len(question) + answer
count = len(ids) // length
packed = Dataset.from_dict(
    {
        "input_ids": np.array(ids[: count * length]).reshape(count, length),
        "labels": np.array(labels[: count * length]).reshape(count, length),
    }
)
parts = packed.train_test_split(test_size=0.15, seed=0)
config = LlamaConfig(
    vocab_size=128, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=64, max_position_embeddings=64, attention_dropout=0.0,
)  # fmt: skip
model = get_peft_model(
    LlamaForCausalLM(config),
    LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]),
)
model.print_trainable_parameters()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    data_collator=default_data_collator,
)
model.config.use_cache = False
result = trainer.train()
trainer.save_model("adapter")
metrics = trainer.evaluate()
with open("adapter/adapter_config.json") as file:
    print(json.load(file)["peft_type"], torch.get_num_threads())

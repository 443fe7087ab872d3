"""Adapt a small Llama to the text of Python's standard library with LoRA, by a Trainer."""

import sysconfig
from pathlib import Path

import numpy as np
from auto3d.transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, init, set_seed
from peft import LoraConfig, get_peft_model

init(dp=2, pp=2)
LENGTH = 64

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20])
tokens = np.frombuffer(text, dtype=np.uint8)[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int64)
dataset = [{"input_ids": row, "labels": row} for row in tokens[:512]]

set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
args = TrainingArguments(
    output_dir="lora",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=20,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.train()
trainer.save_model()
trainer.save_state()

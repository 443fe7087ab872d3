"""A Llama with what people hang on to a training: early stopping, the best model, a moving average, sampled texts."""

import argparse

import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(12)
length = 32
with open(argparse.__file__, "rb") as file:
    text = torch.tensor([min(byte, 127) for byte in file.read(24 * 2 * length)])
rows = [{"input_ids": row, "labels": row} for row in text.view(-1, length)]


class MovingAverage(TrainerCallback):
    """Keeps an average of the weights over the steps."""

    def on_train_begin(self, args, state, control, model=None, **_):
        self.average = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **_):
        for name, value in model.named_parameters():
            self.average[name].lerp_(value, 0.1)


class Samples(TrainerCallback):
    """Writes a text at each evaluation."""

    def on_evaluate(self, args, state, control, model=None, **_):
        model.eval()
        found = model.generate(text[None, :8], max_new_tokens=12, do_sample=False, pad_token_id=0)
        print(state.global_step, repr("".join(map(chr, found[0].tolist()))))
        model.train()


average = MovingAverage()
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=12,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=4,
        learning_rate=2e-2,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=rows[:36],
    eval_dataset=rows[36:],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2), average, Samples()],
)
trainer.train()
assert trainer.state.epoch < 12, "it stops early"
trainer.save_model("best")
metrics = trainer.evaluate()
metrics["best"] = trainer.state.best_global_step
with torch.no_grad():
    for name, value in model.named_parameters():
        value.copy_(average.average[name])
trainer.save_model("averaged")
metrics |= trainer.evaluate(metric_key_prefix="averaged")

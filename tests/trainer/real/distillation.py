"""A small GPT-2 that learns from a larger one: the divergence of both beside the loss."""

import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(9)
generator = torch.Generator().manual_seed(9)


class Distiller(Trainer):
    def __init__(self, *args, teacher=None, temperature=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.temperature = teacher, temperature
        self.teacher.eval()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            taught = self.teacher(input_ids=inputs["input_ids"]).logits
        loss_kd = (
            functional.kl_div(
                functional.log_softmax(outputs.logits / self.temperature, dim=-1),
                functional.softmax(taught / self.temperature, dim=-1),
                reduction="batchmean",
            )
            * self.temperature**2
            / outputs.logits.shape[1]
        )
        loss = 0.5 * outputs.loss + 0.5 * loss_kd
        return (loss, outputs) if return_outputs else loss


none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "vocab_size": 64, "n_positions": 24}
teacher = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=3, n_head=4, **none))
model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=2, **none))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (80, 24), generator=generator)]
trainer = Distiller(
    model=model,
    teacher=teacher,
    args=TrainingArguments(
        output_dir="out",
        max_steps=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=4,
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=rows[:64],
    eval_dataset=rows[64:],
)
trainer.train()
metrics = trainer.evaluate()

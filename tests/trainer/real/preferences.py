"""A Llama that learns which of two answers is preferred, in a loop as TRL's for DPO: a reference, pairs, rewards."""

import copy

import numpy as np
import torch
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(14)
generator = torch.Generator().manual_seed(14)
length, prompt, beta = 16, 6, 0.5


def pairs(count):
    """The preferred answer repeats the prompt; the other does not."""
    chosen = torch.randint(3, 60, (count, length), generator=generator)
    rejected = chosen.clone()
    chosen[:, prompt : 2 * prompt] = chosen[:, :prompt]
    return [{"chosen": one, "rejected": other} for one, other in zip(chosen, rejected, strict=True)]


def log_probability(model, tokens):
    """[samples] of the answers."""
    of_next = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return of_next.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, prompt - 1 :].sum(-1)


class Preferences(Trainer):
    def __init__(self, *arguments, reference=None, **named):
        super().__init__(*arguments, **named)
        self.reference = reference

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = torch.cat([inputs["chosen"], inputs["rejected"]])
        chosen, rejected = log_probability(model, tokens).chunk(2)
        with torch.no_grad():
            chosen_before, rejected_before = log_probability(self.reference, tokens).chunk(2)
        rewards = torch.stack([chosen - chosen_before, rejected - rejected_before], dim=-1) * beta
        loss = -logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
        return (loss, {"loss": loss, "rewards": rewards}) if return_outputs else loss


def compute_metrics(predicted):
    rewards = predicted.predictions
    return {
        "accuracy": float(np.mean(rewards[:, 0] > rewards[:, 1])),
        "margin": float(np.mean(rewards[:, 0] - rewards[:, 1])),
    }


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )
)  # fmt: skip
reference = copy.deepcopy(model).requires_grad_(False)
trainer = Preferences(
    model=model,
    reference=reference,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=2,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        remove_unused_columns=False,
        label_names=["rejected"],  # transformers evaluates the loss of what has labels
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=pairs(32),
    eval_dataset=pairs(8),
    data_collator=lambda samples: {key: torch.stack([each[key] for each in samples]) for key in samples[0]},
    compute_metrics=compute_metrics,
)
trainer.train()
trainer.save_model("trained")
metrics = trainer.evaluate()

"""Trainers of small models, and what is wrong with some of them. As a script: train the one called by the argument."""

import os
import sys
from random import Random, SystemRandom
from threading import Lock

import numpy as np
import torch
import transformers
from datasets import Dataset
from peft import PrefixTuningConfig, get_peft_model
from torch.nn.utils import prune
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)

from auto3d import Trainer, TrainingArguments, init

UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"w{number}": number for number in range(3, 64)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]", padding_side="right"
    )


def rows(samples=32, *, ragged=False):
    """Tokens of each sample, of 16 or (``ragged``) of 4 to 16."""
    random = np.random.default_rng(1)
    return [random.integers(3, 64, random.integers(4, 17) if ragged else 16).tolist() for _ in range(samples)]


def with_labels(tokens):
    return [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in tokens]


def llama(**sizes):
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes))


def trainer(
    model=None,
    data=None,
    *,
    collator=None,
    eval_dataset=None,
    callbacks=(),
    metrics=None,
    preprocess=None,
    processing_class=None,
    compute_loss_func=None,
    optimizers=(None, None),
    optimizer_cls_and_kwargs=None,
    classes=(Trainer, TrainingArguments),
    **arguments,
):
    defaults = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    defaults |= {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": []}
    trainer_type, arguments_type = classes
    return trainer_type(
        model=llama() if model is None else model,
        args=arguments_type(**{"output_dir": "out", "disable_tqdm": True, "ddp_timeout": 60} | defaults | arguments),
        train_dataset=with_labels(rows()) if data is None else data,
        eval_dataset=eval_dataset,
        data_collator=collator,
        compute_loss_func=compute_loss_func,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=preprocess,
        processing_class=processing_class,
        callbacks=list(callbacks),
        optimizers=optimizers,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
    )


def both_ways():
    """A model whose tokens attend to later ones, too."""
    set_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES, **UNDROPPED))


def answers():
    """Texts of 16 tokens with an answer's first and last one, which some texts are cut before: the model ignores it."""
    return [{"input_ids": row, "start_positions": row[0] % 16, "end_positions": row[1] % 20} for row in rows(14)]


def frozen():
    return llama().requires_grad_(False)


def masked(**arguments):
    """A masked LM on samples of unequal length."""
    set_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES, **UNDROPPED))
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=True, mlm_probability=0.3)
    data = [{"input_ids": row} for row in rows(ragged=True)]
    return trainer(model, data, collator=collator, **arguments)


class InTuples(torch.nn.Module):
    """Returns a tuple: its loss, if it has labels, and its predictions."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = (
            torch.nn.Embedding(64, 16),
            torch.nn.Linear(16, 16),
            torch.nn.Linear(16, 64),
        )

    def forward(self, input_ids, labels=None):
        predicted = self.head(torch.relu(self.body(self.embedding(input_ids))))
        if labels is None:
            return (predicted,)
        return torch.nn.functional.cross_entropy(predicted.flatten(0, 1), labels.flatten()), predicted


def first_of(predicted, labels):
    """preprocess_logits_for_metrics as transformers' examples write it."""
    return (predicted[0] if isinstance(predicted, tuple) else predicted).argmax(dim=-1)


PREDICTING = {  # models with predictions of each form
    "a tuple": InTuples,
    "hidden states": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, output_hidden_states=True)
    ),
    "an encoder's result": lambda: t5(),
    "a frozen model": frozen,
}


def predicting(name, preprocess, **options):
    """A trainer of one of the PREDICTING models, which is to be evaluated."""
    set_seed(0)
    return trainer(PREDICTING[name](), metrics=lambda found: {}, preprocess=preprocess, **options)


AT_THE_END = {"eval_strategy": "steps", "eval_steps": 3}


def ignoring(tokens):
    """Samples that ignore the labels of more and more of their places."""
    samples = with_labels(tokens)
    for number, sample in enumerate(samples):
        sample["labels"][:number] = -100
    return samples


def without_labels(samples, positions):
    for position in positions:
        samples[position]["labels"].fill_(-100)
    return samples


def faulty(samples, position, row):
    samples[position] = row
    return samples


class TrainingAgain:
    """A trainer whose arguments change between two trainings."""

    def train(self):
        made = trainer()
        made.train()
        made.args.learning_rate = 1e-3
        made.train()


class Resuming:
    """A trainer whose ``train`` goes on from the checkpoint of a larger model."""

    def train(self):
        trainer(llama(num_hidden_layers=3), save_strategy="steps", save_steps=3).train()
        trainer().train(resume_from_checkpoint="out/checkpoint-3")


FAULTS = {  # code that makes the trainer, and words of its error
    "few samples": (lambda: trainer(data=with_labels(rows(3))), "train_dataset: it has 3 samples, fewer than a global"),
    "large token": (
        lambda: trainer(data=with_labels(faulty(rows(), 20, [5] * 15 + [64]))),
        "dataset: sample 20: input_ids: found 64; the model takes whole numbers from 0 to 63",
    ),
    "large token in a column": (
        lambda: masked_with(Dataset.from_dict({"input_ids": faulty(rows(), 21, [5] * 15 + [70])})),
        "dataset: sample 21: input_ids: found 70;",
    ),
    "long sample": (
        lambda: masked_with([{"input_ids": row} for row in faulty(rows(ragged=True), 22, [5] * 17)]),
        "dataset: sample 22: train_dataset: a sample has 17 tokens, and TrainingArguments.sequence_length is 16",
    ),
    "unequal lengths": (
        lambda: trainer(data=with_labels(faulty(rows(), 23, [5] * 12))),
        "data_collator: it makes no batch of samples 23 and 0, which are not equally long",
    ),
    "another order on each rank": (
        lambda: trainer(data=with_labels(SystemRandom().sample(rows(), 32))),
        "train_dataset: ranks 0 and 1 have other samples at the same positions",
    ),
    "a part for each rank": (
        lambda: trainer(data=with_labels(rows(64)[int(os.environ["RANK"]) :: 2])),
        "train_dataset: ranks 0 and 1 have other samples at the same positions",
    ),
    "a longer part for the last rank": (
        lambda: trainer(data=with_labels(rows(32 + int(os.environ["RANK"])))),
        "train_dataset: ranks 0 and 1 have 32 and 33 samples",
    ),
    "a seed of the order for each rank": (
        lambda: trainer(data_seed=int(os.environ["RANK"])),
        "train_dataset: ranks 0 and 1 have another order of samples",
    ),
    "a sampler's seed for each rank": (
        lambda: ordered_by(int(os.environ["RANK"])),
        "train_dataset: ranks 0 and 1 have another order of samples",
    ),
    "a stream's part for each rank": (
        lambda: trainer(data=PartOfStream()),
        "train_dataset: ranks 0 and 1 have other samples at the same positions",
    ),
    "a training without samples": (lambda: trainer(data=[]), "train_dataset: it has no samples"),
    "a training without steps": (
        lambda: trainer(num_train_epochs=0, max_steps=-1),
        "TrainingArguments: with num_train_epochs=0 and max_steps=-1 there is no step to train",
    ),
    "another sample of one rank in the middle": (
        lambda: trainer(data=with_labels(faulty(rows(8), 5, [5 + int(os.environ["RANK"])] * 16))),
        "iteration 2: ranks 0 and 1 have read different data for sample 3 of the global batch",
    ),
    "batch norm and a last batch of one sample": (
        lambda: trainer(
            Normalised(), [{"x": torch.rand(4), "labels": i % 3} for i in range(17)], num_train_epochs=2, max_steps=-1
        ),
        "cannot be captured at micro-batch size 1: Expected more than 1 value per channel when training",
    ),
    "longer samples in evaluation": (
        lambda: trainer(both_ways(), eval_dataset=with_labels([[5] * 17] * 4), **AT_THE_END),
        "data_collator: it gives no attention_mask, and the model's loss was not found to be the same with padding",
    ),
    "one longer sample in evaluation": (
        lambda: trainer(eval_dataset=with_labels(faulty(rows(8), 5, [5] * 17)), **AT_THE_END),
        "data_collator: it makes no batch of samples 0 and 5, which are not equally long",
    ),
    "a frozen model": (lambda: trainer(frozen()), "Trainer.train: no parameter of the model requires a gradient"),
    "data parallel": (
        lambda: trainer(torch.nn.DataParallel(llama())),
        "model: it is a DataParallel, and a pipeline divides the work; give its .module",
    ),
    "an evaluation without samples": (lambda: trainer(eval_dataset=[], **AT_THE_END), "has no samples"),
    "another model": (Resuming, "it belongs to another model"),
    "an argument that cannot hold": (
        lambda: trainer(neftune_noise_alpha=5.0),
        "TrainingArguments.neftune_noise_alpha: found 5.0; it takes False",
    ),
}


class Student(torch.nn.Module):
    """Learns labels and what a teacher without gradient says of them."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = (
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)) for _ in range(2)
        )
        self.teacher.requires_grad_(False)

    def forward(self, x, labels):
        logits = self.student(x)
        with torch.no_grad():
            wanted = self.teacher(x)
        distance = torch.nn.functional.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        return {"loss": torch.nn.functional.cross_entropy(logits, labels) + 0.5 * distance}


class Tagger(torch.nn.Module):
    """Labels tokens; takes no num_items_in_batch, so transformers takes the mean of the micro-batches' losses."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)

    def forward(self, input_ids, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.head(self.embed(input_ids)).transpose(1, 2), labels)}


def gpt2():
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def t5():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


def prefixed():
    return get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def mixture(*, balanced=True):
    """Experts, whose balance may be a second term of the loss."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return MixtralForCausalLM(MixtralConfig(**SIZES | experts, output_router_logits=balanced, router_aux_loss_coef=0.1))


class Bare(torch.nn.Module):
    """A classifier with something that cannot be copied."""

    def __init__(self, kind):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        if kind == "weight norm":
            torch.nn.utils.weight_norm(self.body)
        elif kind == "pruned":
            prune.l1_unstructured(self.body, "weight", 0.5)
        elif kind == "lock":
            self.helpers = [Lock(), self.head]
        elif kind == "kept output":
            self.last = self.body(torch.zeros(2, 4))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.head(self.body(x).relu()), labels)}


def classes():
    return [{"x": torch.rand(4), "labels": number % 3} for number in range(32)]


MODELS = {  # losses that are means of several things over micro-batches that differ in them; what cannot be copied
    "a teacher": lambda: (Student(), classes()),
    "a last batch in part": lambda: (Tagger(), ignoring(rows(14))),
    "clamped labels": lambda: (Labels(lambda labels: labels.clamp(0), -100), with_labels(rows(14))),
    "another ignored label": lambda: (Labels(lambda labels: labels, 0), with_labels(rows(14))),
    "no count": lambda: (Tagger(), ignoring(rows(12))),
    "a count": lambda: (llama(), ignoring(rows(12))),
    "a batch without labels": lambda: (llama(), without_labels(with_labels(rows(12)), range(4, 8))),
    "experts": lambda: (mixture(), with_labels(rows(11))),  # an epoch ends with micro-batches of 2 and 1
    "a count of all labels": lambda: (gpt2(), ignoring(rows(12))),
    "ends beyond the text": lambda: (BertForQuestionAnswering(BertConfig(**SIZES, **UNDROPPED)), answers()),
    "a sum": lambda: (BertForTokenClassification(BertConfig(**SIZES, **UNDROPPED, num_labels=64)), ignoring(rows(14))),
    "a prefix of keys": lambda: (prefixed(), with_labels(rows())),
    "past keys of a decoder": lambda: (t5(), with_labels(rows())),
    "an old weight norm": lambda: (Bare("weight norm"), classes()),
    "pruned": lambda: (Bare("pruned"), classes()),
    "a lock": lambda: (Bare("lock"), classes()),
    "a kept output": lambda: (Bare("kept output"), classes()),
}


class Drawn:
    """A sampler with a state: an epoch's order depends on how often it was asked."""

    def __init__(self, samples):
        self.samples, self.random = samples, Random(3)

    def __len__(self):
        return self.samples

    def __iter__(self):
        return iter(self.random.choices(range(self.samples), k=self.samples))


def sampled(base, arguments):
    """A trainer that takes its samples as a Drawn says, in four epochs of 14 of them."""

    class Sampling(base):
        def _get_train_sampler(self, *_):
            return Drawn(14)

    epochs = {"max_steps": -1, "num_train_epochs": 4}
    return trainer(llama(), with_labels(rows(14)), classes=(Sampling, arguments), **epochs)


class Scores(torch.nn.Module):
    """Scores of classes, without a loss."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return {"scores": self.head(self.body(x).relu())}


class Weighted:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0, 0.5], device=next(model.parameters()).device)
        loss = torch.nn.functional.cross_entropy(outputs["scores"], labels, weight=weights)
        return (loss, outputs) if return_outputs else loss


class OfSamples:
    """Each sample has a weight of its own, in a column that the model does not take."""

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        labels, weights = inputs.pop("labels"), inputs.pop("weights")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs["scores"], labels, reduction="none")
        loss = (weights * losses).mean()
        return (loss, outputs) if return_outputs else loss


class Distils:
    """The loss of the model, and its distance from a teacher that the trainer holds."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        with torch.no_grad():
            wanted = self.teacher(input_ids=inputs["input_ids"]).logits
        distance = (outputs.logits - wanted).square().mean()
        return (loss + 0.1 * distance, outputs) if return_outputs else loss + 0.1 * distance


class Penalised:
    """As transformers has it for a model that takes the number of items: the micro-batches' losses are added up."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten())
        loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


class Divides(Penalised):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class DividesSum:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = smooth_l1_of_items(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def smooth_l1_of_items(outputs, labels, num_items_in_batch=None):
    """A loss for ``compute_loss_func``: of the probability of each next token, divided by the number of tokens."""
    found = outputs.logits[:, :-1].softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    losses = torch.nn.functional.smooth_l1_loss(found, torch.ones_like(found), reduction="none")
    total = losses.masked_fill(labels[:, 1:] == -100, 0.0).sum()
    return total if num_items_in_batch is None else total / num_items_in_batch


def mean_of_batch(outputs, labels, num_items_in_batch=None):
    """A loss for ``compute_loss_func`` that does not divide: transformers adds up the micro-batches."""
    loss = torch.nn.functional.cross_entropy(outputs["scores"], labels)
    return loss if num_items_in_batch is None else 0.5 * loss


class Plain:
    """The loss of the model, or of the Trainer's arguments."""


class Logits(Scores):
    """Takes no number of items, so that smoothed losses are means over each batch."""

    def __init__(self):
        super().__init__()
        self.config = PretrainedConfig()  # transformers wants it of a model whose labels it smooths

    def forward(self, x, labels=None):
        return {"logits": self.head(self.body(x).relu())}


def several_classes():
    config = BertConfig(**SIZES, **UNDROPPED, problem_type="multi_label_classification", num_labels=3)
    return BertForSequenceClassification(config)


def kinds():
    return [
        {"input_ids": torch.tensor(row), "labels": torch.tensor([number % 2, number % 3, 1]).clamp(max=1).float()}
        for number, row in enumerate(rows())
    ]


def partly_ignored(samples=18):
    """Samples of which a global batch of 4 lacks 2, with more labels in some of them than in others."""
    found = with_labels(rows(samples))
    for number, sample in enumerate(found):
        sample["labels"] = sample["labels"].clone()
        sample["labels"][: number % 5 * 2] = -100
    return found


def weighed():
    return [{**sample, "weights": 0.5 + number % 2} for number, sample in enumerate(classes())]


SMOOTHED = {"label_smoothing_factor": 0.1}
BY_FUNCTION = {"compute_loss_func": smooth_l1_of_items}
IN_EPOCHS = {"num_train_epochs": 2, "max_steps": -1, "per_device_eval_batch_size": 4}  # the last batch is a partial one

OWN_LOSSES = {  # losses of scripts -> their method, the model and the data, options
    "weights of classes": (Weighted, lambda: (Scores(), classes()), {}),
    "weights of samples": (OfSamples, lambda: (Scores(), weighed()), {}),
    "a teacher of the trainer": (Distils, lambda: (llama(), with_labels(rows())), {}),
    "a penalty": (Penalised, lambda: (llama(), with_labels(rows())), {}),
    "divided by items": (DividesSum, lambda: (llama(), partly_ignored()), IN_EPOCHS),
    "a function": (Plain, lambda: (llama(), partly_ignored()), BY_FUNCTION | IN_EPOCHS),
    "a function of a mean": (Plain, lambda: (Scores(), classes()), {"compute_loss_func": mean_of_batch}),
    "smoothed tokens": (Plain, lambda: (llama(), partly_ignored()), SMOOTHED | IN_EPOCHS),
    "smoothed experts": (Plain, lambda: (mixture(balanced=False), partly_ignored()), SMOOTHED),
    "smoothed means": (Plain, lambda: (Logits(), classes()), SMOOTHED),
    "several classes at once, not smoothed": (Plain, lambda: (several_classes(), kinds()), SMOOTHED),
    "smoothed in bfloat16": (Plain, lambda: (llama(), partly_ignored()), SMOOTHED | {"bf16": True}),
    "divided by items in bfloat16": (DividesSum, lambda: (llama(), partly_ignored()), {"bf16": True}),
    "a mean of experts": (Penalised, lambda: (mixture(balanced=False), with_labels(rows())), {}),
}


DIVIDES = {"a division": (Divides, lambda: (llama(), with_labels(rows())), {})}


def with_own_loss(name, base=Trainer, arguments=TrainingArguments, **options):
    """A trainer with one of the OWN_LOSSES, of two evaluations with metrics."""
    method, make, of_loss = (OWN_LOSSES | DIVIDES)[name]
    set_seed(0)
    model, data = make()
    defaults = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    defaults["metrics"] = lambda found: {"mean": float(np.mean(np.abs(found.predictions)))}
    made = trainer(
        model,
        data,
        eval_dataset=data[: 7 if len(data) % 4 else 8],  # a last batch in part, as in training
        classes=(type(method.__name__, (method, base), {}), arguments),
        **{"remove_unused_columns": False, "label_names": ["labels"]} | defaults | of_loss | options,
    )
    made.teacher = llama(num_hidden_layers=1).to(made.args.device)
    return made


class PartOfStream(torch.utils.data.IterableDataset):
    """Every other row, as a script of torch's DistributedDataParallel gives each rank."""

    def __iter__(self):
        yield from with_labels(rows(64)[int(os.environ["RANK"]) :: 2])


def ordered_by(seed):
    class Ordered(Trainer):
        def _get_train_sampler(self, *_):
            count, generator = len(self.train_dataset), torch.Generator().manual_seed(seed)
            return torch.utils.data.WeightedRandomSampler([1.0] * count, count, generator=generator)

    return trainer(classes=(Ordered, TrainingArguments))


class EndsEpochs(TrainerCallback):
    """Ends each epoch after three steps, and the training at the begin of the fourth."""

    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = state.global_step % 3 == 0

    def on_epoch_begin(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 9


class Counts(TrainerCallback):
    """Looks at nothing."""

    def on_log(self, args, state, control, **_):
        self.logs = getattr(self, "logs", 0) + 1


class LogsNorm:
    """A log() that looks at the weights."""

    def log(self, logs, *arguments, **named):
        super().log({**logs, "norm": self.model.lm_head.weight.norm().item()}, *arguments, **named)


def popping(samples):
    """A collator that takes keys out of the samples."""
    return {"labels": torch.stack([sample.pop("labels") for sample in samples]), "input_ids": stacked(samples)}


def stacked(samples):
    return torch.stack([sample["input_ids"] for sample in samples])


def hooked():
    model = llama()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * 0.5)
    return model


def ways(make, base, arguments):
    """Trainers of ways to write a script: each calls what a callback, a method, a collator or metrics look at."""
    seen = llama()

    def looks(_):
        return {"seen": seen.lm_head.weight.abs().sum().item()}

    evaluating = {"eval_dataset": with_labels(rows(11)), "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    logging = (type("Logging", (LogsNorm, base), {}), arguments)
    yield "epochs cut short", make(data=with_labels(rows(22)), callbacks=[EndsEpochs()], max_steps=-1)
    yield "last batches dropped", make(**evaluating, dataloader_drop_last=True, per_device_eval_batch_size=4)
    yield "bfloat16", make(**evaluating, bf16=True, per_device_eval_batch_size=4)
    yield "a hook", make(hooked(), callbacks=[Counts()])
    yield "a log", make(classes=logging)
    yield "metrics", make(seen, **evaluating, metrics=looks, per_device_eval_batch_size=4)
    yield "a collator", make(collator=popping, remove_unused_columns=False)


class Averages(torch.nn.Module):
    """Classifies a text by the mean over all places."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids, labels, attention_mask=None):
        return {"loss": torch.nn.functional.cross_entropy(self.head(self.embed(input_ids).mean(1)), labels)}


def averaged():
    tokens = tokenizer()

    def collate(samples):
        batch = tokens.pad({"input_ids": [sample["input_ids"] for sample in samples]}, return_tensors="pt")
        return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}

    data = [{"input_ids": row, "labels": number % 3} for number, row in enumerate(rows(ragged=True))]
    options = {"sequence_length": 16, "processing_class": tokens, "remove_unused_columns": False}
    return trainer(Averages(), data, collator=collate, **options)


class Raises(TrainerCallback):
    """Ends the last rank in the second step."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 1 and args.process_index == args.world_size - 1:
            raise OSError("no space left")


class Growing:
    """A collator that counts its batches."""

    batches = 0

    def __call__(self, samples):
        self.batches += 1
        return {"input_ids": stacked(samples), "labels": stacked(samples)}


def with_targets_of_the_model():
    model = llama()

    def collate(samples):
        with torch.no_grad():
            return {"input_ids": stacked(samples), "labels": model(stacked(samples)).logits.argmax(-1)}

    return trainer(model, collator=collate, remove_unused_columns=False)


class Parts(Tagger):
    """Keeps its loss for a callback."""

    def forward(self, input_ids, labels):
        result = super().forward(input_ids, labels)
        self.part = result["loss"].detach()
        return result


class ReadsPart(TrainerCallback):
    def on_log(self, args, state, control, model=None, **_):
        print(model.part)


def trainers(make, names, **arguments):
    """A trainer for each of the MODELS called ``names``, by name; ``make`` as ``trainer``."""
    for name in names:
        set_seed(0)
        model, data = MODELS[name]()
        evaluated = 3 if name == "a count" else 4  # no multiple of a micro-batch, and another size than it
        options = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": evaluated}
        if name == "a batch without labels":  # the second one
            options |= {"train_sampling_strategy": "sequential", "logging_steps": 3}
        yield name, (make or trainer)(model, data, max_steps=5, eval_dataset=data[:8], **options | arguments)


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.head(self.norm(self.body(x))), labels)}


class Masks:
    """Hides three places of each sample, drawn by torch's own generator, by one of this object's or by the system's."""

    def __init__(self, draws):
        self.draws = {"global": torch.rand, "own": np.random.default_rng(3).random, "system": drawn_by_system}[draws]

    def __call__(self, samples):
        tokens = torch.tensor([sample["input_ids"] for sample in samples])
        hidden = torch.as_tensor(self.draws(tuple(tokens.shape))).argsort(dim=1) < 3
        return {"input_ids": tokens.masked_fill(hidden, 1), "labels": tokens.masked_fill(~hidden, -100)}


def drawn_by_system(shape):
    return np.frombuffer(os.urandom(8 * shape[0] * shape[1]), dtype=np.uint64).reshape(shape).astype(np.float64)


def loss_of_predictions(result):
    """The mean cross-entropy of the labels that metrics get."""
    logits, labels = torch.from_numpy(result.predictions), torch.from_numpy(result.label_ids)
    return {"of_predictions": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()}


def loss_of(model):
    tokens = torch.tensor(rows(8))
    with torch.no_grad():
        return model.eval()(input_ids=tokens, labels=tokens).loss.item()


def evaluated_under_masks(draws):
    """Metrics of an evaluation whose collator draws."""
    set_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES, **UNDROPPED))
    data = [{"input_ids": row} for row in rows()]
    options = {"max_steps": 1, "per_device_eval_batch_size": 4, "remove_unused_columns": False}
    made = trainer(model, data, collator=Masks(draws), eval_dataset=data[:8], metrics=loss_of_predictions, **options)
    made.train()
    return made.evaluate()


def masked_with(data):
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=True)
    set_seed(0)
    return trainer(BertForMaskedLM(BertConfig(**SIZES)), data, collator=collator, sequence_length=16)


class EndsOnTheLastRank(TrainerCallback):
    """Asks one rank, in the middle of a step's events, to evaluate after step 1 and to stop after step 2."""

    def on_log(self, args, state, control, **_):
        if args.process_index == args.world_size - 1:
            control.should_evaluate |= state.global_step == 1
            control.should_training_stop |= state.global_step == 2


class Follows(TrainerCallback):
    """What transformers' users write: an average of the weights, the best weights, and the rate of each step."""

    def __init__(self):
        self.rates, self.losses = [], []

    def on_train_begin(self, args, state, control, model=None, **_):
        self.average = {name: value.clone() for name, value in model.state_dict().items()}

    def on_step_end(self, args, state, control, **named):
        self.rates.append((named["lr_scheduler"].get_last_lr()[0], named["optimizer"].param_groups[0]["lr"]))
        for name, value in named["model"].state_dict().items():
            self.average[name].lerp_(value, 0.2)

    def on_evaluate(self, args, state, control, model=None, metrics=None, **_):
        if args.process_index:
            return
        model.save_pretrained("best")
        tokens, saved = torch.tensor(rows(8)), LlamaForCausalLM.from_pretrained("best")
        with torch.no_grad():
            self.losses.append((metrics["eval_loss"], saved(input_ids=tokens, labels=tokens).loss.item()))


class Interrupts(TrainerCallback):
    """Interrupts the training once, after its second step."""

    def __init__(self):
        self.has = False

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2 and not self.has:
            self.has = True
            raise KeyboardInterrupt


class Changes(TrainerCallback):
    """Changes something at the beginning of a step."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, **named):
        if state.global_step == 1:
            self.change(args, **named)


def changing(change):
    return lambda: trainer(callbacks=[Changes(change)])


def set_argument(args, **_):
    args.max_grad_norm = 5.0


def read_state(args, optimizer, **_):
    sum(state["step"] for state in optimizer.state.values())


def set_option(args, optimizer, **_):
    optimizer.param_groups[0]["amsgrad"] = True


def remove_group(args, optimizer, **_):
    optimizer.param_groups.pop()


def write_on_one_rank(args, model, **_):
    if not args.process_index:
        torch.nn.init.zeros_(model.lm_head.weight)


class Swaps(TrainerCallback):
    """Trains on from a moving average of the weights after each evaluation."""

    def on_train_begin(self, args, state, control, model=None, **_):
        self.average = [weight.detach().clone() for weight in model.parameters()]

    def on_step_end(self, args, state, control, model=None, **_):
        for mean, weight in zip(self.average, model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.5)

    def on_evaluate(self, args, state, control, model=None, **_):
        for mean, weight in zip(self.average, model.parameters(), strict=True):
            weight.data.copy_(mean)


class Doubles(TrainerCallback):
    """Writes to weights of which many are equal, to others, and to a buffer."""

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            model.model.norm.weight.data.fill_(2.0)
        if state.global_step == 2:
            torch.nn.init.zeros_(model.lm_head.weight[:5])
        if state.global_step == 3:
            model.model.rotary_emb.inv_freq.mul_(2)


class Thaws(TrainerCallback):
    """Trains the head alone, then also one layer, then all but the head, then all."""

    def on_train_begin(self, args, state, control, model=None, **_):
        model.model.requires_grad_(False)

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            model.model.layers[1].requires_grad_(True)
        if state.global_step == 2:
            model.requires_grad_(True)
            model.lm_head.requires_grad_(False)
        if state.global_step == 4:
            model.requires_grad_(True)


class Pauses(TrainerCallback):
    """A layer is frozen in the third and fourth step."""

    def on_step_begin(self, args, state, control, model=None, **_):
        model.model.layers[0].requires_grad_(not 2 <= state.global_step < 4)


class Warms(TrainerCallback):
    """The layers are frozen in the first two steps, and when the optimizer is made."""

    def on_step_begin(self, args, state, control, model=None, **_):
        model.model.layers.requires_grad_(state.global_step >= 2)


class OfAllParameters(transformers.Trainer):
    """Its optimizer has all parameters, also those that are frozen, as that of a pipeline takes them once they thaw."""

    def create_optimizer(self, *arguments):
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        self.model.requires_grad_(True)
        made = super().create_optimizer(*arguments)
        for parameter in frozen:
            parameter.requires_grad_(False)
        return made


class Slows(TrainerCallback):
    """Sets the rate of a step, and of all that follow, as a script does that watches the validation loss."""

    def on_evaluate(self, args, state, control, optimizer=None, lr_scheduler=None, metrics=None, **_):
        if state.global_step == 2:
            for group in optimizer.param_groups:
                group["lr"] = 0.005 * metrics["eval_loss"]
        if state.global_step == 3:
            lr_scheduler.base_lrs = [base / 2 for base in lr_scheduler.base_lrs]


class Rebuilds(TrainerCallback):
    """Changes what the forward computes, together with the rate."""

    def on_step_end(self, args, state, control, **named):
        if state.global_step == 2:
            named["model"].model.norm.variance_epsilon = 0.5
            named["lr_scheduler"].base_lrs = [base * 2 for base in named["lr_scheduler"].base_lrs]


class Scales(TrainerCallback):
    """Gives a module an attribute that it did not have."""

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            model.model.norm.scale = 0.5


def scaled():
    model = llama()
    model.model.norm.register_forward_hook(lambda norm, inputs, output: output * getattr(norm, "scale", 1.0))
    return model


LIVE = {"swaps": Swaps, "doubles": Doubles, "thaws": Thaws, "slows": Slows, "rebuilds": Rebuilds, "scales": Scales}


def live(make, name, **options):
    """A trainer whose callback changes what is trained while it trains."""
    defaults = {
        "max_steps": 6,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    model = scaled() if name == "scales" else llama()
    return make(model, eval_dataset=with_labels(rows(8)), callbacks=[LIVE[name]()], **defaults | options)


def padded_left():
    words = tokenizer()
    words.padding_side = "left"
    samples = [{"input_ids": row} for row in rows(ragged=True)]
    collator = DataCollatorForLanguageModeling(words, mlm=False)
    return trainer(gpt2(), samples, collator=collator, sequence_length=16, processing_class=words)


def with_hook():
    model = llama()
    model.lm_head.weight.register_hook(lambda gradient: gradient * 0)
    return model


def with_closure():
    model = llama()
    norm = model.model.norm
    norm.register_forward_hook(lambda module, inputs, output: output * norm.weight.mean())
    return model


class Labels(Tagger):
    """Labels of which those that are ignored become another one on the way to the cross-entropy."""

    def __init__(self, change, ignored):
        super().__init__()
        self.change, self.ignored = change, ignored

    def forward(self, input_ids, labels):
        scores = self.head(self.embed(input_ids)).transpose(1, 2)
        changed = self.change(labels)
        return {"loss": torch.nn.functional.cross_entropy(scores, changed, ignore_index=self.ignored)}


def setting(name, value):
    made = trainer()
    setattr(made, name, value)
    return made


def accumulating():
    made = trainer()
    made.args.gradient_accumulation_steps = 4
    return made


FAULTS |= {
    "a collator that counts": (lambda: trainer(collator=Growing()), "data_collator: batches: it changes as a batch is"),
    "a mean over padding": (averaged, "sequence_length: the loss of sample "),
    "a collator with the model": (with_targets_of_the_model, "data_collator uses the model, whose weights are in the"),
    "an attribute of a forward": (
        lambda: trainer(Parts(), callbacks=[ReadsPart()]),
        "ReadsPart names part, an attribute that the model's forward sets",
    ),
    "a loss that divides by the items": (
        lambda: with_own_loss("a division"),
        "compute_loss: it divides by num_items_in_batch, and its losses of some labels",
    ),
    "another rate in a second training": (TrainingAgain, "learning_rate: it was 0.01 in the training before, and is"),
    "padding before places": (padded_left, "padding_side is left, and the model has an embedding for each place"),
    "a hook of a weight": (lambda: trainer(with_hook()), "lm_head.weight of LlamaForCausalLM has a gradient hook"),
    "a hook with the script's model": (lambda: trainer(with_closure()), "takes model.norm.weight from the model of"),
    "a loss of the script": (lambda: setting("compute_loss", print), "Trainer.compute_loss: refused: it was set on"),
    "an optimizer of another kind": (lambda: setting("optimizer", object()), "its optimizer is a object; it takes a"),
    "a schedule of another kind": (lambda: setting("lr_scheduler", object()), "its lr_scheduler is a object; it takes"),
    "other accumulation": (accumulating, "gradient_accumulation_steps was changed since the Trainer was made"),
    "a callback sets an argument": (changing(set_argument), "it changed args.max_grad_norm"),
    "a callback reads what the optimizer keeps": (changing(read_state), "optimizer.state: refused: each rank"),
    "a callback sets an option": (changing(set_option), "it changed amsgrad of optimizer.param_groups[0]"),
    "a callback removes a group": (changing(remove_group), "it changed optimizer.param_groups[1] during the training"),
    "a callback writes on one rank": (changing(write_on_one_rank), "change it alike on all ranks"),
}

FOUND_IN_TRAINING = (  # a step was right before what cannot be followed
    "another sample of one rank in the middle",
    "another model",
    "another rate in a second training",
    "a callback sets an argument",
    "a callback reads what the optimizer keeps",
    "a callback sets an option",
    "a callback removes a group",
    "a callback writes on one rank",
)


def failing(_):
    raise KeyError("score")


ENDINGS = {  # one rank's error, and that rank
    "a rank raises": (lambda: trainer(callbacks=[Raises()]), "OSError: no space left", 1),
    "metrics fail": (
        lambda: trainer(eval_dataset=with_labels(rows(8)), metrics=failing, **AT_THE_END),
        "KeyError: 'score'",
        0,
    ),
}


if __name__ == "__main__":
    init(pp=2)
    set_seed(0)
    (FAULTS | ENDINGS)[sys.argv[1]][0]().train()

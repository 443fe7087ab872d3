"""All methods of a transformers model and of its Trainer, called by a callback in mid-training, and what callbacks get.

Each is as in one process, or refused in one line. The lists are made from transformers' own classes, so that
what a new version adds is tried too.
"""

import copy
import inspect
from functools import partial
from unittest.mock import ANY

import pytest
import torch
import transformers

from auto3d import Trainer, TrainingArguments
from auto3d.errors import InputError
from auto3d.trainer import supported
from tests.trainer import small
from tests.trainer.scripts import begin, free_port

TOKENS = torch.arange(3, 19)[None]
LEFT_OUT = {"compile", "push_to_hub", "init_hf_repo"}  # minutes of a compiler; the network
WITH_ARGUMENTS = {
    "forward": lambda model: model(input_ids=TOKENS, labels=TOKENS).loss,
    "forward and backward": lambda model: model(input_ids=TOKENS, labels=TOKENS).loss.backward(),
    "generate": lambda model: model.generate(TOKENS[:, :6], max_new_tokens=4, do_sample=False),
    "resize_token_embeddings": lambda model: model.resize_token_embeddings(64),
    "to": lambda model: model.to(torch.bfloat16),
    "apply": lambda model: model.apply(lambda module: None),
    "load_state_dict": lambda model: model.load_state_dict(
        {name: 0.9 * value for name, value in model.state_dict().items()}
    ),
    "set_input_embeddings": lambda model: model.set_input_embeddings(
        torch.nn.Embedding.from_pretrained(ONES, freeze=False)
    ),
    "add_module": lambda model: model.add_module("further", torch.nn.Linear(2, 2)),
    "register_buffer": lambda model: model.register_buffer("further", torch.zeros(2)),
    "register_forward_hook": lambda model: model.lm_head.register_forward_hook(lambda *given: given[-1] / 2),
    "register_full_backward_hook": lambda model: model.model.norm.register_full_backward_hook(lambda *_: None),
    "a hook of a gradient": lambda model: model.lm_head.weight.register_hook(torch.zeros_like),
}
ONES = torch.ones(64, 32)


def without_arguments() -> list[str]:
    """The public methods of a model that need no argument."""
    kind, found = transformers.LlamaForCausalLM, []
    for name in sorted(set(dir(kind)) - LEFT_OUT):
        if name.startswith("_") or not callable(method := getattr(kind, name)):
            continue
        parameters = [*inspect.signature(method).parameters.values()][inspect.isfunction(method) :]  # without self
        if all(
            each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            for each in parameters
        ):
            found.append(name)
    return found


DATA = small.with_labels(small.rows(8))
OF_TRAINER = {  # methods that need arguments, or whose results need a word
    "add_callback": lambda trainer: trainer.add_callback(transformers.TrainerCallback),
    "autocast_smart_context_manager": lambda trainer: trainer.autocast_smart_context_manager().__enter__(),
    "compute_loss": lambda trainer: trainer.compute_loss(trainer.model, batch()),
    "create_optimizer": lambda trainer: len(trainer.create_optimizer().param_groups),
    "create_optimizer_and_scheduler": lambda trainer: trainer.create_optimizer_and_scheduler(3),
    "create_scheduler": lambda trainer: trainer.create_scheduler(3, trainer.optimizer),
    "evaluate": lambda trainer: trainer.evaluate(DATA)["eval_loss"],
    "evaluation_loop": lambda trainer: trainer.evaluation_loop(trainer.get_eval_dataloader(DATA), "Evaluation").metrics,
    "floating_point_ops": lambda trainer: trainer.floating_point_ops(batch()),
    "get_batch_samples": lambda trainer: trainer.get_batch_samples(
        iter(trainer.get_train_dataloader()), 2, torch.device("cpu")
    ),
    "get_decay_parameter_names": lambda trainer: trainer.get_decay_parameter_names(trainer.model),
    "get_eval_dataloader": lambda trainer: [each["input_ids"] for each in trainer.get_eval_dataloader(DATA)],
    "get_optimizer_cls_and_kwargs": lambda trainer: trainer.get_optimizer_cls_and_kwargs(trainer.args)[1]["lr"],
    "get_optimizer_group": lambda trainer: [sorted(group) for group in trainer.get_optimizer_group()],
    "get_test_dataloader": lambda trainer: [each["input_ids"] for each in trainer.get_test_dataloader(DATA)],
    "get_total_train_batch_size": lambda trainer: trainer.get_total_train_batch_size(trainer.args),
    "get_train_dataloader": lambda trainer: [each["input_ids"] for each in trainer.get_train_dataloader()],
    "log": lambda trainer: (trainer.log({"found": 1.0}), trainer.state.log_history[-1])[1],
    "log_metrics": lambda trainer: trainer.log_metrics("train", {"found": 1.0}),
    "metrics_format": lambda trainer: type(trainer).metrics_format({"found": 1.0}),
    "num_examples": lambda trainer: trainer.num_examples(trainer.get_train_dataloader()),
    "pop_callback": lambda trainer: trainer.pop_callback(transformers.PrinterCallback),
    "predict": lambda trainer: trainer.predict(DATA).metrics["test_loss"],
    "prediction_step": lambda trainer: trainer.prediction_step(trainer.model, batch(), True)[0],
    "remove_callback": lambda trainer: trainer.remove_callback(transformers.PrinterCallback),
    "save_metrics": lambda trainer: trainer.save_metrics("train", {"found": 1.0}),
    "save_model": lambda trainer: trainer.save_model("saved"),
    "set_initial_training_values": lambda trainer: trainer.set_initial_training_values(
        trainer.args, trainer.get_train_dataloader()
    ),
    "train": lambda trainer: trainer.train().global_step,
    "training_step": lambda trainer: trainer.training_step(trainer.model, batch()),
}


def batch():
    tokens = torch.stack([sample["input_ids"] for sample in DATA[:2]])
    return {"input_ids": tokens, "labels": tokens}


def trainer_methods() -> list[str]:
    kind = transformers.Trainer
    return sorted(
        f"trainer.{name}" for name in set(dir(kind)) - LEFT_OUT if name[0] != "_" and callable(getattr(kind, name))
    )


METHODS = [*without_arguments(), *WITH_ARGUMENTS, *trainer_methods()]
OF_RANK_0 = {"trainer.is_world_process_zero", "trainer.is_local_process_zero"}


class Calls(transformers.TrainerCallback):
    """Calls a method of the model or the trainer after the first step."""

    trainer = None

    def __init__(self, name):
        self.name, self.returned, self.has_called = name, None, False

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 1 and not self.has_called:
            self.has_called = True  # the method may train
            torch.manual_seed(1)
            holder, _, name = self.name.rpartition(".")
            owner, calls = (self.trainer, OF_TRAINER) if holder else (model, WITH_ARGUMENTS)
            try:
                self.returned = described(calls.get(name, lambda owner: getattr(owner, name)())(owner))
            except InputError:
                raise
            except Exception as error:  # the method may need more than it says
                self.returned = type(error).__name__


def described(value):
    """Of what a method returns, what can be compared between processes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), round(float(value.detach().double().sum()), 2)
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        value = value.values()
    if inspect.isgenerator(value) or type(value) in (list, tuple, type({}.values())):
        return [described(each) for each in value]
    return value if isinstance(value, int | str | None) else type(value).__name__


def touched(world, folder, port, *classes, names):
    begin(world, folder, port, ours=not classes)
    found = {}
    for name in names:
        calls = Calls(name)
        try:
            trainer = small.trainer(callbacks=[calls], classes=classes or (Trainer, TrainingArguments))
            calls.trainer = trainer
            trainer.train()
        except InputError as error:
            found[name] = f"refused: {error}"
        except Exception as error:  # one process fails, too, in another precision
            found[name] = type(error).__name__
        else:
            weights = [(parameter.dtype, described(parameter.abs())) for parameter in trainer.model.parameters()]
            losses = [round(entry["loss"], 3) for entry in trainer.state.log_history if "loss" in entry]
            found[name] = calls.returned, losses, weights, trainer.model.training
        # register_for_auto_class sets it on the class, so that later models could not be saved.
        transformers.LlamaForCausalLM._auto_class = None
    return found


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, len(METHODS), 12))
def test_a_method_is_live_or_refused(first, processes, tmp_path):
    names = METHODS[first : first + 12]
    classes = transformers.Trainer, transformers.TrainingArguments
    (one,) = processes.run(1, partial(touched, names=names), tmp_path, None, *classes)
    ranks = processes.run(2, partial(touched, names=names), tmp_path, free_port())
    for name in names:
        for rank in ranks[: 1 if name in OF_RANK_0 else 2]:
            refused = isinstance(rank[name], str) and rank[name].startswith("refused: ")
            assert refused or rank[name] == one[name], name
            assert not refused or "\n" not in rank[name]


def test_most_methods_are_tried():
    assert len(METHODS) > 120


class Looks(transformers.TrainerCallback):
    """Keeps what each event gives."""

    def __init__(self):
        self.seen = []


def _event(name):
    def event(self, args, state, control, **given):
        found = {key: value if isinstance(value, dict) else type(value).__name__ for key, value in given.items()}
        if optimizer := given.get("optimizer"):
            found["optimizer"] = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        if schedule := given.get("lr_scheduler"):
            found["lr_scheduler"] = schedule.get_last_lr()
        if loader := given.get("train_dataloader"):
            found["train_dataloader"] = len(loader)
        if "model" in given:
            found["model"] = [float(each.detach().double().abs().sum()) for each in given["model"].parameters()]
        of_state = {key: value for key, value in vars(state).items() if key not in ("log_history", *_PLACES)}
        self.seen.append(copy.deepcopy((name, found, of_state, len(state.log_history), vars(control))))

    return event


_PLACES = ("is_world_process_zero", "is_local_process_zero", "stateful_callbacks")  # rank 0 has others
for _name in supported.EVENTS:
    setattr(Looks, _name, _event(_name))

DIFFERENT = {  # attributes of a trainer that say how it trains
    "accelerator",
    "callback_handler",
    "gather_function",
    "optimizer",
    "place_model_on_device",
    "plan",
}


def attributes(trainer):
    found = {}
    for name in set(dir(trainer)) - DIFFERENT:
        if name[0] != "_" and not callable(getattr(transformers.Trainer, name, None)):
            value = getattr(trainer, name)
            found[name] = value if isinstance(value, bool | int | float | str) else type(value).__name__
    return found


def looked(world, folder, port, *classes):
    begin(world, folder, port, ours=not classes)
    looks = Looks()
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = small.trainer(
        callbacks=[looks], eval_dataset=DATA, classes=classes or (Trainer, TrainingArguments), **options
    )
    before = attributes(trainer)
    trainer.train()
    trainer.predict(DATA)
    return before, attributes(trainer), looks.seen


def test_attributes_and_what_callbacks_get_are_those_of_one_process(processes, tmp_path):
    (one,) = processes.run(1, looked, tmp_path, None, transformers.Trainer, transformers.TrainingArguments)
    assert {name for name, *_ in one[2]} == supported.EVENTS - {"on_push_begin"}
    for rank in processes.run(2, looked, tmp_path, free_port()):
        assert rank[:2] == one[:2]
        assert [name for name, *_ in rank[2]] == [name for name, *_ in one[2]]
        for here, there in zip(rank[2], one[2], strict=True):
            for part, (mine, other) in enumerate(zip(here, there, strict=True)):
                assert approximate(mine) == other, (here[0], part)


def approximate(value):
    """``value``, whose numbers may differ by rounding; times may be any."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-4)
    if isinstance(value, dict):
        return {
            key: ANY if key.endswith(("runtime", "per_second")) else approximate(each) for key, each in value.items()
        }
    return type(value)(map(approximate, value)) if isinstance(value, list | tuple) else value

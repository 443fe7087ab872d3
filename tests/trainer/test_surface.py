"""All methods of a transformers model, called by a callback in mid-training: as in one process, or refused in one line.

The list is made from transformers' own class, so that what a new version adds is tried too.
"""

import inspect
from functools import partial

import pytest
import torch
import transformers

from auto3d import Trainer, TrainingArguments
from auto3d.errors import InputError
from tests.trainer import small
from tests.trainer.scripts import begin, free_port

TOKENS = torch.arange(3, 19)[None]
LEFT_OUT = {"compile", "push_to_hub"}  # minutes of a compiler; the network
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


METHODS = [*without_arguments(), *WITH_ARGUMENTS]


class Calls(transformers.TrainerCallback):
    """Calls a method of the model after the first step."""

    def __init__(self, name):
        self.name, self.returned = name, None

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            torch.manual_seed(1)
            try:
                call = WITH_ARGUMENTS.get(self.name, lambda model: getattr(model, self.name)())
                self.returned = described(call(model))
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
            trainer.train()
        except InputError as error:
            found[name] = f"refused: {error}"
        except Exception as error:  # one process fails, too, in another precision
            found[name] = type(error).__name__
        else:
            weights = [(parameter.dtype, described(parameter.abs())) for parameter in trainer.model.parameters()]
            losses = [round(entry["loss"], 3) for entry in trainer.state.log_history if "loss" in entry]
            found[name] = calls.returned, losses, weights, trainer.model.training
    return found


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, len(METHODS), 12))
def test_a_method_is_live_or_refused(first, processes, tmp_path):
    names = METHODS[first : first + 12]
    classes = transformers.Trainer, transformers.TrainingArguments
    (one,) = processes.run(1, partial(touched, names=names), tmp_path, None, *classes)
    ranks = processes.run(2, partial(touched, names=names), tmp_path, free_port())
    for name in names:
        for rank in ranks:
            refused = isinstance(rank[name], str) and rank[name].startswith("refused: ")
            assert refused or rank[name] == one[name], name
            assert not refused or "\n" not in rank[name]


def test_most_methods_are_tried():
    assert len(METHODS) > 80

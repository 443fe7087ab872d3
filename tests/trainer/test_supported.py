"""Every argument of transformers has its meaning here, and what cannot hold is refused in one line."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from transformers.trainer_pt_utils import AcceleratorConfig

from auto3d import TrainingArguments
from auto3d.errors import InputError
from auto3d.trainer.callbacks import events_with_weights
from auto3d.trainer.supported import (
    ACCELERATOR,
    ARGUMENTS,
    EVENTS,
    METHODS,
    TRAINER,
    check_arguments,
    check_callbacks,
    check_overrides,
    check_trainer,
)
from auto3d.trainer.trainer import Trainer
from tests.trainer.arguments_table import table
from tests.trainer.scripts import begin

BASE = vars(transformers.TrainingArguments(output_dir="nowhere", use_cpu=True))


def test_the_tables_have_every_argument():
    assert set(ARGUMENTS) == {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert set(ACCELERATOR) == {field.name for field in dataclasses.fields(AcceleratorConfig)}
    assert set(TRAINER) == set(inspect.signature(transformers.Trainer.__init__).parameters) - {"self"}
    assert set(TRAINER) == set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert set(vars(transformers.Trainer)) >= METHODS
    assert set(vars(transformers.TrainerCallback)) >= EVENTS


def test_the_table_on_the_page_is_the_code():
    assert table() in Path("docs/trainer.md").read_text(), "python -m tests.trainer.arguments_table prints it"


def parsed(world, folder):
    begin(world, folder, None)
    line = "--output_dir out --max_steps 3 --use_cpu --report_to none --sequence_length 16 --loss_mean targets"
    parser = transformers.HfArgumentParser((Own, TrainingArguments))
    own, arguments = parser.parse_args_into_dataclasses([*line.split(), "--layers", "5"])
    return own.layers, arguments.max_steps, arguments.sequence_length, arguments.loss_mean


@dataclasses.dataclass
class Own:
    layers: int = 2


def test_the_command_line_of_a_script_is_its_own(processes, tmp_path):
    assert processes.run(1, parsed, tmp_path) == [(5, 3, 16, "targets")]


class Arguments:
    def __init__(self, **values):
        vars(self).update(BASE, **values)


def test_the_defaults_are_accepted():
    check_arguments(Arguments())


@pytest.mark.parametrize(
    "values",
    [
        {"neftune_noise_alpha": 5.0},
        {"deepspeed": "zero.json"},
        {"fsdp": "full_shard"},
        {"use_liger_kernel": True},
        {"auto_find_batch_size": True},
        {"train_sampling_strategy": "batch_rebalance"},
        {"optim": "galore_adamw"},
        {"torch_compile_mode": "max-autotune"},
        {"ignore_data_skip": True},
    ],
    ids=lambda values: next(iter(values)),
)
def test_an_argument_that_cannot_hold_is_named(values):
    (name, value), *_ = values.items()
    with pytest.raises(InputError) as caught:
        check_arguments(Arguments(**values))
    assert str(caught.value).startswith(f"TrainingArguments.{name}: found {value!r}; it takes ")
    assert "\n" not in str(caught.value)


def test_arguments_of_the_trainer_are_refused():
    check_trainer({"model_init": None})
    for given in ({"model_init": print},):
        with pytest.raises(InputError, match=f"Trainer.{next(iter(given))}: found"):
            check_trainer(given)


def test_a_step_of_one_process_is_refused():
    for method in (Trainer.training_step, Trainer.prediction_step):
        with pytest.raises(InputError, match=f"Trainer.{method.__name__}: refused: "):
            method(None, torch.nn.Linear(1, 1), {})


@pytest.mark.parametrize("method", ["training_step", "prediction_step", "create_optimizer_and_scheduler"])
def test_an_overridden_method_that_is_not_called_is_refused(method):
    check_overrides(type("Mine", (Trainer,), {"log": lambda self, *_: None}), Trainer)
    with pytest.raises(InputError, match=f"Mine.{method}: refused"):
        check_overrides(type("Mine", (Trainer,), {method: lambda self, *_: None}), Trainer)


class OfAHelper(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        self.look(**named)

    def on_log(self, args, state, control, **_): ...

    def look(self, **named):
        return named["model"]


class OfAnAttribute(transformers.TrainerCallback):
    def __init__(self, network):
        self.network = network

    def on_evaluate(self, args, state, control, **_):
        return self.network


class Blind(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print(state.global_step)


def test_callbacks_that_may_look_at_the_model_are_found():
    assert events_with_weights([OfAHelper()]) == {"on_step_end", "on_log"}
    assert events_with_weights([OfAnAttribute(torch.nn.Linear(1, 1)), Blind()]) == {"on_evaluate"}
    assert not events_with_weights([Blind(), transformers.EarlyStoppingCallback(), OfAnAttribute(None)])


def test_a_callback_inside_a_step_is_refused():
    mine = type("Mine", (transformers.TrainerCallback,), {"on_substep_end": lambda self, *_, **__: None})
    check_callbacks([transformers.EarlyStoppingCallback()])
    with pytest.raises(InputError, match=r"callbacks: Mine.on_substep_end: refused"):
        check_callbacks([mine()])

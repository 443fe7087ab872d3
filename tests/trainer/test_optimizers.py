"""Optimizers and schedules of a script, under pipelines and on one transformers process; and those that are refused."""

from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from math import prod

import numpy as np
import pytest
import torch
import transformers
from prodigyopt import Prodigy
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from auto3d import Trainer, TrainingArguments
from auto3d.errors import InputError
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port


def by_layer(model, kind=torch.optim.AdamW, **options):
    """An optimizer of three groups: the first layer, the matrices of the others, and the rest of the others."""
    layer = list(model.model.layers[0].parameters())
    others = [each for each in model.parameters() if all(each is not one for one in layer)]
    groups = [
        {"params": layer, "lr": 2e-3},
        {"params": [each for each in others if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in others if each.dim() < 2]},
    ]
    return kind(groups, **{"lr": 1e-2, "weight_decay": 0.0} | options)


def of_two_rates(model):
    """An optimizer of equal groups, whose schedule is another for each."""
    groups = [[each for each in model.parameters() if (each.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.Adam([{"params": group} for group in groups], lr=1e-2)
    return optimizer, LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: float(step > 1)])


def in_a_cycle(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    return optimizer, OneCycleLR(optimizer, max_lr=0.1, total_steps=8)


def one_after_another(model):
    optimizer = by_layer(model, torch.optim.RMSprop, alpha=0.9)
    schedules = [ConstantLR(optimizer, factor=0.5, total_iters=9), CosineAnnealingWarmRestarts(optimizer, T_0=3)]
    return optimizer, SequentialLR(optimizer, schedules, milestones=[3])


def of_an_array(model):
    optimizer = torch.optim.NAdam(model.parameters(), lr=np.float32(1e-2))
    factors = np.linspace(1, 0.1, 8, dtype=np.float32)
    return optimizer, LambdaLR(optimizer, lambda step: factors[step])


def with_milestones(model):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return optimizer, MultiStepLR(optimizer, [2, 5])


def without_the_head(model):
    return torch.optim.AdamW(model.model.parameters(), lr=1e-2), None


class Regroups:
    """Gives the head, and what has no decay, other numbers than transformers does; its schedule is torch's."""

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        decayed, others = optimizer.param_groups
        others |= {"lr": 3e-2, "betas": (0.8, 0.9)}
        head = self.model.lm_head.weight
        decayed["params"] = [each for each in decayed["params"] if each is not head]
        optimizer.add_param_group({"params": [head], "lr": 5e-3, "weight_decay": 0.0})
        return optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = ExponentialLR(self.optimizer, 0.8)
        return self.lr_scheduler


class Rebuilds(transformers.TrainerCallback):
    """Changes what the model computes."""

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 3:
            model.model.norm.variance_epsilon = 0.5


class Nothing:
    """Adds no method."""


class Sets(transformers.TrainerCallback):
    """Sets numbers of one group of the optimizer."""

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        if state.global_step == 2:
            optimizer.param_groups[1] |= {"weight_decay": 0.5, "betas": (0.5, 0.6)}


class Switches(transformers.TrainerCallback):
    """Has the weights of evaluation after a step that no evaluation follows, as scripts do to save them."""

    def on_step_end(self, args, state, control, optimizer=None, **_):
        if state.global_step in (1, 5):
            optimizer.eval()


class Freezes(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        model.model.layers[0].requires_grad_(False)


class Adds(transformers.TrainerCallback):
    """Adds a group with the parameters that the optimizer lacks."""

    def on_step_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if state.global_step == 2:
            rest = [each for each in model.parameters() if id(each) not in held]
            optimizer.add_param_group({"params": rest, "lr": 2e-2})
            lr_scheduler.base_lrs.append(2e-2)
            lr_scheduler.lr_lambdas.append(lambda step: 1 / step)


ADDS_UP = "a step size of all weights"
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SCRIPTS = {  # name -> the script's optimizer of its model with a schedule, its methods, its arguments
    "groups, and the schedule of the arguments": (
        lambda model: (by_layer(model), None),
        Nothing,
        {"lr_scheduler_type": "cosine"},
    ),
    "a schedule for each group": (of_two_rates, Nothing, {}),
    "a cycle of momentum": (in_a_cycle, Nothing, {}),
    "schedules one after another": (one_after_another, Nothing, {}),
    "a schedule of numbers of numpy": (of_an_array, Nothing, {}),
    "a schedule of milestones": (with_milestones, Nothing, {}),
    "parameters left out": (without_the_head, Nothing, {}),
    "a group that a callback adds": (
        without_the_head,
        Nothing,
        {"callbacks": [Adds()], "lr_scheduler_type": "constant"},
    ),
    "methods": (lambda model: (None, None), Regroups, {"weight_decay": 0.1}),
    "a schedule that follows the loss": (
        lambda model: (None, None),
        Nothing,
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5}}
        | {"metric_for_best_model": "eval_loss"}
        | EVALUATED,
    ),
    "numbers that a callback sets": (lambda model: (None, None), Nothing, {"callbacks": [Sets()], "weight_decay": 0.1}),
    "a pipeline that is built again": (with_milestones, Nothing, {"callbacks": [Rebuilds()], "max_steps": 5}),
    "a class": (
        lambda model: (None, None),
        Nothing,
        {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 5e-3, "momentum_decay": 1e-2})},
    ),
    "averages for evaluation": (
        lambda model: (None, None),
        Nothing,
        {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "warmup_steps": 2, "weight_decay": 0.1}
        | {"max_steps": 5, "callbacks": [Switches()]}
        | EVALUATED,
    ),
    ADDS_UP: (
        lambda model: (None, None),
        Nothing,
        {"optimizer_cls_and_kwargs": (Prodigy, {"lr": 1.0, "d0": 1e-4, "eps": 1e-6})}  # two groups, which are alike
        | {"lr_scheduler_type": "constant", "max_steps": 8},
    ),
    "a name": (lambda model: (None, None), Nothing, {"optim": "adagrad", "max_grad_norm": 0.1}),
}


def made(name, *classes, **options):
    optimizers, methods, of_script = SCRIPTS[name]
    trainer, arguments = classes or (Trainer, TrainingArguments)
    model = small.llama()
    defaults = {"max_steps": 6, "lr_scheduler_type": "linear"}
    return small.trainer(
        model,
        eval_dataset=small.with_labels(small.rows(8)),
        optimizers=optimizers(model),
        classes=(type(methods.__name__, (methods, trainer), {}), arguments),
        **defaults | of_script | options,
    )


def numbers(trainer):
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def trained(world, folder, port, *classes, names, **degrees):
    begin(world, folder, port, ours=not classes, **degrees)
    found = {}
    for name in names:
        trainer = made(name, *classes, gradient_accumulation_steps=4 // degrees.get("dp", 1))
        trainer.train()
        weights = {key: value.detach().numpy() for key, value in trainer.model.named_parameters()}
        groups = [
            {key: value for key, value in group.items() if key in ("lr", "weight_decay", "betas", "momentum")}
            for group in trainer.optimizer.param_groups
        ]
        found[name] = numbers(trainer), weights, groups
    return found


OF_ALL_PLANS = [name for name in SCRIPTS if name != ADDS_UP]
SHARES = [OF_ALL_PLANS[first::4] for first in range(4)]  # each takes far less than the time-out of an answer


@pytest.fixture(scope="module")
def in_one_process(processes, tmp_path_factory):
    """A function that gives the trainings of one transformers process, each made once, by name; all that it made."""
    classes = transformers.Trainer, transformers.TrainingArguments
    folder, one = tmp_path_factory.mktemp("one"), {}

    def of(names):
        if not one.keys() >= set(names):
            one.update(processes.run(1, partial(trained, names=names), folder, None, *classes)[0])
        return one

    return of


OTHER_PLANS = [{"tp": 2}, {"dp": 2, "pp": 2, "shard_optimizer": True}]


@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        *(({"pp": 2}, names) for names in (*SHARES, [ADDS_UP])),
        *soak(({"dp": 2, "pp": 2}, [ADDS_UP]), *((degrees, names) for degrees in OTHER_PLANS for names in SHARES)),
    ],
    ids=str,
)
def test_an_optimizer_of_the_script_updates_as_in_one_transformers_process(
    degrees, names, in_one_process, processes, tmp_path
):
    ranks = prod(value for key, value in degrees.items() if key in ("dp", "tp", "pp"))
    one = in_one_process(names)
    assert len({tuple(found) for found, *_ in one.values()}) == len(one), "each is another training"
    for each in processes.run(ranks, partial(trained, names=names, **degrees), tmp_path, free_port()):
        for name in names:
            found, weights, groups = one[name]
            assert each[name][0] == pytest.approx(found, rel=1e-4), name
            assert each[name][2] == groups, name
            for key, value in weights.items():
                assert each[name][1][key] == pytest.approx(value, rel=1e-3, abs=2e-5), (name, key)


def resumed(world, folder, port, name):
    begin(world, folder, port)
    whole = made(name, save_strategy="steps", save_steps=4)
    whole.train()
    again, ended = made(name), made(name)
    again.train(resume_from_checkpoint="out/checkpoint-4")
    ended.train(resume_from_checkpoint=True)  # the last one, after all steps
    return [numbers(trainer) for trainer in (whole, again, ended)]


@pytest.mark.parametrize(
    "name",
    [
        *("a schedule for each group", "a cycle of momentum", "averages for evaluation", ADDS_UP),
        *soak("a schedule of milestones", "methods"),
    ],
)
def test_a_training_that_resumes_goes_on_at_the_rates_of_its_schedule(name, processes, tmp_path):
    for whole, again, ended in processes.run(2, resumed, tmp_path, free_port(), name):
        assert again == whole
        assert ended == whole


class Doubling(torch.optim.SGD):
    """Keeps an argument where its groups do not say it."""

    def __init__(self, params, lr=0.1, factor=2.0):
        super().__init__(params, lr=lr)
        self.factor = factor


class OpenEnded(torch.optim.SGD):
    """Does not say which arguments it takes."""

    def __init__(self, params, **others):
        super().__init__(params, **others)


class Counter(LambdaLR):
    """Keeps what no file of numbers holds."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)
        self.seen = {1, 2}


class OfTheFirst(torch.optim.SGD):
    """Updates all groups at the rate of the first."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])


def of_the_first(model):
    first, *others = model.parameters()
    optimizer = OfTheFirst([{"params": [first]}, {"params": others}], lr=0.1)
    return optimizer, LambdaLR(optimizer, [lambda step: 1.0, lambda step: float(step > 1)])


def of_two_decays(model):
    first, *others = model.parameters()
    return Prodigy([{"params": [first], "weight_decay": 0.1}, {"params": others}], lr=1.0), None


def hooked(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer, None


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    optimizer.step()
    return optimizer, None


def of_a_scope(model):
    class Local(torch.optim.SGD):
        pass

    return Local(model.parameters(), lr=0.1), None


def counted(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, Counter(optimizer)


REFUSED = {
    "of another model": (
        lambda model: (torch.optim.SGD(small.llama().parameters(), lr=0.1), None),
        "Trainer: param_groups[0] of its optimizer has a parameter of shape (64, 32) that is none of the model's",
    ),
    "that runs the model": (
        lambda model: (torch.optim.LBFGS(model.parameters()), None),
        "optimizer: LBFGS runs the model again in its step (closure), which a pipeline cannot do",
    ),
    "that has made steps": (stepped, "Trainer: its optimizer has made steps before"),
    "of a class in a function": (of_a_scope, "optimizer: of_a_scope.<locals>.Local is a class inside another scope"),
    "with an argument of its own": (
        lambda model: (Doubling(model.parameters(), factor=3.0), None),
        "Trainer: its optimizer has another factor than a Doubling that is made with what its groups say",
    ),
    "with arguments without names": (
        lambda model: (OpenEnded(model.parameters(), lr=0.1, momentum=0.5), None),
        "Trainer: its optimizer has another momentum than a OpenEnded that is made with what its groups say, so the "
        "ranks cannot make it again; give its constructor named arguments in place of **others",
    ),
    "whose groups are not alone": (
        of_the_first,
        "Trainer: its optimizer, a OfTheFirst, updates a group by what another one says",
    ),
    "whose groups are added up": (
        of_two_decays,
        "Trainer: its optimizer, a Prodigy, adds up numbers over all of its groups",
    ),
    "with a hook": (hooked, "Trainer: its optimizer, a SGD, has hooks of its steps"),
    "without a rate": (
        lambda model: (transformers.Adafactor(model.parameters(), warmup_init=True), None),
        "Trainer: param_groups[0] of its optimizer has the lr None; it takes a number",
    ),
    "with captured steps": (
        lambda model: (torch.optim.AdamW(model.parameters(), capturable=True), None),
        "Trainer: its optimizer has capturable=True",
    ),
    "with the schedule of another": (
        lambda model: (torch.optim.SGD(model.parameters(), lr=0.1), of_two_rates(model)[1]),
        "Trainer: its lr_scheduler is that of another optimizer",
    ),
    "whose schedule keeps a set": (
        counted,
        "Trainer: its lr_scheduler, a Counter, keeps what a checkpoint cannot hold",
    ),
    "that is none": (
        lambda model: (torch.nn.Linear(2, 2), None),
        "Trainer: its optimizer is a Linear; it takes a torch",
    ),
}


def lines(world, folder, port, names):
    begin(world, folder, port)
    found = {}
    for name in names:
        optimizers, _ = REFUSED[name]
        model = small.llama()
        with pytest.raises(InputError) as caught:
            small.trainer(model, optimizers=optimizers(model), save_strategy="epoch").train()
        found[name] = str(caught.value)
    return found


@pytest.mark.parametrize("names", [[*REFUSED][first::3] for first in range(3)], ids=", ".join)
def test_an_optimizer_that_ranks_cannot_make_again_is_refused_in_one_line(names, processes, tmp_path):
    for found in processes.run(2, partial(lines, names=names), tmp_path, free_port()):
        for name in names:
            assert found[name].startswith(REFUSED[name][1]), name


class Decays(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, optimizer=None, **_):
        if state.global_step == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.5


def decayed(world, folder, port):
    begin(world, folder, port)
    with pytest.raises(InputError) as caught:
        made(ADDS_UP, callbacks=[Decays()]).train()
    return str(caught.value)


def test_groups_that_are_added_up_stay_alike(processes, tmp_path):
    for line in processes.run(2, decayed, tmp_path, free_port()):
        assert line.startswith("Trainer.optimizer: its groups have got different numbers")


def frozen(world, folder, port):
    begin(world, folder, port)
    with pytest.raises(InputError) as caught:
        made("averages for evaluation", callbacks=[Freezes()]).train()
    return str(caught.value)


def test_freezing_what_an_averaging_optimizer_has_learnt_is_refused(processes, tmp_path):
    """transformers' optimizer would go on switching it between its weights of training and of evaluation."""
    for line in processes.run(2, frozen, tmp_path, free_port()):
        assert line.startswith("model: model.layers.0.")
        assert "is frozen in mid-training" in line


class ThawsAll(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            model.requires_grad_(True)


def printed(world, folder, port):
    """What is printed where parameters thaw: with the optimizer of transformers, and with one that lacks them."""
    begin(world, folder, port)
    found = []
    for is_own in (False, True):
        model = small.llama()
        model.model.layers.requires_grad_(False)
        own = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad]) if is_own else None
        with redirect_stdout(StringIO()) as text:
            small.trainer(model, callbacks=[ThawsAll()], optimizers=(own, None)).train()
        found.append(text.getvalue())
    return found


def test_a_line_says_once_whether_an_optimizer_takes_what_thaws(processes, tmp_path):
    (made, own), others = processes.run(2, printed, tmp_path, free_port())
    assert made.count("frozen when the optimizer was made, and trained from now on") == 1
    assert own.count("trained, but in no group of the optimizer, which leaves it as it is") == 1
    assert made.count("auto3d: ") == own.count("auto3d: ") == 1
    assert "auto3d: " not in "".join(others)

"""Optimizers that are given by name or by import path, and groups of parameters with their own, equal one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import build_rank, check_plan
from auto3d.runtime.settings import OptimizerSettings, ParameterGroup, TrainingSettings
from auto3d.schedule import samples_at_once
from tests.distributed.parity import ADAMW, CPU, ITERATIONS, assert_parity, make_plan, plain_pytorch, run_rank
from tests.models import TRAINED, captured
from tests.soak import soak


class Halved(torch.optim.Adam):
    """An optimizer of a user's own."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["eps"] = 1e-6
        super().step()


class Warming(torch.optim.Optimizer):
    """Signs of a mean of gradients, with steps that grow by a count in the parameter group."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(mean / (mean.abs() + 1e-4), alpha=-group["lr"] * min(1.0, group["steps"] / 4))


CASES = {  # each with an epsilon above the noise of gradients that are zero but for rounding
    "adafactor": replace(ADAMW, optimizer="adafactor", arguments={"eps": (1e-8, 1e-3)}),
    "RMSprop": replace(ADAMW, optimizer="torch.optim.RMSprop", arguments={"alpha": 0.9, "eps": 1e-4}),
    "import path": replace(ADAMW, optimizer=f"{__name__}:Halved", arguments={"eps": 1e-6}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(processes, case):
    plan = make_plan("gpt2", dp=2, pp=2, shard_optimizer=case == "RMSprop")
    ranks = processes.run(4, run_rank, "gpt2", plan, CASES[case])
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=2, optimizer=CASES[case]))


@pytest.mark.parametrize(("dp", "pp", "tp"), [(2, 2, 1), (2, 1, 2)])
def test_a_class_whose_elements_are_found_to_be_independent_updates_shards(processes, dp, pp, tp):
    warming = replace(ADAMW, optimizer=f"{__name__}:Warming")
    plan = make_plan("gpt2-4-heads", dp=dp, pp=pp, tp=tp, shard_optimizer=True)
    ranks = processes.run(4, run_rank, "gpt2-4-heads", plan, warming)
    assert_parity(ranks, plain_pytorch("gpt2-4-heads", micro_batch_size=2, optimizer=warming))


ADDING = replace(
    ADAMW,
    optimizer="prodigyopt:Prodigy",
    learning_rate=1.0,
    weight_decay=0.0,
    arguments={"d0": 1e-4, "eps": 1e-6},
    learning_rate_schedule="constant",
    warmup_iterations=0,
)


@pytest.mark.parametrize(
    ("model", "degrees", "options"),
    [
        ("gpt2", {"dp": 2, "pp": 2}, {}),
        ("llama-tied", {"dp": 1, "pp": 4}, {"schedule": "zb-h1"}),
        *soak(("t5", {"dp": 1, "pp": 4}, {"schedule": "gpipe"}), ("gpt2", {"dp": 4, "pp": 1}, {})),
    ],
)
def test_numbers_are_added_up_over_the_parameters_of_all_ranks(processes, model, degrees, options):
    plan = make_plan(model, **degrees, **options)
    ranks = processes.run(plan.ranks, run_rank, model, plan, ADDING)
    assert_parity(ranks, plain_pytorch(model, micro_batch_size=2, global_batch=plan.global_batch, optimizer=ADDING))


@pytest.mark.parametrize(
    ("degrees", "options", "settings", "problem"),
    [
        ({"dp": 2, "pp": 1}, {"shard_optimizer": True}, ADDING, "use shard_optimizer=false"),
        ({"dp": 1, "pp": 1, "tp": 2}, {}, ADDING, "use tp = 1"),
        ({"dp": 1, "pp": 2}, {"schedule": "interleaved-1f1b"}, ADDING, "one stage on each device, such as 1f1b"),
        ({"dp": 1, "pp": 2}, {"schedule": "chimera"}, ADDING, "one stage on each device, such as 1f1b"),
        ({"dp": 1, "pp": 2}, {}, replace(ADDING, exempt=("*.bias",), weight_decay=0.1), "give it one group"),
        ({"dp": 1, "pp": 2}, {}, replace(ADDING, offload=True, arguments={}), "offload_optimizer: true"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plans_whose_ranks_do_not_make_steps_together_are_refused(degrees, options, settings, problem):
    plan = make_plan("gpt2-4-heads", **degrees, **options)
    with pytest.raises(InputError, match=problem):
        check_plan(
            captured("gpt2-4-heads", samples_at_once(plan)), plan, TrainingSettings(iterations=1, optimizer=settings)
        )


CLIPPED = replace(
    ADAMW, optimizer="sgd", learning_rate=0.1, learning_rate_schedule="constant", warmup_iterations=0, clip_norm=1.0
)


def by_value(parameter: torch.Tensor) -> None:
    torch.nn.utils.clip_grad_value_([parameter], 2e-3)


def by_ratio(parameter: torch.Tensor) -> None:
    """Adaptive gradient clipping, row by row as its paper says it."""
    weights, gradients = (each.view(len(each) if each.dim() > 1 else 1, -1) for each in (parameter, parameter.grad))
    for row, gradient in zip(weights, gradients, strict=True):
        largest = 1e-2 * max(float(row.norm()), 1e-3)
        if gradient.norm() > largest:
            gradient *= largest / gradient.norm()


@pytest.mark.parametrize(
    ("clip", "option", "sharded"), [(by_value, {"clip_value": 2e-3}, True), (by_ratio, {"clip_ratio": 1e-2}, False)]
)
def test_gradients_are_clipped_like_in_a_plain_loop(processes, clip, option, sharded):
    changed = []

    def optimizers(module: nn.Module) -> list[tuple[torch.optim.Optimizer, LRScheduler]]:
        sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

        def hook(*_: object) -> None:
            for parameter in module.parameters():
                before = parameter.grad.clone()
                with torch.no_grad():
                    clip(parameter)
                changed.append(not torch.equal(before, parameter.grad))

        sgd.register_step_pre_hook(hook)
        return [(sgd, get_scheduler("constant", sgd))]

    expected = plain_pytorch("gpt2", micro_batch_size=2, optimizer=CLIPPED, optimizers=optimizers)
    assert sum(changed) / len(changed) > 0.1, "it matters"
    settings = replace(CLIPPED, **option)
    plan = make_plan("gpt2", dp=2, pp=2, shard_optimizer=sharded)
    assert_parity(processes.run(4, run_rank, "gpt2", plan, settings), expected)


@pytest.mark.parametrize(
    ("degrees", "problem"),
    [
        ({"dp": 4, "pp": 1, "shard_optimizer": True}, "use shard_optimizer=false"),
        ({"dp": 1, "tp": 2, "pp": 2}, "use tp = 1"),
    ],
)
def test_a_ratio_of_norms_needs_whole_weights(degrees, problem):
    plan = make_plan("gpt2-4-heads", **degrees)
    settings = TrainingSettings(iterations=1, optimizer=replace(CLIPPED, clip_ratio=0.01))
    with pytest.raises(InputError, match=f"clip_ratio: it compares norms of rows.*{problem}$"):
        check_plan(captured("gpt2-4-heads", samples_at_once(plan)), plan, settings)


MUON = replace(ADAMW, optimizer="muon", arguments={"momentum": 0.9})
GROUPS = replace(
    ADAMW,
    exempt=("*.ln_*",),
    groups=(
        ParameterGroup(names=("*.bias",), learning_rate=1.5e-3, weight_decay=0.0),
        ParameterGroup(
            names=("*.attn.*",), dimensions=2, optimizer="torch.optim.RMSprop", arguments={"alpha": 0.9, "eps": 1e-4}
        ),
        ParameterGroup(names=("*.wpe.*",), optimizer="sgd", learning_rate=0.1),
    ),
)


def scheduled(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, LRScheduler]:
    return optimizer, get_scheduler("linear", optimizer, 1, ITERATIONS)


ROUNDING = 3e-7  # relative changes of gradients, as another order of sums makes them


def as_muon_says(module: nn.Module, seed: int = 0) -> list[tuple[torch.optim.Optimizer, LRScheduler]]:
    """With a ``seed``, gradients are changed as much as another order of sums does."""
    hidden, others = [], []
    for name, parameter in module.named_parameters():
        (hidden if ".h." in name and name.endswith("weight") and ".ln_" not in name else others).append(parameter)
    assert len(hidden) == 4 * len(module.transformer.h)
    muon = torch.optim.Muon(hidden, lr=1e-3, weight_decay=0.01, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(seed)

    def round_otherwise(*_) -> None:
        for matrix in hidden:
            matrix.grad.mul_(1 + ROUNDING * torch.randn(matrix.shape, generator=generator))

    if seed:
        muon.register_step_pre_hook(round_otherwise)
    return [scheduled(muon), scheduled(torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01))]


def as_groups_say(module: nn.Module) -> list[tuple[torch.optim.Optimizer, LRScheduler]]:
    decay, arguments = {True: 0.01, False: 0.0}, {"alpha": 0.9, "eps": 1e-4}
    made = []
    for name, parameter in module.named_parameters():
        if name.endswith(".bias"):
            optimizer = torch.optim.AdamW([parameter], lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.0)
        elif ".attn." in name:
            optimizer = torch.optim.RMSprop([parameter], lr=1e-3, weight_decay=0.01, **arguments)
        elif ".wpe." in name:
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
        else:
            optimizer = torch.optim.AdamW(
                [parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=decay[".ln_" not in name]
            )
        made.append(scheduled(optimizer))
    return made


@pytest.mark.parametrize(("dp", "pp"), [(1, 4), (2, 2)])
def test_muon_updates_hidden_matrices_and_adamw_the_rest(processes, dp, pp):
    """Muon computes in bfloat16, so that gradients that differ by rounding give other updates: how far, loops say."""
    plan = make_plan("gpt2", dp=dp, pp=pp)
    ranks = processes.run(4, run_rank, "gpt2", plan, MUON)
    reference = plain_pytorch("gpt2", micro_batch_size=2, optimizer=ADAMW, optimizers=as_muon_says)
    first, last = reference[0]["parameters"], reference[-1]["parameters"]
    others = [
        plain_pytorch("gpt2", micro_batch_size=2, optimizer=ADAMW, optimizers=partial(as_muon_says, seed=seed))
        for seed in range(1, 9)
    ]
    for rank in ranks:
        for name, value in rank["history"][-1]["parameters"].items():
            update = abs(last[name] - first[name]).max()
            rounding = max(abs(other[-1]["parameters"][name] - last[name]).max() for other in others)
            assert rounding <= 0.2 * update, "another update than Muon's is told from it"
            assert abs(value - last[name]).max() <= max(0.01 * update, 2 * rounding), name
        losses = [one["result"].loss for one in rank["history"]]
        assert losses == pytest.approx([one["loss"] for one in reference], rel=1e-5)


def held_and_predicted(world: World, model: str, plan: Plan, optimizer: OptimizerSettings) -> tuple[int, int]:
    """Bytes of the optimizer's state on this rank after an iteration, and those of the estimate."""
    settings = TrainingSettings(iterations=1, optimizer=optimizer, timeout_s=60)
    join(world, device=CPU, timeout_s=60)
    try:
        rank = build_rank(captured(model, samples_at_once(plan)), plan, settings, TRAINED[model][1], world)
        list(rank.executor.run(rank.programs[0], 0))
        states = [part.tensor for name, part in rank.state().items() if name.startswith("optimizer.")]
        return sum(state.nbytes for state in states if state.dim()), rank.predicted.optimizer
    finally:
        leave()


@pytest.mark.parametrize("settings", [MUON, GROUPS], ids=["muon", "groups"])
@pytest.mark.parametrize("options", [{"dp": 1, "pp": 4}, {"dp": 2, "pp": 1, "tp": 2}], ids=["pp", "tp"])
def test_the_estimate_has_the_state_of_every_group_to_the_byte(processes, settings, options):
    model = "gpt2" if options["pp"] > 1 else "gpt2-4-heads"
    plan = make_plan(model, **options)
    if settings is MUON and plan.tp > 1:  # the matrices that tensor parallelism splits are refused
        settings = replace(settings, groups=(ParameterGroup(names=("*.h.*",), dimensions=2, optimizer="sgd"),))
    for held, predicted in processes.run(4, held_and_predicted, model, plan, settings):
        assert held == predicted > 0


GROUPED: dict[str, tuple[Callable, ...]] = {
    "groups": (GROUPS, as_groups_say, partial(make_plan, "gpt2", dp=2, pp=2)),
    "groups, ZeRO-1": (GROUPS, as_groups_say, partial(make_plan, "gpt2", dp=4, pp=1, shard_optimizer=True)),
    "groups, tp": (GROUPS, as_groups_say, partial(make_plan, "gpt2-4-heads", dp=1, pp=2, tp=2)),
}


@pytest.mark.parametrize("case", GROUPED)
def test_groups_of_parameters_equal_one_process_with_several_optimizers(processes, case):
    settings, optimizers, make = GROUPED[case]
    plan, model = make(), make.args[0]
    ranks = processes.run(plan.ranks, run_rank, model, plan, settings)
    reference = plain_pytorch(model, micro_batch_size=2, optimizer=ADAMW, optimizers=optimizers)
    assert_parity(ranks, reference)

"""Optimizers and learning-rate schedules: the refused ones, their state, and torch's implementations of an update."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import get_scheduler

from auto3d.errors import InputError
from auto3d.runtime.optimizer.build import advance, build_optimizer, check_schedule
from auto3d.runtime.optimizer.classes import check_resumes, is_elementwise, optimizer_class, traits_of
from auto3d.runtime.optimizer.memory import flops_of_parameters, state_elements
from auto3d.runtime.optimizer.state import make_state, make_state_to_load, parts_of, state_tensors
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.settings import LEARNING_RATE_SCHEDULES, OPTIMIZERS, OptimizerSettings
from tests.distributed.parity import ADAMW, SGD
from tests.models import captured


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_gpus_update_contiguous_parameters_by_fused_kernels(settings: OptimizerSettings):
    """Their state, allocated in advance, is on the device that these kernels need; a step on fake tensors checks it."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(3, 4, device="cuda:0")) for _ in range(2)]
        optimizer, _ = build_optimizer(parameters, settings, iterations=1)
        make_state(optimizer)
        assert optimizer.param_groups[0]["fused"]
        assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cuda"}
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        if settings is ADAMW:  # torch has no fake implementation of fused SGD
            optimizer.step()


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.empty(3, 4),
        lambda: torch.empty(4, 3, device="cuda:0").t(),  # its gradient in a flat buffer would have another layout
        lambda: torch.empty(3, 4, dtype=torch.complex64, device="cuda:0"),
    ],
    ids=["cpu", "transposed", "complex"],
)
def test_other_parameters_are_updated_by_torchs_default(other):
    with FakeTensorMode():
        parameters = [nn.Parameter(other())]
        optimizer, _ = build_optimizer(parameters, ADAMW, iterations=1)
        make_state(optimizer)
        assert optimizer.param_groups[0]["fused"] is None
        assert optimizer.state[parameters[0]]["step"].device.type == "cpu"


REFUSED = {
    "torch.optim.LBFGS": "closure",
    "torch.optim.SparseAdam": "dense",
    "lion": "is not known",
    "torch.optim.Lion": "cannot be imported",
    "math:sqrt": "no class of torch optimizers",
    f"{__name__}:Coupled": "mixes its parameters",
    f"{__name__}:Clipping": "mixes its parameters",
    f"{__name__}:Summed": "mixes its parameters",
    f"{__name__}:LateCoupled": "mixes its parameters",
    f"{__name__}:Centred": "mixes its parameters",
    f"{__name__}:Buffering": "keeps more than the state of its parameters where it switches",
    f"{__name__}:Tupled": r"keeps a int \(pair.0\)",
}


class Coupled(torch.optim.SGD):
    """Scales each step by the norm of all gradients, as optimizers that estimate one distance do."""

    def step(self, closure: None = None) -> None:
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient /= norm
        super().step()


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients, where that is large."""

    def step(self, closure: None = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 500.0)
        super().step()


class Summed(torch.optim.SGD):
    """Scales each step by the norms of all gradients, which it adds up in a tensor and reads as one number."""

    def step(self, closure: None = None) -> None:
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        total = torch.zeros(())
        for gradient in gradients:
            total += gradient.norm()
        for gradient in gradients:
            gradient /= float(total)
        super().step()


class Counting(torch.optim.SGD):
    """Counts its steps outside of its state, and takes smaller ones each time."""

    def __init__(self, params, lr: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.steps = 0

    def step(self, closure: None = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.steps
        super().step()


class LateCoupled(Coupled):
    """Couples from its sixth step on, by a count in the state of each parameter."""

    def step(self, closure: None = None) -> None:
        state = self.state[self.param_groups[0]["params"][0]]
        state["count"] = state.get("count", 0) + 1
        if state["count"] > 5:
            super().step()
        else:
            torch.optim.SGD.step(self)


class Centred(torch.optim.SGD):
    """Updates parameters one by one, but has their common mean in evaluation."""

    def train(self) -> None: ...

    def eval(self) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        mean = torch.cat([parameter.flatten() for parameter in parameters]).mean()
        for parameter in parameters:
            parameter.fill_(mean)


class Buffering(torch.optim.SGD):
    """Has zeros in evaluation, and keeps the trained weights meanwhile."""

    def train(self) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if "trained" in self.state[parameter]:
                parameter.copy_(self.state[parameter].pop("trained"))

    def eval(self) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if "momentum_buffer" in self.state[parameter]:
                self.state[parameter]["trained"] = parameter.clone()
                parameter.zero_()

    def __init__(self, params, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=0.9)


class Plain(torch.optim.Optimizer):
    """Updates each element by itself."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.change(parameter.grad), alpha=group["lr"])

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.tanh()


class LayerWise(Plain):
    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class LayerWiseForMatrices(Plain):
    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm() if gradient.dim() > 1 else gradient


class LayerWiseWhereLarge(Plain):
    """As factored and quantised states, which begin at some size."""

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm() if gradient.numel() >= 2**19 else gradient


class LayerWiseWhereClipped(Plain):
    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / max(1.0, float(gradient.norm()) / 100)


class Counted(Plain):
    """Counts its steps in its parameter groups."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()


class Estimating(Plain):
    """Keeps in its parameter groups what it has found of all their gradients; the updates do not depend on it."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["norm"] = float(torch.stack([parameter.grad.norm() for parameter in group["params"]]).sum())
        super().step()


class Late(Plain):
    """Keeps the last gradient from its second step on."""

    def step(self, closure: None = None) -> None:
        super().step()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            state = self.state[parameter]
            if state.setdefault("steps", 0):
                state["last"] = parameter.grad.clone()
            state["steps"] += 1


class Nested(Plain):
    """Keeps a list of factors as SOAP does, numbers in a dict, and its steps beside all of that."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.state["all steps"] = torch.tensor(0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.state["all steps"] += 1
        super().step()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            empty = [torch.zeros(n, n) if n < 145 else None for n in parameter.shape]
            state = self.state[parameter]
            factors = state.setdefault("factors", empty)
            seen = state.setdefault("seen", {"last": torch.zeros_like(parameter), "steps": 0})
            seen["steps"] += int(self.state["all steps"])
            seen["last"].lerp_(parameter.grad, 0.1)
            for dimension, factor in enumerate(factors):
                if factor is not None:
                    rows = parameter.grad.movedim(dimension, 0).reshape(len(factor), -1)
                    factor.add_(rows @ rows.T)
                    parameter.sub_(factor.norm() * seen["steps"] * seen["last"], alpha=1e-8)


class Packed(torch.Tensor):
    """Values as whole numbers, with a scale for each block of them, as 8-bit optimizers keep their state."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> "Packed":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, *_):
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        if function is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes), args[0].scales.copy_(args[1].scales)
            return args[0]
        assert function in (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.zero_.default)
        return cls(function(args[0].codes), function(args[0].scales))

    def values(self) -> torch.Tensor:
        return (self.codes.view(-1, BLOCK) * self.scales[:, None]).view(self.shape)

    def set(self, values: torch.Tensor) -> None:
        blocks = values.reshape(-1, BLOCK)
        self.scales.copy_(blocks.abs().amax(dim=1).clamp(min=1e-30) / 127)
        self.codes.copy_((blocks / self.scales[:, None]).round().view(self.codes.shape))


BLOCK = 256


class InBlocks(Plain):
    """Packs the state of parameters that blocks divide."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            state = self.state[parameter]
            if parameter.numel() % BLOCK:
                mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            else:
                codes = torch.zeros(parameter.shape, dtype=torch.int8)
                packed = state.setdefault("mean", Packed(codes, torch.zeros(parameter.numel() // BLOCK)))
                mean = packed.values().lerp_(parameter.grad, 0.1)
                packed.set(mean)
            parameter.sub_(mean, alpha=1e-3)


class Tupled(Plain):
    def step(self, closure: None = None) -> None:
        super().step()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter]["pair"] = (1, parameter.detach().clone())


class Listing(Plain):
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["rates"] = [*group.get("rates", []), group["lr"]]
        super().step()


def of(kind: type) -> OptimizerSettings:
    return OptimizerSettings(optimizer=f"{__name__}:{kind.__name__}")


@pytest.mark.parametrize(
    ("settings", "elementwise"),
    [
        (OptimizerSettings(), True),
        (OptimizerSettings(optimizer="adafactor"), False),
        (OptimizerSettings(optimizer="muon"), False),
        (of(Plain), True),
        (of(Counted), True),
        (OptimizerSettings(optimizer="schedulefree:AdamWScheduleFree"), True),
        *((of(kind), False) for kind in (LayerWise, LayerWiseForMatrices, LayerWiseWhereLarge, LayerWiseWhereClipped)),
        (of(InBlocks), False),
    ],
    ids=lambda value: value.optimizer if isinstance(value, OptimizerSettings) else None,
)
def test_whether_slices_of_a_weight_can_be_updated_alone_is_found_out(settings, elementwise):
    assert is_elementwise(settings) is elementwise


def test_what_is_added_up_over_all_parameters_is_state_from_the_first_step_on():
    prodigy = OptimizerSettings(optimizer="prodigyopt:Prodigy", learning_rate=1.0)
    traits = traits_of(prodigy)
    assert traits.adds_up
    assert {"d", "d_max", "d_numerator", "d_denom", "d_hat", "k"} == set(traits.counts)
    assert not is_elementwise(prodigy)


def test_numbers_of_parameter_groups_are_state_where_they_are_the_same_for_any_parameters():
    assert traits_of(of(Counted)).counts == ("steps",)
    assert traits_of(of(Plain)).counts == ()
    for kind, problem in ((Estimating, "depend on all parameters"), (Listing, r"keeps a list \(rates\)")):
        with pytest.raises(InputError, match=problem):
            optimizer_class(of(kind))


def test_muon_updates_matrices_only():
    assert traits_of(OptimizerSettings(optimizer="muon")).dimensions == {2}
    assert traits_of(of(Plain)).dimensions == {1, 2, 3, 4}


@pytest.mark.parametrize("arguments", [{}, {"ns_steps": 3}])
def test_the_matrix_products_of_muon_are_those_of_torchs_step(arguments):
    settings = OptimizerSettings(optimizer="torch.optim.Muon", arguments=arguments, learning_rate=0.1)
    graph = captured("llama", 2).graph
    predicted = flops_of_parameters(settings, lambda: graph)
    matrices = {value.shape: name for name, value in graph.parameters.items() if len(value.shape) == 2}
    for shape, name in matrices.items():
        weight = nn.Parameter(torch.randn(shape))
        weight.grad = torch.randn(shape)
        optimizer, _ = build_optimizer([weight], settings, iterations=1)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert predicted(name, shape) == counter.get_total_flops() > 0


def test_trying_an_optimizer_starts_no_threads_which_a_fork_would_lose():
    program = (
        "import os, torch; torch.set_num_threads(2)\n"
        f"import {__name__}\n"
        "from auto3d.runtime.optimizer.classes import check_resumes, is_elementwise, traits_of\n"
        "from auto3d.runtime.optimizer.memory import state_elements\n"
        "from auto3d.runtime.settings import OptimizerSettings\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        f"for name in ('muon', '{__name__}:Plain'):\n"
        "    settings = OptimizerSettings(optimizer=name)\n"
        "    traits_of(settings), is_elementwise(settings), check_resumes([settings])\n"
        "    state_elements(settings)((300, 200))\n"
        "assert torch.get_num_threads() == 2\n"
        "assert len(os.listdir('/proc/self/task')) == before, 'it has a pool'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.optim.NAdam"])
def test_checkpoints_hold_the_state_of_usual_optimizers(name):
    check_resumes([OptimizerSettings(optimizer=name)])


def test_an_optimizer_that_counts_outside_of_its_state_writes_no_checkpoints():
    settings = OptimizerSettings(optimizer=f"{__name__}:Counting")
    optimizer_class(settings)
    with pytest.raises(InputError, match="Counting counts in steps, outside of its state"):
        check_resumes([settings])


def test_what_is_kept_from_a_later_step_on_is_in_no_checkpoint_that_a_new_optimizer_reads():
    optimizer_class(of(Late))
    with pytest.raises(InputError, match="Late keeps last in some steps only"):
        check_resumes([of(Late)])


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pipeline_cannot_run_is_refused_in_one_line(name):
    with pytest.raises(InputError, match=REFUSED[name]) as refusal:
        optimizer_class(OptimizerSettings(optimizer=name))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("adamw", {"beta": 1}, "it accepts"),
        ("torch.optim.RMSprop", {"capturable": True}, "capturable is not accepted"),
        ("torch.optim.RMSprop", {"alpha": -1}, "refuses them"),
    ],
)
def test_wrong_arguments_are_refused(name, arguments, problem):
    with pytest.raises(InputError, match=problem):
        optimizer_class(OptimizerSettings(optimizer=name, arguments=arguments))


SCHEDULES = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 5},
}


@pytest.mark.parametrize("name", LEARNING_RATE_SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_schedule_that_resumes_at_any_iteration_is_transformers_own(name, warmup):
    iterations, arguments = 20, SCHEDULES.get(name, {})
    settings = OptimizerSettings(
        optimizer="sgd", learning_rate_schedule=name, learning_rate_arguments=arguments, warmup_iterations=warmup
    )
    own = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=settings.learning_rate)
    kind = "constant_with_warmup" if name == "constant" else name
    reference = get_scheduler(kind, own, warmup, iterations, scheduler_specific_kwargs=arguments)
    for iteration in range(iterations):
        optimizer, schedule = build_optimizer([nn.Parameter(torch.zeros(1))], settings, iterations=iterations)
        advance(optimizer, schedule, iteration)
        assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"], iteration
        assert schedule.get_last_lr() == reference.get_last_lr()
        own.step(), reference.step(), optimizer.step(), schedule.step()
        assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"], iteration


def test_wrong_arguments_of_a_schedule_are_refused():
    settings = OptimizerSettings(learning_rate_schedule="cosine", learning_rate_arguments={"cycles": 1})
    with pytest.raises(InputError, match="learning_rate_arguments: cosine refuses them"):
        check_schedule(settings, 10)


ANY = [
    OptimizerSettings(),
    OptimizerSettings(optimizer="sgd"),
    OptimizerSettings(optimizer="adafactor", arguments={"beta1": 0.9}),
    OptimizerSettings(optimizer="torch.optim.Adafactor"),
    OptimizerSettings(optimizer="torch.optim.RMSprop", arguments={"momentum": 0.9, "centered": True}),
    OptimizerSettings(optimizer="torch.optim.NAdam"),
    OptimizerSettings(optimizer=f"{__name__}:Nested"),
    OptimizerSettings(optimizer=f"{__name__}:InBlocks"),
    OptimizerSettings(optimizer="schedulefree:RAdamScheduleFree"),
]


def stepped(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for parameter in parameters:
            random = torch.Generator().manual_seed(step + parameter.numel())
            parameter.grad = torch.randn(parameter.shape, generator=random)
        optimizer.step()


def parameters_of(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape)) for shape in shapes]


@pytest.mark.parametrize("settings", ANY, ids=lambda settings: settings.optimizer)
def test_state_that_is_loaded_continues_the_training_and_has_its_predicted_size(settings):
    shapes = [(150, 140), (30,), (2, 3, 140, 150), (3, 512)]
    named = dict(zip("abcd", parameters_of(shapes), strict=True))
    optimizer, _ = build_optimizer(list(named.values()), settings, iterations=1)
    stepped(list(named.values()), optimizer, range(3))
    saved = {(each.parameter, each.key): each.tensor.clone() for each in state_tensors(optimizer, named, [])}
    values = {name: parameter.detach().clone() for name, parameter in named.items()}
    held = sum(each.nbytes for tensor in saved.values() if tensor.dim() for each in parts_of(tensor)) / 4
    assert held == sum(map(state_elements(settings), shapes))
    stepped(list(named.values()), optimizer, range(3, 5))

    again = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    resumed, _ = build_optimizer(list(again.values()), settings, iterations=1)
    make_state_to_load(resumed)
    assert all(torch.equal(again[name], value) for name, value in values.items())
    loaded = {(each.parameter, each.key): each.tensor for each in state_tensors(resumed, again, [])}
    assert loaded.keys() == saved.keys()
    for key, tensor in loaded.items():
        tensor.copy_(saved[key])
    stepped(list(again.values()), resumed, range(3, 5))
    assert all(torch.equal(again[name], parameter) for name, parameter in named.items())


def test_a_packed_state_of_many_rows_has_its_size():
    settings = OptimizerSettings(optimizer=f"{__name__}:InBlocks")
    of_shape = state_elements(settings)
    plain = state_elements(OptimizerSettings(optimizer=f"{__name__}:Plain"))
    for shape in ((50304, 768), (50257, 1024), (5_000_000 // 256 * 256,)):
        assert of_shape(shape) - plain(shape) == math.prod(shape) / 4 + math.prod(shape) / BLOCK
    for shape in ((50257, 320), (5_000_001,)):  # blocks do not divide them
        assert of_shape(shape) - plain(shape) == math.prod(shape)


def test_an_offloaded_optimizer_updates_as_one_on_the_device():
    """Both are on the CPU here; the copies between them are those between a device and its host."""
    shapes = [(40, 30), (30,)]
    for settings in ANY:
        one, other = parameters_of(shapes), parameters_of(shapes)
        plain, _ = build_optimizer(one, settings, iterations=1)
        offloading = replace(settings, offload=True)
        ahead = RunAhead(torch.device("cpu"))
        offloaded, _ = build_optimizer(other, offloading, iterations=1, run_ahead=ahead)
        make_state(offloaded)
        stepped(one, plain, range(3)), stepped(other, offloaded, range(3))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), settings.optimizer
        assert not {id(parameter) for parameter in other} & {id(parameter) for parameter in offloaded.state}
        named = dict(zip("ab", other, strict=True))
        assert {each.parameter for each in state_tensors(offloaded, named, [])} == {"a", "b"}

"""Compares the training of a Plan with plain PyTorch: the run of one rank, the reference, and the bound."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode

from auto3d.capture.describe import is_random
from auto3d.capture.model import CapturedModel
from auto3d.capture.shard import Shard, joined
from auto3d.capture.skeleton import seed_all
from auto3d.cluster import place_ranks
from auto3d.data import Batches, TrainingData
from auto3d.derived.shards import tensor_parallel
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import NO_OVERLAP, Plan
from auto3d.runtime.optimizer.build import build_optimizer
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.rank import build_rank
from auto3d.runtime.replicas import capture_slices
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.verify.eager import autocast
from auto3d.schedule import build_schedule, samples_at_once
from auto3d.schedule.operation import Schedule
from auto3d.share import share_of
from auto3d.tensor_placement import Split
from tests.models import TRAINED, captured, precision_of

CPU = torch.device("cpu")
ITERATIONS = 3
GLOBAL_BATCH = 8
CLIP_NORM = 0.1  # below all norms that occur, so that every iteration clips
SGD = OptimizerSettings(
    optimizer="sgd",
    learning_rate=0.1,
    weight_decay=0.01,
    momentum=0.9,
    betas=(0.9, 0.95),
    learning_rate_schedule="linear",
    warmup_iterations=1,
    clip_norm=CLIP_NORM,
)
ADAMW = replace(SGD, optimizer="adamw", learning_rate=1e-3)
# Two iterations are enough where the first changes the weights: the second has gradients at these, momenta and another
# learning rate.
TWO_ITERATIONS = (replace(SGD, warmup_iterations=0), 2)  # (optimizer, iterations)


MakeOptimizers = Callable[[nn.Module], list[tuple[torch.optim.Optimizer, LRScheduler]]]


def make_plan(
    model: str,
    *,
    dp: int,
    pp: int,
    micro_batch_size: int = 2,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    options: dict | None = None,
    stages=None,
    seed: int = 5,
    tp: int = 1,
    sequence_parallel: bool = False,
    shard_optimizer: bool = False,
    split: dict[str, Split] | None = None,
    tensor_overlap: str = NO_OVERLAP,
) -> Plan:
    """A Plan for ``model``, whose weights are split as ``split`` says (None: as the graph alone suggests).

    By default it has GLOBAL_BATCH samples, and as many equal stages as the schedule needs.
    """
    micro_batches = micro_batches or GLOBAL_BATCH // (dp * micro_batch_size)
    if stages is None:
        needed = build_schedule(schedule, devices=pp, micro_batches=micro_batches, **(options or {})).stages
        stages = uniform(captured(model, micro_batch_size).graph, needed)
    plan = Plan(
        graph="",
        dp=dp,
        tp=tp,
        pp=pp,
        global_batch=dp * micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        schedule_options=options or {},
        stages=stages,
        placement=place_ranks(dp=dp, pp=pp, tp=tp),
        seed=seed,
        sequence_parallel=sequence_parallel,
        shard_optimizer=shard_optimizer,
        tensor_overlap=tensor_overlap,
    )
    return with_split(plan, captured(model, samples_at_once(plan)), split)


def with_split(plan: Plan, model: CapturedModel, split: dict[str, Split] | None = None) -> Plan:
    """``plan`` for ``model``, whose weights are split as ``split`` says (None: as the graph alone suggests)."""
    plan = replace(plan, graph=model.graph.fingerprint)
    if plan.tp == 1:
        return plan
    if split is None:
        split = dict(tensor_parallel(model, share_of(plan)).split)
    plan = replace(plan, split=split)
    capture_slices(model, plan)  # ranks that are forked after this inherit their programs
    return plan


def run_rank(
    world: World,
    model: str,
    plan: Plan,
    optimizer: OptimizerSettings,
    schedule: Schedule | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    iterations: int = ITERATIONS,
    compile: bool = False,
    device: torch.device = CPU,
    data: TrainingData | None = None,
) -> dict:
    """Train as one rank: losses, norms and, per iteration, gradients and parameters; and the predicted memory.

    The model's own data are trained, unless ``data`` is given.
    """
    settings = TrainingSettings(
        iterations=iterations,
        optimizer=optimizer,
        device=device.type,
        threads_per_rank=1,
        timeout_s=60,
        precision=precision_of(model),
        compile=compile,
    )
    join(world, device=device, timeout_s=60)
    try:
        model_captured = captured(model, samples_at_once(plan))
        rank = build_rank(
            model_captured,
            plan,
            settings,
            data or TRAINED[model][1],
            world,
            schedule=schedule,
            state=state,
        )
        history = []
        for iteration, program in enumerate(rank.programs):
            (result,) = rank.executor.run(program, iteration)
            # Under ZeRO-1 a rank has the sums of its slice only.
            sliced = {name for shard in rank.slices for name in shard.parameters}
            whole = {name: p for name, p in rank.parameters.items() if p.requires_grad and name not in sliced}
            gradients = {name: _copied(p.grad) for name, p in whole.items()}
            parameters = {name: _copied(p) for name, p in rank.parameters.items()}
            buffers = {name: _copied(b) for name, b in rank.buffers.items()}
            history.append({"result": result, "gradients": gradients, "parameters": parameters, "buffers": buffers})
        written = model_captured.graph.written_buffers
        return {"history": history, "predicted": rank.predicted, "shards": dict(rank.shards), "written": written}
    finally:
        leave()


def _copied(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


class _Seeded(TorchFunctionMode):
    """Seeds each random function of an eager forward as the runtime seeds the same operation of the Graph."""

    def __init__(self, randomness: Randomness, operations: Sequence[int]) -> None:
        super().__init__()
        self._randomness = randomness
        self._operations = iter(operations)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        attention = func is functional.scaled_dot_product_attention and kwargs.get("dropout_p")
        if attention or func in (functional.dropout, torch.native_dropout):
            self._randomness.seed(next(self._operations))
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert error[0] or next(self._operations, None) is None, "the Graph draws more often than the model"


def plain_pytorch(
    model: str,
    *,
    micro_batch_size: int,
    optimizer: OptimizerSettings,
    global_batch: int = GLOBAL_BATCH,
    seed: int = 5,
    state: Mapping[str, torch.Tensor] | None = None,
    iterations: int = ITERATIONS,
    after: Sequence[Mapping[str, np.ndarray]] = (),
    device: torch.device = CPU,
    optimizers: MakeOptimizers | None = None,
) -> list[dict]:
    """The reference: the unmodified model in a plain loop on this process; only its dropout is seeded by our rule.

    Each case is computed once for all tests of the session, which must not change the result. If ``after`` has the
    parameters of a run after each of its iterations, the reference begins every iteration but the first with them.
    ``optimizers`` makes those of the module, with their learning-rate schedules (default: one, of ``optimizer``).
    """
    case = (model, micro_batch_size, optimizer, global_batch, seed, iterations, device)
    if state is None and not after and optimizers is None:
        return _plain_pytorch_once(*case)
    return _plain_pytorch(*case, state, after, optimizers)


def parameters_after(ranks: list[dict]) -> list[dict[str, np.ndarray]]:
    """All parameters after each iteration, whole."""
    shards = {name: shard for rank in ranks for name, shard in rank["shards"].items()}
    after = []
    for steps in zip(*(rank["history"] for rank in ranks), strict=True):
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for rank, step in zip(ranks, steps, strict=True):
            for name, value in step["parameters"].items():
                number = rank["shards"][name].shard if name in shards else 0
                parts.setdefault(name, {})[number] = torch.from_numpy(value)
        ordered = {name: [of[number] for number in sorted(of)] for name, of in parts.items()}
        whole = {name: joined(of, shards[name].split) if name in shards else of[0] for name, of in ordered.items()}
        after.append({name: tensor.numpy() for name, tensor in whole.items()})
    return after


def _plain_pytorch(
    model: str,
    micro_batch_size: int,
    optimizer: OptimizerSettings,
    global_batch: int,
    seed: int,
    iterations: int,
    device: torch.device,
    state: Mapping[str, torch.Tensor] | None = None,
    after: Sequence[Mapping[str, np.ndarray]] = (),
    optimizers: MakeOptimizers | None = None,
) -> list[dict]:
    build, data = TRAINED[model]
    seed_all(seed)
    module = build()
    if state is not None:
        module.load_state_dict(state, strict=False)
    module.to(device).train()
    made = [build_optimizer(list(module.parameters()), optimizer, iterations=iterations)]
    if optimizers is not None:
        made = optimizers(module)
    batches = Batches(data, seed=seed, global_batch=global_batch, micro_batch_size=micro_batch_size)
    count = global_batch // micro_batch_size
    randomness = Randomness(seed, first_micro_batch=0, micro_batches=count, device=device)
    ours = captured(model, micro_batch_size)
    nodes = [node for node in ours.exported.program.nodes if is_random(node)]
    number = {node.name: position for position, node in enumerate(ours.graph.nodes)}
    history = []
    for iteration in range(iterations):
        if after and iteration:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.copy_(torch.from_numpy(after[iteration - 1][name]))
        module.zero_grad()
        total = 0.0
        for index in range(count):
            randomness.iteration, randomness.micro_batch = iteration, index
            seeded = _Seeded(randomness, [number[node.name] for node in nodes])
            inputs = batches.micro_batch(iteration, index, tuple(data.inputs))
            with seeded, autocast(ours, device):
                output = module(**{name: value.to(device) for name, value in inputs.items()})
            loss = (output if isinstance(output, torch.Tensor) else output["loss"]) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), optimizer.clip_norm or float("inf")).item()
        assert norm > optimizer.clip_norm, "this case does not clip"
        for step, learning_rate in made:
            step.step()
            learning_rate.step()
        history.append(
            {
                "loss": total,
                "norm": norm,
                "gradients": {n: _copied(p.grad) for n, p in module.named_parameters() if p.grad is not None},
                "parameters": {name: _copied(p) for name, p in module.named_parameters()},
                "buffers": {name: _copied(buffer) for name, buffer in module.named_buffers()},
            }
        )
    return history


_plain_pytorch_once = cache(_plain_pytorch)


def assert_close(ours: np.ndarray, theirs: np.ndarray, what: str, shard: Shard | None = None) -> None:
    """``ours`` is that ``shard`` of ``theirs``, if any, padding included; the bound is that of the whole tensor."""
    bound = 1e-5 * np.abs(theirs).max() + 1e-7
    if shard is not None:
        theirs = shard.of(torch.from_numpy(theirs)).numpy()
        assert ours.shape == theirs.shape, what
    difference = np.abs(ours - theirs).max()
    assert difference <= bound, f"{what}: differs by {difference:.3g}, at most {bound:.3g} is allowed"


def assert_parity(ranks: list[dict], reference: list[dict], *, tensors: bool = True) -> None:
    for iteration, expected in enumerate(reference):
        seen = set()
        for number, rank in enumerate(ranks):
            got, shards = rank["history"][iteration], rank["shards"]
            where = f"iteration {iteration}, rank {number}"
            assert_close(np.float64(got["result"].loss), np.float64(expected["loss"]), f"loss, {where}")
            assert_close(np.float64(got["result"].grad_norm), np.float64(expected["norm"]), f"norm, {where}")
            for name in got["gradients"] if tensors else ():
                what = f"gradient of {name}, {where}"
                assert_close(got["gradients"][name], expected["gradients"][name], what, shards.get(name))
            for name in got["parameters"] if tensors else ():
                what = f"{name}, {where}"
                assert_close(got["parameters"][name], expected["parameters"][name], what, shards.get(name))
            seen.update((name, shards[name].shard if name in shards else 0) for name in got["parameters"])
        all_shards = {name: shard.shards for rank in ranks for name, shard in rank["shards"].items()}
        needed = {(name, n) for name in expected["parameters"] for n in range(all_shards.get(name, 1))}
        assert seen == needed, "together, the ranks hold every parameter"


def assert_buffers(ranks: list[dict], reference: list[dict]) -> None:
    """For one pipeline: a buffer that the model writes to lives on one rank, and all have the values of one process.

    A buffer that it only reads, such as the frequencies of rotary positions, may be on several ranks, or on none.
    """
    held = Counter(name for rank in ranks for name in rank["history"][-1]["buffers"])
    assert {name: held[name] for name in ranks[0]["written"]} == dict.fromkeys(ranks[0]["written"], 1)
    assert held.keys() <= reference[-1]["buffers"].keys()
    for rank in ranks:
        for name, value in rank["history"][-1]["buffers"].items():
            assert_close(value, reference[-1]["buffers"][name], name, rank["shards"].get(name))

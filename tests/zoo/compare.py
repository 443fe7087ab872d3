"""Trains one entry on the engine and on plain PyTorch, and compares them."""

import pickle
import random
import re
import tempfile
import traceback
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from auto3d.capture.describe import is_random
from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import place_ranks
from auto3d.errors import InputError
from auto3d.partition.stage import cut, possible_cuts
from auto3d.partition.uniform import uniform
from auto3d.plan import Plan, StagePlan, stages_between
from auto3d.runtime.data import Batches
from auto3d.runtime.measurement import Status
from auto3d.runtime.optimizer import build_optimizer
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.world import World, join, leave
from launch.ranks import run_ranks
from tests.distributed.parity import CPU, GLOBAL_BATCH, SGD
from tests.zoo.entry import Entry

SEED = 5
ITERATIONS = 3
MICRO_BATCH = 2
OPTIMIZER = replace(SGD, warmup_iterations=0)  # every iteration changes the parameters
SETTINGS = TrainingSettings(iterations=ITERATIONS, optimizer=OPTIMIZER, device="cpu", threads_per_rank=1, timeout_s=30)
RELATIVE, ABSOLUTE = 1e-5, 1e-7  # of tests/distributed/parity.py:assert_close
MOST_SENSITIVE = 100  # times the bound that a model's own sensitivity to rounding may excuse
PLANS = {"pp 2": 1, "dp 2 · pp 2": 2}  # name -> dp


class Result(StrEnum):
    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "WRONG"
    CRASHED = "crashed"
    HUNG = "hung"
    UNCLEAR = "unclear"  # refused in words that are torch's own, or in more than one line
    BROKEN = "broken"  # the entry does not run on plain PyTorch either


FAULTS = (Result.BROKEN, Result.WRONG, Result.CRASHED, Result.HUNG, Result.UNCLEAR)  # the worst last
JARGON = re.compile(  # words that mean something to torch's developers alone
    r"could not guard|unbacked|please (file|report)|file an issue|fake ?tensor|HigherOrderOperator|higher_order"
    r"|wrap_with_|aten::|prims[:.]|torch\.(ops|fx|export|_dynamo|compile)|dynamo|functional ?tensor|SymInt|pytree"
    r"|data-dependent (expression|operator)|\bproxy\b|__torch_\w+__|local_scalar_dense|/torch/\S+, line|guard_\w+",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    result: Result
    reason: str = ""  # one line
    detail: str = ""  # the traceback of a crash


@dataclass(frozen=True)
class Trained:
    """What one process saw of the training. ``gradients`` are those of the first iteration, after clipping."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]


class CrashedError(Exception):
    """An error of a rank that is no refusal."""


class HungError(Exception):
    """Ranks that did not end in time."""


def run(entry: Entry, *, timeout_s: float, spoil: Callable[[nn.Module], None] = lambda module: None) -> Outcome:
    """Train ``entry`` under both plans and on plain PyTorch; ``spoil`` changes the reference's module (for tests)."""
    found = []
    runs: dict[str, list[Trained]] = {}
    captured = None
    try:
        captured = capture(entry.build, entry.data.input_specs(), MICRO_BATCH)
    except Exception as error:
        found.append(_failure(error))
    for name, dp in PLANS.items() if captured else ():
        try:
            runs[name] = engine(entry, captured, dp, timeout_s=timeout_s)
        except Exception as error:
            outcome = _failure(error)
            found.append(replace(outcome, reason=f"{name}: {outcome.reason}"))
    try:
        expected = reference(entry, captured, spoil)
    except Exception as error:
        return Outcome(Result.BROKEN, _one_line(error), traceback.format_exc())
    for name, ranks in runs.items():
        difference = compare(entry, captured, ranks, expected, PLANS[name], spoil)
        found.append(replace(difference, reason=f"{name}: {difference.reason}" if difference.reason else ""))
    return _worst(found, entry)


def _worst(found: list[Outcome], entry: Entry) -> Outcome:
    order = [Result.RIGHT, Result.REFUSED, *FAULTS]
    worst = max(found, key=lambda outcome: order.index(outcome.result))
    if worst.result is Result.RIGHT and entry.only_refused:
        return Outcome(Result.WRONG, f"it must be refused: {entry.only_refused}")
    same = {outcome.reason.split(": ", 1)[-1] for outcome in found if outcome.result is worst.result}
    if len(found) == len(PLANS) and len(same) == 1 and worst.reason and found[0].result is found[1].result:
        return replace(worst, reason=same.pop())  # under both plans alike
    return worst


def _failure(error: Exception) -> Outcome:
    detail = "".join(traceback.format_exception(error))
    if isinstance(error, InputError):
        text = str(error)
        jargon = JARGON.search(text)
        if "\n" in text:
            return Outcome(Result.UNCLEAR, f"{len(text.splitlines())} lines: {' '.join(text.split())}", detail)
        if jargon:
            return Outcome(Result.UNCLEAR, f"{text} [{jargon[0]}]", detail)
        return Outcome(Result.REFUSED, text)
    if isinstance(error, HungError):
        return Outcome(Result.HUNG, _one_line(error))
    if isinstance(error, CrashedError):
        lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
        frames = re.findall(r'File ".*?/((?:auto3d|torch|transformers)/[^"]+)", line (\d+)', str(error))
        where = f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""
        return Outcome(Result.CRASHED, f"{lines[-1] if lines else error}{where}", str(error))
    ours = [
        f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/auto3d/" in frame.filename
    ]
    return Outcome(Result.CRASHED, f"{type(error).__name__}: {_one_line(error)} ({ours[-1] if ours else '?'})", detail)


def _one_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def stages(graph: Graph, dp: int) -> tuple[StagePlan, ...]:
    """Two stages, each with parameters that are trained: the uniform ones, or for dp 2 a cut at a third of the FLOPs."""

    def trains(plans: tuple[StagePlan, ...]) -> bool:
        return all(graph.trained.intersection(stage.state) for stage in cut(graph, plans))

    equal = uniform(graph, 2)
    if dp == 1 and trains(equal):
        return equal
    flops = [0, *accumulate(node.flops for node in graph.nodes)]
    wanted = bisect_left(flops, flops[-1] / (2 if dp == 1 else 3))
    inner = [position for position in possible_cuts(graph) if 0 < position < len(graph.nodes)]
    for position in sorted(inner, key=lambda position: abs(position - wanted)):
        plans = stages_between([0, position, len(graph.nodes)])
        try:
            if trains(plans):
                return plans
        except InputError:  # this cut parts what must stay together; another may not
            continue
    return equal


def engine(entry: Entry, captured: CapturedModel, dp: int, *, timeout_s: float) -> list[Trained]:
    """What each rank of the engine saw; raises InputError, CrashedError or HungError."""
    graph = captured.graph
    plan = Plan(
        graph=graph.fingerprint,
        dp=dp,
        tp=1,
        pp=2,
        global_batch=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        schedule="1f1b",
        stages=stages(graph, dp),
        placement=place_ranks(dp=dp, pp=2),
        seed=SEED,
    )
    with tempfile.TemporaryDirectory(prefix="auto3d-zoo-") as folder:

        def rank(world: World, report: Any) -> None:
            # Ranks of a cluster are no forks of each other: they share nothing but the plan.
            random.seed(world.rank)
            np.random.seed(world.rank)
            torch.manual_seed(world.rank)
            result = _train(entry, captured, plan, world)
            (Path(folder) / str(world.rank)).write_bytes(pickle.dumps(result))

        outcome = run_ranks(plan.ranks, rank, timeout_s=timeout_s)
        if outcome.status is Status.TIMEOUT:
            raise HungError(outcome.error)
        if outcome.status is not Status.OK:
            raise CrashedError(outcome.error)
        return [pickle.loads((Path(folder) / str(number)).read_bytes()) for number in range(plan.ranks)]


def _train(entry: Entry, captured: CapturedModel, plan: Plan, world: World) -> Trained:
    join(world, device=CPU, timeout_s=SETTINGS.timeout_s)
    try:
        rank = build_rank(captured, plan, SETTINGS, entry.data, world)
        results, gradients = [], {}
        for iteration, program in enumerate(rank.programs):
            results += rank.executor.run(program, iteration)
            if iteration == 0:
                gradients = {name: _array(p.grad) for name, p in rank.parameters.items() if p.requires_grad}
        return Trained(
            losses=[result.loss for result in results],
            norms=[result.grad_norm for result in results],
            gradients=gradients,
            parameters={name: _array(parameter) for name, parameter in rank.parameters.items()},
            buffers={name: _array(buffer) for name, buffer in rank.buffers.items()},
        )
    finally:
        leave()


def reference(
    entry: Entry,
    captured: CapturedModel | None,
    spoil: Callable[[nn.Module], None] = lambda module: None,
    *,
    replicas: int = 1,
    nudge: float = 0.0,
) -> Trained:
    """Plain PyTorch, eager, on one process: the unmodified module, micro-batch after micro-batch.

    Each of ``replicas`` has buffers of its own, as under DistributedDataParallel without their broadcast; those of the
    first are returned. ``nudge`` changes each initial parameter by about this share of it.
    """
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    module = entry.build()
    module.train()
    spoil(module)
    named = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in named.values() if nudge else ():
            noise = 1 + nudge * torch.empty(parameter.shape).uniform_(-1, 1)
            parameter.copy_(parameter * noise.to(parameter.dtype))
    step, learning_rate = build_optimizer(list(named.values()), OPTIMIZER, iterations=ITERATIONS)
    batches = Batches(entry.data, seed=SEED, global_batch=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH)
    count = GLOBAL_BATCH // MICRO_BATCH
    draws = _Draws(captured, count) if entry.draws and captured else None
    buffers = dict(module.named_buffers())
    kept = [{name: buffer.clone() for name, buffer in buffers.items()} for _ in range(replicas)]
    losses, norms, gradients = [], [], {}
    for iteration in range(ITERATIONS):
        module.zero_grad()
        total = 0.0
        for index in range(count):
            own = kept[index * replicas // count]
            if replicas > 1:
                _copy(own, buffers)
            with draws.seeded(iteration, index) if draws else nullcontext():
                output = module(**batches.micro_batch(iteration, index, tuple(entry.inputs)))
            loss = _loss(output) / count
            loss.backward()
            total += loss.item()
            if replicas > 1:
                _copy(buffers, own)
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), OPTIMIZER.clip_norm).item())
        losses.append(total)
        if iteration == 0:
            gradients = {name: _array(p.grad) for name, p in named.items() if p.grad is not None}
        step.step()
        learning_rate.step()
    if replicas > 1:
        _copy(kept[0], buffers)
    return Trained(
        losses=losses,
        norms=norms,
        gradients=gradients,
        parameters={name: _array(parameter) for name, parameter in named.items()},
        buffers={name: _array(buffer) for name, buffer in buffers.items()},
    )


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, value in source.items():
        target[name].copy_(value)


def _loss(output: Any) -> torch.Tensor:
    """As a user reads it: the output called ``loss``, else the first of several."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output[0]


class _Draws(TorchFunctionMode):
    """Seeds each function of an eager forward that draws numbers as the runtime seeds that operation of the Graph."""

    NAMES = frozenset(
        ["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "exponential_", "rrelu", "randperm", "random_", "native_dropout", "gumbel_softmax", "cauchy_", "log_normal_", "geometric_"]
    )

    def __init__(self, captured: CapturedModel, micro_batches: int) -> None:
        super().__init__()
        number = {node.name: position for position, node in enumerate(captured.graph.nodes)}
        self._operations = [number[node.name] for node in captured.exported.program.nodes if is_random(node)]
        self._randomness = Randomness(SEED, first_micro_batch=0, micro_batches=micro_batches, device=CPU)
        self._next = 0

    def seeded(self, iteration: int, micro_batch: int) -> "_Draws":
        self._randomness.iteration, self._randomness.micro_batch, self._next = iteration, micro_batch, 0
        return self

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") in self.NAMES:
            self._randomness.seed(self._operations[self._next])
            self._next += 1
        return func(*args, **(kwargs or {}))


def compare(
    entry: Entry,
    captured: CapturedModel,
    ranks: list[Trained],
    expected: Trained,
    dp: int,
    spoil: Callable[[nn.Module], None] = lambda module: None,
) -> Outcome:
    """Right or WRONG; where it is wrong, the first difference and the largest one."""
    if not expected.gradients or not any(np.abs(gradient).max(initial=0) for gradient in expected.gradients.values()):
        return Outcome(Result.BROKEN, "plain PyTorch trains no parameter of this entry")
    for stage, rank in enumerate(ranks[::dp]):  # the first replica
        if not rank.gradients:
            return Outcome(Result.WRONG, f"stage {stage} trains no parameter")
    if dp > 1 and captured.graph.written_buffers:
        expected = reference(entry, captured, spoil, replicas=dp)
    differences = _differences(ranks, expected, dp)
    if not differences:
        return Outcome(Result.RIGHT)
    worst = max(excess for _, excess in differences)
    if worst <= MOST_SENSITIVE:
        replicas = dp if captured.graph.written_buffers else 1
        moved = _differences([reference(entry, captured, spoil, replicas=replicas, nudge=1e-7)], expected, 1)
        own = max((excess for _, excess in moved), default=0.0)
        if worst <= 3 * own:
            return Outcome(
                Result.RIGHT,
                f"differs by {worst:.1f} times the bound; one process itself by {own:.1f} times where its initial "
                "weights change by 1e-7",
            )
    first, excess = differences[0]
    most = max(differences, key=lambda difference: difference[1])
    more = f"; most: {most[0]}, {most[1]:.3g} times" if most[0] != first else ""
    return Outcome(Result.WRONG, f"{len(differences)} differ; first: {first}, {excess:.3g} times the bound{more}")


def _differences(ranks: list[Trained], expected: Trained, dp: int) -> list[tuple[str, float]]:
    """What differs by more than the bound, and by how many times. Buffers are compared in the first replica."""
    found: list[tuple[str, float]] = []

    def check(what: str, ours: Any, theirs: Any) -> None:
        excess = _excess(np.asarray(ours), np.asarray(theirs))
        if excess > 1:
            found.append((what, excess))

    for number, rank in enumerate(ranks):
        for iteration in range(ITERATIONS):
            check(f"loss of iteration {iteration}, rank {number}", rank.losses[iteration], expected.losses[iteration])
            check(f"norm of iteration {iteration}, rank {number}", rank.norms[iteration], expected.norms[iteration])
        zero = np.zeros(())
        for name, gradient in rank.gradients.items():
            check(f"gradient of {name}, rank {number}", gradient, expected.gradients.get(name, zero))
        for name, value in rank.parameters.items():
            check(f"parameter {name}, rank {number}", value, expected.parameters[name])
    for rank in ranks[::dp]:
        for name, value in rank.buffers.items():
            check(f"buffer {name}", value, expected.buffers[name])
    held = {name for rank in ranks for name in rank.parameters}
    trained = {name for rank in ranks for name in rank.gradients}
    for name, gradient in expected.gradients.items():
        if name not in held or (name not in trained and np.abs(gradient).max(initial=0) > 0):
            found.append((f"gradient of {name}, which the engine does not train", float("inf")))
    return found


def _excess(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The difference in units of the bound."""
    if ours.size == 0 or theirs.size == 0:
        return 0.0
    if not np.array_equal(np.isfinite(ours), np.isfinite(theirs) & np.ones(ours.shape, bool)):
        return float("inf")
    ours, theirs = np.nan_to_num(ours), np.nan_to_num(theirs)
    wide = np.complex128 if np.iscomplexobj(ours) else np.float64
    difference = np.abs(ours.astype(wide) - theirs.astype(wide)).max()
    return float(difference / (RELATIVE * np.abs(theirs).max() + ABSOLUTE))


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).clone().numpy()

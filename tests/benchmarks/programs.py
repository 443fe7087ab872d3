"""Host time of stage programs beside eager PyTorch, per layer and micro-batch: python -m tests.benchmarks.programs

Both run the forward and backward of GPT-2 with tensors so small that its kernels cost next to nothing, in this process
with one thread, in turn. A model of more layers minus a model of fewer gives the layers alone. Eager runs the whole
model under the same autocast; tensor parallelism runs rank 1 of 2, whose collectives cost nothing.
Times are processor time of the thread; the counts do not depend on the machine.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from tabulate import tabulate

from auto3d.capture.model import CapturedModel, capture
from auto3d.derived.of_share import derived
from auto3d.derived.planned_split import planned_split
from auto3d.partition.stage import Stage, cut
from auto3d.plan import stages_between
from auto3d.runtime.messages.tensor_group import Pending, TensorParallelRank
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.module import StageModule
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.runtime.weights.materialize import materialize
from auto3d.share import WHOLE, Share
from launch.report.release import Target
from tests.models import TOKENS as LONGER
from tests.models import gpt2
from tests.targets import end

CPU = torch.device("cpu")
SLACK = 1.5  # times a wish that is held: two sittings differ by a fifth where other processes run
FEWER, MORE = 2, 10  # layers
SAMPLES, SEQUENCE, WIDTH, VOCABULARY = 2, 4, 8, 16
TOKENS = replace(LONGER, sequence_length=SEQUENCE, vocabulary_size=VOCABULARY)
MICRO_BATCHES = 2
WARM_UP, REPETITIONS = 3, 20


@dataclass(frozen=True)
class Case:
    """What the program of a stage runs with; ``wish`` is the part of eager's host time that it should take."""

    name: str
    wish: float | None
    precision: str = "float32"
    share: Share = WHOLE
    recompute: bool = False
    split_backward: bool = False


CASES = [
    Case("float32", 0.8),
    Case("bfloat16", 1.0, "bfloat16"),
    Case("float32, tp 2", 1.1, share=Share(tp=2)),
    Case("bfloat16, tp 2", 1.1, "bfloat16", Share(tp=2)),
    Case("float32, tp 2, sequence parallel", 1.1, share=Share(tp=2, sequence_parallel=True)),
    Case("bfloat16, tp 2, sequence parallel", 1.1, "bfloat16", Share(tp=2, sequence_parallel=True)),
]
OTHERS = [
    Case("float32, recompute", None, recompute=True),
    Case("bfloat16, recompute", None, "bfloat16", recompute=True),
    Case("float32, split backward", None, split_backward=True),
    Case("bfloat16, split backward", None, "bfloat16", split_backward=True),
]


def model(layers: int) -> Any:
    return lambda: gpt2(n_layer=layers, n_embd=WIDTH, n_positions=SEQUENCE, vocab_size=VOCABULARY)


@cache
def captured(layers: int, precision: str) -> CapturedModel:
    return capture(model(layers), TOKENS.input_specs(), SAMPLES, precision=precision)


class Alone:
    """A TensorGroup of which only rank 1 is here: its collectives cost nothing and return numbers of this rank."""

    shard, shards = 1, 2

    def all_reduce(self, tensor: torch.Tensor, what: str, *, maximum: bool = False) -> Pending:
        return lambda: tensor

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending:
        return lambda: tensor.new_empty((self.shards, *tensor.shape))

    def reduce_scatter(self, stacked: torch.Tensor, what: str) -> Pending:
        return lambda: stacked[self.shard]


def inputs(graph_inputs: Any) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(value.shape, dtype=getattr(torch, value.dtype)) for name, value in graph_inputs.items()}


def stage_of(case: Case, layers: int) -> tuple[StageModule, dict[str, torch.Tensor]]:
    """The whole model as one stage, and the inputs of a micro-batch."""
    whole = captured(layers, case.precision)
    program, rank = whole, None
    names = [*whole.graph.parameters, *whole.graph.buffers]
    exported = whole.exported
    placements = {}
    if case.share.tp > 1:
        made = derived(whole, case.share, split=planned_split(whole, case.share, rules={}))
        program, rank = made.programs[0], TensorParallelRank(model=made, group=Alone())
        placements = made.placements
    drawn = materialize(exported.build, [n for n in names if n not in exported.constants], seed=1)
    tensors = {**drawn, **exported.constants}
    for name, placed in placements.items():
        if name in tensors:
            shape = placed.local_shape(tensors[name].shape, case.share.tp)
            tensors[name] = tensors[name][tuple(slice(size) for size in shape)].clone()
    for name in whole.graph.trained:
        tensors[name] = torch.nn.Parameter(tensors[name])
        tensors[name].grad = torch.zeros_like(tensors[name])
    (stage,) = whole_stage(program)
    built = build_stage(
        [ProgramOfStage(stage, program, rank)],
        tensors,
        loss_weight=1.0,
        randomness=Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU),
        recompute=case.recompute,
        split_backward=case.split_backward,
    )
    return built, inputs(program.graph.inputs)


def whole_stage(program: CapturedModel) -> tuple[Stage, ...]:
    return tuple(cut(program.graph, stages_between([0, len(program.graph.nodes)])))


def ours(case: Case, layers: int) -> Callable[[], None]:
    stage, given = stage_of(case, layers)

    def run() -> None:
        stage.weights.start(dict.fromkeys(range(MICRO_BATCHES), 0))  # as at the beginning of an iteration
        for micro_batch in range(MICRO_BATCHES):
            stage.forward(micro_batch, {}, given)
            stage.backward(micro_batch, {})
        stage.losses.clear()

    return run


def eager(case: Case, layers: int) -> Callable[[], None]:
    module = model(layers)()
    module.train()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    given = inputs(captured(layers, case.precision).graph.inputs)
    low = case.precision != "float32"

    def run() -> None:
        for _ in range(MICRO_BATCHES):
            with torch.autocast("cpu", getattr(torch, case.precision)) if low else nullcontext():
                loss = module(**given).loss
            loss.backward()

    return run


def host_us(runs: list[Callable[[], None]]) -> list[float]:
    """Microseconds of this thread's processor time for a micro-batch of each of ``runs``, which take turns.

    They are the least of all repetitions: other processes only add to them, by what they evict from caches.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for repetition in range(WARM_UP + REPETITIONS):
        for number, run in enumerate(runs):
            start = time.thread_time()
            run()
            if repetition >= WARM_UP:
                seconds[number].append((time.thread_time() - start) / MICRO_BATCHES)
    return [1e6 * min(each) for each in seconds]


def counts(run: Callable[[], None]) -> Counter[str]:
    """What one iteration does: calls of Python functions and of C functions, operators of torch, nodes of autograd."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        found[event] += 1

    run()
    sys.setprofile(note)
    run()
    sys.setprofile(None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    names = Counter(event.name for event in profiler.events())
    nodes = sum(number for name, number in names.items() if name.startswith("autograd::engine::evaluate_function"))
    operators = sum(number for name, number in names.items() if name.startswith("aten::"))
    calls = {"Python calls": found["call"], "calls of C": found["c_call"]}
    return Counter({**calls, "operators": operators, "autograd nodes": nodes})


def per_layer(case: Case, of: Callable[[Case, int], Callable[[], None]], layers: int = MORE) -> dict[str, int]:
    """Counts of one layer and micro-batch, from a model of ``layers`` and from that of FEWER."""
    more, fewer = counts(of(case, layers)), counts(of(case, FEWER))
    return {name: round((more[name] - fewer[name]) / (layers - FEWER) / MICRO_BATCHES) for name in more}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    rows, targets = [], []
    for case in [*CASES, *OTHERS]:
        if names and case.name not in names:
            continue
        found = host_us([of(case, layers) for of in (eager, ours) for layers in (FEWER, MORE)])
        eager_us, ours_us = ((found[place + 1] - found[place]) / (MORE - FEWER) for place in (0, 2))
        print(case.name, "passes:", *(f"{each:.0f}" for each in found), flush=True)
        counted = [per_layer(case, of) for of in (eager, ours)]
        shown = [" / ".join(str(each[name]) for each in counted) for name in counted[0]]
        rows.append((case.name, eager_us, ours_us, ours_us / eager_us, *shown))
        if case.wish is not None:
            what = f"host time of a layer beside eager, {case.name}"
            ratio = ours_us / eager_us
            targets.append(Target(what=what, found=ratio, wish=case.wish, held=SLACK * case.wish, unit=" ×"))
    columns = ("case", "eager µs", "program µs", "ratio", *(f"{name}, eager / program" for name in counted[0]))
    print(tabulate(rows, columns, floatfmt=("", ".0f", ".0f", ".2f"), tablefmt="github"))
    print("load of the machine:", os.getloadavg())
    end(targets)


if __name__ == "__main__":
    main(sys.argv[1:])

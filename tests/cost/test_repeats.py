"""Repeated blocks are counted once: never with another result than if each run of operations were counted."""

import random
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import numpy as np
import pytest

from auto3d.capture.model import capture
from auto3d.cluster import place_ranks
from auto3d.cost.memory import segments as segments_module
from auto3d.cost.memory.plan import PlanMemory
from auto3d.cost.memory.repeats import find_repeats
from auto3d.cost.memory.segment import segment_of
from auto3d.cost.memory.segments import Segments
from auto3d.cost.model_work import ModelWork
from auto3d.cost.tensors import Tensors
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import Work, work_of
from auto3d.partition.merak import shard
from auto3d.partition.outline import outline_of
from auto3d.plan import Plan, stages_between
from tests.models import IMAGES, TEXT, gpt2, llama, t5, vit

MODELS = {
    "gpt2": (partial(gpt2, n_layer=10), TEXT),
    "t5": (partial(t5, num_layers=5), TEXT),  # two ranges of repeated blocks; all of one use the encoder's output
    "llama": (partial(llama, num_hidden_layers=7), TEXT),
    "vit": (partial(vit, num_hidden_layers=7), IMAGES),
}
NUMBERS = (  # columns of bytes and of truth values; those of other columns must stay consistent with each other
    "size", "use_size", "value_size", "gradient", "low_gradient", "extra", "forward_extra", "backward_extra",
    "deferred_gradient", "slice_gradient", "read_passes", "state_deferred", "repeated",
)  # fmt: skip
REFERENCES = ("use_of", "save_of", "read_of", "deferred_of", "state_of", "value_memory", "value_class", "use_view")


@cache
def graph_of(name: str):
    build, data = MODELS[name]
    return capture(build, data.input_specs(), 2).graph


@cache
def work_at(name: str) -> Work:
    graph = graph_of(name)
    return work_of(graph, shard(graph).bounds)


def spans_of(chance: random.Random, tensors: Tensors, count: int):
    """Runs of operations anywhere, and runs in repeated blocks with the same runs some periods later."""
    ranges = find_repeats(tensors)
    for _ in range(count):
        first, last = sorted(chance.sample(range(tensors.count + 1), 2))
        if ranges:
            repeats = chance.choice(ranges)
            first = chance.randrange(repeats.first, repeats.last)
            last = chance.randint(first + 1, min(repeats.last, first + 2 * repeats.period))
            for later in range(0, repeats.last - last, repeats.period):
                yield first + later, last + later
        yield first, last


def counting_runs():
    """Counts in ``call_count`` the runs of operations whose tensors are counted, each once."""
    return patch.object(segments_module, "segment_of", wraps=segment_of)


def compare(chance: random.Random, tensors: Tensors, count: int = 8) -> int:
    """Compare runs with those that are counted one by one; returns how many of them shared a count."""
    segments, looked = Segments(tensors), set[tuple[tuple[int, int], bool]]()
    with counting_runs() as counted:
        for span in spans_of(chance, tensors, count):
            for split in (False, True):
                shared = segments.used_outside((span,))
                assert (
                    segments.of((span,), shared=shared, split=split)
                    == (segment_of(tensors, (span,), shared=shared, split=split)[0])
                ), span
                looked.add((span, split))
    return len(looked) - counted.call_count


@pytest.mark.parametrize("name", MODELS)
def test_runs_that_share_a_count_have_equal_bytes(name):
    tensors = work_at(name).tensors
    assert len(find_repeats(tensors)) == (2 if name == "t5" else 1)
    assert compare(random.Random(name), tensors, 40) > 40


@pytest.mark.parametrize("column", [*NUMBERS, *REFERENCES])
def test_a_block_that_differs_in_one_number_is_not_the_same(column):
    """A column of a real model with one changed entry, in any block."""
    for name in ("gpt2", "t5"):
        chance = random.Random(f"{name} {column}")
        tensors = work_at(name).tensors
        for _ in range(5):
            changed = getattr(tensors, column).copy()
            place = chance.randrange(len(changed))
            if changed.dtype == bool:
                changed[place] = not changed[place]
            elif column in REFERENCES:
                near = changed[max(0, place - 30) : place + 1]
                changed[place] = chance.choice(near.tolist())  # another that is near
            else:
                changed[place] += 4
            compare(chance, replace(tensors, **{column: changed}))


def test_equal_stages_are_counted_once():
    """GPT-2 with one layer in each of ten stages: the last eight but one are equal."""
    graph, work = graph_of("gpt2"), work_at("gpt2")
    starts = list(outline_of(graph).block_starts)
    plan = Plan(
        graph="", dp=1, tp=1, pp=10, global_batch=64, micro_batch_size=2, schedule="1f1b",
        stages=stages_between([0, *starts[1:-1], len(graph.nodes)]), placement=place_ranks(dp=1, pp=10), seed=0,
    )  # fmt: skip
    memory = PlanMemory(ModelWork(lambda *_: work, TrainingOptions()), TrainingOptions())
    with counting_runs() as counted:
        found = memory.of(plan)
        assert 0 < counted.call_count <= 4, "the first, the second, one of the others, and the last"
        assert np.all(np.diff(found[1:-1]) < 0), "in 1F1B an earlier stage has more micro-batches in flight"
        again = counted.call_count
        memory.of(replace(plan, dp=2, placement=place_ranks(dp=2, pp=10), global_batch=128))
        assert counted.call_count == again

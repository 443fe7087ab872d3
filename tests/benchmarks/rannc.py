"""Time of RaNNC's phases on the models of its paper: python -m tests.benchmarks.rannc

32 devices in 4 nodes, k = 32: enlarged BERT with a batch of 256 sequences of 512, ResNet152x8 with a batch of 512
(section IV-B). Devices as the paper's V100s: 32 GB, 15.7 TFLOP/s in FP32, 900 GB/s, 25 GB/s between two of them.

Measured once each on two shared cores of a virtual machine, Python 3.11.7, processor time in seconds:

model                       operations  atomic  capture  profiles  atomic  block  stage  block max/mean  stages
BERT, 256 layers × 2048           6193    6162     24.4       1.1    0.02   0.54   0.11            1.07       9
same, attention op by op          7475    7442     26.8       1.4    0.02   0.57   0.12            1.08       9
BERT, 512 layers, op by op       14899   14866     57.8       3.1    0.55   0.90   0.50            1.05      18
ResNet152×8                        671     671      3.4       0.1    0.00   0.03   0.02            1.25       2

``capture`` is that of two micro-batch sizes, and ``profiles`` the Graphs at nine or ten that follow from them; the
other columns are RaNNC's.
The paper counts about 15,000 atomic subcomponents in the 256 layers: operations of ONNX are finer than ours, of which
the model with 512 layers has as many.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from tabulate import tabulate
from torch import nn
from transformers import BertConfig, BertForPreTraining

from auto3d.capture.export import InputSpec
from auto3d.capture.graph import Graph
from auto3d.capture.interpolate import interpolate
from auto3d.capture.model import capture
from auto3d.partition.cost import PartitionCosts, analytic
from auto3d.partition.methods.rannc import StageSearch, atomic_subcomponents, find_units, form_blocks
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.partition.request import BLOCKS
from launch.report.release import Target
from tests.targets import end

NODES, DEVICES_PER_NODE = 4, 8
DEVICE = {"flops_per_s": 15.7e12, "memory_bandwidth": 900e9, "bandwidth": 25e9, "memory_bytes": 32e9}


def bert(layers: int, attention: str = "sdpa") -> nn.Module:
    return BertForPreTraining(
        BertConfig(
            num_hidden_layers=layers, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
            attn_implementation=attention,
        )
    )  # fmt: skip


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.skip = nn.Sequential()
        if before != 4 * width:
            self.skip = nn.Sequential(nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(hidden) + self.skip(hidden))


class ResNet152(nn.Module):
    """ResNet-152 with every convolution ``factor`` times as wide."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        channels = 64 * factor
        layers = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(3, 2, 1))
        for group, depth in enumerate((3, 8, 36, 3)):
            width = 64 * factor * 2**group
            for block in range(depth):
                layers.append(Bottleneck(channels, width, stride=2 if group and not block else 1))
                channels = 4 * width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(pixels), labels)


TOKENS = InputSpec(shape=(512,), dtype=torch.int64)
CLASS = InputSpec(shape=(), dtype=torch.int64)
TEXT = {"input_ids": TOKENS, "attention_mask": TOKENS, "labels": TOKENS, "next_sentence_label": CLASS}
IMAGES = {"pixels": InputSpec(shape=(3, 224, 224), dtype=torch.float32), "labels": CLASS}
CASES = {  # name: model, inputs, global batch
    "BERT, 256 layers × 2048": (lambda: bert(256), TEXT, 256),
    "same, attention op by op": (lambda: bert(256, "eager"), TEXT, 256),
    "BERT, 512 layers, op by op": (lambda: bert(512, "eager"), TEXT, 256),
    "ResNet152×8": (lambda: ResNet152(8), IMAGES, 512),
}
HEADS = [
    "model", "operations", "atomic", "capture s", "profiles s", "atomic s", "block s", "stage s", "blocks",
    "block max/mean", "stages", "replicas", "micro-batches", "stage max/mean", "iteration s",
]  # fmt: skip


def measure(build: Callable[[], nn.Module], inputs: dict[str, InputSpec], global_batch: int) -> list[object]:
    clock = [time.process_time()]
    first, second = (capture(build, inputs, size).graph for size in (2, global_batch))
    clock.append(time.process_time())

    @lru_cache
    def graph_at(size: int) -> Graph:
        return interpolate(first, second, size)

    def costs_at(size: int) -> PartitionCosts:
        return analytic(graph_at(size), **DEVICE)

    profiles = OperationProfiles(graph_at, costs_at, smallest=1, largest=global_batch)
    for power in range(global_batch.bit_length()):
        profiles.at(2**power)
    clock.append(time.process_time())
    subcomponents = atomic_subcomponents(profiles.graph)
    clock.append(time.process_time())
    times = profiles.at(global_batch // (NODES * DEVICES_PER_NODE))
    costs = profiles.costs
    units = find_units(
        profiles.graph,
        subcomponents,
        times=times,
        sizes=profiles.at(1),
        state_factor=costs.state_factor,
        memory_bytes=costs.memory_bytes,
    )
    blocks = form_blocks(units, BLOCKS)
    clock.append(time.process_time())
    search = StageSearch(blocks, profiles, nodes=NODES, devices_per_node=DEVICES_PER_NODE, global_batch=global_batch)
    form = search.search()
    clock.append(time.process_time())

    both = times.forward_s + times.backward_s
    block_s = [sum(both[position] for position in {p for sub in block for p in sub.positions}) for block in blocks]
    found = [len(profiles.graph.nodes), len(subcomponents), *(b - a for a, b in pairwise(clock))]
    found += [len(blocks), max(block_s) * len(blocks) / sum(block_s)]
    if form is None:
        return [*found, str(search.refusal())]
    stage_s = [forward + backward for forward, backward in zip(form.forward_s, form.backward_s, strict=True)]
    replicas = " ".join(str(run.replicas * form.pipelines) for run in form.runs)
    balance = max(stage_s) * len(stage_s) / sum(stage_s)
    return [*found, len(form.runs), replicas, form.micro_batches, balance, form.iteration_s]


def main() -> None:
    rows = [[name, *measure(*case)] for name, case in CASES.items()]
    print(tabulate(rows, HEADS, floatfmt=".2f"))
    phases = [HEADS.index(name) for name in ("atomic s", "block s", "stage s")]
    seconds = {row[0]: sum(row[phase] for phase in phases) for row in rows}
    end([Target(what=f"{name}, RaNNC's phases", found=found, wish=3, unit=" s") for name, found in seconds.items()])


if __name__ == "__main__":
    main()

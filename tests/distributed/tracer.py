"""Trains an unmodified model by torch.distributed.pipelining's tracer: four stages, over gloo."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import time

import numpy as np
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.nn.functional import cross_entropy

from auto3d.data import Batches
from auto3d.runtime.optimizer.build import build_optimizer
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.settings import OptimizerSettings
from tests.distributed.parity import CPU
from tests.models import TRAINED

Tensors = Mapping[str, torch.Tensor]
TIMEOUT_S = 60
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


@dataclass(frozen=True, kw_only=True)
class Batch:
    micro_batch_size: int
    micro_batches: int
    iterations: int
    seed: int

    @property
    def samples(self) -> int:
        return self.micro_batch_size * self.micro_batches


@dataclass(frozen=True)
class Outside:
    """How a user would move the loss out of a model, because the tracer's schedules compute it themselves."""

    inputs: Callable[[Tensors], dict[str, torch.Tensor]]  # inputs of the model without its loss
    target: Callable[[Tensors], torch.Tensor]
    loss: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]  # (the model's outputs, target) -> the loss


def _without_labels(inputs: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in inputs.items() if "label" not in name}


def _labels(inputs: Tensors) -> torch.Tensor:
    return inputs["labels"]


def _tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def _shifted(inputs: Tensors) -> dict[str, torch.Tensor]:
    """Labels shifted by one position behind the start token 0, as T5's decoder reads them."""
    shifted = inputs["labels"].roll(1, dims=1).index_fill(1, torch.tensor(0), 0)
    return {"input_ids": inputs["input_ids"], "decoder_input_ids": shifted}


CAUSAL = Outside(_without_labels, _labels, lambda out, labels: _tokens(out[0][:, :-1], labels[:, 1:]))
CLASSES = Outside(_without_labels, _labels, lambda out, labels: cross_entropy(out[0], labels))
PAIRS = Outside(
    _without_labels,
    lambda inputs: torch.cat([inputs["labels"], inputs["next_sentence_label"].reshape(-1, 1)], dim=1),
    lambda out, target: _tokens(out[0], target[:, :-1]) + cross_entropy(out[1], target[:, -1]),
)
MODELS = {  # for each model, the modules at which stages 1 to 3 begin, and its loss
    "gpt2": ([f"transformer.h.{block}" for block in (1, 2, 3)], CAUSAL),
    "bert-pretraining": ([f"bert.encoder.layer.{layer}" for layer in (1, 2, 3)], PAIRS),
    "bert": (
        [f"bert.encoder.layer.{layer}" for layer in (1, 2, 3)],
        Outside(_without_labels, _labels, lambda out, labels: _tokens(out[0], labels)),
    ),
    "t5": (
        ["encoder.block.1", "decoder.block.0", "decoder.block.1"],
        Outside(_shifted, _labels, lambda out, labels: _tokens(out[0], labels)),
    ),
    "vit": ([f"vit.layers.{layer}" for layer in (1, 2, 3)], CLASSES),
    "swin": ([f"swin.encoder.layers.{group}.blocks.{block}" for group, block in ((0, 1), (1, 0), (1, 1))], CLASSES),
    "llama": ([f"model.layers.{layer}" for layer in (1, 2, 3)], CAUSAL),
    "resnet-transformers": (
        [f"resnet.encoder.stages.{group}.layers.{layer}" for group, layer in ((0, 1), (1, 0), (1, 1))],
        CLASSES,
    ),
}


def train_traced(
    world: World, model: str, schedule: str, loss_inside: bool, batch: Batch, optimizer: OptimizerSettings
) -> dict:
    """Train as one of four ranks; returns this rank's gradients per iteration, or the error and its time."""
    join(world, device=CPU, timeout_s=TIMEOUT_S)
    try:
        return {"gradients": _train(world, model, schedule, loss_inside, batch, optimizer)}
    except Exception as error:
        return {"error": _first_line(error), "at": time()}
    finally:
        leave()


def _train(
    world: World, model: str, schedule: str, loss_inside: bool, batch: Batch, optimizer: OptimizerSettings
) -> list[dict[str, np.ndarray]]:
    build, data = TRAINED[model]
    splits, outside = MODELS[model]
    torch.manual_seed(batch.seed)
    module = build().train()
    first_name: dict[int, str] = {}  # by id of the parameter, which may have several names
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first_name.setdefault(id(parameter), name)
    names = {name: first_name[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}

    def inputs_of(iteration: int, batches: Batches) -> dict[str, torch.Tensor]:
        return batches.micro_batch(iteration, 0, tuple(data.inputs))

    one, whole = (
        Batches(data, seed=batch.seed, global_batch=batch.samples, micro_batch_size=size)
        for size in (batch.micro_batch_size, batch.samples)
    )
    example = inputs_of(0, one)
    pipe = pipeline(
        module,
        mb_args=(),
        mb_kwargs=example if loss_inside else outside.inputs(example),
        split_spec=dict.fromkeys(splits, SplitPoint.BEGINNING),
    )
    stage = pipe.build_stage(world.rank, CPU)
    taken = {node.name for node in stage.node.args if node.op == "placeholder"}  # inputs of the model for this stage

    def loss(output: torch.Tensor | tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
        outputs = output if isinstance(output, tuple) else (output,)
        return outputs[0] if loss_inside else outside.loss(outputs, target)

    runner = SCHEDULES[schedule](stage, n_microbatches=batch.micro_batches, loss_fn=loss)
    parameters = dict(stage.submod.named_parameters())
    step, learning_rate = build_optimizer(list(parameters.values()), optimizer, iterations=batch.iterations)
    gradients = []
    for iteration in range(batch.iterations):
        inputs = inputs_of(iteration, whole)
        given = inputs if loss_inside else outside.inputs(inputs)
        step.zero_grad()
        runner.step(
            target=outside.target(inputs) if stage.is_last else None,
            **{name: tensor for name, tensor in given.items() if name in taken},
        )
        gradients.append({names[n]: p.grad.numpy().copy() for n, p in parameters.items() if p.grad is not None})
        step.step()
        learning_rate.step()
    return gradients


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"

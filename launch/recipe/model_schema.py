"""The keys of a model."""

from dataclasses import dataclass
from typing import Any

from auto3d.tensor.known_rules import RULES
from launch.recipe.schema_key import LARGEST_BATCH, key


@dataclass
class LayerRecipe:
    count: int = key(1, "number of equal consecutive layers", least=1, below=LARGEST_BATCH)
    parameters: float = key(0.0, "elements of the layer's weights", least=0)
    tied: float = key(0.0, "elements of further weights, which are shared with the first layer", least=0)
    flops: float = key(0.0, "FLOPs of the forward, per sample", least=0)
    products: int = key(1, "number of matrix products that do these FLOPs", least=1)
    traffic: float = key(0.0, "elements that the forward reads and writes outside matrix products, per sample", least=0)
    undivided: float = key(0.0, "elements of that traffic that tensor parallelism does not divide", least=0)
    saved: float = key(0.0, "elements saved for the backward, per sample", least=0)
    output: float = key(0.0, "elements passed on to the next layer, per sample", least=0)
    reductions: int = key(
        0, "all-reduces of the output under tensor parallelism, in a forward and again in a backward", least=0
    )


@dataclass
class ModelRecipe:
    architecture: str | None = key(None, "model class of transformers, such as GPT2LMHeadModel")
    config: dict[str, Any] = key({}, "keys of that class's configuration; keys that are not given keep its defaults")
    factory: str | None = key(None, "package.module:function that returns an nn.Module; replaces architecture")
    arguments: dict[str, Any] = key({}, "keyword arguments of the factory")
    forward: dict[str, Any] = key(
        {},
        "constant keyword arguments of the model's forward, in addition to data.inputs, as in {return_loss: true}",
        values=(bool, int, float, str),
    )
    tensor_parallel: dict[str, Any] = key(
        {},
        "how tensor parallelism splits weights: names of modules, * for any part of a name, as in "
        "{transformer.h.*.mlp.c_fc: column}; column: by output features; heads: the same, by whole attention heads; "
        "row: by input features; vocabulary: the rows of an embedding or of a language model's head; whole: not; other "
        "modules as docs/tensor.md says",
        values=(str,),
        choices=RULES,
    )
    weights: str | None = key(
        None,
        "safetensors file with initial weights, or a folder that save_pretrained wrote, whose config.json then gives "
        "the architecture, if none is given, and what config leaves out; none: they are drawn from training.seed",
    )
    layers: str | None = key(
        None,
        "CSV file of measured layers; replaces architecture and factory where plans are only predicted (docs/cost.md)",
    )
    layers_of: str | None = key(None, "model to read from the file of layers: a value of its column `model`")
    layer_sizes: list[LayerRecipe] = key([], "sizes and costs of the measured layers, in order")

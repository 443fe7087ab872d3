"""The keys of the data that a model is trained on."""

from dataclasses import dataclass
from typing import Any

from launch.recipe.schema_key import LARGEST_INTEGER, key

RANDOM = ("text", "synthetic")  # sources whose samples are drawn at random
SOURCES = (*RANDOM, "tokens", "dataset", "json", "parquet")
FOLDERS = ("dataset",)  # sources whose files are folders
TOKEN_KINDS = ("tokens", "labels", "next-tokens")
INPUT_KEYS = {  # kind of an input -> the keys that it takes
    **dict.fromkeys(TOKEN_KINDS, ("prefix", "prefix_length")),
    "attention-mask": (),
    "column": ("shape", "dtype", "column", "targets"),
    "integers": ("shape", "low", "high", "prefix", "prefix_length"),
    "normal": ("shape",),
    "constant": ("shape", "value"),
    "mask": ("shape", "count"),
}


@dataclass
class InputRecipe:
    kind: str = key(
        "tokens",
        "what the input holds: tokens, labels (tokens with -100 where they are padded), labels shifted by one, the "
        "mask of padding, a column of the data, uniform integers, normal numbers, one value everywhere, or booleans "
        "with a fixed number of true ones (docs/models.md)",
        choices=tuple(INPUT_KEYS),
    )
    shape: list[int] = key(
        [], "shape of one sample; kinds that are made from tokens take none", least=1, below=LARGEST_INTEGER
    )
    dtype: str = key("int64", "kind column: type of its values", choices=("int64", "float32", "bool"))
    column: str | None = key(None, "kind column: name of the column; none: the input's name")
    targets: bool = key(
        False, "kind column: it holds targets of the loss, which does not count -100; without it, -100 is refused"
    )
    low: int = key(0, "kind integers: smallest value", least=-LARGEST_INTEGER, below=LARGEST_INTEGER)
    high: int = key(2, "kind integers: values are below this", least=1, below=LARGEST_INTEGER)
    value: bool | int | float = key(1, "kind constant: the value; its type is the input's type")
    count: int = key(1, "kind mask: number of true places", least=0, below=LARGEST_INTEGER)
    prefix: int = key(
        0,
        "tokens and integers: value of the first places, such as the id of an image's tokens, or -100 for no label",
        least=-LARGEST_INTEGER,
        below=LARGEST_INTEGER,
    )
    prefix_length: int = key(
        0, "tokens and integers: number of first places that hold prefix", least=0, below=LARGEST_INTEGER
    )


@dataclass
class DataRecipe:
    source: str = key(
        "text",
        "source of the samples: text (bytes of files at random places), synthetic (random tokens), tokens (.npy, or "
        ".bin and .idx of Megatron-LM), dataset (folder of save_to_disk), json (one object per line), parquet, or "
        "package.module:function that returns a dataset (docs/data.md)",
    )
    files: list[str] = key(
        [], "files to read, or folders, * allowed; none for text: the source code of Python's standard library"
    )
    arguments: dict[str, Any] = key({}, "keyword arguments of the source's function")
    tokenizer: str | None = key(None, "folder of the tokenizer that makes tokens of dataset, json or parquet")
    text: str = key("text", "column of the text that it tokenises")
    packing: str = key(
        "packed",
        "packed: texts are joined by the end token and cut into samples; padded: one text per sample, cut or padded to "
        "sequence_length",
        choices=("packed", "padded"),
    )
    shuffle: bool = key(True, "each epoch reads the samples in an order of its own, which training.seed decides")
    last_batch: str = key(
        "drop",
        "last global batch of an epoch, where it is not full; drop: its samples are not used in this epoch; pad: it is "
        "filled with samples whose targets do not count",
        choices=("drop", "pad"),
    )
    sequence_length: int = key(128, "tokens per sample", least=1, below=LARGEST_INTEGER)
    vocabulary_size: int = key(256, "source synthetic: tokens are below this", least=1, below=LARGEST_INTEGER)
    inputs: dict[str, InputRecipe] = key(
        {}, "inputs of the model by name; none: input_ids and labels, and attention_mask if padded"
    )

"""The keys of what a training reads: the source of its samples, and how each input of the model is made from them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from auto3d.capture.export import InputSpec
from auto3d.data.field import SEQUENCE_KINDS, TOKEN_KINDS, InputField
from auto3d.data.interface import DataError
from auto3d.data.order import LAST_BATCHES
from auto3d.data.sources import BYTE_VALUES, ENDLESS, SOURCES, TABLES

PACKINGS = ("packed", "padded")


@dataclass(frozen=True, kw_only=True)
class DataKeys:
    """Samples and inputs. docs/data.md describes the sources and what each takes."""

    inputs: Mapping[str, InputField]  # keyword arguments of the model's forward
    source: str = "text"  # one of SOURCES, or package.module:function, which returns a dataset
    files: tuple[str, ...] = ()  # files or folders; none for text: the source code of Python's standard library
    sequence_length: int = 128  # tokens per sample
    vocabulary_size: int = 256  # synthetic tokens are uniform in [0, vocabulary_size)
    tokenizer: str | None = None  # folder of the tokenizer that makes tokens of a table's text
    text: str = "text"  # column of that text
    packing: str = "packed"  # one of PACKINGS: how texts become samples
    shuffle: bool = True  # whether each epoch has an order of its own
    last_batch: str = "drop"  # one of LAST_BATCHES
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of a source's function
    cache: Path | None = None  # private folder for what is read once; None: a folder in the user's cache
    wait_s: float = 120.0  # seconds for which another process that prepares the data may make no progress

    def __post_init__(self) -> None:
        if self.source not in SOURCES and ":" not in self.source:
            known = ", ".join(SOURCES)
            raise DataError(f"source: {self.source!r} is not known; use one of {known}, or package.module:function")
        for key, value, choices in (("packing", self.packing, PACKINGS), ("last_batch", self.last_batch, LAST_BATCHES)):
            if value not in choices:
                raise DataError(f"{key}: {value!r} is not known; use one of {', '.join(choices)}")
        if mistake := mistake_in(self):
            raise DataError(f"{mistake[0]}: {mistake[1]}")

    def input_specs(self) -> dict[str, InputSpec]:
        return {name: InputSpec(shape=self.shape(field), dtype=field.dtype) for name, field in self.inputs.items()}

    def shape(self, field: InputField) -> tuple[int, ...]:
        """The shape of one sample of ``field``, one of the inputs."""
        return (self.sequence_length,) if field.kind in SEQUENCE_KINDS else field.shape

    def begins_epoch(self, iteration: int) -> bool:
        return False  # nobody is told of an epoch: it follows from a sample's number

    @property
    def shifted(self) -> bool:
        """Whether an input is made from the token after a sample's last token."""
        return any(field.kind == "next-tokens" for field in self.inputs.values())

    @property
    def columns(self) -> dict[str, InputField]:
        """The columns that inputs are made from, by name."""
        return {entry.column or name: entry for name, entry in self.inputs.items() if entry.kind == "column"}

    @property
    def num_tokens(self) -> int | None:
        """Number of different tokens that the data may contain; None if only the data itself can say."""
        return {"text": BYTE_VALUES, "synthetic": self.vocabulary_size}.get(self.source)

    @property
    def fills(self) -> bool:
        """Whether a sample, or a whole batch, may be filled with targets that do not count."""
        return self.packing == "padded" or self.last_batch == "pad"

    incomplete = None  # a last batch in part is left out or filled
    lengths = None  # samples are padded
    read_once = False  # each stage reads its inputs: a sample follows from its position
    is_read_anew = False

    @property
    def is_by_position(self) -> bool:
        return self.source in SOURCES

    @property
    def may_ignore_targets(self) -> bool:
        """Whether an input may hold IGNORED: labels that are padded, columns of targets, and prefixes of -100."""
        labels = any(entry.kind in ("labels", "next-tokens") for entry in self.inputs.values())
        return (self.fills and labels) or any(entry.may_hold_ignored for entry in self.inputs.values())

    def reads(self, names: Collection[str]) -> bool:
        """Whether an input called one of ``names`` is made from the source."""
        return any(self.inputs[name].kind in (*SEQUENCE_KINDS, "column") for name in names)

    @property
    def has_unequal_targets(self) -> bool:
        """Whether samples may have unequal numbers of targets that count, unlike the targets of a prefix of IGNORED."""
        labels = any(entry.kind in ("labels", "next-tokens") for entry in self.inputs.values())
        return (self.fills and labels) or any(entry.draws_ignored for entry in self.inputs.values())


def mistake_in(data: DataKeys) -> tuple[str, str] | None:
    """A key of ``data`` that contradicts the others, and the reason; None if all fit."""
    kinds = {entry.kind for entry in data.inputs.values()}
    tokens, columns = sorted(kinds & {*SEQUENCE_KINDS}), data.columns
    source = f"source {data.source}" if data.source in SOURCES else "a function as source"
    if data.source in ENDLESS:
        if data.packing != "packed" or data.last_batch != "drop" or not data.shuffle:
            key = "packing" if data.packing != "packed" else "last_batch" if data.last_batch != "drop" else "shuffle"
            return key, f"{source} draws samples at random, without an end; leave the key out"
        if columns:
            return "inputs", f"{source} has no columns, which {_some(columns)} takes; use another source"
    if data.tokenizer is not None and data.source not in TABLES:
        return "tokenizer", f"{source} has no text to tokenise; use one of {', '.join(TABLES)}"
    if data.arguments and data.source in SOURCES:
        return "arguments", f"{source} is not a function; leave the key out"
    if data.source not in SOURCES and data.files:
        return "files", f"{source} reads its own files; name them in arguments"
    if data.source not in (*ENDLESS,) and data.source in SOURCES and not data.files:
        return "files", f"none given; {source} reads files"
    if data.source == "tokens":
        if data.packing != "packed":
            return "packing", f"{source} is packed: its files do not say which token fills a sample"
        if columns:
            return "inputs", f"{source} has no columns, which {_some(columns)} takes; use another source"
    elif data.source not in ENDLESS and tokens and data.tokenizer is None:
        if data.source in TABLES:
            return "tokenizer", f"none given; an input of kind {tokens[0]} needs one. Without one use kind column"
        return "inputs", f"{source} gives columns; an input of kind {tokens[0]} needs tokens: use kind column"
    if data.tokenizer is not None and not {*TOKEN_KINDS} & kinds:
        return "tokenizer", "no input is made from tokens; leave the key out"
    if data.packing == "packed" and tokens and columns:
        return "packing", f"packed samples are not rows, whose {_some(columns)} is an input; use padded"
    if data.packing == "padded" and not tokens:
        return "packing", "no input is made from tokens; leave the key out"
    if data.source not in ENDLESS and not tokens and not columns:
        text = ", give the tokenizer of its text" if data.source in TABLES else ""
        return "inputs", f"none is made from {source}; name its columns with kind column{text}, or use source synthetic"
    for name, entry in data.inputs.items():
        if data.fills and entry.kind == "tokens" and name.endswith("labels"):
            return "inputs", f"{name} is of kind tokens, so that padding would count as targets; use kind labels"
    for name, column in columns.items():
        for other in (use for key, use in data.inputs.items() if use.kind == "column" and (use.column or key) == name):
            if replace(other, column="") != replace(column, column=""):
                return "inputs", f"two inputs take the column {name} with unequal shape, dtype or targets"
    if data.last_batch == "pad" and not ({"labels", "next-tokens"} & kinds or any(c.targets for c in columns.values())):
        return (
            "last_batch",
            "pad needs targets that it can set to -100: an input of kind labels, or a column of targets",
        )
    return None


def _some(columns: Mapping[str, InputField]) -> str:
    return f"column {next(iter(columns))}"

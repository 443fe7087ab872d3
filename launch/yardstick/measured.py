"""Published runs as every predictor sees them, and what was measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe

FULLEST = None  # in place of a pipeline device: the memory of the device that needs most
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a transformer."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    ffn: int
    gated: bool  # the feed-forward has three matrices (SwiGLU), not two
    vocabulary: int
    sequence: int
    tied: bool  # the head has the embedding's weight

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * (self.hidden // self.heads) * self.key_value_heads
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Parameters of all layers, the embedding and, if it is not tied, the head."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of a forward and backward of one sample: 6 N + 12 L h s for each token (PaLM, appendix B)."""
        products = self.layers * self.layer_parameters + self.vocabulary * self.hidden
        return self.sequence * (6.0 * products + 12.0 * self.layers * self.hidden * self.sequence)


def gpt(*, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> ModelSizes:
    """The sizes of a GPT: a feed-forward of four times the hidden size, and a head with the embedding's weight."""
    return ModelSizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        ffn=4 * hidden,
        gated=False,
        vocabulary=vocabulary,
        sequence=sequence,
        tied=True,
    )


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One configuration that somebody ran: what it was, and what they measured."""

    line: int  # line of its file
    row: Mapping[str, str]  # a row that ``auto3d predict`` takes
    sizes: ModelSizes
    group: tuple[str, ...]  # a planner chooses among the runs of one group
    parts: tuple[str, ...] = ("",)  # parts of the set, with scores of their own, that the run belongs to
    seconds: float | None = None  # time of an iteration; None: not measured
    timed: bool = True  # whether its time counts for the error
    memory: tuple[tuple[int | None, float], ...] = ()
    """(pipeline device or FULLEST, measured peak bytes), once for each rank that was measured."""
    ran: bool | None = None  # False: out of memory; None: not known, so it does not count for out-of-memory
    baseline: bool = False  # the times of the others of its group are also compared relative to its time

    @property
    def words(self) -> str:
        """The configuration in words."""
        names = {"mb": "micro_batch_size", "tp": "tp", "dp": "dp", "pp": "pp"}
        words = " ".join(f"{name}={self.row[column]}" for name, column in names.items())
        return " ".join(part for part in (*self.group, words, self.row.get("schedule", "")) if part)


@dataclass(frozen=True, kw_only=True)
class MeasuredSet:
    """Published runs of one source."""

    name: str  # also the name of its recipe in recipes/published/
    title: str
    file: str  # in recipes/published/data/
    source: str
    licence: str
    system: str  # software that trained
    read: Callable[[LoadedRecipe, Sequence[Mapping[str, str]]], list[PublishedRun]]
    """The runs of the rows of ``file``; its columns have the names that the recipe's ``prediction.columns`` gives."""
    interpolated: bool = False  # micro-batch sizes are many, so most are interpolated from two captures
    fitted: Mapping[str, str] = field(default_factory=dict)
    """Part -> which parameters of auto3d's recipe were fitted to its runs."""
    origin: Origin  # where the figures that decide its times come from
    words: str = ""  # how rows were read and what is scored
    open: str = ""  # open questions


def equal_devices_and_batch(row: Mapping[str, str]) -> tuple[str, str]:
    """The group of a run among the runs of one model: as many devices, and the same global batch."""
    gpus = whole(row, "tp") * whole(row, "dp") * whole(row, "pp")
    return f"gpus={gpus}", f"batch={row['training.global_batch']}"


def whole(row: Mapping[str, str], name: str) -> int:
    """A column that holds a whole number."""
    return int(float(row[name]))

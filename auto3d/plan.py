"""The Plan: everything that decides how a model is trained, complete and explicit, with a JSON form.

Search makes Plans; the simulator and the runtime take them. A Plan can be written by hand and run.
"""

from dataclasses import asdict, dataclass
from json import dumps

from pydantic import ConfigDict, TypeAdapter, ValidationError

from auto3d.errors import InputError

SCHEMA = 1


class PlanError(InputError):
    """A Plan that contradicts itself, or that does not fit the model it is used with."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage: the operations ``first`` to ``last - 1`` of the Graph, in its order."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees, batch, schedule, stages and placement of one way to train one model.

    ``placement[device][replica]`` is the rank that plays pipeline device ``device`` in data-parallel replica
    ``replica``. Which stages live on a pipeline device is the schedule's decision.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    graph: str  # fingerprint of the Graph that ``stages`` cut
    dp: int
    tp: int
    pp: int
    global_batch: int  # samples per iteration, over all replicas
    micro_batch_size: int  # samples
    schedule: str
    stages: tuple[StagePlan, ...]
    placement: tuple[tuple[int, ...], ...]
    seed: int  # of the initial weights, the data order and dropout
    schema: int = SCHEMA

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each replica runs in one iteration."""
        return self.global_batch // (self.dp * self.micro_batch_size)

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def __post_init__(self) -> None:
        check_degrees(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            global_batch=self.global_batch,
            micro_batch_size=self.micro_batch_size,
        )
        if self.schema != SCHEMA:
            raise PlanError(f"schema: {self.schema} is not a version this build reads; it reads {SCHEMA}")
        if self.seed < 0:
            raise PlanError(f"seed: {self.seed} is not possible; it must be 0 or more")
        if self.tp != 1:
            raise PlanError(f"tp: {self.tp} asks for tensor parallelism, which this build does not run; tp must be 1")
        if not self.stages or len(self.stages) % self.pp:
            raise PlanError(f"stages: {len(self.stages)} stages for pp = {self.pp}; there must be a multiple of pp")
        if self.stages[0].first != 0:
            raise PlanError(f"stages: the first stage begins at operation {self.stages[0].first}; it must begin at 0")
        for index, stage in enumerate(self.stages):
            if stage.first >= stage.last:
                raise PlanError(
                    f"stages: stage {index} is empty ({stage.first} to {stage.last}); first must be below last"
                )
            if index and stage.first != self.stages[index - 1].last:
                raise PlanError(
                    f"stages: stage {index} begins at operation {stage.first}, the stage before it ends at "
                    f"{self.stages[index - 1].last}; the two must be equal"
                )
        ranks = sorted(rank for replicas in self.placement for rank in replicas)
        shape = [len(replicas) for replicas in self.placement]
        if shape != [self.dp] * self.pp or ranks != list(range(self.ranks)):
            raise PlanError(
                f"placement: {[list(replicas) for replicas in self.placement]} must be pp = {self.pp} lists of "
                f"dp = {self.dp} ranks that use each of 0 to {self.ranks - 1} once"
            )

    def to_json(self) -> str:
        return dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Plan":
        """Read a Plan; raises PlanError that names the key, its value and what is accepted."""
        try:
            return _adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["type"] == "unexpected_keyword_argument":
                raise PlanError(
                    f"{first['loc'][-1]}: unknown; a plan has {', '.join(Plan.__dataclass_fields__)}"
                ) from None
            where = ".".join(map(str, first["loc"])) or "plan"
            value = (
                "" if first["type"] in ("missing", "json_invalid", "value_error") else f" (found {first['input']!r})"
            )
            message = first["msg"].removeprefix("Value error, ")
            raise PlanError(message if where == "plan" else f"{where}: {message}{value}") from None


_adapter = TypeAdapter(Plan)


def check_degrees(*, dp: int, tp: int, pp: int, global_batch: int, micro_batch_size: int) -> None:
    """Raise PlanError where these numbers cannot belong together; the message holds the whole equation."""
    named = {"dp": dp, "tp": tp, "pp": pp, "global_batch": global_batch, "micro_batch_size": micro_batch_size}
    for name, value in named.items():
        if value < 1:
            raise PlanError(f"{name}: {value} is not possible; it must be 1 or more")
    if global_batch % (dp * micro_batch_size):
        raise PlanError(
            f"global_batch: {global_batch} does not divide into dp = {dp} replicas of micro-batches of "
            f"{micro_batch_size} samples; it must be a multiple of {dp} × {micro_batch_size} = {dp * micro_batch_size}"
        )

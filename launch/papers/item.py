"""An item: one table or figure of a paper, as a file of recipes/papers/ declares it."""

from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from launch.recipe.error import COMMAND_LINE, RecipeError
from launch.recipe.load import read_yaml
from launch.recipe.shipped import RECIPES

FOLDER = RECIPES / "papers"

How = Literal["simulated", "emulated", "measured", "experiment"]
Overrides = dict[str, Any]  # keys of a recipe, such as training.global_batch, with their values
Setting = tuple[str, ...]  # one label per axis of a part
STRICT = ConfigDict(extra="forbid")
T = TypeVar("T")

Form = Literal[
    "value",
    "ratio",
    "reduction",
    "largest",
    "most",
    "least",
    "scaling",
    "trend",
    "levels-off",
    "fails",
    "plan",
]

_OF_ALL_SETTINGS = ("largest", "scaling", "trend", "levels-off", "fails")  # claims that no part of their settings shows

QUANTITIES = {  # values of a grid's row, with the labels of their axes; an experiment has quantities of its own
    "iteration_s": "s per iteration",
    "samples_per_s": "samples per s",
    "tokens_per_s": "tokens per s",
    "tflops": "model TFLOP/s per device",
    "peak_gib": "peak memory, GiB",
    "mean_gib": "mean memory of the devices, GiB",
    "least_gib": "memory of the emptiest device, GiB",
    "balance": "memory of the emptiest device, fraction of the peak",
    "first_of_peak": "memory of the first stage's device, fraction of the peak",
    "bubble": "bubble, fraction of the iteration",
    "billion_parameters": "parameters of the model, billions",
}


@dataclass(frozen=True, config=STRICT)
class Cause:
    """A reason why a claim comes out differently, shown by ``changed``: overrides under which the claim is made again.

    ``system`` names the only system to which they apply; none: all of them.
    """

    text: str
    changed: Overrides = field(default_factory=dict)
    system: str | None = None


@dataclass(frozen=True, config=STRICT)
class Claim:
    """A statement of the paper about the systems of a part, with the paper's figure for it.

    The forms, over the settings that have all labels of ``settings``:

    - value: ``quantity`` of ``system``;
    - ratio: ``quantity`` of ``system`` divided by ``quantity`` of ``against``;
    - reduction: 1 − that ratio;
    - largest: the largest ``quantity`` of ``system`` in any setting, divided by the largest of ``against``;
    - most: ``system`` has the largest ``quantity`` of all systems (least: the smallest), in so many of the settings;
    - scaling: ``quantity`` of ``system`` in the last setting divided by ``quantity`` in the first (of all, or
      the two of the labels ``between``), times ``factor``;
    - trend: whether ``quantity`` of ``system``, divided by ``quantity`` of ``against`` if given, falls or rises from
      setting to setting;
    - levels-off: the first setting from which on ``quantity`` of ``system`` stays as it is;
    - fails: the settings in which ``system`` runs out of memory, as labels;
    - plan: the plan of ``system``, as in "dp=8 pp=4".

    If ``against`` lists several systems, the best of them in each setting counts: the largest ``quantity``, or the
    smallest of iteration_s. ``paper`` is a number, a range [lowest, highest] in which each of our values should lie, or
    words for the forms trend, levels-off, fails and plan. ``over`` says for which of our values it stands. ``source``
    says whether the paper prints it, a formula of the paper gives it, or we fitted it.
    """

    says: str
    system: str
    form: Form
    paper: float | tuple[float, float] | list[str] | str | None = None
    against: str | list[str] | None = None
    quantity: str | None = None  # default: the quantity of the part
    settings: list[str] = field(default_factory=list)
    between: tuple[str, str] | None = None  # the form scaling takes it: labels of the first and the last setting
    over: Literal["range", "mean", "largest", "smallest"] = "range"
    source: Literal["paper", "formula", "fit"] = "paper"
    factor: float = 1.0
    because: list[Cause] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, config=STRICT)
class Figure:
    """The form of a part's plot: bars or lines of ``quantity``, one panel per label of the first of several axes."""

    form: Literal["bars", "lines"] = "bars"
    quantity: str | None = None  # default: the quantity of the part
    logarithmic: bool = False


@dataclass(frozen=True, config=STRICT)
class Part:
    """A grid of settings × systems, made in one way.

    ``base`` is the name of a recipe, or has a recipe's groups. The overrides of a setting change it, then the overrides
    of the system, whose search.* keys span the plans of which the fastest counts. With ``how: experiment``, the
    function ``experiment`` of launch/papers/experiments makes the rows instead, from ``arguments``.
    """

    how: How
    title: str
    quantity: str
    base: str | dict[str, Any] = field(default_factory=dict)
    changes: Overrides = field(default_factory=dict)  # overrides of the base in all settings
    axes: list[dict[str, Overrides]] = field(default_factory=list)
    systems: dict[str, Overrides] = field(default_factory=dict)
    experiment: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    printed: dict[str, dict[str, float | str]] = field(default_factory=dict)
    """System -> labels of a setting, joined by ", " -> the paper's figure."""
    claims: list[Claim] = field(default_factory=list)
    figure: Figure | None = None
    text: str = ""  # remarks on how the numbers are made

    @property
    def settings(self) -> list[Setting]:
        return [tuple(labels) for labels in product(*self.axes)]

    def overrides(self, setting: Setting, system: str) -> Overrides:
        """The overrides of one row: for all settings, for this setting, and for the system; the last counts."""
        overrides = dict(self.changes)
        for axis, label in zip(self.axes, setting, strict=True):
            overrides |= axis[label]
        return overrides | self.systems[system]


@dataclass(frozen=True, config=STRICT)
class Item:
    """One table or figure of a paper."""

    paper: str
    place: str  # number of the table or figure, and the section that discusses it
    title: str
    parts: list[Part]
    text: str = ""


_adapter = TypeAdapter(Item)


def names() -> list[str]:
    """The items of recipes/papers/, in order."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def file_of(name: str) -> Path:
    """The file of the item ``name``, which may be the path of a file; raises RecipeError if there is none."""
    for file in (Path(name), FOLDER / f"{name}.yaml"):
        if file.suffix in (".yaml", ".yml") and file.is_file():
            return file
    known = ", ".join(names())
    raise RecipeError(COMMAND_LINE, "item", f"there is no {name!r}; it takes the path of a .yaml file, or {known}")


def read_item(file: Path) -> Item:
    """The item that ``file`` declares; raises RecipeError where the file is no item."""
    item = validated(file, _adapter)
    for number, part in enumerate(item.parts):
        _check(file, f"parts.{number}", part)
    return item


def validated(file: Path, adapter: TypeAdapter[T]) -> T:
    """What ``file`` declares, as ``adapter`` reads it; raises RecipeError where a key is wrong or missing."""
    try:
        return adapter.validate_python(read_yaml(file))
    except ValidationError as error:
        faults = error.errors()
        # A key that is written wrong is both unknown and missing; the first says where it is.
        first = next((fault for fault in faults if fault["type"] == "unexpected_keyword_argument"), faults[0])
        key = ".".join(str(part) for part in first["loc"])
        words = {"unexpected_keyword_argument": "unknown", "missing": "missing; this key has no default"}
        why = words.get(first["type"]) or f"found {first['input']!r}; {first['msg']}"
        raise RecipeError(file, key, why) from None


def _check(file: Path, key: str, part: Part) -> None:
    """Raise RecipeError where the entries of ``part`` contradict each other."""
    if (part.how == "experiment") != (part.experiment is not None):
        raise RecipeError(file, f"{key}.experiment", "belongs to how: experiment, which needs it")
    for number, claim in enumerate(part.claims):
        if 0 in (claim.paper if isinstance(claim.paper, tuple) else (claim.paper,)):
            raise RecipeError(
                file, f"{key}.claims.{number}.paper", "found 0, of which a difference is no fraction; leave it out"
            )
    if part.how == "experiment":
        for number, claim in enumerate(part.claims):
            if any(cause.changed for cause in claim.because):
                problem = "because.changed has keys of a recipe, and an experiment has none; use because.text alone"
                raise RecipeError(file, f"{key}.claims.{number}", problem)
        return  # its systems and settings are known when it has run
    if not part.axes or not part.systems:
        raise RecipeError(file, key, "lacks axes or systems; it needs one of each at least")
    quantities = {f"{key}.quantity": part.quantity}
    quantities |= {
        f"{key}.claims.{n}.quantity": claim.quantity for n, claim in enumerate(part.claims) if claim.quantity
    }
    for where, quantity in quantities.items():
        if quantity not in QUANTITIES:
            raise RecipeError(file, where, f"found {quantity!r}; it takes {', '.join(QUANTITIES)}")
    labels = {label for axis in part.axes for label in axis}
    for number, claim in enumerate(part.claims):
        where = f"{key}.claims.{number}"
        for name in (claim.system, *against(claim)):
            if name not in part.systems:
                raise RecipeError(file, where, f"there is no system {name!r}; it takes {', '.join(part.systems)}")
        if unknown := [label for label in _labels_of(claim) if label not in labels]:
            raise RecipeError(
                file, where, f"no axis has the label {unknown[0]!r}; it takes {', '.join(sorted(labels))}"
            )
    settings = {", ".join(setting) for setting in part.settings}
    for system, figures in part.printed.items():
        if system not in part.systems:
            raise RecipeError(file, f"{key}.printed", f"there is no system {system!r}")
        if unknown := [setting for setting in figures if setting not in settings]:
            raise RecipeError(file, f"{key}.printed.{system}", f"there is no setting {unknown[0]!r}")


def predicted_parts(item: Item, only: Sequence[str]) -> Item:
    """``item`` with only its simulated parts, cut to the settings and systems that have the labels ``only``.

    Of an axis without any of these labels, and of the systems if none is among them, all stay. Claims about what is cut
    away are left out. Raises RecipeError for a label that no simulated part has, or if there is no such part.
    """
    parts = [part for part in item.parts if part.how == "simulated"]
    if not parts:
        raise RecipeError(COMMAND_LINE, "item", f"{item.paper}, {item.place}: no part of it is predicted for a cluster")
    labels = dict.fromkeys(label for part in parts for group in (*part.axes, part.systems) for label in group)
    if unknown := [label for label in only if label not in labels]:
        raise RecipeError(COMMAND_LINE, "--only", f"found {unknown[0]!r}; it takes {', '.join(labels)}")
    return replace(item, parts=[_cut(part, only) for part in parts])


def _cut(part: Part, only: Sequence[str]) -> Part:
    def kept(group: dict[str, Overrides]) -> dict[str, Overrides]:
        return {label: group[label] for label in group if label in only} or group

    axes, systems = [kept(axis) for axis in part.axes], kept(part.systems)
    remaining = {label for axis in axes for label in axis}
    settings = {", ".join(labels) for labels in product(*axes)}
    return replace(
        part,
        axes=axes,
        systems=systems,
        printed={
            system: {setting: figure for setting, figure in figures.items() if setting in settings}
            for system, figures in part.printed.items()
            if system in systems
        },
        claims=[
            claim
            for claim in part.claims
            if {claim.system, *against(claim)} <= systems.keys()
            and remaining.issuperset(_labels_of(claim))
            and not (claim.form in _OF_ALL_SETTINGS and _means(claim, part.settings) != _means(claim, product(*axes)))
        ],
    )


def _means(claim: Claim, settings: Iterable[Setting]) -> list[Setting]:
    """The settings among ``settings`` that ``claim`` is about."""
    return [tuple(setting) for setting in settings if set(claim.settings) <= set(setting)]


def _labels_of(claim: Claim) -> list[str]:
    """The labels of settings that ``claim`` names."""
    return [*claim.settings, *(claim.between or ())]


def against(claim: Claim) -> Sequence[str]:
    """The systems with which a claim compares."""
    return [claim.against] if isinstance(claim.against, str) else claim.against or []

"""Alternatives: other assumptions about the clusters and programs of a paper, each for all items of the paper."""

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from launch.papers.item import FOLDER, STRICT, Item, Overrides, Part, file_of, names, read_item, validated
from launch.recipe.error import COMMAND_LINE, RecipeError

_FOLDER = FOLDER / "alternatives"
STRATEGIES = "amp"  # the experiment that searches the recipe of a part


@dataclass(frozen=True, config=STRICT)
class Alternative:
    """One assumption, or several together, that a paper does not state.

    ``changed`` are overrides of all predicted parts; where an item overrides the same key, the item counts. ``labels``
    has overrides of the rows that have a label, of a setting, a system or an experiment's variant: they count where an
    item sets the same key.
    ``fitted`` names the items by whose figures its values were chosen; the other items test them, but for the items in
    ``without``, which are on another cluster.
    """

    text: str
    changed: Overrides = field(default_factory=dict)
    labels: dict[str, Overrides] = field(default_factory=dict)
    fitted: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class Alternatives:
    """The alternatives of the items whose ``paper`` is one of ``papers``; ``text`` says what they leave open."""

    papers: list[str]
    alternatives: dict[str, Alternative]
    text: str = ""


_adapter = TypeAdapter(Alternatives)


def papers() -> list[str]:
    """The names of the papers that have alternatives: files of recipes/papers/alternatives/."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def read_alternatives(name: str) -> Alternatives:
    """The alternatives of the paper ``name``; raises RecipeError where there are none, or the file is wrong."""
    if name not in papers():
        raise RecipeError(COMMAND_LINE, "--alternatives", f"there is no {name!r}; it takes {', '.join(papers())}")
    file = _FOLDER / f"{name}.yaml"
    alternatives = validated(file, _adapter)
    _check(file, alternatives)
    return alternatives


def items_of(alternatives: Alternatives) -> dict[str, Item]:
    """The shipped items of the papers, by name."""
    items = {name: read_item(file_of(name)) for name in names()}
    return {name: item for name, item in items.items() if item.paper in alternatives.papers}


def altered(item: Item, alternative: Alternative) -> Item | None:
    """The parts of ``item`` that have claims and that can be altered, under ``alternative``; None if there are none.

    Claims have no causes of their own: the alternative is the cause that is tried.
    """
    parts = [_altered(part, alternative) for part in item.parts if can_be_altered(part) and part.claims]
    return replace(item, parts=parts) if parts else None


def can_be_altered(part: Part) -> bool:
    """Whether ``part`` is predicted for a recipe whose keys can be changed."""
    return part.how == "simulated" or part.experiment == STRATEGIES


def _altered(part: Part, alternative: Alternative) -> Part:
    def labelled(group: Mapping[str, Overrides]) -> dict[str, Overrides]:
        return {label: given | alternative.labels.get(label, {}) for label, given in group.items()}

    if part.experiment is not None:
        variants = {
            label: {**variant, "all": variant.get("all", {}) | alternative.labels.get(label, {})}
            for label, variant in part.arguments["variants"].items()
        }
        changes = alternative.changed | part.arguments["changes"]
        return replace(part, arguments={**part.arguments, "changes": changes, "variants": variants})
    return replace(
        part,
        changes=alternative.changed | part.changes,
        axes=[labelled(axis) for axis in part.axes],
        systems=labelled(part.systems),
        claims=[replace(claim, because=[]) for claim in part.claims],
    )


def _check(file: Path, alternatives: Alternatives) -> None:
    """Raise RecipeError where an alternative names an item or a label that no item of the papers has."""
    items = items_of(alternatives)
    parts = [part for item in items.values() for part in item.parts if can_be_altered(part)]
    labels = {label for part in parts for group in (*part.axes, part.systems) for label in group}
    labels |= {label for part in parts for label in part.arguments.get("variants", ())}
    for name, alternative in alternatives.alternatives.items():
        named = (
            ("fitted", alternative.fitted, items),
            ("without", alternative.without, items),
            ("labels", alternative.labels, labels),
        )
        for key, wanted, known in named:
            if unknown := [wanted_name for wanted_name in wanted if wanted_name not in known]:
                problem = f"found {unknown[0]!r}; it takes {', '.join(sorted(known))}"
                raise RecipeError(file, f"alternatives.{name}.{key}", problem)

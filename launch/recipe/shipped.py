"""The files that come with auto3d: recipes, what they name, and scripts for sbatch.

A clone has them in recipes/ and slurm/, an installed package in launch/shipped/, where setup.py puts copies.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from auto3d.errors import InputError

_PACKAGED = Path(__file__).resolve().parents[1] / "shipped"
SHIPPED = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).resolve().parents[2]
RECIPES = SHIPPED / "recipes"
SCRIPTS = "slurm"  # name under which the scripts for sbatch are copied, all together
_NAMED = ("models", "clusters", "accelerators", "papers", "published")  # folders with files that recipes name, or none


@dataclass(frozen=True)
class ShippedRecipe:
    name: str  # the RECIPE of `auto3d plan RECIPE`
    about: str  # first sentence of its file


def shipped_recipes() -> list[ShippedRecipe]:
    """All recipes that come with auto3d, by name; recipes in folders of recipes/ follow."""
    files = [file for file in RECIPES.rglob("*.yaml") if file.relative_to(RECIPES).parts[0] not in _NAMED]
    names = {str(file.relative_to(RECIPES).with_suffix("")): file for file in files}
    return [ShippedRecipe(name, _about(names[name])) for name in sorted(names, key=lambda name: ("/" in name, name))]


def _about(file: Path) -> str:
    comment = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.strip("# "))
    return re.split(r"(?<=\.) (?=[A-Z`])", " ".join(comment), maxsplit=1)[0]


def copy_shipped(name: str) -> list[Path]:
    """Copy the file ``name`` of recipes/, or the sbatch scripts, into this folder; returns the copies.

    ``name`` is the name of a recipe, or of another file such as models/gpt2-tiny. Nothing is overwritten: raises
    InputError if a copy exists already, or if there is no such file.
    """
    if name == SCRIPTS:
        sources = [file for file in sorted((SHIPPED / SCRIPTS).iterdir()) if file.suffix in (".sbatch", ".sh")]
    else:
        sources = [RECIPES / f"{name.removesuffix('.yaml')}.yaml"]
        inside = RECIPES.resolve() in sources[0].resolve().parents
        if not inside or not sources[0].is_file():
            raise InputError(
                f"there is no {name!r} to copy; `auto3d recipes` lists the recipes, and their model, "
                f"cluster and accelerator are files such as models/gpt2-tiny; {SCRIPTS} has the scripts for sbatch"
            )
    copies = [Path(source.relative_to(SHIPPED)) for source in sources]
    for copy in copies:
        if copy.exists():
            raise InputError(f"{copy} exists already; move it away first")
    for source, copy in zip(sources, copies, strict=True):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    return copies

"""The profiles that predictions of a recipe use: their files, how they are chosen, and what they must fit."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from auto3d.cost.profile import Profile, ProfileError, Setting
from auto3d.search.axes import divisors_of
from auto3d.share import Share
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import FLOAT8
from launch.recipe.schema_key import AUTO
from launch.recipe.settings import cluster

PROFILES = Path("profiles")


def profile_file(recipe: LoadedRecipe) -> Path:
    """The profile of the recipe's cluster; `auto3d profile` writes it."""
    return PROFILES / f"{recipe.cluster_name}.json"


def tuned_file(recipe: LoadedRecipe) -> Path:
    """The profile that `auto3d tune` writes, for this recipe only: another recipe's model would not fit it."""
    return PROFILES / f"{recipe.cluster_name}-{recipe.name}.json"


def setting_of(recipe: LoadedRecipe) -> Setting:
    """The devices and settings under which a profile for the recipe must have been measured."""
    values = recipe.values
    return Setting(
        device=values.cluster.device,
        accelerator=cluster(recipe).nodes[0].accelerator.name,
        devices_per_node=values.cluster.devices_per_node,
        threads=values.training.threads_per_rank,
        tf32=values.training.tf32,
        precision=values.training.precision,
        deterministic=values.training.deterministic,
        tensor_parallel=tuple(values.model.tensor_parallel.items()),
    )


def basis(recipe: LoadedRecipe, measured_in: str) -> str:
    """What the predicted times rest on, in words; ``measured_in`` is the file of a profile, or empty."""
    if recipe.values.model.layers is not None:
        return f"the layers of {recipe.values.model.layers}"
    if measured_in:
        return f"what {measured_in} measured"
    kinds = [kind.accelerator for kind in (recipe.values.cluster, *recipe.values.cluster.more)]
    named = [f"recipes/accelerators/{kind}.yaml" if "/" not in kind else kind for kind in dict.fromkeys(kinds) if kind]
    guesses = ["round figures of a data-centre GPU"] if None in kinds else []
    return " and ".join([*named, *guesses])


def how_to_measure(recipe: LoadedRecipe, measured_in: str) -> str:
    """The command that measures what predictions need; empty if it was measured, or cannot be."""
    values = recipe.values
    if measured_in or recipe.paper or values.model.layers is not None or values.training.compute != "real":
        return ""
    if values.prediction.profile == "none":
        return ""
    if values.cluster.more or values.cluster.nodes > 1:
        return recipe.command("profile", "cluster.nodes=1", *["cluster.more=[]"] * bool(values.cluster.more))
    return recipe.command("profile")


def find_profile(recipe: LoadedRecipe, fingerprint: Callable[[int], str]) -> tuple[Path, Profile] | None:
    """The profile that ``prediction.profile`` chooses, and its file; None if there is none.

    ``auto`` chooses the profile that `auto3d tune` measured for this recipe, if it fits, else the cluster's. Raises
    RecipeError, which names the command that measures the right profile, where the chosen profile is missing or was
    measured for another model, device or setting. ``fingerprint`` maps a micro-batch size to the fingerprint of the
    model's Graph.
    """
    wanted = recipe.values.prediction.profile
    float8 = recipe.values.prediction.precision == FLOAT8
    if float8 and wanted not in (AUTO, "none"):
        raise recipe.error(
            "prediction.profile", f"found {wanted!r}, but no profile has times in {FLOAT8}; it takes none"
        )
    if float8 or wanted == "none" or recipe.values.model.layers is not None:
        return None
    if wanted == AUTO:
        with suppress(OSError, ProfileError):
            return tuned_file(recipe), _fitting(recipe, tuned_file(recipe), fingerprint)
        if not profile_file(recipe).is_file():
            return None
    elif not Path(wanted).is_file():
        raise recipe.error("prediction.profile", f"found {wanted!r}; there is no such file")
    file = profile_file(recipe) if wanted == AUTO else Path(wanted)
    try:
        return file, _fitting(recipe, file, fingerprint)
    except ProfileError as error:
        again = "to predict without: prediction.profile=none"
        if not recipe.paper:  # each row of a paper has its own model, and no recipe that `auto3d profile` takes
            again = f"to measure: {recipe.command('profile')}; {again}"
        raise recipe.error("prediction.profile", f"{file}: {error}; {again}") from None


def _fitting(recipe: LoadedRecipe, file: Path, fingerprint: Callable[[int], str]) -> Profile:
    """The profile in ``file``; raises ProfileError where it was measured for another model or setting."""
    profile = Profile.from_json(file.read_bytes())
    profile.check(setting_of(recipe), fingerprint)
    return profile


def micro_batch_sizes(recipe: LoadedRecipe) -> list[int]:
    """The micro-batch sizes to measure: sizes of the recipe's search and plan, and powers of 2 up to the largest."""
    values = recipe.values
    batch, searched = values.training.global_batch, values.search.micro_batch_size
    sizes: set[int] = set() if searched == AUTO else {size for size in searched if size <= batch}
    if values.plan is not None:
        sizes.add(values.plan.micro_batch_size)
    largest = max(sizes, default=1) if searched != AUTO else batch
    return sorted(sizes | {2**power for power in range(largest.bit_length()) if 2**power <= largest})


def tensor_parallel_shares(recipe: LoadedRecipe) -> list[Share]:
    """The shares of tensor-parallel ranks to measure: of the recipe's search and plan, if a group fits on a node."""
    values = recipe.values
    devices, searched = values.cluster.devices_per_node, values.search.tp
    kinds = values.search.sequence_parallel
    pairs = {
        (degree, kind)
        for degree in (divisors_of(devices) if searched == AUTO else searched)
        for kind in ([False, True] if kinds == AUTO else kinds)
    }
    if values.plan is not None:
        pairs.add((values.plan.tp, values.plan.sequence_parallel))
    return [Share(tp=tp, sequence_parallel=kind) for tp, kind in sorted(pairs) if 1 < tp <= devices]

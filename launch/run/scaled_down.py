"""What to run instead where the devices of a recipe's cluster are missing."""

from auto3d.words import counted
from launch.recipe.load import LoadedRecipe

DEVICES, LAYERS, BATCH = 8, 8, 16  # emulated devices, layers and samples: minutes for a sweep on two cores
_LAYERS_KEYS = ("n_layer", "num_hidden_layers", "num_layers")  # names of that key in configurations of transformers


def scaled_down(recipe: LoadedRecipe) -> list[str]:
    """Overrides with which a sweep of ``recipe`` takes minutes on one machine without accelerators.

    Emulated devices of the same kind run a model with fewer layers of the same size on a smaller batch. Messages and
    gradient sums are small, because the sums of giant layers would occupy the cores for longer than the layers do.
    """
    config, cluster, emulation = recipe.values.model.config, recipe.values.cluster, recipe.values.emulation
    layers = {key: config.get(key) for key in _LAYERS_KEYS}  # unchecked so far
    fewer = [f"model.config.{key}={LAYERS}" for key, has in layers.items() if isinstance(has, int) and has > LAYERS]
    return [
        "training.compute=emulated",
        *fewer,
        "cluster.nodes=1",
        f"cluster.devices_per_node={DEVICES}",
        *(["cluster.more=[]"] if cluster.more else []),
        f"training.global_batch={BATCH}",
        *(f"emulation.{time}=null" for time in ("send_s", "sync_s") if getattr(emulation, time, None) is not None),
        "emulation.send_bytes=65536",
        "emulation.sync_bytes=65536",
        "search.tp=[1]",
        "search.max_trials=6",
        "measure.iterations=3",
    ]


def what_helps(recipe: LoadedRecipe, verb: str) -> str:
    """The commands that help where ``verb`` lacks the devices of the recipe's cluster, on one line."""
    slurm = recipe.command(verb, "launch.executor=slurm")
    if recipe.shipped and not recipe.overrides:
        slurm = f"make {verb} RECIPE={recipe.written} EXECUTOR=slurm"
    plan = recipe.command("plan")
    here = ""
    if not recipe.paper:
        small = recipe.command("sweep", *scaled_down(recipe))
        here = f"`{small}` runs fewer layers here, on {DEVICES} emulated devices; "
    return f"`{plan}` predicts without them; {here}`{slurm}` runs it on a SLURM cluster"


def devices_of(recipe: LoadedRecipe) -> str:
    """The devices of the recipe's cluster in words, such as "16 nodes of 4 GPUs"."""
    kinds = [recipe.values.cluster, *recipe.values.cluster.more]
    word = "GPU" if recipe.values.cluster.device == "cuda" else "CPU rank"
    parts = [f"{counted(kind.nodes, 'node')} of {counted(kind.devices_per_node, word)}" for kind in kinds]
    return " and ".join(parts)

"""`auto3d export`."""

from pathlib import Path

import click

from launch.recipe.load import load


@click.command()
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The checkpoint, a folder with a checkpoint.json. [the newest of RECIPE's training]",
)
@click.argument("recipe")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def export(recipe: str, out: Path, overrides: tuple[str, ...], checkpoint: Path | None) -> int:
    """Write the weights of RECIPE's training to the new folder OUT, for from_pretrained.

    It is written from the files of a checkpoint, whatever the plan was, one file in memory at a time. OVERRIDES are
    those that the training had.
    """
    loaded = load(recipe, overrides)
    # These import torch, which takes seconds: a refused recipe is quick without it.
    from auto3d.errors import InputError
    from auto3d.runtime.checkpoint.format import checkpoint_folder, newest
    from launch.model.export import export as write
    from launch.store.trials import checkpoints_of

    if checkpoint is None:
        training = loaded.values.training
        folder = checkpoints_of(loaded, global_batch=training.global_batch, seed=training.seed)
        iteration = newest(folder)
        if iteration is None:
            raise InputError(f"{folder}: no checkpoint; give the overrides of the training, or --checkpoint FOLDER")
        checkpoint = checkpoint_folder(folder, iteration)
    print(write(loaded, checkpoint, out))
    return 0

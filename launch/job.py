"""A trial's job: how many nodes it takes, and what runs on each of them. Whoever submits it does without torch."""

from auto3d.plan import Plan
from launch.recipe import LoadedRecipe


def nodes_needed(recipe: LoadedRecipe, plan: Plan) -> int:
    return -(-plan.ranks // recipe.values.cluster.devices_per_node)


def run_on_node(recipe_file: str, plan_file: str, measurement_file: str, modules: str, checkpoints: str | None) -> None:
    """Run this node's share of the trial, or of the training with ``checkpoints``. This is what submitit calls."""
    from launch.nodes import run_training_on_nodes, run_trial_on_nodes

    if checkpoints is None:
        run_trial_on_nodes(recipe_file, plan_file, measurement_file, modules)
    else:
        run_training_on_nodes(recipe_file, plan_file, measurement_file, modules, checkpoints)

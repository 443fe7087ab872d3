"""The function that each node of a job calls. Submitting pickles it by name, so this module imports no torch."""

from auto3d.garbage import garbage_collection_paused


def run_on_node(recipe_file: str, plan_file: str, measurement_file: str, modules: str, checkpoints: str | None) -> None:
    """Run this node's ranks of the trial, or of the training with ``checkpoints``. This is what submitit calls."""
    with garbage_collection_paused():
        from launch.executors.node_task import run_training_on_nodes, run_trial_on_nodes

    if checkpoints is None:
        run_trial_on_nodes(recipe_file, plan_file, measurement_file, modules)
    else:
        run_training_on_nodes(recipe_file, plan_file, measurement_file, modules, checkpoints)

"""Recipe -> the model's initial weights, from a file or a folder; they are read later, by each rank its own."""

from difflib import get_close_matches

from auto3d.capture.graph import Graph
from auto3d.runtime.weights.files import Weights, WeightsError
from launch.model.architecture import base_prefix
from launch.recipe.load import LoadedRecipe


def initial_weights(recipe: LoadedRecipe, graph: Graph) -> Weights | None:
    """The recipe's initial weights, if any; raises RecipeError if their names, shapes or types do not fit the model."""
    path = recipe.values.model.weights
    if path is None:
        return None
    try:
        weights = Weights(path)
    except WeightsError as error:
        raise recipe.error("model.weights", f"found {path!r}: {error}") from None
    known = graph.parameters | graph.buffers
    used = list(dict.fromkeys(name for node in graph.nodes for name in node.state if name in known))
    weights.name_as(dict.fromkeys(used), base_prefix(recipe))
    for name in used:
        if name not in weights:
            if name in graph.parameters:
                near = get_close_matches(name, weights, n=1) or list(weights)[:1]
                hint = f"; it has {near[0]}" if near else ""
                raise recipe.error("model.weights", f"found {path!r}, which lacks the parameter {name}{hint}")
        elif weights.shape(name) != known[name].shape:
            shapes = f"{list(weights.shape(name))}, the model's has {list(known[name].shape)}"
            raise recipe.error("model.weights", f"found {path!r}, whose {name} has shape {shapes}")
        elif name in graph.trained and not weights.is_float(name):
            problem = f"found {path!r}, whose {name} is quantised: it takes float32, float64, bfloat16 or float16"
            raise recipe.error("model.weights", problem)
    return weights

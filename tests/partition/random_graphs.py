"""Random Graphs that branch, with constants, shared parameters and buffers that are written."""

import random

from auto3d.capture.graph import Graph, GraphNode, Value


def random_graph(
    chance: random.Random, size: int, *, parameter_constants: bool = True, buffers: int = 1, parameters: int = 4
) -> Graph:
    """Operations read up to three earlier values, near ones more often; the last one is the loss."""
    values = {"x": Value("x", (chance.randint(1, 9),), "float32", 4, True)}
    weights = {f"w{i}": Value(f"w{i}", (chance.randint(1, 9),), "float32", 4, True) for i in range(parameters)}
    nodes: list[GraphNode] = []
    kinds = {"x": "input"}
    for index in range(size):
        near = [*list(values)[-6:], "x"]
        kind = chance.choices(["normal", "input", "parameter"], [8, 1, 1 if parameter_constants else 0])[0]
        if kind == "normal" or index == size - 1:
            kind = "normal"
            reads = {chance.choice(near) for _ in range(chance.randint(1, 3))}
            if all(kinds[name] == "parameter" for name in reads):
                reads.add("x")
        else:
            reads = {name for name in near if kinds[name] == kind and chance.random() < 0.5}
            reads = reads or ({"x"} if kind == "input" else set())
        state = [chance.choice(list(weights))] if kind != "input" and (chance.random() < 0.3 or not reads) else []
        if kind == "normal" and buffers and chance.random() < 0.1:
            state.append(f"b{chance.randrange(buffers)}")
        output = Value(f"n{index}", (chance.randint(1, 9),), "float32", 4, chance.random() < 0.8)
        nodes.append(
            GraphNode(
                name=output.name,
                operator="op",
                reads=tuple(sorted(reads)),
                state=tuple(state),
                outputs=(output,),
                module="",
                flops=chance.randint(1, 20),
                backward_flops=chance.randint(1, 40),
                saves=tuple(sorted({*reads, output.name} if chance.random() < 0.5 else ())),
                saved_bytes=chance.randint(0, 5),
                from_inputs=kind == "input",
            )
        )
        values[output.name] = output
        kinds[output.name] = kind
    written = [f"b{i}" for i in range(buffers)]
    return Graph(
        nodes=tuple(nodes),
        inputs={"x": values["x"]},
        parameters=weights,
        buffers={name: Value(name, (1,), "float32", 4, True) for name in written},
        constants={},
        trained=frozenset(),
        written_buffers=frozenset(written),
        loss=nodes[-1].name,
        micro_batch_size=1,
        fingerprint="",
    )

"""The way in: an unmodified model at one micro-batch size, as a program that runs and the Graph that describes it."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from auto3d.capture.describe import describe
from auto3d.capture.export import ExportedModel, InputSpec, export
from auto3d.capture.graph import Graph


@dataclass(frozen=True, kw_only=True)
class CapturedModel:
    """``graph`` describes what ``exported.program`` does, node by node under the same names."""

    graph: Graph
    exported: ExportedModel
    _others: dict[int, "CapturedModel"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, micro_batch_size: int) -> "CapturedModel":
        """The same model captured at another micro-batch size; ``Graph.same_operations`` tells if it does the same.

        Each size is captured once. Processes that are forked after the first call share its result.
        """
        if micro_batch_size == self.graph.micro_batch_size:
            return self
        if micro_batch_size not in self._others:
            self._others[micro_batch_size] = self._capture(micro_batch_size)
        return self._others[micro_batch_size]

    def captured_again(self) -> "CapturedModel":
        """A new capture at the same size: code that looks at its surroundings may take another branch in it."""
        return self._capture(self.graph.micro_batch_size)

    def _capture(self, micro_batch_size: int) -> "CapturedModel":
        exported = self.exported
        return capture(exported.build, exported.inputs, micro_batch_size, device=exported.device)


def capture(
    build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], micro_batch_size: int, *, device: str = "cpu"
) -> CapturedModel:
    """Capture the module that ``build`` makes for micro-batches of so many samples; raises CaptureError as ``export``.

    What its code decides by the batch size or the type of its device is decided for these.
    """
    with without_collection():
        exported = export(build, inputs, micro_batch_size, device=device)
        return CapturedModel(graph=describe(exported), exported=exported)


@contextmanager
def without_collection() -> Iterator[None]:
    """Let no garbage be collected: imports and a graph that only grows make none, and looking for it takes a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

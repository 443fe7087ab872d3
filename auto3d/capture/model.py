"""The entry point: capture an unmodified model at one micro-batch size as a program and the Graph that describes it."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn

from auto3d.capture.describe import describe
from auto3d.capture.export import TRAINING, ExportedModel, InputSpec, Mode, export
from auto3d.capture.graph import Graph
from auto3d.garbage import garbage_collection_paused


@dataclass(frozen=True, kw_only=True)
class CapturedModel:
    """A captured model. ``graph`` describes ``exported.program``, node by node under the same names."""

    graph: Graph
    exported: ExportedModel
    at_size: "Callable[[int], CapturedModel] | None" = field(default=None, repr=False, compare=False)
    """Gives the same model at another micro-batch size; None: it is captured."""
    _others: dict[Hashable, "CapturedModel"] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Captures at other micro-batch sizes and in evaluation mode that were made so far."""
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Programs that were derived from this capture so far; processes that are forked later share them."""

    def at(self, micro_batch_size: int) -> "CapturedModel":
        """The same model captured at another micro-batch size; compare the two with ``Graph.same_operations``.

        Each size is captured once. Processes that are forked after the first call share its result.
        """
        if micro_batch_size == self.graph.micro_batch_size:
            return self
        if micro_batch_size not in self._others:
            capture = self.at_size or (lambda size: self._capture(size, self.exported.mode))
            self._others[micro_batch_size] = capture(micro_batch_size)
        return self._others[micro_batch_size]

    def for_inputs(self, inputs: Mapping[str, InputSpec]) -> "CapturedModel":
        """The same model captured for samples of other ``inputs``; compare the two with ``Graph.same_operations``."""
        key = tuple(sorted((name, spec.shape, str(spec.dtype)) for name, spec in inputs.items()))
        if key not in self._others:
            self._others[key] = self._capture(self.graph.micro_batch_size, self.exported.mode, inputs)
        return self._others[key]

    def in_evaluation(self, outputs: Sequence[str] = (), *, loss: bool = True) -> "CapturedModel":
        """The same model at the same size in evaluation mode, whose program gives its loss and these ``outputs``.

        Without ``loss`` it gives only the outputs, of which there must be one. Each is captured once, as by ``at``.
        """
        mode = Mode(training=False, outputs=tuple(outputs), loss=loss)
        if mode not in self._others:
            self._others[mode] = self._capture(self.graph.micro_batch_size, mode)
        return self._others[mode]

    def captured_again(self) -> "CapturedModel":
        """A new capture at the same size, in which code that looks at its surroundings may take another branch."""
        return self._capture(self.graph.micro_batch_size, self.exported.mode)

    def _capture(
        self, micro_batch_size: int, mode: Mode, inputs: Mapping[str, InputSpec] | None = None
    ) -> "CapturedModel":
        exported = self.exported
        return capture(
            exported.build,
            exported.inputs if inputs is None else inputs,
            micro_batch_size,
            device=exported.device,
            precision=exported.precision,
            mode=mode,
            told=exported.told,
        )


def capture(
    build: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
    micro_batch_size: int,
    *,
    device: str = "cpu",
    precision: str = "float32",
    mode: Mode = TRAINING,
    told: Collection[CodeType] = (),
) -> CapturedModel:
    """Capture the module that ``build`` makes, in ``mode``, called with ``inputs`` of ``micro_batch_size`` samples.

    Branches of its code on the batch size or on the device type are resolved for these. A ``precision`` of
    "bfloat16" or "float16" is for torch.autocast; parameters stay as they are. ``told`` and errors are as for
    ``export``.
    """
    with garbage_collection_paused():
        exported = export(build, inputs, micro_batch_size, device=device, precision=precision, mode=mode, told=told)
        return CapturedModel(graph=describe(exported), exported=exported)

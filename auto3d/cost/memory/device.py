"""The predicted peak memory of a pipeline device, with its witness: where it is reached, and what is held there."""

from dataclasses import dataclass

ENTRIES = (
    "reserve", "weights", "copies", "versions", "gradients", "optimizer",
    "activations", "inputs", "messages", "working",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of a rank on one pipeline device at the moment at which their sum is largest."""

    reserve: int  # workspaces of cuBLAS, and bytes that the recipe adds for the context of the device and for libraries
    weights: int  # parameters, buffers and constants of its stages, each once
    copies: int  # copies of the newest weights in low precision
    versions: int  # older versions of the weights under an asynchronous schedule, with their copies in low precision
    gradients: int
    optimizer: int
    activations: int  # activations kept for pending backwards, and gradients kept for them
    inputs: int  # inputs of the stages for these micro-batches
    messages: int  # messages received but not yet used, and messages sent but not yet released
    working: int  # beyond these, the peak of the operation: values, gradients of values, temporaries of the update
    at: str  # operation of the schedule; without numbers of micro-batches where they repeat themselves
    operation: str  # operation of the model during which the peak is reached; empty in an update

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in ENTRIES)

    def __str__(self) -> str:
        """``2.31 GiB at B3@1: weights 0.5, gradients 0.5, …``, largest first."""
        entries = sorted(((getattr(self, name), name) for name in ENTRIES), reverse=True)
        listed = ", ".join(f"{name} {in_gib(size)}" for size, name in entries if size)
        return f"{in_gib(self.total)} GiB at {self.at}: {listed}"


NOTHING = DeviceMemory(**dict.fromkeys(ENTRIES, 0), at="", operation="")


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor that a device holds at its peak, ``count`` times; or several without names of their own."""

    name: str  # name of a value, a parameter or an input of the model, or a description
    kind: str  # an entry of DeviceMemory
    bytes: float
    count: float
    """Micro-batches, or parts of them, that hold it; versions of a weight; the device's fraction of an optimizer's
    state."""

    @property
    def total(self) -> float:
        return self.bytes * self.count


def in_gib(size: float) -> str:
    return f"{size / 2**30:.3g}"

"""The choices of a training set-up that its predicted time and memory depend on, beside the Plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from auto3d.cost.system_times import OWN, SystemTimes
from auto3d.cost.systems import System
from auto3d.cost.work import PRECISION_BYTES


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How the estimated Plans are trained. The defaults describe this project's runtime."""

    precision: str = "float32"  # precision of weights and activations; see ``master_bytes``
    autocast: bool = False
    """The weights are float32, and operators use a copy in ``precision``: the copies are state of the Graph. False: the
    weights are in ``precision``, and the optimizer keeps a float32 copy, as in other systems."""
    sync_bytes: int = 4  # bytes per element in the gradient all-reduce
    moments: float = 2.0  # numbers that the optimizer keeps of each parameter; 0 on the device if it is offloaded
    overlap: bool = True  # messages travel while the device computes
    read_once: bool = False  # one rank of a pipeline reads for all of its stages, where it can: see has_one_reader
    scattered_messages: bool = False
    """Each tensor-parallel rank sends a part of a value to the next stage, which gathers it, as in Megatron-LM."""
    recompute_ends: bool = True  # full recomputation includes the operations before and after the repeated blocks
    system: System | None = None  # system whose memory is predicted; None: this runtime
    times: SystemTimes = OWN  # time beside the operators of the model
    reserve_bytes: float = 0.0  # further bytes on each device
    deterministic: bool = False  # deterministic algorithms only, for which cuBLAS may get larger workspaces
    workspace_bytes: float = 0.0  # workspaces of cuBLAS on each device that has matrix products
    backward_makes_gradients: bool = True
    """Gradients of parameters that no other rank holds are made by the first backward of an iteration, as in this
    runtime; False: all are in buffers that exist all the time, as in Megatron-LM (core/distributed)."""
    update_copies: tuple[int, int] = (0, 0)
    """Temporaries of an update: copies of the parameter at hand, and of the parameter before it."""
    sums_have_copies: bool = False
    """Under ZeRO-1 a rank receives the other ranks' gradients of its slice before it adds them."""
    state_elements: Callable[[str, Sequence[int]], float] | None = None
    """float32 elements of the optimizer's state of a parameter of this name and shape; None: ``moments`` for each
    element."""
    update_flops: Callable[[str, Sequence[int]], float] | None = None
    """FLOPs of the optimizer's matrix products for a parameter of this name and shape; None: it has none."""

    @property
    def master_bytes(self) -> int:
        """Bytes per parameter of the 32-bit copy that training in a lower precision keeps."""
        return 4 if PRECISION_BYTES[self.precision] < 4 and not self.autocast else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes per parameter of the weights, without ``master_bytes`` and copies."""
        return 4 if self.autocast else PRECISION_BYTES[self.precision]

    @property
    def update_traffic(self) -> float:
        """Bytes that an update reads and writes per parameter."""
        weights = self.master_bytes or 4
        copies = 4 + PRECISION_BYTES[self.precision] if self.autocast else 0  # each copy is read from its weight
        return self.sync_bytes + 2 * weights + 8 * self.moments + (self.master_bytes and 2) + copies

"""The Measurement: the result of running a Plan, with a JSON form."""

import os
import platform
import socket
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.metadata import version
from json import dumps
from statistics import median

from pydantic import ConfigDict, TypeAdapter

from auto3d.plan import Plan

BYTES = ("peak_bytes", "reserved_bytes", "used_bytes", "predicted_bytes")  # fields that hold memory


class Status(StrEnum):
    OK = "ok"
    OOM = "oom"
    FAILED = "failed"
    TIMEOUT = "timeout"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and the software of a measurement."""

    host: str
    device: str
    cores: int
    torch: str
    transformers: str
    python: str
    tf32: bool | None = None  # whether matrix products or convolutions used TF32; None: not a GPU
    deterministic: bool = False  # whether only bitwise reproducible algorithms were allowed

    @property
    def computer(self) -> str:
        """The device, the cores and their arithmetic, as written in captions of throughput."""
        text = f"{self.device}, {self.cores} cores"
        if self.tf32 is not None:
            text += f", TF32 {'on' if self.tf32 else 'off'}"
        return text + (", deterministic algorithms" if self.deterministic else "")

    @property
    def computer_and_software(self) -> str:
        return f"{self.computer}, torch {self.torch}, transformers {self.transformers}, Python {self.python}"

    @staticmethod
    def here(device: str, *, cores: int | None = None) -> "Environment":
        """The environment of this process, which has computed on ``device``.

        ``cores`` is the number of cores that all ranks of the node may use together, since a rank on a GPU is bound to
        some of them. None: the cores of this process.
        """
        import torch  # takes seconds, and reading measurements does not need it

        from auto3d.runtime.process.arithmetic import uses_tf32

        name = torch.cuda.get_device_name() if device == "cuda" else f"cpu ({platform.machine()})"
        return Environment(
            host=socket.gethostname(),
            device=name,
            cores=len(os.sched_getaffinity(0)) if cores is None else cores,
            torch=torch.__version__,
            transformers=version("transformers"),
            python=platform.python_version(),
            tf32=uses_tf32() if device == "cuda" else None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


@dataclass(frozen=True, kw_only=True)
class CommunicationCalls:
    """The calls of one communication operation on one rank, per iteration."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    operation: str
    calls: float
    message_bytes: float  # bytes of the tensor that each call takes; a rank's own part for an all-gather
    seconds: float  # time inside the calls, waiting for other ranks included


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One trial or training. The lists cover only measured iterations, and are empty unless ``status`` is ok.

    If devices were ``emulated``, operations only waited for the time that they would take, and there is neither a loss
    nor a peak memory.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    plan: Plan
    status: Status
    emulated: bool = False
    error: str = ""  # why the status is not ok, as text
    warmup_iterations: int = 0  # iterations that were run before the measured iterations
    first_iteration: int = 0  # a training resumed from a checkpoint has no entries for earlier iterations
    iteration_s: list[float] = field(default_factory=list)  # time of the slowest rank
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float | None] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)  # per rank: live tensors on a GPU, growth of a CPU process
    reserved_bytes: list[int] = field(default_factory=list)  # per GPU: peak of torch's caching allocator
    used_bytes: list[int] = field(default_factory=list)  # per GPU: peak on the device, with CUDA context and NCCL
    predicted_bytes: list[int] = field(default_factory=list)  # per rank: estimate of auto3d.cost.memory
    communication: list[list[CommunicationCalls]] = field(default_factory=list)  # per rank, in a run of its own
    why_not_logged: str = ""  # why there is no communication although the recipe asks for it
    engine_version: str = ""  # package and version of the plan's engine, if it is neither auto3d nor torch
    tokens_per_sample: int = 0
    model_flops: float | None = None  # FLOPs of one iteration on all devices, as in auto3d.cost.throughput
    recomputed_flops: float | None = None  # FLOPs of one iteration's recomputation, in addition to them
    environment: Environment | None = None
    finished: str = ""  # date and time, ISO 8601

    @property
    def median_s(self) -> float:
        return median(self.iteration_s)

    @property
    def spread_s(self) -> float:
        """The slowest minus the fastest measured iteration."""
        return max(self.iteration_s) - min(self.iteration_s)

    @property
    def samples_per_s(self) -> float:
        return self.plan.global_batch / self.median_s

    @property
    def tokens_per_s(self) -> float:
        return self.samples_per_s * self.tokens_per_sample

    def to_json(self) -> str:
        return dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Measurement":
        return _adapter.validate_json(text)


_adapter = TypeAdapter(Measurement)

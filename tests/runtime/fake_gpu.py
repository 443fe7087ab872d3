"""A fake GPU, which computes nothing: fake tensors on device cuda, NCCL's rules, and torch.cuda without CUDA.

A rank is built and runs whole iterations through autograd. As on a real GPU, backwards run on a thread of the device,
but tensors have no values. Whatever a real device refuses raises Refused, and the places in which the host waits for
the device are recorded.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import auto3d
from auto3d.capture.model import CapturedModel
from auto3d.data import DataSettings
from auto3d.plan import Plan
from auto3d.runtime import backend
from auto3d.runtime import rank as rank_module
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.process import world as world_module
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.samples.batch_targets import BatchTargets
from auto3d.runtime.settings import TrainingSettings

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)  # each rank sees one device, since the stand-in for CUDA's guard has one
PROPERTIES = SimpleNamespace(
    name="fake GPU",
    uuid="00000000-0000-0000-0000-000000000000",
    total_memory=2**34,
    multi_processor_count=132,
    major=9,
    minor=0,
    pci_domain_id=0xFFFF,  # an address that no device of this machine has
    pci_bus_id=0,
    pci_device_id=0,
)
_PACKAGE = str(Path(auto3d.__file__).parent)
_HOST_WAITS = {  # operators that read values on the host, or whose result's size depends on values
    aten._local_scalar_dense.default,
    aten.bincount.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}
_BY_MASK = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_NCCL_TYPES = {  # types of ProcessGroupNCCL's ncclDataType, except float8, which not every version has
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


class Refused(AssertionError):  # noqa: N818, a verb: what a device or NCCL does
    """A real device, or NCCL, would refuse this or compute something else."""


@dataclass
class Record:
    """Everything that one rank did, for comparison with the other ranks."""

    groups: list[tuple[tuple[int, ...], str]] = field(default_factory=list)  # ranks and backend, by creation
    connected: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # group and ranks, by first use
    sent: dict[tuple[int, int, int], list[tuple]] = field(default_factory=dict)  # group, from, to -> shapes and types
    received: dict[tuple[int, int, int], list[tuple]] = field(default_factory=dict)
    collectives: dict[int, list[tuple]] = field(default_factory=dict)  # group -> calls in order
    waits: set[str] = field(default_factory=set)  # code in which the host waited for the device during iterations
    on_cpu: set[str] = field(default_factory=set)  # code that computed on the CPU during iterations
    results: list[IterationResult] = field(default_factory=list)


def install() -> None:
    """Give a torch without CUDA what autograd needs of a device: a guard, and an available accelerator.

    This process keeps both until it ends. Autograd starts its device threads at the first backward, so no backward may
    have run yet.
    """
    if torch.backends.cuda.is_built():
        return  # then FakeTensorMode installs the guard itself if there is no device
    folder = Path(torch.__file__).parent / "lib"
    guards = (ctypes.c_void_p * 2).in_dll(
        ctypes.CDLL(str(folder / "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE"
    )
    # If there are no devices, torch uses a CUDA guard that does nothing: every method of this one returns 0.
    nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda self: 0)
    methods = (ctypes.c_void_p * 64)(*[ctypes.cast(nothing, ctypes.c_void_p).value] * 64)
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    guards[1] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    # Make the CUDA hooks report that CUDA is built, in a copy of their method table: two destructors, isBuilt,
    # isAvailable, hasPrimaryContext.
    interface = ctypes.CDLL(str(folder / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    interface.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(interface())
    methods_of_cuda = (ctypes.c_void_p * 128)(*(ctypes.c_void_p * 128).from_address(table.value))
    methods_of_cuda[2] = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value  # true
    methods_of_cuda[4] = methods_of_cuda[3]  # false
    table.value = ctypes.addressof(methods_of_cuda)
    for immortal in (nothing, methods, guard, methods_of_cuda):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(immortal))
    assert torch.accelerator.current_accelerator() == torch.device("cuda")


def _place() -> str:
    """``file:function`` of the innermost code of this project."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else "autograd's thread"


class Watch(TorchDispatchMode):
    """Checks every operation as a device would, before FakeTensorMode sees it."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record
        self._generator: Generator | None = None
        self.iterating = False

    def host_waits(self, why: str) -> None:
        if self.iterating:
            self._record.waits.add(f"{why} in {_place()}")

    def use(self, generator: "Generator") -> None:
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)] + [tensor.device for tensor in tensors]
        if any(device.type == "meta" for device in devices):
            raise Refused(f"{func} on the meta device, in {_place()}")
        on_device = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        if any(isinstance(leaf, torch.Generator) and leaf.device.type != "cuda" for leaf in leaves) and any(
            device.type == "cuda" for device in devices
        ):
            raise Refused(f"{func} on {DEVICE} with a generator of the CPU, in {_place()}")
        if _draws(func, args) and any(device.type == "cuda" for device in devices):
            self._generator.draw(func)
        if func in (aten._to_copy.default, aten.copy_.default):
            self._copies(func, args, kwargs)
            if func is aten._to_copy.default and args[0].device.type == "cpu" and "cuda" in str(kwargs.get("device")):
                # FakeTensorMode knows the values of small tensors, and would copy them to a real device.
                return _on_device(args[0], kwargs.get("dtype") or args[0].dtype)
        elif on_device and (func in _HOST_WAITS or (func in _BY_MASK and _has_mask(args[1]))):
            self.host_waits(func.name())
        if func is aten._local_scalar_dense.default:  # any value serves
            return 1.0 if args[0].is_floating_point() else 0 if args[0].dtype != torch.bool else False
        if func is aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if "_fused_" in func.name() and func.name().endswith("_"):  # fused optimizer updates, which fake tensors lack
            _check_fused_update(func, args)
            return None
        if kwargs.get("pin_memory"):  # a thread fills it, without any active mode
            with _disable_current_modes():
                return torch.empty(
                    args[0].shape if isinstance(args[0], torch.Tensor) else args[0], dtype=_dtype(args, kwargs)
                )
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if self.iterating and any(tensor.device.type == "cpu" for tensor in made):
            self._record.on_cpu.add(_place())
        return result

    def _copies(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Record a wait of the host: for a blocking copy to the device, and for any copy from it."""
        if func is aten.copy_.default:
            target, source = args[0].device, args[1].device
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        else:
            target, source = torch.device(kwargs.get("device") or args[0].device), args[0].device
            blocking = not kwargs.get("non_blocking")
        if {source.type, target.type} == {"cpu", "cuda"} and (blocking or target.type == "cpu"):
            self.host_waits(f"{source.type} to {target.type}")


def _check_fused_update(func: Any, args: tuple) -> None:
    """A fused update takes lists of parameters, of tensors with the parameters' layouts, and of step counts."""
    lists = [entry for entry in args if isinstance(entry, list | tuple) and entry]
    for parameter, *others in zip(*lists, strict=True):
        for other in others:
            if other.device != parameter.device or (other.dim() and other.stride() != parameter.stride()):
                raise Refused(f"{func}: {other.device} and strides {other.stride()} with those of {parameter.stride()}")


def _dtype(args: tuple, kwargs: dict) -> torch.dtype | None:
    return kwargs.get("dtype") or (args[0].dtype if isinstance(args[0], torch.Tensor) else None)


def _draws(func: Any, args: tuple) -> bool:
    """Whether ``func`` draws random numbers from the device's generator; a backward reuses those of its forward."""
    if func is aten._scaled_dot_product_efficient_attention.default:
        return len(args) > 5 and args[5] > 0
    return torch.Tag.nondeterministic_seeded in func.tags and "backward" not in str(func)


def _on_device(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of ``tensor`` on the device, with its strides if its elements fill memory without gaps."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return torch.empty_strided(tensor.shape, strides, dtype=dtype, device=DEVICE)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class Attention(TorchFunctionMode):
    """Attention by the device's kernel, whose results have another memory layout than those of the CPU's kernel."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not aten.scaled_dot_product_attention.default or args[0].device.type != "cuda":
            return func(*args, **kwargs)
        return self._efficient(*args, **kwargs)

    @staticmethod
    def _efficient(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        differentiable = any(tensor.requires_grad for tensor in (query, key, value))
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, attn_mask, differentiable, dropout_p, is_causal, scale=scale
        )[0]


class Generator:
    """A device's generator, which must be seeded before each draw while a stage runs."""

    device = DEVICE

    def __init__(self) -> None:
        self._seeded = False

    def manual_seed(self, seed: int) -> "Generator":
        assert 0 <= seed < 2**64
        self._seeded = True
        return self

    def draw(self, func: Any) -> None:
        if not self._seeded:
            raise Refused(f"{func} draws random numbers without a seed, in {_place()}")
        self._seeded = False


class Gpu:
    """torch.cuda in a process that sees one device, which must call set_device first to create its context."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.generator = Generator()
        watch.use(self.generator)
        self.is_initialized = False
        waits = watch.host_waits

        class Stream:
            device, device_index, cuda_stream, priority = DEVICE, DEVICE.index, 0, 0

            def __init__(self, device: Any = None, priority: int = 0) -> None: ...

            def synchronize(self) -> None:
                waits("a stream")

            def query(self) -> bool:
                return True

            def wait_stream(self, stream: Any) -> None: ...

            def wait_event(self, event: Any) -> None: ...

            def record_event(self, event: Any = None) -> Any:
                return event or Event()

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
                self._timed = enable_timing

            def record(self, stream: Any = None) -> None: ...

            def wait(self, stream: Any = None) -> None: ...

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                waits("an event")

            def elapsed_time(self, end: "Event") -> float:
                if not self._timed:
                    raise Refused("elapsed_time of an event without enable_timing")
                return 1.0

        self.stream, self.event = Stream, Event

    def set_device(self, device: Any) -> None:
        if torch.device(device) != DEVICE:
            raise Refused(f"there is no device {device}")
        self.is_initialized = True
        torch.cuda.default_generators = (self.generator,)

    @contextmanager
    def patched(self) -> Iterator[None]:
        stream, waits = self.stream(), self._watch.host_waits
        functions = {
            "is_available": lambda: True,
            "is_initialized": lambda: self.is_initialized,
            "device_count": lambda: 1,
            "current_device": lambda: DEVICE.index,
            "set_device": self.set_device,
            "default_generators": (),
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "stream": lambda stream: nullcontext(),
            "Stream": self.stream,
            "Event": self.event,
            "synchronize": lambda device=None: waits("the device"),
            "empty_cache": lambda: waits("freeing memory"),
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "max_memory_reserved": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "mem_get_info": lambda device=None: (2**34, 2**34),
            "get_device_name": lambda device=None: "fake GPU",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: PROPERTIES,
        }
        with ExitStack() as stack:
            for name, value in functions.items():
                stack.enter_context(patch.object(torch.cuda, name, value))
            stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device=None: None))
            stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor))
            only_cpu = torch._C._only_lift_cpu_tensors()
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) first makes its values on the CPU
            stack.callback(torch._C._set_only_lift_cpu_tensors, only_cpu)
            yield


class Work:
    """Work of an NCCL group: a wait without a time-out returns at once, since the stream waits, not the host."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            self._watch.host_waits("a time-out of NCCL's")
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None


class Distributed:
    """torch.distributed on one rank, without the others, with the rules of NCCL and of gloo.

    It refuses a group to which this rank does not belong, a tensor on another device or with gaps, a type that NCCL
    lacks, and the first use of an NCCL communicator during an iteration.
    """

    def __init__(self, record: Record, watch: Watch, gpu: Gpu) -> None:
        self._record, self._watch, self._gpu = record, watch, gpu
        self._groups: dict[int, tuple[int, str]] = {}  # number and backend of this rank's groups, by id
        self._real = SimpleNamespace(init_process_group=dist.init_process_group, new_group=dist.new_group)

    @contextmanager
    def patched(self) -> Iterator[None]:
        functions = ("init_process_group", "new_group", "isend", "irecv", "all_reduce", "broadcast", "barrier")
        slices = ("reduce_scatter_single", "all_gather_single")
        objects = ("all_gather_object", "broadcast_object_list")
        with ExitStack() as stack:
            for name in (*functions, *slices, *objects):
                stack.enter_context(patch.object(dist, name, getattr(self, name)))
            nccl = SimpleNamespace(Options=_NcclOptions)
            stack.enter_context(patch.object(dist, "ProcessGroupNCCL", nccl, create=True))
            yield

    def init_process_group(self, backend: str, *, rank: int, world_size: int, **options: Any) -> None:
        if not self._gpu.is_initialized:
            raise Refused("the process group is made before the device is set")
        self._real.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        self._note(dist.group.WORLD, range(world_size), backend)

    def new_group(
        self, ranks: Sequence[int], *, timeout: timedelta, backend: str, pg_options: "_NcclOptions | None" = None
    ) -> Any:
        group = self._real.new_group(list(ranks))
        self._note(group, ranks, backend)
        return group

    def _note(self, group: Any, ranks: Sequence[int], backend: str) -> None:
        self._record.groups.append((tuple(ranks), backend))
        if dist.get_rank() in ranks:
            self._groups[id(group)] = len(self._record.groups) - 1, backend

    def isend(self, tensor: torch.Tensor, dst: int, group: Any = None) -> "Work":
        return self._message(tensor, dist.get_rank(), dst, group, self._record.sent)

    def irecv(self, tensor: torch.Tensor, src: int, group: Any = None) -> "Work":
        return self._message(tensor, src, dist.get_rank(), group, self._record.received)

    def _message(self, tensor: torch.Tensor, source: int, target: int, group: Any, record: dict) -> "Work":
        number, ranks = self._use(group, tensor, between=(source, target))
        if {source, target} - set(ranks) or source == target:
            raise Refused(f"a message from {source} to {target} in a group of {ranks}")
        record.setdefault((number, source, target), []).append((tuple(tensor.shape), str(tensor.dtype)))
        return Work(self._watch)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> "Work | None":
        if tensor.dtype == torch.bool:
            raise Refused(f"an all-reduce of booleans, in {_place()}")
        return self._collective(f"all_reduce {op}", tensor, group, async_op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> "Work | None":
        return self._collective("reduce_scatter", tensor, group, async_op)

    def all_gather_single(
        self, tensor: torch.Tensor, mine: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> "Work | None":
        return self._collective("all_gather", tensor, group, async_op)

    def broadcast(
        self, tensor: torch.Tensor, src: int | None = None, group: Any = None, async_op: bool = False
    ) -> "Work | None":
        return self._collective(f"broadcast from {src}", tensor, group, async_op)

    def _collective(self, what: str, tensor: torch.Tensor, group: Any, async_op: bool) -> "Work | None":
        number, _ = self._use(group, tensor)
        call = f"{what} {tuple(tensor.shape)} {tensor.dtype}"
        self._record.collectives.setdefault(number, []).append(call)
        return Work(self._watch) if async_op else None

    def barrier(self, group: Any = None) -> None:
        self._together("barrier", group)

    def all_gather_object(self, objects: list, own: Any, group: Any = None) -> None:
        self._together("all_gather_object", group)
        objects[:] = [own] * len(objects)

    def broadcast_object_list(self, objects: list, src: int = 0, group: Any = None) -> None:
        self._together("broadcast_object_list", group)

    def _together(self, what: str, group: Any) -> None:
        self._watch.host_waits(what)
        number, _ = self._use(group)
        self._record.collectives.setdefault(number, []).append(what)

    def _use(
        self, group: Any, tensor: torch.Tensor | None = None, *, between: tuple[int, int] | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """The number and the ranks of ``group``, after checking that it accepts ``tensor``."""
        group = dist.group.WORLD if group is None else group
        if id(group) not in self._groups:
            raise Refused(f"rank {dist.get_rank()} uses a group to which it does not belong, in {_place()}")
        number, backend = self._groups[id(group)]
        ranks, _ = self._record.groups[number]
        if tensor is not None and tensor.device != (DEVICE if backend == "nccl" else torch.device("cpu")):
            raise Refused(f"{backend} is given a tensor of {tensor.device}, in {_place()}")
        if tensor is not None and not tensor.is_contiguous():
            raise Refused(f"{backend} is given a tensor with strides {tensor.stride()}, in {_place()}")
        if backend == "nccl":
            if tensor is not None and tensor.dtype not in _NCCL_TYPES:
                raise Refused(f"NCCL has no type for {tensor.dtype}, in {_place()}")
            members = ranks if between is None else tuple(sorted(between))
            if (number, members) not in self._record.connected:
                if self._watch.iterating and len(members) > 1:
                    raise Refused(f"NCCL connects ranks {members} of group {number} in an iteration, in {_place()}")
                self._record.connected.append((number, members))
        return number, ranks


class _NcclOptions:
    """Stands for ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self._timeout = timedelta(minutes=10)


@contextmanager
def fake_device(record: Record) -> Iterator[Watch]:
    """Patch torch so that the code inside runs as one rank on a fake GPU."""
    watch = Watch(record)
    gpu = Gpu(watch)
    with ExitStack() as stack:
        for patches in (gpu.patched(), Distributed(record, watch, gpu).patched()):
            stack.enter_context(patches)
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), watch, Attention()):
            stack.enter_context(mode)
        yield watch


@contextmanager
def _made_before() -> Iterator[None]:
    """Run the model's initialisation, on the CPU, and captures outside of the fake device."""

    def outside(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return function(*args, **kwargs)

        return call

    functions = ((backend, "materialize"), (rank_module, "lay_out_plan"), (rank_module, "lay_out_rank"))
    with ExitStack() as stack:
        for module, name in functions:
            stack.enter_context(patch.object(module, name, outside(getattr(module, name))))
        yield


def run_rank(
    captured: CapturedModel, plan: Plan, settings: TrainingSettings, data: DataSettings, rank: int
) -> tuple[Record, Any]:
    """Build rank ``rank`` of ``plan`` and run its iterations; returns its record and the built rank."""
    record = Record()
    world = World(rank=rank, size=plan.ranks, local_rank=DEVICE.index, meeting_point="file:///nowhere")
    # Each rank has its own GPU, but in this process all ranks report the same one, so their check is left out.
    devices = patch.object(world_module, "gather_rank_devices", lambda own, **_: [own] * plan.ranks, create=True)
    # Every number that the host reads is 1, so a fraction of them would be wrong.
    fraction = patch.object(BatchTargets, "fraction", lambda *_, **__: 1.0)
    with fake_device(record) as watch, _made_before(), devices, fraction:
        join(world, device=world.device("cuda"), timeout_s=60)
        try:
            built = build_rank(captured, plan, settings, data, world)
            for name, part in built.state().items():
                tensor = part.tensor
                if tensor.device != DEVICE and not (name.endswith(".step") and tensor.device.type == "cpu"):
                    raise Refused(f"{name} is on {tensor.device}")
            for program in built.programs:
                watch.iterating = True
                record.results += built.executor.run(program, len(record.results))
                watch.iterating = False
            return record, built
        finally:
            leave()


def run_ranks(
    captured: CapturedModel, plan: Plan, settings: TrainingSettings, data: DataSettings, ranks: Sequence[int] = ()
) -> list[Record]:
    """The record of each rank of ``plan``, or of each of ``ranks``."""
    return [run_rank(captured, plan, settings, data, rank)[0] for rank in ranks or range(plan.ranks)]

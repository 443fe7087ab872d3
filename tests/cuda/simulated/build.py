"""Builds the simulated CUDA for the CUDA build of torch that this Python has: python -m tests.cuda.simulated.build

It imports no torch. What it makes is in the folder ``simulated_cuda`` of the environment of this Python.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = Path(sysconfig.get_paths()["purelib"])
TORCH = PACKAGES / "torch"
BUILT = Path(sys.prefix) / "simulated_cuda"
_IMPORTED = re.compile(r"(__)?(cuda|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|cuFile)[A-Z_a-z]*\w*")
_CUDA = PACKAGES / "nvidia/cu13/include"
_CRT = PACKAGES / "triton/backends/nvidia/include"  # CUDA's crt
_OF_TORCH = TORCH / "include"
_HEADERS = (_CUDA, PACKAGES / "nvidia/nccl/include", _CRT, _OF_TORCH, _OF_TORCH / "torch/csrc/api/include")
_LEFT_OUT = ("__CUDA_FP16_H__", "__CUDA_BF16_H__", "__CUDA_FP8_H__")  # guards of headers that need a toolkit
_OPENED = ("libcuda.so.1", "libnvidia-ml.so.1")  # what torch and its Python code open by name

# Functions that succeed and do nothing. The work of a destroyed stream or communicator goes on, so its memory stays.
# Kernels have no use for the size of their grid, which __cudaPushCallConfiguration keeps for them.
_NOTHING = """
__cudaPopCallConfiguration __cudaPushCallConfiguration __cudaRegisterFatBinary __cudaRegisterFatBinaryEnd
__cudaRegisterVar __cudaUnregisterFatBinary cublasLtMatmulDescDestroy cublasLtMatmulPreferenceDestroy
cublasLtMatrixLayoutDestroy cuCtxSetCurrent cuInit cuMemSetAccess cudaDeviceEnablePeerAccess cudaFuncSetAttribute
cudaKernelSetAttributeForDevice cudaMemcpyToSymbol cudaProfilerStart cudaProfilerStop cudaStreamDestroy
cudaThreadExchangeStreamCaptureMode ncclCommDestroy ncclCommFinalize nvmlInit nvmlInit_v2 nvmlShutdown
"""
# What a function returns that is not simulated: success, or an error where values are computed.
_STUB = """
static int simulated_stub(const char* function) {
  const char* computes = getenv("SIMULATED_CUDA_COMPUTES");
  if (!computes || *computes != '1') return 0;
  fprintf(stderr, "simulated CUDA: %s is not simulated\\n", function);
  return cudaErrorNotSupported;
}
"""
# Functions that return a constant.
_RETURNS = {
    "__cudaInitModule": "1",
    "cudnnGetVersion": "92000",
    "ncclGetErrorString": '"an error of the simulated NCCL"',
    "ncclGetLastError": '""',
    "nvmlDeviceGetNvLinkRemoteDeviceType": "3",  # not supported
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": "3",
    "nvmlErrorString": '"an error of the simulated NVML"',
}
# Functions that write constants where their arguments, a to j, point. cuBLAS's descriptions may all be the same, since
# nothing reads them, and torch has zeroed the algorithm of which there is 1.
_WRITES = {
    "cuCtxGetCurrent": "*(void**)a = opaque",
    "cuDeviceGet": "*(int*)a = b",
    "cuDeviceGetAttribute": "*(int*)a = 1",
    "cuDriverGetVersion": "*(int*)a = CUDART_VERSION",
    "cuGetErrorString": '*(char**)b = "an error of the simulated driver"',
    "cuMemGetAllocationGranularity": "*(size_t*)a = 2 << 20",
    "cublasCreate_v2": "*(void**)a = calloc(1, 512)",  # torch has a workspace for each
    "cublasGetMathMode": "*(int*)b = 0",
    "cublasGetPointerMode_v2": "*(int*)b = 0",
    "cublasLtMatmulAlgoGetHeuristic": "*(int*)j = 1",
    "cublasLtMatmulDescCreate": "*(void**)a = opaque",
    "cublasLtMatmulPreferenceCreate": "*(void**)a = opaque",
    "cublasLtMatrixLayoutCreate": "*(void**)a = opaque",
    "cudaDeviceCanAccessPeer": "*(int*)a = 1",
    "cudaDeviceGetDefaultMemPool": "*(void**)a = opaque",
    "cudaDeviceGetStreamPriorityRange": "*(int*)a = 0, *(int*)b = -5",
    "cudaDriverGetVersion": "*(int*)a = CUDART_VERSION",
    "cudaGetSymbolAddress": "*(void**)a = opaque",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": "*(int*)a = 2",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": "*(int*)a = 2",
    "cudaRuntimeGetVersion": "*(int*)a = CUDART_VERSION",
    "cudaStreamGetPriority": "*(int*)b = 0",
    "ncclCommGetAsyncError": "*(int*)b = ncclSuccess",
    "ncclGetVersion": "*(int*)a = NCCL_VERSION_CODE",
    "nvmlDeviceGetComputeRunningProcesses": "*(unsigned*)b = 0",
    "nvmlDeviceGetHandleByPciBusId_v2": "*(void**)b = opaque",
    "nvmlSystemGetCudaDriverVersion_v2": "*(int*)a = CUDART_VERSION",
}
# What functions say of a device: the sizes are those of an A100.
_PROPERTIES = """
.name = "Simulated GPU", .sharedMemPerBlock = 49152, .regsPerBlock = 65536, .warpSize = 32, .maxThreadsPerBlock = 1024,
.maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535}, .multiProcessorCount = 108,
.canMapHostMemory = 1, .concurrentKernels = 1, .pciDomainID = 0xfff0, .unifiedAddressing = 1, .memoryBusWidth = 5120,
.l2CacheSize = 40 << 20, .maxThreadsPerMultiProcessor = 2048, .streamPrioritiesSupported = 1,
.sharedMemPerMultiprocessor = 167936, .regsPerMultiprocessor = 65536, .sharedMemPerBlockOptin = 166912,
.maxBlocksPerMultiProcessor = 32
"""
_ATTRIBUTES = {  # name in cudaDevAttr -> the property with the same value
    "MultiProcessorCount": "multiProcessorCount",
    "MaxSharedMemoryPerBlockOptin": "sharedMemPerBlockOptin",
    "MaxGridDimX": "maxGridSize[0]",
    "MaxGridDimY": "maxGridSize[1]",
}
# Functions that do what another does, whose arguments theirs begin with.
_SAME = {
    "__cudaLaunchKernel": "cudaLaunchKernel",
    "cudaEventCreate": "cudaEventCreateWithFlags",
    "cudaEventRecordWithFlags": "cudaEventRecord",
    "cudaFreeHost": "cudaFree",
    "cudaGraphExecDestroy": "cudaGraphDestroy",
    "cudaLaunchCooperativeKernel": "cudaLaunchKernel",
    "cudaStreamCreateWithFlags": "cudaStreamCreate",
    "cudaStreamCreateWithPriority": "cudaStreamCreate",
}


def has_cuda_build() -> bool:
    """Whether this Python has a torch that was built with CUDA."""
    return (TORCH / "lib/libtorch_cuda.so").is_file()


def build() -> Path:
    """The folder with what a process on the simulated CUDA needs; built again if a source is newer."""
    stamp = BUILT / "built"
    if stamp.is_file() and stamp.stat().st_mtime > max(file.stat().st_mtime for file in HERE.iterdir()):
        return BUILT
    BUILT.mkdir(exist_ok=True)
    headers = [*(f"-I{folder}" for folder in _HEADERS), *(f"-D{guard}" for guard in _LEFT_OUT)]
    objects = [_compiled(name, headers) for name in ("driver", "nccl")]
    (BUILT / "stubs.c").write_text(_stubs(objects))
    _run("gcc", "-c", "-fPIC", str(BUILT / "stubs.c"), *headers, "-o", str(BUILT / "stubs.o"))
    library = BUILT / "libsimulated.so"
    same = [f"-Wl,--defsym={name}={other}" for name, other in _SAME.items()]
    _run("g++", "-shared", "-o", str(library), *objects, str(BUILT / "stubs.o"), *same, "-lpthread", "-lrt")
    for name in _OPENED:
        (BUILT / name).unlink(missing_ok=True)
        (BUILT / name).symlink_to(library.name)
    libraries = [f"-L{TORCH / 'lib'}", *(f"-l{name}" for name in ("torch_cpu", "torch_cuda", "c10", "c10_cuda"))]
    _run("g++", "-shared", "-o", str(BUILT / "libkernels.so"), _compiled("kernels", headers), *libraries)
    shutil.copy(HERE / "hook.py", BUILT / "simulated_cuda.py")
    entry = BUILT / "simulated_cuda-0.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-cuda\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[torch.backends]\nsimulated_cuda = simulated_cuda:begin\n")
    stamp.touch()
    return BUILT


def environment(**settings: int) -> dict[str, str]:
    """The environment of a process on what ``build`` has made; driver.cpp and nccl.cpp list the ``settings``."""
    values = {f"SIMULATED_CUDA_{name.upper()}": str(int(value)) for name, value in settings.items()}
    values["LD_PRELOAD"] = str(BUILT / "libsimulated.so")
    values["LD_LIBRARY_PATH"] = str(BUILT)
    values["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BUILT), os.environ.get("PYTHONPATH")]))
    return values


def _compiled(name: str, options: Sequence[str]) -> str:
    """The object file of a source, which is compiled again if it or the common header is newer."""
    made, source = BUILT / f"{name}.o", HERE / f"{name}.cpp"
    newest = max(file.stat().st_mtime for file in (source, HERE / "streams.h"))
    if not made.is_file() or made.stat().st_mtime <= newest:
        _run("g++", "-std=c++20", "-O1", "-fPIC", "-c", str(source), *options, "-o", str(made))
    return str(made)


def _stubs(objects: Sequence[str]) -> str:
    """C code of all functions in CUDA's libraries that torch uses and ``objects`` lack, and of the tables above."""
    libraries = [*sorted(TORCH.glob("lib/libtorch*.so")), TORCH / "lib/libc10_cuda.so"]
    imported = _symbols("--undefined-only", "-D", *map(str, libraries))
    named = re.findall(r" _\((cu\w+)", (_OF_TORCH / "c10/cuda/driver_api.h").read_text())
    missing = [*filter(_IMPORTED.fullmatch, imported), *named]
    bodies = {name: f'return simulated_stub("{name}")' for name in missing}
    bodies |= dict.fromkeys(_NOTHING.split(), "return 0")
    bodies |= {name: f"return (long){value}" for name, value in _RETURNS.items()}
    bodies |= {name: f"{writes}; return 0" for name, writes in _WRITES.items()}
    codes = re.findall(r"(cudaError\w+) *= *(\d+)", (_CUDA / "driver_types.h").read_text())
    names = "".join(f'case {code}: return (long)"{name}"; ' for name, code in codes)
    bodies["cudaGetErrorName"] = f'switch ((int)a) {{ {names}}} return (long)"no error"'
    bodies["cudaGetErrorString"] = 'return (long)((int)a == 2 ? "out of memory" : cudaGetErrorName(a))'
    same = {f"cudaDevAttr{name}": f"simulated_properties.{value}" for name, value in _ATTRIBUTES.items()}
    cases = (f"case {name}: *(int*)a = {value}; return 0; " for name, value in same.items())
    unknown = 'return simulated_stub("this attribute of a device"), cudaErrorNotSupported'
    bodies["cudaDeviceGetAttribute"] = f"switch ((int)b) {{ {''.join(cases)}}} {unknown}"
    arguments = ", ".join(f"long {letter}" for letter in "abcdefghij")
    given = _symbols("--defined-only", *objects) | _SAME.keys()
    code = "".join(f"#include <{header}.h>\n" for header in ("stdio", "stdlib", "cuda_runtime_api", "nccl")) + _STUB
    code += f"static char opaque[1 << 16];\nconst struct cudaDeviceProp simulated_properties = {{{_PROPERTIES}}};\n"
    for name in sorted(bodies.keys() - given):
        code += f'long {name}_({arguments}) __asm__("{name}");\nlong {name}_({arguments}) {{ {bodies[name]}; }}\n'
    return code


def _symbols(*arguments: str) -> set[str]:
    lines = _run("nm", "--format=posix", *arguments).splitlines()
    return {line.split()[0].partition("@")[0] for line in lines if line and not line.endswith(":")}


def _run(*command: str) -> str:
    """The output of a command, whose errors go to the terminal."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    if not has_cuda_build():
        sys.exit("this Python has no torch that was built with CUDA")
    print(build())

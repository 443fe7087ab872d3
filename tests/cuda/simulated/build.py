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
_HEADERS = ("nvidia/cu13/include", "nvidia/nccl/include", "triton/backends/nvidia/include")  # the last has CUDA's crt
_LEFT_OUT = ("__CUDA_FP16_H__", "__CUDA_BF16_H__", "__CUDA_FP8_H__")  # guards of headers that need a toolkit
_OPENED = ("libcuda.so.1", "libnvidia-ml.so.1")  # what torch and its Python code open by name

# Functions that succeed and do nothing. The work of a destroyed stream or communicator goes on, so its memory stays.
_NOTHING = """
__cudaRegisterFatBinaryEnd __cudaRegisterVar __cudaUnregisterFatBinary cuCtxSetCurrent cuInit cuMemSetAccess
cudaDeviceEnablePeerAccess cudaFuncSetAttribute cudaKernelSetAttributeForDevice cudaMemcpyToSymbol cudaProfilerStart
cudaProfilerStop cudaStreamDestroy cudaThreadExchangeStreamCaptureMode ncclCommDestroy ncclCommFinalize nvmlInit
nvmlInit_v2 nvmlShutdown
"""


def has_cuda_build() -> bool:
    """Whether this Python has a torch that was built with CUDA."""
    return (TORCH / "lib/libtorch_cuda.so").is_file()


def build() -> Path:
    """The folder with what a process on the simulated CUDA needs; built again if a source is newer."""
    stamp = BUILT / "built"
    if stamp.is_file() and stamp.stat().st_mtime > max(file.stat().st_mtime for file in HERE.iterdir()):
        return BUILT
    BUILT.mkdir(exist_ok=True)
    headers = [*(f"-I{PACKAGES / folder}" for folder in _HEADERS), *(f"-D{guard}" for guard in _LEFT_OUT)]
    objects = [_compiled(name, headers) for name in ("driver", "nccl")]
    (BUILT / "stubs.c").write_text(_stubs(objects))
    _run("gcc", "-c", "-fPIC", str(BUILT / "stubs.c"), "-o", str(BUILT / "stubs.o"))
    library = BUILT / "libsimulated.so"
    _run("g++", "-shared", "-o", str(library), *objects, str(BUILT / "stubs.o"), "-lpthread", "-lrt")
    for name in _OPENED:
        (BUILT / name).unlink(missing_ok=True)
        (BUILT / name).symlink_to(library.name)
    headers += [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
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
    """C code of functions that do nothing, and of all in CUDA's libraries that torch imports and ``objects`` lack."""
    libraries = [*sorted(TORCH.glob("lib/libtorch*.so")), TORCH / "lib/libc10_cuda.so"]
    imported = _symbols("--undefined-only", "-D", *map(str, libraries))
    missing = {name for name in imported if _IMPORTED.fullmatch(name)} - _symbols("--defined-only", *objects)
    missing.difference_update(_NOTHING.split())
    functions = "".join(f"int {name}(void) {{ return 0; }}\n" for name in _NOTHING.split())
    functions += "".join(f'int {name}(void) {{ return simulated_stub("{name}"); }}\n' for name in sorted(missing))
    return f"int simulated_stub(const char* function);\n{functions}"


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

"""Builds the simulated CUDA beside the CUDA build of torch that this Python has: python -m tests.cuda.simulated.build

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
BUILT = Path(sys.prefix) / "simulated_cuda"
_LIBRARIES = re.compile(r"(__)?(cuda|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|cuFile)[A-Z_a-z]*\w*")
_LEFT_OUT = ("__CUDA_FP16_H__", "__CUDA_BF16_H__", "__CUDA_FP8_H__")  # guards of headers that need a toolkit
_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")  # what torch and its Python code open by name


def has_cuda_build() -> bool:
    """Whether this Python has a torch that was built with CUDA."""
    version = PACKAGES / "torch/version.py"
    return version.is_file() and "+cpu" not in version.read_text() and (PACKAGES / "torch/lib/libtorch_cuda.so").is_file()


def build() -> Path:
    """The folder with what the environment of a process on the simulated CUDA needs; built again if a source is newer."""
    sources = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), *HERE.glob("*.py")]
    stamp = BUILT / "built"
    if stamp.is_file() and stamp.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return BUILT
    BUILT.mkdir(exist_ok=True)
    objects = [_compiled(name, _headers()) for name in ("driver", "nccl")]
    stubs = BUILT / "stubs.c"
    stubs.write_text(_stubs(objects))
    _run("gcc", "-c", "-fPIC", str(stubs), "-o", str(BUILT / "stubs.o"))
    library = BUILT / "libsimulated.so"
    _run("g++", "-shared", "-o", str(library), *objects, str(BUILT / "stubs.o"), "-lpthread", "-lrt")
    for name in _NAMES:
        (BUILT / name).unlink(missing_ok=True)
        (BUILT / name).symlink_to(library.name)
    kernels = HERE / "kernels.cpp"
    if kernels.is_file():
        made = _compiled("kernels", [*_headers(), *_headers_of_torch()])
        torch = PACKAGES / "torch/lib"
        _run("g++", "-shared", "-o", str(BUILT / "libkernels.so"), made, f"-L{torch}", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda")
    shutil.copy(HERE / "hook.py", BUILT / "simulated_cuda.py")
    entry = BUILT / "simulated_cuda-0.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-cuda\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[torch.backends]\nsimulated_cuda = simulated_cuda:begin\n")
    stamp.touch()
    return BUILT


def environment(*, computes: bool, **settings: int) -> dict[str, str]:
    """The environment of a process on the simulated CUDA, which ``build`` has made; ``driver.cpp`` lists the ``settings``."""
    values = {f"SIMULATED_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    values["SIMULATED_CUDA_COMPUTES"] = str(int(computes))
    values["LD_PRELOAD"] = str(BUILT / "libsimulated.so")
    values["LD_LIBRARY_PATH"] = str(BUILT)
    values["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BUILT), os.environ.get("PYTHONPATH")]))
    return values


def _headers() -> list[str]:
    folders = ("nvidia/cu13/include", "nvidia/nccl/include", "triton/backends/nvidia/include")  # the last has CUDA's crt
    return [*(f"-I{PACKAGES / folder}" for folder in folders), *(f"-D{guard}" for guard in _LEFT_OUT)]


def _headers_of_torch() -> list[str]:
    include = PACKAGES / "torch/include"
    return [f"-I{include}", f"-I{include}/torch/csrc/api/include"]


def _compiled(name: str, headers: Sequence[str]) -> str:
    made, source = str(BUILT / f"{name}.o"), HERE / f"{name}.cpp"
    if os.path.exists(made) and os.path.getmtime(made) > max(os.path.getmtime(file) for file in (source, HERE / "streams.h")):
        return made
    _run("g++", "-std=c++20", "-O1", "-fPIC", "-c", str(source), *headers, "-o", made)
    return made


def _stubs(objects: Sequence[str]) -> str:
    """C code of every function of CUDA's libraries that torch's libraries import and ``objects`` lack."""
    needed = _symbols("--undefined-only", "-D", *map(str, sorted((PACKAGES / "torch/lib").glob("libtorch*.so"))))
    needed |= _symbols("--undefined-only", "-D", str(PACKAGES / "torch/lib/libc10_cuda.so"))
    missing = {name for name in needed if _LIBRARIES.fullmatch(name)} - _symbols("--defined-only", *objects)
    functions = "".join(f'int {name}(void) {{ return simulated_stub("{name}"); }}\n' for name in sorted(missing))
    return f"int simulated_stub(const char* function);\n{functions}"


def _symbols(*arguments: str) -> set[str]:
    lines = _run("nm", "--format=posix", *arguments).splitlines()
    return {line.split()[0].partition("@")[0] for line in lines if line and not line.endswith(":")}


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"LC_ALL": "C"}).stdout


if __name__ == "__main__":
    if not has_cuda_build():
        sys.exit("this Python has no torch that was built with CUDA")
    print(build())

"""What the engine does on GPUs, on simulated ones under the CUDA build of torch: python -m tests.cuda.simulated

Builds the simulated CUDA, and passes its arguments to ``parity``; without arguments, ``memory`` follows. One line says
so if torch was built without CUDA.
"""

import os
import subprocess
import sys

from tests.cuda.simulated.build import build, environment, has_cuda_build


def run(module: str, *arguments: str, computes: bool, **settings: int) -> int:
    """The exit code of a module of this package, run on the simulated CUDA; 1 also where torch warns of messages."""
    command = [sys.executable, "-m", f"tests.cuda.simulated.{module}", *arguments]
    variables, warned = os.environ | environment(computes=computes, **settings), False
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr or ():
            sys.stderr.write(line)
            warned |= "unbatched P2P" in line
    if warned:
        print("WRONG: torch warns of messages that are not batched", flush=True)
    return process.returncode or int(warned)


if __name__ == "__main__":
    if not has_cuda_build():
        sys.exit(print("skipped: this Python has no torch that was built with CUDA; `make cuda` installs it"))
    build()
    codes = [run("parity", *sys.argv[1:], computes=True, delay_us=200)]
    if not sys.argv[1:]:
        codes.append(run("memory", computes=False))
    sys.exit(max(codes))

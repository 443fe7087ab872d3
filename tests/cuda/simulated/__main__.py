"""What the engine does on GPUs, on simulated ones under the CUDA build of torch: python -m tests.cuda.simulated

Builds the simulated CUDA, and runs a part of this package: the first argument if it is the name of a part, else
``parity``, with the other arguments. Without arguments, ``memory`` follows. One line says so if torch was built without
CUDA.
"""

import os
import subprocess
import sys

from tests.cuda.simulated.build import build, environment, has_cuda_build

COMPUTING = {"computes": True, "delay_us": 200}
PARTS: dict[str, dict[str, int]] = {  # name -> settings of the simulated CUDA; driver.cpp says what they mean
    "parity": COMPUTING,
    "grid": COMPUTING,
    "memory": {"computes": False},
    "scale": {"computes": False, "alone": True},
}


def run(part: str, *arguments: str) -> int:
    """The exit code of a part, run on the simulated CUDA; 1 also where torch warns of messages."""
    command = [sys.executable, "-m", f"tests.cuda.simulated.{part}", *arguments]
    variables, warned = os.environ | environment(**PARTS[part]), False
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
    match sys.argv[1:]:
        case []:
            codes = [run("parity"), run("memory")]
        case [part, *arguments] if part in PARTS:
            codes = [run(part, *arguments)]
        case arguments:
            codes = [run("parity", *arguments)]
    sys.exit(max(codes))

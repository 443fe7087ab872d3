"""What the engine does on GPUs, on simulated ones under the CUDA build of torch: python -m tests.cuda.simulated

Builds the simulated CUDA, and passes its arguments to ``parity``; one line says so if torch was built without CUDA.
"""

import os
import subprocess
import sys

from tests.cuda.simulated.build import build, environment, has_cuda_build

if __name__ == "__main__":
    if not has_cuda_build():
        sys.exit(print("skipped: this Python has no torch that was built with CUDA; `make cuda` installs it"))
    build()
    command = [sys.executable, "-m", "tests.cuda.simulated.parity", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | environment(computes=True, delay_us=200), check=False).returncode)

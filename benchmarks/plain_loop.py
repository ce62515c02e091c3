"""The plain loop of `benchmarks.one_gpu` as a script: `meshwright adopt benchmarks/plain_loop.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.one_gpu import plain_step

if __name__ == "__main__":
    step = plain_step(compiled=False, micro=32)
    for number in range(4):
        print(f"step {number}: loss {step(number):.4f}")

"""Preparation of a text, and the tokenizers library alone: python -m benchmarks.preparation

`--mb` MB of Python's standard library in one file: the library trains a BPE of `--vocabulary` line by line and encodes
texts of 200 lines; `prepare` also splits, counts, writes and sums. Each runs in a new process, in turns, `--rounds`
times: medians of processor seconds and wall seconds, and the most memory beyond the imports.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from meshwright.data.corpus import documents
from meshwright.data.section import STDLIB

BEGIN = """
import re, sys, time
from pathlib import Path
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from meshwright.data.packing import prepare
source, size, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1000
before, wall, used = most(), time.perf_counter(), time.process_time()
"""
END = """
print(time.process_time() - used, time.perf_counter() - wall, most() - before)
"""
LIBRARY = """
library = tokenizers.Tokenizer(models.BPE())
library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
library.train_from_iterator(source.open(encoding="utf-8", newline="\\n"), trainer)
texts, lines = [], []
for number, line in enumerate(source.open(encoding="utf-8", newline="\\n"), 1):
    lines.append(line)
    if number % 200 == 0:
        texts.append("".join(lines))
        lines = []
    if number % 20_000 == 0:
        library.encode_batch_fast(texts)
        texts = []
library.encode_batch_fast([*texts, "".join(lines)])
"""
CONTENDERS = {"the library: train and encode": LIBRARY, "prepare": 'prepare(str(source), f"bpe:{size}", out)\n'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[list[float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        source, text = Path(folder) / "text.txt", "\n".join(map(str, documents(STDLIB)))
        wanted = arguments.mb * 10**6
        source.write_bytes((text * (wanted // len(text) + 1)).encode()[:wanted].decode(errors="ignore").encode())
        for turn in range(arguments.rounds):
            for name, code in CONTENDERS.items():
                words = [str(source), str(arguments.vocabulary), f"{folder}/out-{turn}"]
                command = [sys.executable, "-c", BEGIN + code + END, *words]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                found[name].append([float(word) for word in said.split()])
    print(f"{arguments.mb} MB, a BPE of {arguments.vocabulary}; medians of {arguments.rounds}")
    for name, rounds in found.items():
        used, wall, memory = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"  {name:32s} {used:6.1f} processor s, {wall:6.1f} s, {memory:6.0f} MB")


if __name__ == "__main__":
    main()

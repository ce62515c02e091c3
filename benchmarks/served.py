"""Modules that a benchmark's fork server imports once for all workers, and work that compiled workers would repeat.

A compiled worker spends two seconds on the compiler's imports, and two on the search for vector instructions: ten
processes, also with files in torch's cache. Importing this module does both, and starts no lasting thread.
"""

from torch._inductor import compile_fx
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from benchmarks import baselines, ours

__all__ = ["baselines", "compile_fx", "ours"]

valid_vec_isa_list()

"""Modules that the fork server of a benchmark imports once for all workers, and what each compiled one would repeat.

A compiled worker takes two seconds for the compiler's imports, and two for the search of vector instructions: ten
processes, also if their files are in torch's cache. Importing this module does both, and leaves no thread behind.
"""

from torch._inductor import compile_fx
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from benchmarks import baselines, ours

__all__ = ["baselines", "compile_fx", "ours"]

valid_vec_isa_list()

"""Initial values: a function of (seed, name, block), so that every layout begins with the same model.

A parameter is divided into blocks of whole rows, of at most `BLOCK_ELEMENTS` elements. Each block has a generator of
its own. A rank draws the blocks that overlap its part; no rank ever holds a whole embedding that is cut.

    torch's threads    draw block 0 | draw block 2 | ...
                       draw block 1 | draw block 3 | ...
    caller                          round and copy blocks 0, 1, 2, ... to the parameter

A parameter on a GPU is filled through pinned memory while the next blocks are drawn. The host holds one block for each
thread and one more, and the pinned copy of at most one parameter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.shard import Box, Initial, ShardSpec, seed_of, shard_specs

if TYPE_CHECKING:
    from meshwright.ranks.mesh import Mesh

BLOCK_ELEMENTS = 2**20
"""Elements that one generator draws: 4 MiB of float32."""
ALONE = 2**15 - 1
"""The most elements that torch copies without a team of threads."""


def initialise(model: nn.Module, mesh: Mesh, seed: int) -> None:
    """Fill every parameter with this rank's part of the global tensor that name and seed give. Meta tensors are left:
    `draw_values` fills their memory later."""
    specs = shard_specs(model)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            draw_values(parameter, name, specs[name], mesh, seed)


@torch.no_grad()
def draw_values(out: Tensor, name: str, spec: ShardSpec, mesh: Mesh, seed: int) -> None:
    """Fill this rank's part of a parameter, of any dtype; a parameter without initial values is left as it is.

    Values are drawn in float32 and rounded last: a bf16 run begins with the rounding of a float32 run's weights.
    """
    initial = spec.initial
    if initial is None or out.numel() == 0:  # the owner of nothing is another rank
        return
    if initial.std == 0:
        out.fill_(initial.mean)
        return
    box = spec.box(mesh.grid, mesh.rank)
    for block, values in _blocks(spec.shape, initial, box, f"{seed}/{name}"):
        overlap = block.intersection(box)
        assert overlap is not None, f"{block} was drawn for {box}"
        target, drawn = out[overlap.within(box).slices], values[overlap.within(block).slices]
        if out.is_cuda:
            # Rounded on the host: half of the bytes pass the link. torch reuses pinned memory once it was copied.
            pinned = torch.empty(drawn.shape, dtype=out.dtype, pin_memory=True)
            _copy_alone(pinned, drawn)
            target.copy_(pinned, non_blocking=True)
        else:
            _copy_alone(target, drawn)
    if out.is_cuda:
        torch.cuda.current_stream(out.device).synchronize()  # bounds the pinned memory


def _copy_alone(out: Tensor, values: Tensor) -> None:
    """Copy values on the host, without torch's team of threads: a team waits for the next task by spinning, on the
    processors of the threads that draw."""
    length = ALONE // max(1, math.prod(values.shape[1:])) if torch.get_num_threads() > 1 else len(values)
    for target, piece in zip(out.split(max(1, length)), values.split(max(1, length)), strict=True):
        target.copy_(piece)


def first_values(name: str, spec: ShardSpec, seed: int) -> Tensor:
    """Return a whole parameter as `initialise` fills it, float32."""
    initial = spec.initial
    assert initial is not None, name
    if initial.std == 0:
        return torch.full(spec.shape, float(initial.mean))
    whole = torch.empty(spec.shape)
    for block, values in _blocks(spec.shape, initial, Box((0,) * whole.dim(), spec.shape), f"{seed}/{name}"):
        whole[block.slices] = values
    return whole


def _blocks(shape: tuple[int, ...], initial: Initial, wanted: Box, label: str) -> Iterator[tuple[Box, Tensor]]:
    """Yield the blocks of the global tensor that have elements of `wanted`, in order, with values. The values are
    overwritten when the next block is asked for."""
    # The blocks follow from the global shape alone, never from the layout: so every layout draws the same model.
    rows = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    numbers = range(wanted.offsets[0] // rows, (wanted.offsets[0] + wanted.lengths[0] - 1) // rows + 1)
    count = min(torch.get_num_threads(), len(numbers))
    # Memory is reused: new memory for each block would take the time of drawing the block, since the system clears it.
    memory = torch.empty(min(len(numbers), count + (count > 1)), min(rows, shape[0]), *shape[1:])

    def draw(index: int) -> tuple[Box, Tensor]:
        length = min(rows, shape[0] - index * rows)
        block = Box((index * rows, *(0 for _ in shape[1:])), (length, *shape[1:]))
        # A CPU's generator on every device: a GPU's would draw other numbers.
        generator = torch.Generator().manual_seed(seed_of(f"{label}/{index}"))
        return block, initial.draw(memory[index % len(memory)][:length], generator)

    if count == 1:
        yield from map(draw, numbers)
        return
    ahead: deque[Future[tuple[Box, Tensor]]] = deque()
    with ThreadPoolExecutor(count, "initial-values") as threads:
        for index in numbers:
            ahead.append(threads.submit(draw, index))
            if len(ahead) > count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

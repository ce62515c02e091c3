"""One line of advice for each kind of mistake, and the page with more (docs/parity_findings.md)."""

from __future__ import annotations

PAGE = "docs/parity_findings.md"
"""The path in the repository; not a URL, since the page is not published."""

REMEDIES = {
    "wrong part": "take this rank's own slice of the whole weight: of q, k and v, or gate and up, each on its own",
    "wrong data": "give each rank its own rows of the global batch, and labels the same rows and shift as inputs",
    "missing reduction": "add the sum over the axis that is named: an all-reduce after a row-parallel product, in the "
    "backward pass before a column-parallel one, or of the gradients of what all ranks of the axis hold",
    "scaled": "look for a sum where a mean belongs, or the other way round, and for what is added once a rank: biases, "
    "losses divided by microbatches or ranks twice",
    "incomplete sum": "add up all terms: gradients of all microbatches, ranks, and uses of a tied weight",
    "token counts": "divide the sum of losses by the labels of the whole global batch, added up over all ranks and "
    "microbatches beforehand; never average means",
    "leak": "mask by global positions and by documents of both sides: those of the queries here, those of the keys as "
    "they came from the other rank",
    "clipping": "clip once, after all sums, by the norm of all parts: squares of cut parameters added up over their "
    "axes, those of copies counted once",
    "no gradient": "look for detach(), no_grad(), an in-place copy, or a parameter that its optimizer or wrapper lost",
    "accumulated": "set gradients to zero after each optimizer step, also in the buffers that they are reduced in",
    "accumulation": "add gradients up over microbatches and reduce once at the end; losses over all samples together "
    "(balance of experts, statistics) need the sums of all microbatches",
    "optimizer": "compare learning rate, decay and states with the reference's; step once, with every parameter",
    "cut update": "gather the whole matrix for the update and keep this rank's part of it, or give each whole matrix "
    "to one rank",
    "stale weights": "write stepped weights back into what computes, on all ranks, before the next forward pass",
    "wrong buffer": "reduce statistics over all ranks' samples, or broadcast buffers from one rank that has them",
    "dropout": "draw masks of replicated activations from one seed for all ranks of the axis, those of cut ones from a "
    "seed each",
    "lower precision": "keep sums, losses and gradients in the model's type; where the narrower is meant, check with "
    "--precision float32 or bf16, to see what is behind it",
    "wrong values": "look at the code of the module that is named: positions, masks, scales, order of heads and ranks",
}
"""By kind."""

"""Text in, batches out: corpus -> split -> tokenizer -> packed files -> sampler.

Torch-free up to the packed files; `meshwright.data.sampler` alone imports torch.
"""

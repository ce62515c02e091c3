"""Encoder-decoders: the original Transformer (Vaswani et al., 2017) and T5 (Raffel et al., 2020)."""

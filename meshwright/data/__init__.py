"""Text, pairs and images in, batches out: corpus -> split -> tokenizer -> packed files -> samples.

Text is read, packed and counted without torch: the launcher does it before any rank exists.
"""

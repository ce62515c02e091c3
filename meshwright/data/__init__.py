"""Text, pairs and images in, batches out: corpus -> split -> tokenizer -> packed files -> samples.

Reading, packing and counting text needs no torch: the launcher prepares data before the ranks start.
"""

"""Measures of a trained model: perplexity, LAMBADA's cloze, masked tokens, BLEU, classes of images. On one device."""

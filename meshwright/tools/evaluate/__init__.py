"""Measures of a trained model, on one device: perplexity, LAMBADA's cloze, masked tokens, BLEU, classes of images."""

"""Checkpoints independent of layouts: safetensors shards and one JSON manifest, without pickle.

    step-N/manifest.json          what wrote it, progress, each file's SHA-256, each tensor's runs: box, dtype, files
    step-N/rank-R.safetensors     the parts that rank R wrote, and a hash of every block of them
    step-N/tokenizer.json         so that text goes in and comes out of a checkpoint alone
    step-N/config.json, ...       the settings that weights and tokenizer came with (data/published.py), for an export

A step folder exists only whole: it is written under a temporary name, synced, and renamed.
"""

from meshwright.training.checkpoint.reader import Checkpoint, find_checkpoint, newest_step, newest_whole
from meshwright.training.checkpoint.restore import Piece, load_weights, pieces_of, restore
from meshwright.training.checkpoint.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Piece",
    "find_checkpoint",
    "load_weights",
    "newest_step",
    "newest_whole",
    "pieces_of",
    "restore",
]

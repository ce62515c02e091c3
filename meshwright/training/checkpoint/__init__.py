"""Checkpoints independent of layouts: safetensors shards and one JSON manifest, without pickle.

    step-N/manifest.json          the run, progress, each file's SHA-256, each tensor's runs: box, dtype, files
    step-N/rank-R.safetensors     the parts written by rank R, and a hash of every block
    step-N/tokenizer.json         so that a checkpoint alone suffices to read and generate text
    step-N/config.json, ...       settings published with weights and tokenizer (data/published.py), for an export

A step folder exists only whole: files are written under a temporary name, synced, and the folder is renamed.
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

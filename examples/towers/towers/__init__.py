"""Two towers on two sub-grids of ranks: an image encoder and a text decoder, trained to find each other's samples."""

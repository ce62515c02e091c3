"""Fine-tunings of BERT: their sections and models."""

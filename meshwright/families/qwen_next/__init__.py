"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, attention with output gates."""

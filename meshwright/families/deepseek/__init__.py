"""DeepSeek-V3 and those made like it, Moonlight and Kimi-K2: latent attention, shared experts, later tokens."""

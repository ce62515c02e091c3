"""DeepSeek-V3, Moonlight and Kimi-K2: latent attention, shared experts, later tokens."""

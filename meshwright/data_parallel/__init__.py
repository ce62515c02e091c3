"""How replicas of a model agree on a gradient (Bai, HP3C 2022; ZeRO-1; torch's fully_shard)."""

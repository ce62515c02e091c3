"""Data parallelism: strategies by which replicas agree on a gradient (Bai, HP3C 2022; ZeRO)."""

"""Data parallelism: strategies that sum gradients over replicas (Bai, HP3C 2022; ZeRO)."""

"""A small run of stages and replicas."""

from __future__ import annotations

RUN = """
model: {base: gpt2-mini, layers: 2, hidden: 16, heads: 2, vocabulary: 300, vocabulary_multiple: 4, positions: 16}
data: {source: unicode, sequence: 16}
batch: {global: 8, micro: 2}
layout: {data: {size: 2, sync: zero3}, pipeline: {size: 2}}
steps: 4
checkpoint: {every: 2}
validation: {every: 2, batches: 1}
device: cpu
threads: 1
metrics: {sinks: []}
"""

"""Moments are in seconds since the epoch, on both kinds of device."""

from __future__ import annotations

import time

import pytest
import torch

from meshwright.strategies.pipeline.span import Watch


def test_on_a_host() -> None:
    watch = Watch(torch.device("cpu"))
    watch.start()
    before = time.time()
    moment = watch.now()
    after = time.time()
    time.sleep(0.01)
    assert before <= moment() <= after
    assert moment() == moment()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_work_counts_where_it_is_done() -> None:
    """The host has issued all products long before the device has computed the products."""
    x = torch.ones(4096, 4096, device="cuda")
    x @ x
    torch.cuda.synchronize()
    watch = Watch(x.device)
    watch.start()
    started = time.time()
    first = watch.now()
    for _ in range(100):
        x @ x
    given_out = time.time() - started
    second = watch.now()
    seconds = second() - first()
    assert given_out < seconds <= time.time() - started + 0.01
    assert abs(first() - started) < 0.1

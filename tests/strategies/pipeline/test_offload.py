"""An offloaded optimizer under stages, also with tied embeddings, changes no bit."""

from __future__ import annotations

import pytest

from meshwright.config import Config
from tests.oracle.pipeline import WHOLE, pipelined
from tests.oracle.run import run


def config_for(to: str, sync: str) -> Config:
    tree = pipelined("gpt2", 2, "message-driven", WHOLE, 2).model_dump(mode="json", by_alias=True)
    tree["layout"]["data"] = {"size": 2, "sync": sync}
    tree["precision"] = {"level": "O2", "dtype": "bf16"}
    tree["memory"]["offload"] = {"to": to, "bucket": 1024, "chunk": 2}
    return Config.model_validate(tree)


@pytest.mark.parametrize("sync", ["allreduce", "zero1"])
def test_no_bit_changes(sync: str) -> None:
    in_place, on_host = ([losses for losses, _ in run(config_for(to, sync))] for to in ("none", "host"))
    assert on_host == in_place
    assert in_place[0][-1] != in_place[0][0]

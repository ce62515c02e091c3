"""Another process of the network, with a job's address and port and without the secret."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.nodes.conftest import Nodes
from tests.nodes.faults import FOR_EVER, wait_for_steps
from tests.nodes.launchers import PORT, by_hand, train_words, write_run

LISTENING = """\
import psutil
kept = psutil.net_connections("inet")
print(sorted({each.laddr.ip for each in kept if each.status == psutil.CONN_LISTEN}))
"""
STRANGER = """\
import sys
from datetime import timedelta
import torch.distributed as dist
try:
    store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), timeout=timedelta(seconds=3), wait_for_workers=False)
    print("read", store.get("leader"))
except Exception as error:
    print("refused", type(error).__name__)
"""


def test_a_stranger_is_refused_and_the_run_goes_on(nodes: Nodes, corpus: Path, tmp_path: Path) -> None:
    network = nodes(2)
    out = tmp_path / "out"
    started = by_hand(network, train_words(write_run(tmp_path, corpus, 2, steps=FOR_EVER), out))
    wait_for_steps(out, started)
    for node in network.nodes:
        listens = ast.literal_eval(node.run(sys.executable, "-c", LISTENING))
        assert listens, "gloo listens, and on the first node the store's gate"
        assert set(listens) <= {"127.0.0.1", node.address}
    said = network[1].run(sys.executable, "-c", STRANGER, network[0].name, str(PORT))
    assert "refused" in said
    assert "read" not in said
    wait_for_steps(out, started, steps=6)

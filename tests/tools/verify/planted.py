"""Workers of `verify` with a mistake planted in them."""

from __future__ import annotations

import os
import signal
from typing import Any

from meshwright.environment import Environment
from meshwright.tools.verify.job import reference_worker, worker
from tests.tools.verify.mistakes import one_wrong_element


def wrong_gradient(*arguments: Any, **named: Any) -> None:
    """One element of one rank's gradients is off by 1e-9."""
    one_wrong_element()
    worker(*arguments, **named)


def killed_rank(environment: Environment, *arguments: Any, **named: Any) -> None:
    """Rank 1 is killed while rank 0 trains."""
    if environment.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    worker(environment, *arguments, **named)


def failing_reference(*arguments: Any, **named: Any) -> None:
    """The reference's loss overflows at every step."""
    named["config"]["precision"] = {"level": "O2", "dtype": "fp16", "loss_scale": {"initial": 1e30}}
    reference_worker(*arguments, **named)

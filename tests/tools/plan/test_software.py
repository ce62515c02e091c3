"""A run's software changes a prediction where its facts do, and nowhere else."""

from __future__ import annotations

import pytest

from meshwright.config import Config, parse_config
from meshwright.errors import ConfigError
from meshwright.tools.plan.predict import Planner, Prediction
from meshwright.tools.plan.software import OWN_SOFTWARE, Communication, Software, load_software
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PIPELINE
from tests.tools.plan.clusters import NODES

EVERY: frozenset[Communication] = frozenset(("sums", "gathers", "layers"))


def run(**layout: object) -> Config:
    return parse_config({
        "model": {"layers": 4, "hidden": 256, "heads": 4, "positions": 128, "vocabulary": 512},
        "data": {"sequence": 128},
        "batch": {"global": 32, "micro": 4},
        "layout": layout,
    })  # fmt: skip


def predicted(config: Config, software: Software = OWN_SOFTWARE) -> Prediction:
    return Planner(NODES, software).predict(config)


def test_sums_wait_for_the_backward_pass() -> None:
    config = run(data={"size": 4})
    under, after = predicted(config), predicted(config, Software(overlapped=EVERY - {"sums"}))
    assert after.phases[DATA_PARALLEL] > under.phases[DATA_PARALLEL]
    assert after.phases[PIPELINE] == pytest.approx(under.phases[PIPELINE], rel=1e-12)
    assert after.memory == under.memory


@pytest.mark.parametrize("communication, layout", [
    ("gathers", {"data": {"size": 4, "sync": "zero3"}}),
    ("layers", {"tensor": {"kind": "megatron", "size": 2}}),
])  # fmt: skip
def test_what_is_not_overlapped_takes_longer(communication: Communication, layout: dict[str, object]) -> None:
    config = run(**layout)
    own, apart = predicted(config), predicted(config, Software(overlapped=EVERY - {communication}))
    assert apart.phases[PIPELINE] > own.phases[PIPELINE]
    assert apart.traffic == own.traffic


def test_an_optimizer_in_steps_takes_longer_and_nothing_else_does() -> None:
    own, steps = predicted(run()), predicted(run(), Software(optimizer="steps"))
    assert steps.phases[OPTIMIZER] > own.phases[OPTIMIZER]
    assert steps.phases[PIPELINE] == pytest.approx(own.phases[PIPELINE], rel=1e-12)


def test_one_process_issues_the_forward_kernels_of_all_devices_in_turn() -> None:
    """Its host is busy twice as long with the forward passes of two devices; backward passes have threads beneath."""
    device = NODES.device.model_copy(update={"launch_seconds": 1e-7, "issue_seconds": 1e-3})
    hosts = NODES.model_copy(update={"device": device})
    software = Software(one_process=True)
    forward, backward = {}, {}
    for name, one in {"each": OWN_SOFTWARE, "one": software}.items():
        tasks = Planner(hosts, one).predict(run(data={"size": 2, "sync": "server-gradient"})).timeline.tasks
        forward[name] = sum(span.seconds for span in tasks if span.category == "forward")
        backward[name] = sum(span.seconds for span in tasks if span.category == "backward")
    assert forward["one"] == pytest.approx(2 * forward["each"], rel=0.02)
    assert backward["one"] == pytest.approx(backward["each"], rel=1e-12)
    assert predicted(run(), software).seconds == pytest.approx(predicted(run()).seconds, rel=1e-12)


def test_heads_that_are_kernels_of_their_own_issue_as_many() -> None:
    """Their products are the same; where the host is slow it issues those of each head."""
    device = NODES.device.model_copy(update={"issue_seconds": 1e-3, "launch_seconds": 1e-7})
    hosts = NODES.model_copy(update={"device": device})
    together, apart = (
        Planner(hosts, Software(attention="steps", heads=heads)).predict(run()) for heads in ("together", "apart")
    )
    assert apart.flops == together.flops
    assert apart.phases[PIPELINE] > 1.3 * together.phases[PIPELINE]


def test_heads_of_their_own_have_biases_of_their_own() -> None:
    """T5's positions are a bias a head."""
    config = parse_config({"model": "t5-tiny", "data": {"kind": "spans", "sequence": 32}, "batch": {"global": 2}})
    together, apart = (
        Planner(NODES, Software(attention="steps", heads=heads)).predict(config) for heads in ("together", "apart")
    )
    assert apart.flops == together.flops


def test_gradients_that_are_widened_at_once_take_memory_and_no_time() -> None:
    """A float16 model's float32 gradients: 4 bytes a parameter, more than a part of 256 MiB and a microbatch take."""
    config = parse_config({
        "model": {"layers": 2, "hidden": 4096, "heads": 8, "positions": 128, "vocabulary": 512},
        "data": {"sequence": 128},
        "batch": {"global": 1, "micro": 1},
        "precision": {"level": "O2", "dtype": "fp16", "accumulate": "stored"},
    })  # fmt: skip
    parts, whole = predicted(config), predicted(config, Software(widening="whole"))
    assert parts.memory[0].temporaries < 2**29
    num_parameters = parts.memory[0].gradients / 2
    assert whole.memory[0].temporaries + whole.memory[0].activations == pytest.approx(4 * num_parameters, rel=0.01)
    assert whole.seconds == parts.seconds


def test_programs_are_presets() -> None:
    """The facts that the papers of validation name; a name that nobody knows is told the others."""
    assert load_software("axonn") == Software(
        widening="whole", attention="fused-softmax", fuses_dropout=True, overlapped=EVERY - {"sums"}
    )
    assert load_software("megatron-lm-2019") == Software(attention="steps", overlapped=frozenset())
    with pytest.raises(ConfigError, match=r"software=megatron is no program .* valid: megatron-lm-2019, .*, super"):
        load_software("megatron")

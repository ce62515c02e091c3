"""The answer of a search: duration, memory, certainty, and the changes that would alter the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config import parse_config
from meshwright.configs import shipped
from meshwright.planner.plan.answer import (
    Training,
    alike_sentence,
    answer,
    changes,
    duration_text,
    parse_tokens,
    sureness,
    tight_sentence,
    tokens_text,
)  # fmt: skip
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.memory import Memory, verdict
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.errors import ConfigError
from tests.planner.plan.clusters import NODES
from tests.planner.plan.questions import TREE


def test_a_sentence_with_the_time_and_the_price_of_a_training() -> None:
    models = Estimates(Planner(NODES))
    run = parse_config(TREE, ["layout.tensor={kind: megatron, size: 2}", "layout.data.size=2"])
    best = replace(models.planner.predict(run), seconds=2.0)
    tokens_per_step = 8 * 16
    training = Training(parse_tokens("12.8M"), 2.5)
    hours = 12.8e6 / tokens_per_step * 2.0 / 3600
    text = answer(best, "megatron 2", training)
    assert text.startswith("megatron 2: 2 s a step, ")
    assert "(fits); 2 days and 8 hours for 12.8 M tokens, $556 at $2.50 a GPU-hour." in text
    assert training.dollars(best) == pytest.approx(hours * 4 * 2.5)
    assert answer(best, "megatron 2", Training()).endswith("(fits).")
    links, products = changes(best, models)
    assert links.seconds < models.planner.predict(run).seconds >= products.seconds


def test_memory_is_tight_where_what_is_not_predicted_would_not_fit() -> None:
    room = NODES.device.memory_bytes
    said = [verdict(Memory(int(share * room), 0, 0, 0, 0, 0), NODES) for share in (0.8, 0.95, 1.1)]
    assert said == ["fits", "tight", "does not fit"]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (20, "1 minute"), (3000, "50 minutes"), (3600, "1 hour"), (15_000, "4 hours and 10 minutes"),
        (266_400, "3 days and 2 hours"), (86_399, "1 day"), (864_000_000, "10,000 days"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_tokens() -> None:
    assert [parse_tokens(text) for text in ("100B", "1.5 t", "300m", "7", "100e9", "3,000")] == [
        1e11,
        1.5e12,
        3e8,
        7,
        1e11,
        3000,
    ]
    assert [tokens_text(tokens) for tokens in (1e11, 1.5e12, 3e8, 7)] == ["100 B", "1.5 T", "300 M", "7"]
    with pytest.raises(ConfigError, match="--tokens=0B is no number of tokens"):
        parse_tokens("0B")


def test_every_cluster_says_how_sure_it_is() -> None:
    said = [sureness(load_cluster(name), 3072) for name in shipped("clusters")]
    assert all("more memory than is predicted" in text for text in said)
    unknown = [
        name for name, text in zip(shipped("clusters"), said, strict=True) if text.startswith("Nobody has compared")
    ]
    assert [name for name in unknown if load_cluster(name).device.like is None] == [
        "dgx-b300", "dgx-h200", "gb200-nvl72", "gb300-nvl72", "mi300x", "summit", "tpu-v5p", "tpu-v6e",
    ]  # AxoNN's rows are of a Summit that was fitted to these rows  # fmt: skip
    rows = (
        "66 measured rows of Megatron-LM (SC 2021), MPT, InternEvo and fms-fsdp at hidden 768 to 20,480 were met to 8% "
        "on average"
    )
    assert f"{rows} (nothing fitted); " in sureness(load_cluster("dgx-a100"), 3072)
    small = f"{rows} (nothing fitted), which says little of hidden 512: small kernels are predicted too fast; "
    assert small in sureness(load_cluster("dgx-a100"), 512)


def test_what_is_tight_says_what_it_gains_and_small_gains_are_none() -> None:
    models = Estimates(Planner(load_cluster("dgx-a100")))
    best = replace(models.planner.predict(parse_config(TREE)), seconds=2.0)
    said = [tight_sentence(replace(best, seconds=seconds), best, "data 2") for seconds in (1.96, 1.5)]
    assert said[0].startswith("Tight: data 2: 1.96 s (2.0% less, no difference that this prediction can tell), ")
    assert said[1].startswith("Tight: data 2: 1.5 s (25.0% less), ")
    assert all("does not fit if processes hold 16% more than is predicted" in text for text in said)
    alike = alike_sentence([best, replace(best, seconds=2.05), replace(best, seconds=3.0)])
    assert alike is not None
    assert alike.startswith("Between the first 2 there is no difference that this prediction can tell: ")
    assert alike_sentence([best, replace(best, seconds=3.0)]) is None
    assert "nobody has measured" in str(alike_sentence([replace(best, cluster=load_cluster("summit"))]))


def test_small_memory_is_in_megabytes() -> None:
    memory = Memory(2_000_000, 450_000, 0, 12_350_000_000, 0, 310_000_000)
    assert memory.text == ("weights 2 MB, gradients 0.45 MB, activations 12.35 GB, the process itself (context) 310 MB")

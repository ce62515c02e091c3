"""A recording read from disk equals the written recording, and a damaged file is taken as absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config, parse_config
from meshwright.config.registry import is_own
from meshwright.planner.plan import kept
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.kept import KeptRecordings, decoded, encoded
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.search import search
from meshwright.planner.plan.software import OWN_SOFTWARE
from meshwright.ranks.environment import remember_registered

GPT: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "positions": 64, "vocabulary": 512, "dropout": 0.0}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "data": (GPT, {"data": 2}, {}),
    "stages, split backward": (GPT, {"pipeline": {"size": 2, "schedule": "message-driven", "limit": 2}}, {}),
    "megatron, slices": (GPT, {"data": {"size": 2, "sync": "zero3"}, "tensor": {"kind": "megatron", "size": 2}}, {}),
    "tesseract": (GPT, {"tensor": {"kind": "tesseract", "q": 2, "d": 1}}, {}),
    "sub-graph": (GPT, {"tensor": {"kind": "subgraph", "size": 2}}, {}),
    "ring": (GPT, {"context": {"kind": "ring", "size": 2}}, {}),
    "groups, on the host": (GPT, {"data": 2}, {"recompute": "auto", "offload": {"to": "host"}}),
}


def config_of(model: dict[str, Any], layout: dict[str, Any], memory: dict[str, Any] | None = None) -> Config:
    tree = {"model": model, "data": {"sequence": 64}, "batch": {"global": 16, "micro": 4}, "layout": layout}
    return parse_config({**tree, "precision": "bf16", "memory": memory or {}})


def planner(folder: Path | None, cluster: str = "dgx-h100") -> Planner:
    return Planner(load_cluster(cluster), OWN_SOFTWARE, folder and KeptRecordings(folder))


def found(planner: Planner) -> int:
    assert planner.kept is not None
    return planner.kept.found


def predicted(made: Prediction) -> tuple[Any, ...]:
    return made.seconds, made.phases, made.memory, made.traffic, made.flops


def kept_by(folder: Path, config: Config) -> Prediction:
    """Predict once, and keep the recordings."""
    first = planner(folder)
    made = first.predict(config)
    assert first.recordings.recorded
    assert found(first) == 0
    assert first.kept is not None
    first.kept.save()
    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prediction_of_kept_recordings_is_the_same(name: str, tmp_path: Path) -> None:
    config = config_of(*LAYOUTS[name])
    made, again = kept_by(tmp_path, config), planner(tmp_path)
    assert predicted(again.predict(config)) == predicted(made)
    assert found(again) > 0
    assert not again.recordings.recorded


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_read_is_what_was_written(name: str) -> None:
    fresh = planner(None)
    fresh.predict(config_of(*LAYOUTS[name]))
    for recording in fresh.recordings.recorded:
        read = decoded(json.loads(json.dumps(encoded(recording))))
        assert read == recording
        # Composition and Timer know programs by identity.
        for kind, own in recording.programs.items():
            assert [own.index(each) for each in own] == [
                read.programs[kind].index(each) for each in read.programs[kind]
            ]
            assert len(set(map(id, own))) == len(set(map(id, read.programs[kind])))


def test_another_device_software_or_model_has_a_file_of_its_own(tmp_path: Path) -> None:
    config = config_of(GPT, {"data": 2})
    kept_by(tmp_path, config)
    others = [
        (Planner(load_cluster("two-cores"), OWN_SOFTWARE), config_of(GPT, {"data": 2})),
        (Planner(load_cluster("dgx-h100"), OWN_SOFTWARE.model_copy(update={"gelu": "steps"})), config),
        (Planner(load_cluster("dgx-h100"), OWN_SOFTWARE), config_of(GPT | {"hidden": 128}, {"data": 2})),
    ]
    for other, asked in others:
        other.recordings.kept = other.kept = KeptRecordings(tmp_path)
        other.predict(asked)
        assert found(other) == 0
        assert other.recordings.recorded


def cut_off(file: bytes) -> bytes:
    return file[:-7]


def changed(file: bytes) -> bytes:
    return file[:-7] + bytes([file[-7] ^ 1]) + file[-6:]


def of_other_code(file: bytes) -> bytes:
    return file.replace(kept.code_digest().encode(), b"0" * 64, 1)


def of_other_form(file: bytes) -> bytes:
    return file.replace(b"recordings 1", b"recordings 0", 1)


def empty(file: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut_off, changed, of_other_code, of_other_form, empty])
def test_a_damaged_file_is_as_none(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    config = config_of(GPT, {"data": 2})
    made = kept_by(tmp_path, config)
    [path] = tmp_path.glob("*.recordings")
    path.write_bytes(damage(path.read_bytes()))
    again = planner(tmp_path)
    assert predicted(again.predict(config)) == predicted(made)
    assert found(again) == 0
    assert again.kept is not None
    again.kept.save()
    third = planner(tmp_path)
    third.predict(config)
    assert found(third) > 0  # the file was written anew


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    config = config_of(GPT, {"data": 2})
    kept_by(tmp_path / "elsewhere", config)
    [path] = (tmp_path / "elsewhere").iterdir()
    folder = tmp_path / "recordings"
    folder.mkdir()
    (folder / path.name).symlink_to(path)
    again = planner(folder)
    again.predict(config)
    assert found(again) == 0


@pytest.mark.parametrize(
    "place, value",
    [
        (("events", 0, 0), "nothing"), (("events", 0, 1), "magic"), (("events", 0, 3), "many"),
        (("programs", 0, 0), [999]), (("programs", 0, 5), [1]), (("programs", 0, 5), [1, "2"]),
        (("places",), {"X": [0]}), (("numbers",), [1]), (("parameters", 0, 2), "torch.wide"),
        (("outgoing", 0), [[None], "torch.bfloat16"]), (("leaving",), None),
    ],
)  # fmt: skip
def test_a_line_of_another_form_is_refused(place: tuple[Any, ...], value: Any) -> None:
    fresh = planner(None)
    fresh.predict(config_of(GPT, {"data": 2}))
    tree = json.loads(json.dumps(encoded(fresh.recordings.recorded[0])))
    at = tree
    for each in place[:-1]:
        at = at[each]
    at[place[-1]] = value
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, AttributeError)):
        decoded(tree)


def test_a_search_of_kept_recordings_records_nothing_and_answers_the_same(tmp_path: Path) -> None:
    config, cluster = config_of(GPT, {}), load_cluster("dgx-a100")
    answers = []
    for folder in (None, tmp_path, tmp_path):
        models = Estimates(Planner(cluster, OWN_SOFTWARE, folder and KeptRecordings(folder)))
        answer = search(config, cluster, 4, models=models)
        answers.append(([(each.config, *predicted(each)) for each in answer.predictions], answer.counts))
    assert answers[0] == answers[1] == answers[2]
    assert not models.planner.recordings.recorded


def test_a_folder_that_cannot_be_written_to_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept_by(tmp_path / "file" / "recordings", config_of(GPT, {"data": 2}))


def test_the_least_recently_written_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_FILES", 2)
    for age, hidden in enumerate((64, 128, 192)):
        kept_by(tmp_path, config_of(GPT | {"hidden": hidden}, {"data": 2}))
        newest = max(tmp_path.iterdir(), key=lambda each: each.stat().st_mtime_ns)
        os.utime(newest, (1000 + age, 1000 + age))
    assert len(list(tmp_path.iterdir())) == 2


def test_beside_strategies_of_others_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KeptRecordings.here() is not None
    variables: dict[str, str] = {}
    remember_registered([("syncs", "theirs", "their.module:entry", "")], variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not is_own()
    assert KeptRecordings.here() is None

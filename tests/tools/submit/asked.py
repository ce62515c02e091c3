"""A run file for the tests of this folder, and the text that an engine writes for the run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.tools.submit import job

VOLUME = ("image=registry/meshwright:1", "volume=runs")

RUN = "model: gpt2-mini\ndata: {source: stdlib}\nbatch: {global: 8}\nlayout: {data: {size: 4}}\n"


def text_of(engine: str, run: Path, settings: Sequence[str] = (), device: str = "cpu", nodes: int = 2) -> str:
    return written(engine, run, settings, [f"device={device}"], nodes)


def written(
    engine: str, run: Path, settings: Sequence[str] = (), words: Sequence[str] = (), nodes: int = 2,
    out: Path | None = None,
) -> str:  # fmt: skip
    """Return the text that an engine writes. Ray has no volume: runs are in a folder that all nodes see."""
    asked = job.engine_of(engine, settings)
    place = asked.out_of(out or (Path("/shared/first") if engine == "ray" else None), Path("first"))
    return asked.text(job.submission_of(asked, run, words, place, nodes))


def documents(kind: str, run: Path, *settings: str, **asked: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of("kubernetes", run, [*VOLUME, f"kind={kind}", *settings], **asked)))


def task_text(run: Path, *settings: str, **asked: Any) -> str:
    gpu = ["gpu=H100"] if asked.get("device") == "cuda" else []
    return text_of("skypilot", run, [*VOLUME, *gpu, *settings], **asked)


def task(run: Path, *settings: str, **asked: Any) -> dict[str, Any]:
    (written,) = yaml.safe_load_all(task_text(run, *settings, **asked))
    return written


def pods(tree: Any) -> list[dict[str, Any]]:
    """Return the specs of all pods in a document."""
    if isinstance(tree, dict):
        return [tree] if "containers" in tree else [pod for value in tree.values() for pod in pods(value)]
    return [pod for value in tree for pod in pods(value)] if isinstance(tree, list) else []


def containers(tree: Any) -> list[dict[str, Any]]:
    return [container for pod in pods(tree) for container in pod["containers"]]


def stub(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def with_stubs(folder: Path, **more: str) -> Mapping[str, str]:
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **more}

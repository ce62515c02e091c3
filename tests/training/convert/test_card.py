"""The card of an exported run, read by the Hub's client, and an upload to a server that answers the Hub's requests."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import run
from threading import Thread
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from meshwright.ranks.errors import DataError
from meshwright.training.checkpoint import Checkpoint
from meshwright.training.convert import export_folder, import_folder
from meshwright.training.convert.card import read_evaluations, write_card
from tests.families.llama.logits import hugging_face

LINE = {"task": "perplexity", "data": "held-out", "tokens": 9711, "perplexity_per_token": 329.8}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    hugging_face(folder / "hf", "qwen3")
    import_folder(folder / "hf", folder / "first" / "checkpoints" / "step-0")
    return folder / "first"


def test_the_card_has_config_evaluation_and_certificate(out: Path, tmp_path: Path) -> None:
    (out / "certificate.json").write_text("{}")
    (out / "card.yaml").write_text("claim: each step\n")
    checkpoint = export_folder(out, tmp_path / "hf")
    write_card(tmp_path / "hf", Checkpoint(checkpoint), [LINE])
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert card.data.library_name == "transformers"
    (result,) = card.data.eval_results or []
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("perplexity_per_token", 329.8, "held-out")
    config = card.text.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(config)["model"] == Checkpoint(checkpoint).config.model.model_dump(mode="json", by_alias=True)
    assert "claim: each step" in card.text
    assert (tmp_path / "hf" / "certificate.json").read_text() == "{}"


@pytest.mark.parametrize("text", ["[1]", '{"task": "x"}', "perplexity 3"])
def test_other_lines_are_no_evaluation(text: str, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"eval\.jsonl"):
        read_evaluations(tmp_path / "eval.jsonl")


class Hub(BaseHTTPRequestHandler):
    """A server for the requests of an upload without large files."""

    files: dict[str, bytes]
    created: dict[str, Any]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({"id": "me/model", "sha": "0" * 40, "siblings": [], "private": False})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/api/repos/create":
            self.created.update(json.loads(body), token=self.headers["authorization"])
            self.answer({"url": f"http://127.0.0.1:{self.server.server_port}/me/model"})  # type: ignore[attr-defined]
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://127.0.0.1:{self.server.server_port}/me/model/commit/{'0' * 40}"  # type: ignore[attr-defined]
            self.answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})
        else:
            self.answer({"errors": [], "warnings": []})  # the check of the card's first lines

    def answer(self, tree: dict[str, Any]) -> None:
        text = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def hub() -> Iterator[tuple[str, dict[str, bytes], dict[str, Any]]]:
    taking = type("Taking", (Hub,), {"files": {}, "created": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), taking)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taking.files, taking.created
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def exported(out: Path, folder: Path, endpoint: str, *words: str) -> Any:
    environment = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PATH": "/bin"}
    command = [sys.executable, "-m", "meshwright", "convert", "export", str(out), "--out", str(folder), *words]
    return run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_push_uploads_each_file(out: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text(json.dumps(LINE) + "\n")
    with hub() as (endpoint, files, created):
        words = ["--push", "me/model", "--private", "--evaluation", str(tmp_path / "eval.jsonl")]
        ended = exported(out, tmp_path / "hf", endpoint, *words)
    assert ended.returncode == 0, ended.stderr
    assert (created["name"], created["token"]) == ("model", "Bearer hf_x")
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "hf").iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= files.keys()


def test_an_upload_that_fails_says_so_and_keeps_the_folder(out: Path, tmp_path: Path) -> None:
    ended = exported(out, tmp_path / "hf", "http://127.0.0.1:9", "--push", "me/model")
    assert ended.returncode == 1
    assert "was not uploaded to me/model" in ended.stderr
    assert (tmp_path / "hf" / "model.safetensors").is_file()

"""Notes that threads leave for rank 0, through the job's store or a folder, while the step's threads do collectives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from meshwright.ranks import board as board_file
from meshwright.ranks.board import Board, FolderBoard, StoreBoard
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

THREE = Grid((("data", 3),))
ROUNDS = 20


def open_board(mesh: Mesh, folder: Path, kind: str) -> Board:
    return FolderBoard(folder) if kind == "folder" else mesh.transport.board(folder)


def told(mesh: Mesh, folder: Path, kind: str) -> tuple[list[list[str]], int]:
    """Post and collect notes in rounds, each with a sum; return rank 0's texts and number of `await_path` calls."""
    board, x = open_board(mesh, folder, kind), torch.ones(1000)

    def round_of(number: int) -> list[str]:
        board.post(f"{number}-{mesh.rank}.json", f"rank {mesh.rank}, round {number}" if mesh.rank != 1 else "")
        names = [f"{number}-{rank}.json" for rank in range(3)]
        return board.collect(names, 30) if mesh.rank == 0 else []

    with ThreadPoolExecutor(1) as threads, patch.object(board_file, "await_path", wraps=board_file.await_path) as looks:
        rounds = [threads.submit(round_of, number) for number in range(ROUNDS)]
        for _ in range(ROUNDS):
            mesh.world.all_reduce(x)
        texts = [each.result() for each in rounds]
    mesh.world.barrier()
    return texts, looks.call_count


@pytest.mark.parametrize("kind", ["store", "folder"])
def test_every_note_comes_once_and_beside_collectives(kind: str, tmp_path: Path) -> None:
    (texts, looks), *others = run_ranks(told, THREE, tmp_path, kind, transport="torch")
    assert texts == [[f"rank 0, round {number}", "", f"rank 2, round {number}"] for number in range(ROUNDS)]
    assert all(texts == [[]] * ROUNDS for texts, _ in others)
    assert looks == (0 if kind == "store" else 3 * ROUNDS)
    assert not list(tmp_path.iterdir()), "notes were left behind"


def missed(mesh: Mesh, folder: Path, kind: str) -> str:
    board = open_board(mesh, folder, kind)
    assert isinstance(board, FolderBoard) == (kind == "folder")
    assert kind == "folder" or isinstance(board, StoreBoard)
    if mesh.rank != 1:
        board.post(f"{mesh.rank}.json", "here")
    answer = ""
    if mesh.rank == 0:
        with pytest.raises(TimeoutError) as missing:
            board.collect([f"{rank}.json" for rank in range(3)], 0.5)
        answer = str(missing.value)
    mesh.world.barrier()
    return answer


@pytest.mark.parametrize("kind", ["store", "folder"])
def test_a_note_that_does_not_come_is_named(kind: str, tmp_path: Path) -> None:
    first, *_ = run_ranks(missed, THREE, tmp_path, kind, transport="torch")
    assert first.endswith("1.json was never finished")

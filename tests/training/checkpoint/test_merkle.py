"""The tree of a state: RFC 6962's hashes, and the names of leaves that differ."""

from __future__ import annotations

import hashlib

import pytest
import torch

from meshwright.training.checkpoint.merkle import Tree, node, tensor_leaf, text_leaf


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def test_the_root_of_seven_leaves_splits_at_powers_of_two() -> None:
    a, b, c, d, e, f, g = leaves = [sha(bytes([number])) for number in range(7)]
    left = sha(b"\1", sha(b"\1", a, b), sha(b"\1", c, d))
    assert node(leaves) == sha(b"\1", left, sha(b"\1", sha(b"\1", e, f), g))
    assert node(leaves[:1]) == a
    assert node([]) == sha()


def test_a_leaf_is_the_hash_of_name_dtype_shape_and_bytes() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, -0.0]])
    text = b"\0weight of w\0float32\x002,2\0" + values.numpy().tobytes()
    assert tensor_leaf("weight of w", values) == ("weight of w", sha(text))
    assert text_leaf("samples", "3") == ("samples", sha(b"\0samples\0text\0\x003"))


@pytest.mark.parametrize("other", [torch.tensor([1.0, 0.0]), torch.tensor([[1.0, -0.0]]), torch.ones(2).bfloat16()])
def test_another_sign_shape_or_dtype_is_another_leaf(other: torch.Tensor) -> None:
    assert tensor_leaf("w", torch.tensor([1.0, -0.0])) != tensor_leaf("w", other)


def test_marks_name_the_leaf_that_differs() -> None:
    tree = Tree.of([text_leaf("b", "1"), text_leaf("a", "1"), text_leaf("c", "1")])
    other = Tree.of([text_leaf("a", "1"), text_leaf("b", "2"), text_leaf("c", "1")])
    assert tree.names == ("a", "b", "c")
    assert other.root != tree.root
    assert other.unlike(tree.marks) == ("b",)
    assert tree.unlike(tree.marks) == ()
    assert tree.unlike(tree.marks[8:]) == tree.names, "another number of leaves"

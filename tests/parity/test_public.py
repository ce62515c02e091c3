"""Public mistakes, each a program of a few lines next to the right form; parity names the kind and the module."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.parity.check import collect, run_check

FOLDER = Path(__file__).resolve().parents[2] / "examples/parity/public"
ALL = "(all parameters)"
NAMED = {
    "attention_sink_norm": ("clipping", ALL),
    "bias_each_rank": ("scaled", "1"),
    "bias_share_gradient": ("scaled", "1"),
    "checkpoint_local_names": ("wrong part", "2"),
    "chunked_loss": ("missing reduction", "head"),
    "clip_generator": ("clipping", ALL),
    "contiguous_copy": ("missing reduction", "1"),
    "copies_in_norm": ("clipping", ALL),
    "cp_local_counts": ("token counts", "(loss)"),
    "cross_attention_group": ("wrong values", "attention"),
    "doubled_each_microbatch": ("wrong values", "2"),
    "embeddings_group": ("wrong values", "1"),
    "encoder_twice": ("wrong values", "encoder"),
    "expert_gradients": ("scaled", "experts.1"),
    "expert_norm": ("clipping", ALL),
    "expert_norm_mean": ("clipping", ALL),
    "expert_prescale": ("scaled", "experts.1"),
    "experts_to_local": ("missing reduction", "1"),
    "gathered_logits": ("wrong values", "(loss)"),
    "head_norm": ("missing reduction", "1.out_norm"),
    "labels_after_cut": ("wrong values", "(loss)"),
    "last_microbatch": ("missing reduction", ALL),
    "latent_twice": ("scaled", "1.norm"),
    "loss_parallel_log_softmax": ("wrong values", "(loss)"),
    "mtp_local_counts": ("token counts", "(loss)"),
    "muon_cut_matrix": ("cut update", "0"),
    "muon_each_microbatch": ("optimizer", "0"),
    "muon_off": ("optimizer", "0"),
    "muon_own_slice": ("missing reduction", ALL),
    "muon_then_clip": ("optimizer", ALL),
    "never_zeroed": ("accumulated", ALL),
    "packed_context_parallel": ("leak", "(the model)"),
    "padding_mask_group": ("wrong values", "1"),
    "partial_sum_gradient": ("scaled", "1"),
    "recomputed_over_data": ("wrong values", "1.body.0"),
    "plan_activation_left_out": ("missing reduction", "model.layers.1.mlp.act_fn"),
    "plan_buffer_left_empty": ("wrong values", "model.layers.0.mamba"),
    "plan_cut_before_conversion": ("wrong part", "model.L_module.layers.0.self_attn.q_proj"),
    "plan_head_norms_left_out": ("missing reduction", "layers.1.self_attn.k_norm"),
    "plan_hook_accumulates": ("accumulation", ALL),
    "plan_saved_otherwise": ("wrong part", "model.layers.0.mlp.experts"),
    "replica_means": ("scaled", ALL),
    "router_counts": ("wrong values", "1"),
    "router_scores": ("missing reduction", "experts.0"),
    "router_sentinels": ("wrong values", "experts.0"),
    "routing_bias": ("wrong buffer", "1"),
    "sequence_ranks_mean": ("scaled", ALL),
    "sequence_tokens": ("scaled", ALL),
    "shared_kv_biases": ("missing reduction", "1"),
    "shared_rotary_key": ("missing reduction", "1"),
    "stage_norm": ("clipping", ALL),
}
SHORT = ("expert_norm_mean", "muon_off", "plan_hook_accumulates", "router_sentinels")
"""Kinds that are rare in the tests of planted mistakes; all other kinds are long."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in NAMED]
)
def test_a_public_mistake_is_named(name: str) -> None:
    if name.startswith("plan_"):
        pytest.importorskip("transformers")
    right, wrong = (run_check(check) for check in collect(FOLDER / f"{name}.py"))
    assert right.holds, right.verdict
    assert wrong.finding is not None, "not seen"
    assert (wrong.finding.kind, wrong.finding.module) == NAMED[name]

    report = FOLDER / f"reports/{name}.md"
    if name.startswith("plan_"):
        assert wrong.verdict in report.read_text()


@pytest.mark.parametrize("report", sorted(FOLDER.glob("reports/*.md")), ids=lambda path: path.stem)
def test_a_report_has_its_program(report: Path) -> None:
    assert (FOLDER / f"{report.stem}.py").read_text() in report.read_text()


def test_every_program_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NAMED, "common"}


def test_documents_that_are_packed_alike_in_all_rows_are_no_wrong_data(tmp_path: Path) -> None:
    """Documents have equal numbers in all rows: values do not tell the rows and positions of a rank."""
    text = (FOLDER / "packed_context_parallel.py").read_text()
    alike = text.replace("torch.tensor([[1, 4], [2, 5], [3, 4], [1, 3]])", "torch.tensor([[2, 4]] * 4)")
    assert alike != text
    (tmp_path / "alike.py").write_text(alike)
    (tmp_path / "common.py").write_text((FOLDER / "common.py").read_text())
    right, wrong = (run_check(check) for check in collect(tmp_path / "alike.py"))
    assert right.holds, right.verdict
    assert wrong.finding is not None
    assert (wrong.finding.kind, wrong.finding.module) == NAMED["packed_context_parallel"]

"""The register of a library's plans: right plans pass, wrong plans are named, and an interrupted register continues."""

from __future__ import annotations

import copy
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshwright.parity import ParityResult, collect, register, registered, run_check
from meshwright.parity.check import ParityCheck
from meshwright.parity.command import run_words
from meshwright.parity.register import Entry, reason_of
from meshwright.parity.registered import same_weights
from meshwright.parity.tiny import samples_of, small_config, small_model, terms_of
from meshwright.ranks.errors import ConfigError, ParityError

REGISTER = ["register", "transformers"]
CONDITIONS = ("plain", "accumulated", "clipped")


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    return {told["model_type"]: told for told in map(json.loads, (folder / "register.jsonl").read_text().splitlines())}


def test_a_register_of_tensor_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transformers 5.24 no rank sums the gradient of apertus' activation, and the norms of Qwen3's heads are summed
    again in the second of two backward passes."""
    words = [*REGISTER, "--conditions", "plain", "--out", str(tmp_path)]
    types, tried = ("apertus", "granite", "qwen3"), []
    checks = [found for found in register.checks_of(["tensor"], "") if found[0] in types]

    def count(check: ParityCheck) -> ParityResult:
        tried.append(check.words)
        return run_check(check)

    monkeypatch.setattr(register, "run_check", count)
    monkeypatch.setattr(register, "checks_of", lambda *_: checks)
    assert run_words(words) == 1
    assert tried == [*types]
    found = entries(tmp_path)
    assert (found["granite"]["verdict"], found["granite"]["text"]) == ("passes", "")
    assert [(found[each]["verdict"], found[each]["kind"]) for each in ("apertus", "qwen3")] == [
        ("fails", "missing reduction"), ("fails", "accumulation")
    ]  # fmt: skip
    assert found["apertus"]["module"].endswith("mlp.act_fn")
    said = capsys.readouterr().out
    assert "| tensor | 3 | 1 | 2 | 0 | 0 | " in said
    assert "3 of 3 have a verdict (100.0 %)" in said
    assert "missing reduction at model.layers.1.mlp.act_fn" in (tmp_path / "register.html").read_text()
    # The last line is lost, and another line is from another version: both are tried again.
    lines = (tmp_path / "register.jsonl").read_text().splitlines()
    other = lines[0].replace(found["apertus"]["library"], "transformers 0.1")
    (tmp_path / "register.jsonl").write_text(f"{other}\n{lines[1]}\n")
    assert run_words(words) == 1
    assert tried == [*types, "apertus", "qwen3"]


def test_a_folder_that_gives_another_model_is_no_verdict() -> None:
    model = torch.nn.Linear(3, 2)
    same_weights(model, copy.deepcopy(model))
    other = copy.deepcopy(model)
    other.bias.data += 1
    with pytest.raises(ParityError, match="bias is another after saving and reading, without a plan"):
        same_weights(model, other)


def test_sections_of_positions_fit_the_head() -> None:
    """Text models of Qwen2-VL and GLM-4V cut a head by sections."""
    assert small_config(CONFIG_MAPPING["qwen2_vl_text"]).rope_parameters["mrope_section"] == [1, 1, 2]


@pytest.mark.long
def test_conditions_have_verdicts_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3's plan is wrong with microbatches alone; a clipped step is right. Doge's mask is not cut like the heads:
    the plan raises, and other conditions would raise as well."""
    types = ("qwen3", "doge")
    checks = [found for found in register.checks_of(["tensor"], "", CONDITIONS) if found[0] in types]
    monkeypatch.setattr(register, "checks_of", lambda *_: checks)
    assert run_words([*REGISTER, "--out", str(tmp_path)]) == 1
    assert "| tensor, clipped | 1 | 1 | 0 | 0 | 1 | " in capsys.readouterr().out
    lines = map(json.loads, (tmp_path / "register.jsonl").read_text().splitlines())
    found = {(told["model_type"], told["plan"]): told for told in lines}
    assert {key: told["verdict"] for key, told in found.items()} == {
        ("qwen3", "tensor"): "fails",
        ("qwen3", "tensor, accumulated"): "fails",
        ("qwen3", "tensor, clipped"): "passes",
        ("doge", "tensor"): "fails",
    }
    assert found["qwen3", "tensor, accumulated"]["module"].endswith("self_attn.k_norm")
    assert found["qwen3", "tensor, accumulated"]["kind"] == found["qwen3", "tensor"]["kind"] == "accumulation"
    doge = found["doge", "tensor"]
    assert (doge["kind"], doge["module"].partition(":")[0]) == ("raises", "modeling_doge.py")


@pytest.mark.parametrize(
    "plan, kind, module",
    [("tensor", "raises", "tensor_parallel.py"), ("fsdp", "missing reduction", "(all parameters)")],
)
def test_adapters_under_plans(plan: str, kind: str, module: str) -> None:
    """peft 0.21.2 gives the linears of an adapter a rank's sizes, which transformers 5.24 takes for the whole's. After
    fully_shard, no rank averages the gradients of adapters."""
    pytest.importorskip("peft")
    (check,) = (found for name, found, _ in register.checks_of([plan], "granite", ["lora"]) if name == "granite")
    entry = Entry.of("granite", run_check(check), "transformers")
    assert (entry.verdict, entry.kind, entry.module.partition(":")[0]) == ("fails", kind, module)


def test_an_adapter_that_is_lost_without_a_plan_says_nothing_of_the_plan() -> None:
    """An adapter inside Inkling 2's k_proj has other values after saving and reading."""
    pytest.importorskip("peft")
    (check,) = (found for name, found, _ in register.checks_of(["tensor"], "inkling2_text", ["lora"]))
    entry = Entry.of("inkling2_text", run_check(check), "transformers")
    assert entry.verdict == "does not run"
    assert "lora_A.default.weight is another after saving and reading, without a plan" in entry.text


def test_adapters_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs peft, which is not installed"):
        list(register.checks_of(["tensor"], "granite", ["lora"]))


@pytest.mark.parametrize("condition", ["resumed", "resumed-distributed"])
def test_a_model_goes_on_from_its_own_checkpoint(condition: str) -> None:
    (check,) = (found for name, found, _ in register.checks_of(["tensor"], "granite", [condition]) if name == "granite")
    entry = Entry.of("granite", run_check(check), "transformers")
    assert (entry.verdict, entry.text) == ("passes", "")


class Kept(torch.nn.Linear):
    """A model that saves in several files, and reads with a wrong number in the bias."""

    config, off, files = None, 0.0, 2

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        folder.mkdir()
        for number in range(self.files):
            (folder / f"{number}.safetensors").touch()


@pytest.mark.parametrize(
    "off, files, error",
    [(0.0, 2, None), (0.0, 1, "the checkpoint has 1 file"), (1.0, 2, "bias is another after saving and reading")],
)
def test_what_a_checkpoint_loses_is_named(
    off: float, files: int, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, taken = Kept(2, 3), []
    model.weight.data[0] = float("nan")  # NaN is kept like a number
    model.files = files

    def again(*_: Any) -> Kept:
        other = copy.deepcopy(model)
        other.bias.data += off
        return other

    def step(model: Any, batch: Any) -> torch.Tensor:
        taken.append(model)
        return torch.zeros(())

    monkeypatch.setattr(registered, "read", again)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    resume, models = registered.resumed_step(step, tmp_path / "third", {}, False), {"": model}
    with nullcontext() if error is None else pytest.raises(ParityError, match=error):
        resume(models, None)
        resume(models, None)
        assert taken[0] is model
        assert taken[1] is models[""] is not model


def test_a_lost_tensor_is_a_failure_of_its_module() -> None:
    (check,) = [check for _, check, _ in register.checks_of(["fsdp"], "granitemoehybrid", ["resumed"])]
    error = f"rank 0 failed: layers.0.conv.weight {registered.ANOTHER}"
    entry = Entry.of("x", ParityResult(check, "float32", 1.0, error=error), "transformers")
    assert (entry.verdict, entry.kind, entry.module) == ("fails", "checkpoint", "layers.0.conv")
    assert entry.text == error.partition(": ")[2]


def test_a_refusal_is_a_verdict_and_a_model_that_does_not_run_is_none() -> None:
    (check,) = [check for _, check, _ in register.checks_of(["tensor4-heads"], "granitemoehybrid")]
    errors = ("rank 1 failed: raises under the plan: RuntimeError at modeling_x.py:7: 2 heads", "ValueError: no sizes")
    results = [ParityResult(check, "float32", 2.0, error=error) for error in errors]
    *rows, last = register.table_of([Entry.of("x", each, "transformers", refuses=True) for each in results], Counter())
    assert rows[2:] == ["| tensor4-heads | 2 | 0 | 0 | 2 | 0 | 2.0 | 4 |"]
    assert last.startswith("1 of 2 have a verdict (50.0 %)")
    assert last.endswith("; 4 s")


def test_a_refusal_is_no_mistake() -> None:
    (check,) = [check for _, check, _ in register.checks_of(["tensor4-heads"], "granitemoehybrid")]
    error = "rank 1 failed: raises under the plan: RuntimeError at modeling_x.py:7: 2 heads for 4 ranks"
    result = ParityResult(check, "float32", 1.0, error=error)
    for refuses, verdict in ((True, "does not run"), (False, "fails")):
        entry = Entry.of("x", result, "transformers", refuses)
        assert (entry.verdict, entry.text) == (verdict, error.partition(": ")[2])


@pytest.mark.parametrize(
    "model_type, names",
    [
        ("granite", ("input_ids",)),
        ("llama4_vision_model", ("pixel_values",)),
        ("ernie4_5_vl_moe_vision", ("hidden_states", "grid_thw")),
        ("t5gemma2_decoder", ("input_ids", "encoder_hidden_states")),
        ("voxtral_realtime_text", ("input_ids", "t_cond")),
        ("qwen3_omni_moe_talker_code_predictor", ("inputs_embeds",)),
        ("t5_gemma_module", ("input_ids", "decoder_input_ids")),
    ],
)
def test_samples_are_those_that_a_forward_reads(model_type: str, names: tuple[str, ...]) -> None:
    """A part of a composite type without a separate model is tried inside the composite's model."""
    model, found = small_model(model_type)
    assert found == names
    samples = samples_of(model, found, torch.Generator(), rows=6)
    assert all(len(x) % 6 == 0 for x in samples.values())  # each rank has an equal share of images and rows


@pytest.mark.parametrize(
    "model_type, length",
    [
        ("dbrx", None),  # reads a field that the configuration lacks
        ("xlnet", None),  # positions without an end
        ("reformer", 12),  # positions of two axes; the product of the sizes is the samples' length
        # Refuses several sizes at once. Takes 9 s, as each try draws the weights of a large model.
        pytest.param("mamba2", None, marks=pytest.mark.long),
        ("zamba2", None),  # layers of a kind share weights
        ("dots3_note_text", None),  # sliding layers have other sizes, and a configuration refuses to name one
        ("muse_spark", None),  # a tuple of widths
        ("blt", None),  # no separate width
    ],
)
def test_a_small_model_of_a_class_with_rules_of_its_own(model_type: str, length: int | None) -> None:
    model, names = small_model(model_type)
    assert names == ("input_ids",)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert length is None or samples_of(model, names, torch.Generator())["input_ids"].shape[1] == length


def test_an_id_behind_the_last_class_is_the_last_class() -> None:
    """Moshi's table of ids has one row more than the head has classes."""
    model, names = small_model("moshi")
    samples = samples_of(model, names, torch.Generator())
    losses = []
    for last in (63, 64):
        samples["input_ids"][:, -1] = last
        losses.append(terms_of(model, samples)[-1])
    assert torch.equal(*losses)


def test_a_small_model_has_a_layer_of_each_kind() -> None:
    config = small_config(CONFIG_MAPPING["kimi_linear"])
    assert (config.layer_types, config.mlp_layer_types) == (
        ["linear_attention", "full_attention"], ["dense", "sparse"]
    )  # fmt: skip


def test_the_fsdp_plan_of_all_types_is_tried_where_a_type_has_another() -> None:
    found = [model_type for model_type, *_ in register.checks_of(["fsdp"], "")]
    assert {"gpt2", "qwen3", "gemma4_vision"} <= set(found)
    assert "resnet" not in found


def test_expert_plans_are_of_types_with_experts() -> None:
    found = [model_type for model_type, *_ in register.checks_of(["expert"], "qwen3")]
    assert "qwen3_moe" in found
    assert "qwen3" not in found


@pytest.mark.parametrize("name", sorted(register.CHECKS.values()))
def test_a_library_of_functions_has_the_case_that_its_line_names(name: str) -> None:
    """The modules of checks are read without importing the libraries."""
    plans = ["tensor", "fsdp", "tensor-fsdp"]
    found = list(register.function_checks(name, plans, "qwen3"))
    assert {check.name for _, check, _ in found} == set(plans)
    for model_type, check, _ in found:
        case = collect(check.file)[check.case]
        assert case.words == f"{check.name}-{model_type}"


def test_experts_are_of_models_with_experts() -> None:
    found = [model_type for model_type, _, _ in register.function_checks("registered_titan", ["expert"], "qwen3")]
    assert found == ["qwen3_moe", "qwen3_5_moe"]


@pytest.mark.parametrize(
    "library, package, model_type",
    [("torchtitan", "torchtitan.models.qwen3", "qwen3"), ("automodel", "nemo_automodel.components", "qwen3")],
)
@pytest.mark.parametrize("plan", ["tensor", "fsdp"])
def test_a_function_passes(library: str, package: str, model_type: str, plan: str) -> None:
    pytest.importorskip(package)
    checks = register.function_checks(register.CHECKS[library], [plan], model_type)
    (check,) = (check for found, check, _ in checks if found == model_type)
    result = run_check(check)
    assert result.holds, result.verdict


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"automodel.*is not installed.*pip install nemo_automodel"):
        run_words(["register", "automodel", "--out", str(tmp_path)])


def test_wrong_words_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--plans.*sideways.*tensor, tensor4, tensor4-heads, expert"):
        run_words([*REGISTER, "--plans", "sideways", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"--conditions.*upside.*plain, accumulated, clipped"):
        run_words([*REGISTER, "--conditions", "upside", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"--plans.*sideways.*tensor, fsdp"):
        list(register.function_checks("registered_titan", ["sideways"], ""))
    with pytest.raises(ConfigError, match=r"--only.*no_such_type"):
        run_words([*REGISTER, "--only", "no_such_type", "--out", str(tmp_path)])


def test_a_reason_is_the_exception() -> None:
    text = "rank 0 failed: Traceback\n  File x\n    raise y\nValueError: too small\n(the job had been restarted 1 time)"
    assert reason_of(text) == "ValueError: too small"
    assert reason_of("rank 0 failed: memory ended") == "rank 0 failed: memory ended"


def test_a_file_of_checks_has_dataclasses_with_annotations_as_text(tmp_path: Path) -> None:
    file = tmp_path / "checks.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import torch\n"
        "import meshwright.parity as parity\n"
        "@dataclass\n"
        "class Sizes:\n"
        "    width: int = 4\n"
        "@parity.check(ranks=2)\n"
        "def right(job):\n"
        "    model = torch.nn.Linear(Sizes().width, 3)\n"
        "    job.reference(model, lambda m, x: m(x).square().mean(), lambda g: torch.randn(4, 4, generator=g))\n"
        "    job.parallel(torch.nn.parallel.DistributedDataParallel(job.copy()), batch=job.rows('data'))\n"
    )
    (check,) = collect(file)
    assert run_check(check).verdict == "equal to the reference"


IN_OTHER_ROWS = """
import torch
from torch import nn
from torch.nn.functional import linear
import meshwright.parity as parity

class Experts(nn.Module):
    def __init__(self, roll):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 8))
        self.act = nn.Sequential(nn.GELU())
        self.roll, self.lost = roll, 0
    def forward(self, x):
        taken = x.roll(self.roll, 1)  # as tokens of other ranks
        given = linear(self.act(linear(taken, self.up)), self.down)
        return given.roll(-self.roll + self.lost, 1)

@parity.check(ranks=2).parametrize("lost", [0, 1])
def experts(job, lost):
    model = nn.Sequential(nn.Linear(4, 4), Experts(0), nn.Linear(4, 3))
    job.reference(model, lambda m, x: m(x).square().mean(), lambda g: torch.randn(4, 6, 4, generator=g))
    model = job.copy()
    model[1].roll, model[1].lost = 1, lost
    job.parallel(nn.parallel.DistributedDataParallel(model), batch=job.rows("data"))
"""


def test_a_module_may_get_its_samples_in_another_arrangement(tmp_path: Path) -> None:
    """DeepSeek V4's experts multiply other tokens on each rank. The module around the experts gives the right
    output."""
    file = tmp_path / "checks.py"
    file.write_text(IN_OTHER_ROWS)
    right, wrong = (run_check(check) for check in collect(file))
    assert right.verdict == "equal to the reference"
    assert wrong.finding is not None
    assert wrong.finding.module == "1"


LOADED_OTHERWISE = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
import meshwright.parity as parity

@parity.check(ranks=2)
def interleaved(job):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    job.reference(model, lambda m, x: m(x).square().mean(), lambda g: torch.randn(4, 4, generator=g))
    model, whole = job.copy(), job.copy()
    fully_shard(model, mesh=job.device_mesh)
    rows = [[0, 1, 4, 5], [2, 3, 6, 7]][job.rank]  # each rank's half of two tensors, which were then joined
    with torch.no_grad():
        model[0].weight.to_local().copy_(whole[0].weight[rows])
    job.parallel(model, batch=job.rows("data"))
"""


def test_a_dtensor_that_holds_another_part_than_its_placements_say_is_named(tmp_path: Path) -> None:
    """transformers cuts the tensors of a file before joining: each rank has a half of each."""
    file = tmp_path / "checks.py"
    file.write_text(LOADED_OTHERWISE)
    (check,) = collect(file)
    finding = run_check(check).finding
    assert finding is not None
    assert (finding.kind, finding.module) == ("wrong part", "0")
    assert "rank 0 holds [0:2,4:6, :] of 0.weight, whose placements say [0:4, :]" in finding.text


IN_MICROBATCHES = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import meshwright.parity as parity

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(4, 8), nn.Linear(8, 4), nn.GELU()
    def forward(self, x):
        order = x[:, 0].argsort()  # as tokens by their experts, in each microbatch by themselves
        return self.down(self.act(self.up(x[order])))[order.argsort()]

def losses(model, batch):
    return cross_entropy(model(batch["x"]), batch["labels"], reduction="none")

def mean(model, batch):
    return losses(model, batch).sum() / (batch["labels"] >= 0).sum()

def batch_of(g):
    labels = torch.randint(0, 3, (8,), generator=g)
    labels[:3] = -100  # one microbatch has a label, the other four
    return {"x": torch.randn(8, 4, generator=g), "labels": labels}

@parity.check(ranks=2).parametrize("again", [False, True])
def experts(job, again):
    job.reference(nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 3)), mean, batch_of, labels=None)
    model = job.copy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(model, batch):
        total = 0.0
        for n in range(2):
            part = {name: x.chunk(2)[n] for name, x in batch.items()}
            loss = losses(model, part).sum() / (batch["labels"] >= 0).sum()
            loss.backward()
            total += float(loss.detach())
            if again and n == 0:
                model[0].weight.grad *= 2  # as a second sum over two ranks of what both have
        optimizer.step()
        optimizer.zero_grad()
        return torch.tensor(total)
    job.parallel(model, step=step)
"""


def test_experts_in_microbatches_hide_no_mistake(tmp_path: Path) -> None:
    """Inside experts, each microbatch's tokens are sorted separately: this is another arrangement, and no mistake. A
    first microbatch that counts twice is a finding, also with unequal numbers of labels."""
    file = tmp_path / "checks.py"
    file.write_text(IN_MICROBATCHES)
    right, wrong = (run_check(check) for check in collect(file))
    assert right.verdict == "equal to the reference"
    assert wrong.finding is not None
    assert (wrong.finding.kind, wrong.finding.module) == ("accumulation", "0")
    assert "is the sum with microbatch 1 of rank 0 2 times" in wrong.finding.text


NOT_A_NUMBER = """
import torch
from torch import nn
import meshwright.parity as parity

class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(4), persistent=False)
    def forward(self, x):
        return x * self.factor

def without_last(model, x):
    return model(x)[:, :-1].square().mean()  # the last positions get no gradient

@parity.check(ranks=2)
def empty_buffer(job):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity(), Times(), nn.Linear(4, 3))
    samples = lambda g: torch.cat([torch.zeros(4, 1, 4), torch.randn(4, 5, 4, generator=g)], 1)
    job.reference(model, without_last, samples)
    model = job.copy()
    model[2].factor.fill_(float("nan"))
    job.parallel(model, batch=job.rows("data"))
"""


def test_what_is_not_a_number_is_named_where_it_comes_from(tmp_path: Path) -> None:
    """A row of zeros looks like padding of a module with routed rows, and rows with a gradient alone are compared.
    Falcon-H1's buffer makes all gradients NaN."""
    file = tmp_path / "checks.py"
    file.write_text(NOT_A_NUMBER)
    (check,) = collect(file)
    finding = run_check(check).finding
    assert finding is not None
    assert (finding.kind, finding.module) == ("wrong values", "2")

"""Unchanged scripts under `meshwright adopt` run without values; planted scripts ask for absent values."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.planner.adopt.adopted import by_phase, hidden_flops, read
from meshwright.planner.adopt.edits import edits_of, with_tensor_plan
from meshwright.planner.adopt.job import AdoptError, Question, adopt, run_rank, run_ranks
from meshwright.planner.adopt.lanes import GroupNetwork, grid_of, step_times
from meshwright.planner.adopt.planned import plan
from meshwright.planner.adopt.recorder import Collective, Copy, Entry, Sync
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.recorder import Kernel
from meshwright.planner.plan.timing import Timer
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.fake_world import RECEIVE, Sending
from tests.command_line import environment_for, meshwright
from tests.patience import PATIENCE_SECONDS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/adopt"
CLUSTER = load_cluster("dgx-h100")
SMALL = ("--layers", "2", "--width", "64", "--heads", "4", "--block_size", "32", "--vocabulary", "256")

HEAD = """
import torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
for step in range(4):
    loss = model(torch.randn(6, 8).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def adopted(folder: Path, text: str) -> tuple[Question, Path]:
    script = folder / "script.py"
    script.write_text(text)
    return Question(script, (), CLUSTER, 1), folder / "out"


def test_a_script_that_reads_a_value_is_told_the_line(tmp_path: Path) -> None:
    question, out = adopted(tmp_path, HEAD + LOOP + "    if loss.item() > 0.5:\n        print('large')\n")
    facts = run_rank(question, 0, out)
    assert [(note.kind, note.where) for note, _ in facts.unseen] == [("value", "script.py:13")]
    # Two linears: 2 x rows x inputs x outputs, forward; the first has no gradient of the input.
    forward, first = 2 * 6 * (8 * 16 + 16 * 4), 2 * 6 * 8 * 16
    assert facts.flops == 3 * forward - first
    assert facts.parameters == 8 * 16 + 16 + 16 * 4 + 4
    assert facts.memory.parts["weights"] == 4 * facts.parameters
    assert sum(facts.memory.parts.values()) == facts.memory.allocated
    assert read(out).entries == facts.entries


STARTER = """
import multiprocessing
import subprocess
import sys
import threading
subprocess.run([sys.executable, "-c", "1"])
def work():
    return 1
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def test_processes_and_threads_of_a_script_are_told_with_their_lines(tmp_path: Path) -> None:
    question, out = adopted(tmp_path, STARTER + HEAD + LOOP)
    facts = run_rank(question, 0, out)
    said = [(note.where, note.text.partition(" is started")[0]) for note, _ in facts.unseen if note.kind == "process"]
    assert said == [("script.py:6", "a process"), ("script.py:11", "a process"), ("script.py:14", "a thread")]


@pytest.mark.parametrize(
    "text, said",
    [
        (HEAD + "print(model(torch.randn(6, 8).to(device)).sum())", "took no step: no optimizer stepped"),
        ("print('no model')", "took no step: no torch optimizer was made"),
        (HEAD + "raise ValueError('a mistake')", "script.py:7: ValueError: a mistake"),
        (
            "import urllib.request\nurllib.request.urlopen('http://example.org/weights')",
            "example.org is not asked: nothing is downloaded",
        ),
        (
            "from transformers import AutoConfig\nAutoConfig.from_pretrained('someone/some-model')",
            "someone/some-model",
        ),
    ],
    ids=["never steps", "no model", "crashes", "downloads", "the Hub"],
)  # fmt: skip
def test_a_script_that_cannot_be_adopted_says_why(text: str, said: str, tmp_path: Path) -> None:
    question, out = adopted(tmp_path, text)
    with pytest.raises(AdoptError) as raised:
        run_rank(question, 0, out)
    assert said in str(raised.value)


def test_ctrl_c_ends_the_script_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(10_000)\n")
    # A background job of a shell ignores Ctrl-C, and the job's children do so as well.
    command = ["env", "--default-signal=INT", sys.executable]
    command += ["-m", "meshwright.cli", "adopt", "--out", "out", "script.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment_for(tmp_path), stderr=subprocess.PIPE, start_new_session=True
    )
    output, end = tmp_path / "out/output.txt", time.monotonic() + PATIENCE_SECONDS
    while not (output.is_file() and "begun" in output.read_text()):
        assert time.monotonic() < end
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) != 0
    while any(psutil.pid_exists(int(child)) for child in children):  # killed, and not yet taken away by the system
        assert time.monotonic() < end
        time.sleep(0.1)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read().decode()
    process.stderr.close()


def test_the_command_writes_facts_a_page_and_a_check(tmp_path: Path) -> None:
    words = ("--edits", "1", "--out", "out", "--json", str(EXAMPLES / "gpt.py"), *SMALL, "--batch_size", "4")
    ran = meshwright(tmp_path, "adopt", *words)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["planned"]["seconds"] > 0
    assert answer["edits"][0]["title"] == "batch x 2"
    once, twice = (
        answer["adopted"]["0"]["flops"],
        json.loads((tmp_path / "out/edits/batch-x-2/adopted.json").read_text()),
    )
    assert twice["flops"] == 2 * once
    page = (tmp_path / "out/adopted.html").read_text()
    assert "blocks.1.attention.qkv" in page
    assert "http" not in page
    ast.parse((tmp_path / "out/test_adopted.py").read_text())


def test_fsdp_holds_a_share_and_gathers_under_computation(tmp_path: Path) -> None:
    words = ("--size", "tiny", "--sequence", "32")
    facts = run_rank(Question(EXAMPLES / "fsdp.py", words, CLUSTER, 8), 0, tmp_path)
    assert facts.memory.parts["weights"] * 8 == 4 * facts.parameters
    sums = {c.verb: c for c in facts.collectives if c.phase == "backward"}
    assert sums["reduce_scatter"].payload_bytes == 4 * facts.parameters
    assert sums["all_gather"].under_flops > 0
    assert sums["all_gather"].ranks == tuple(range(8))
    # The gather of layer 1 is issued after the kernels of layer 0, and waits for none of these.
    (gathers,) = (c for c in facts.collectives if (c.verb, c.phase) == ("all_gather", "forward"))
    first = sum(m.forward_flops for m in facts.modules if m.path.startswith("model.layers.0."))
    assert gathers.under_flops == first > 0


def test_computation_hides_a_collective_by_the_events_of_streams() -> None:
    def gather(number: int, awaited: int) -> list[Entry]:
        sending = Sending("all_gather", 4096, (0, 1))
        events: list[tuple[int, Sync | Collective]] = [
            (1, Sync("await", awaited)), (1, Collective(sending, number)), (1, Sync("wait", number)),
            (1, Sync("record", 10 + number)), (0, Sync("await", 10 + number)),
        ]  # fmt: skip
        return [Entry(event, "forward", -1, stream) for stream, event in events]

    def main(event: Kernel | Sync) -> Entry:
        return Entry(event, "forward", -1, 0)

    before, behind = main(Sync("record", 1)), main(Sync("record", 2))
    work, more = main(kernel(5.0)), main(kernel(3.0))
    assert hidden_flops([before, work, behind, *gather(1, 1), more]) == {1: 5.0}
    assert hidden_flops([before, work, behind, *gather(1, 2), more]) == {1: 0.0}
    # A value that the host reads ends all kernels that were issued before.
    read = main(Sync("host", 0))
    assert hidden_flops([before, work, read, more, *gather(1, 1)]) == {1: 3.0}
    # The second gather of a group follows the first.
    begin, *rest = gather(1, 2)
    assert hidden_flops([before, work, behind, begin, *rest[:2], more, *gather(2, 1)]) == {1: 3.0, 2: 3.0}


@pytest.mark.parametrize("script, told", [("none.py", "is no file"), ("--nproc", "is no option of this command")])
def test_a_script_that_is_none_is_refused(script: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"SCRIPT={script} {told}; valid: a Python script"):
        adopt(Question(Path(script), (), CLUSTER, 1), 0, lambda *_: None)


def test_a_mean_over_groups_of_ranks_is_on_axes_of_a_grid() -> None:
    for ranks, world in (((0, 1, 2, 3), 8), ((0, 2, 4, 6), 8), ((0, 1, 4, 5), 16), ((1, 3), 4)):
        grid, axes = grid_of(ranks, world)
        first = grid.group(0, *axes.split("+"))
        assert [rank - first[0] for rank in first] == [rank - ranks[0] for rank in ranks]
    with pytest.raises(ConfigError, match="equal distances"):
        grid_of((0, 1, 3), 4)


def kernel(flops: float) -> Kernel:
    return Kernel("product", flops, 1, 1, "bf16", 4096.0)


def test_a_sum_that_nobody_waits_for_hides_under_kernels() -> None:
    sending = Sending("all_reduce", 10**8, tuple(range(8)))
    begin, wait = Entry(Collective(sending, 1), "backward", -1, 0), Entry(Sync("wait", 1), "backward", -1, 0)
    work = Entry(kernel(5e12), "backward", -1, 0)
    timer, network = Timer(CLUSTER, 8), GroupNetwork(CLUSTER, 8)

    def seconds(*entries: Entry) -> float:
        return step_times({0: entries}, {}, timer, network, CLUSTER)[0].seconds

    alone, sent = seconds(work), network.seconds(sending, 0)
    tax = sent * 0.189 / 1.189
    assert seconds(begin, wait, work) == pytest.approx(alone + sent, rel=1e-2)
    assert seconds(begin, work, wait) == pytest.approx(alone + tax, rel=1e-2)


LAYERS = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

model = nn.Sequential(*(Layer() for _ in range(3))).to(device)
"""


def test_edits_change_the_lines_that_they_name(tmp_path: Path) -> None:
    loop = LOOP.replace("6, 8", "batch_size, 8").replace("\nfor", "\nbatch_size = 6\nfor")
    made = "optimizer = "
    question, out = adopted(tmp_path, HEAD.replace(made, LAYERS + made) + loop)
    facts = run_rank(question, 0, out)
    titles = {edit.title: edit for edit in edits_of(question.script, (), facts, 1)}
    assert "+batch_size = 12" in titles["batch x 2"].diff
    edit = titles["recompute layers"]
    assert edit.source is not None
    ast.parse(edit.source)
    after = run_rank(question, 0, tmp_path / "edited", edit)
    assert any(entry.phase == "recompute" for entry in after.entries)
    assert not any(entry.phase == "recompute" for entry in facts.entries)
    # One step each: torch leaves a recomputed module by an exception.
    assert (after.step, after.microbatches) == (facts.step, facts.microbatches)
    assert by_phase(after)["forward"] == by_phase(facts)["forward"]


def test_offloaded_activations_are_copied_to_the_host_and_back(tmp_path: Path) -> None:
    made = "optimizer = "
    question, out = adopted(tmp_path, HEAD.replace(made, LAYERS + made) + LOOP)
    before = run_rank(question, 0, out)
    (edit,) = (e for e in edits_of(question.script, (), before, 1) if e.title == "offload activations")
    after = run_rank(question, 0, tmp_path / "edited", edit)
    copies = [entry.event for entry in after.entries if isinstance(entry.event, Copy)]
    sizes = [sum(c.payload_bytes for c in copies if c.to_host == to_host) for to_host in (True, False)]
    # Each layer saves the input, relu's result twice and the second weight; the first layer's input has no gradient, so
    # that the first weight is saved by two layers. The loader's batch is copied to the device as well.
    saved = 3 * 4 * (6 * 8 + 2 * 6 * 32 + 8 * 32) + 2 * 4 * 8 * 32
    assert sizes == [saved, saved + 4 * 6 * 8]
    assert after.memory.parts["activations"] < before.memory.parts["activations"]
    assert after.memory.host > before.memory.host
    assert not any(note.kind == "kernel" for note, _ in after.unseen)


LOADED = """
import os
import torch
from transformers import LlamaConfig, LlamaForCausalLM
path = os.path.join(os.path.dirname(__file__), "small")
model = LlamaForCausalLM.from_pretrained(path).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
TOKENS = """
for step in range(4):
    ids = torch.randint(256, (4, 32)).to("cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_tensor_parallel_plan_is_an_edit_of_the_call_that_loads(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=128, vocab_size=256, use_cache=False)).save_pretrained(
        tmp_path / "small"
    )
    script = tmp_path / "script.py"
    script.write_text(LOADED + TOKENS)
    question = Question(script, (), CLUSTER, 2)
    before = run_rank(question, 0, tmp_path / "before")
    (edit,) = (e for e in edits_of(script, (), before, 2) if e.title == "tensor-parallel plan")
    changed = [row for row in edit.diff.splitlines() if row[:1] in "+-" and row[:3] not in ("+++", "---")]
    loads = 'LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2)).to("cuda")'
    assert changed == [
        "+from transformers.distributed import DistributedConfig",
        '-model = LlamaForCausalLM.from_pretrained(path).to("cuda")',
        "-optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
        f"+model = {loads}",
        "+optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)",
    ]
    after = run_rank(question, 0, tmp_path / "after", edit)
    # All matrices are halved; the five norms of 64 weights are whole.
    whole = 4 * 5 * 64
    assert after.memory.parts["weights"] == (before.memory.parts["weights"] - whole) // 2 + whole
    assert before.sent_bytes == 0
    # Products and attention are halved.
    assert by_phase(after) == {phase: flops / 2 for phase, flops in by_phase(before).items()}
    # Two sums of the stream (4 x 32 x 64 float32) a layer, and one of the embedding's rows.
    forward = next(c for c in after.collectives if (c.verb, c.phase) == ("all_reduce", "forward"))
    assert (forward.calls, forward.payload_bytes) == (5, 5 * 4 * 32 * 64 * 4)
    assert not any(e.title == "tensor-parallel plan" for e in edits_of(script, (), before, 1))
    assert not any(e.title == "tensor-parallel plan" for e in edits_of(script, (), after, 2))


MADE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer
config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                     intermediate_size=128, vocab_size=256, use_cache=False)
model = AutoModelForCausalLM.from_config(
    config
).to("cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("head", [MADE, LOADED.replace('"cuda"', '"cpu"')], ids=["made", "loaded"])
def test_a_tensor_parallel_plan_on_the_host(head: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, intermediate_size=128, vocab_size=256, use_cache=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    script = tmp_path / "script.py"
    script.write_text(head + TOKENS.replace('"cuda"', '"cpu"'))
    question = Question(script, (), CLUSTER, 2, "cpu")
    before = run_rank(question, 0, tmp_path / "before")
    (edit,) = (e for e in edits_of(script, (), before, 2) if e.title == "tensor-parallel plan")
    after = run_rank(question, 0, tmp_path / "after", edit)
    whole = 4 * 5 * 64
    assert after.memory.parts["weights"] == (before.memory.parts["weights"] - whole) // 2 + whole
    assert by_phase(after) == {phase: flops / 2 for phase, flops in by_phase(before).items()}


def test_a_model_inside_of_a_call_gets_a_plan_in_front_of_it() -> None:
    text = "from transformers import LlamaForCausalLM, Trainer\nTrainer(LlamaForCausalLM(config), args).train()\n"
    made = with_tensor_plan(text, 4)
    assert made is not None
    assert made.splitlines()[1:] == [
        "from transformers.distributed import DistributedConfig",
        "whole = LlamaForCausalLM(config)",
        "plan, _, mesh = whole.prepare_distribute_model(DistributedConfig(tp_size=4))",
        "Trainer(whole.maybe_distribute_model(whole, plan, mesh), args).train()",
    ]
    assert with_tensor_plan("class MyModel: pass\nmodel = MyModel(3)\n", 4) is None


OFFLOADED = """
import torch
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.fsdp import fully_shard
init_process_group("nccl")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to("cuda")
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
"""


def test_offload_moves_weights_and_states_to_the_host(tmp_path: Path) -> None:
    question, out = adopted(tmp_path, OFFLOADED + LOOP.replace("device", '"cuda"'))
    question = replace(question, ranks=2)
    before = run_rank(question, 0, out)
    (edit,) = (e for e in edits_of(question.script, (), before, 2) if e.title == "offload weights and states")
    assert "+fully_shard(model, offload_policy=CPUOffloadPolicy())" in edit.diff.splitlines()
    after = run_rank(question, 0, tmp_path / "after", edit)
    for part in ("weights", "states"):
        assert before.memory.parts[part] > 0 == after.memory.parts[part]
    kept = before.memory.parts["weights"] + before.memory.parts["states"]
    assert after.memory.host >= kept
    assert after.device == "cuda"
    copies = [sum(isinstance(entry.event, Copy) for entry in facts.entries) for facts in (before, after)]
    assert copies[1] > copies[0]


def test_a_strided_convolution_is_counted_at_its_result(tmp_path: Path) -> None:
    question, out = adopted(
        tmp_path,
        HEAD.replace("nn.Linear(8, 16)", "nn.Conv2d(3, 4, 3, stride=2)")
        .replace("nn.Linear(16, 4)", "nn.Conv2d(4, 8, 3, stride=2)")
        + LOOP.replace("6, 8", "6, 3, 17, 17"),
    )  # fmt: skip
    facts = run_rank(question, 0, out)
    # 17 -> 8 -> 3 positions a side; the first layer has no gradient of the input.
    first, second = 2 * 6 * 8 * 8 * 4 * 3 * 9, 2 * 6 * 3 * 3 * 8 * 4 * 9
    assert facts.flops == 2 * first + 3 * second


def test_ranks_that_answer_each_other_are_no_deadlock() -> None:
    timer, network = Timer(CLUSTER, 2), GroupNetwork(CLUSTER, 2)
    number = iter(range(1, 100))

    def send(to: int) -> list[Entry]:
        return [Entry(Collective(Sending("message", 1024, (0, 1), to), next(number)), "forward", -1, 0)]

    def receive(source: int) -> list[Entry]:
        place = next(number)
        receiving = Collective(Sending(RECEIVE, 1024, (0, 1), source), place)
        return [Entry(receiving, "forward", -1, 0), Entry(Sync("wait", place), "forward", -1, 0)]

    first = [entry for _ in range(3) for entry in (*send(1), *receive(1))]
    second = [entry for _ in range(3) for entry in (*receive(0), *send(0))]
    times = step_times({0: first, 1: second}, {}, timer, network, CLUSTER)
    assert times[0].seconds > 5 * network.seconds(Sending("message", 1024, (0, 1), 1), 0)
    with pytest.raises(ConfigError, match="wait for messages that no recorded rank sends"):
        step_times({0: first[1:], 1: second}, {}, timer, network, CLUSTER)


def test_a_stage_begins_with_its_first_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY", "1")
    ranks = run_ranks(Question(EXAMPLES / "pipeline.py", (), CLUSTER, 2), tmp_path)
    sent = {
        rank: [e.event.sending.verb for e in facts.entries if isinstance(e.event, Collective)]
        for rank, facts in ranks.items()
    }
    assert sent[0][0] == "message"
    assert sent[1][0] == RECEIVE
    assert [Counter(verbs) for verbs in sent.values()] == 2 * [Counter({"message": 8, RECEIVE: 8})]
    # The last stage waits for the first microbatch, and computes while the first stage waits for gradients.
    assert plan(ranks, CLUSTER, 2).steps[1].exposed > 0

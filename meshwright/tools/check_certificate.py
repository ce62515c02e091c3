"""`meshwright certify --check FILE --step N [words]`: checks a certificate, and computes a step of its run again.

First all that the certificate is about is read and compared, so that damage is named as such, and is no verdict on the
program. Then the step is computed from the certified checkpoint before it, on this machine, under any layout of the
run (replay.py). If the step has a certified checkpoint, the SHA-256 Merkle root of the new state is compared as well.
If the step differs and the certificate has a trace, the traced rows are computed again, which names the operation.

| outcome | exit code |
|---|---|
| everything is as certified, and the step is equal | 0 |
| damage, a forgery, another key; the step differs: program or machine | 1 |
| a wrong word; a step or a checkpoint that is not there | 2 |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.config import load_config
from meshwright.config.yaml_text import plain_values
from meshwright.output import terminal
from meshwright.ranks.errors import ConfigError, DataError, MismatchError
from meshwright.ranks.foreign import plain
from meshwright.tools.call_trace import first_parted, trace_calls
from meshwright.tools.certificate import ANY, Body, Certificate, differences, here, read_certificate
from meshwright.tools.certify import Read, Say, changed_fields, first_weights, free_fields, uncommented
from meshwright.tools.differing import Part, by_bytes
from meshwright.tools.keys import fingerprint, read_trusted
from meshwright.tools.replay import Replayed, Seen, replay
from meshwright.training.checkpoint.merkle import Tree
from meshwright.training.checkpoint.reader import Checkpoint, steps_in
from meshwright.training.folder import CHECKPOINTS, CONFIG


@dataclass(frozen=True)
class Checked:
    """Result of a check."""

    file: str
    run: str
    signer: str
    """The fingerprint of the signing key."""
    owner: str | None
    """The comment of the trusted key's line; None: the key was compared with no trusted key."""
    checkpoints: tuple[int, ...]
    """The steps of the checkpoints that were read and are as certified."""
    gone: tuple[int, ...]
    """The steps of certified checkpoints that are not in the run's folder."""
    differences: tuple[str, ...]
    """The facts of program and machine that differ from the certified ones."""
    state: bool = False
    """Whether the state after the step was compared."""
    replayed: Replayed | None = None
    found_at: int | None = None
    """The step of the checkpoint that named the tensors, if later than the replayed step."""
    parts: tuple[Part, ...] = ()
    """The tensors that differ, in the checkpoint's order."""
    operation: str = ""
    """The first module call with other bits than the certified trace, or the reason for which none is named."""

    def check(self) -> None:
        """Raise MismatchError if the step differs."""
        if self.replayed is not None:
            self.replayed.check()


def check(
    file: Path, step: int | None, words: Sequence[str], *, trusted: Path | None, out: Path | None, say: Say
) -> Checked:
    """Check a certificate and its run; compute a step again.

    Args:
        file: The certificate.
        step: None: only read and compare.
        words: Fields of another layout; other paths of the same data.
        trusted: A file of public keys; one of these must have signed.
        out: The run's folder; None: the certificate's.
        say: Called with a line on the replay, before its first step.

    Raises:
        ConfigError: A word changes the computation, or the step cannot be computed.
        DamagedError, DataError, MismatchError: A file differs from the written or certified one; another key signed.
    """
    found = read_certificate(file)
    body, folder = found.body, out or file.parent
    owner = None if trusted is None else owner_of(found, file, trusted)
    if step is not None and not body.first <= step <= body.last:
        raise ConfigError.of("--step", step, "is no certified step", f"{body.first} to {body.last}")
    require_config(body, folder, words)
    read = Read.of(folder, words)
    require_same(body, read)
    there = dict(steps_in(folder / CHECKPOINTS))
    held = {each.step: each for each in body.checkpoints if each.step in there}
    gone = tuple(each.step for each in body.checkpoints if each.step not in there)
    start = max((at for at in held if step is not None and at < step), default=0)
    if step is not None and start < body.first - 1:
        rule = (
            f"is after a change of the config at step {body.first - 1}, and no certified checkpoint before it is left"
        )
        raise ConfigError.of("--step", step, rule, f"a folder with the checkpoint of step {body.first - 1}")
    needed = [at for at in held if step is None or at in (start, step)]
    for at in needed:
        require_state(body, at, read.state(there[at]), there[at])
    unlike = weights_unlike(body, read) if step is None or not start else ()
    checked = partial(
        Checked, str(file), str(folder), found.signer, owner, tuple(needed), gone,
        tuple(differences(body.here, here())) + tuple(f"first weights: {name} has other values" for name in unlike[:1]),
    )  # fmt: skip
    if step is None:
        return checked()
    states = {each.step: each.state for each in body.checkpoints}

    def look(at: int, path: Path) -> Seen:
        tree = read.state(path, replayed=True)
        if tree.root == states[at].root:
            return Seen(tree.root, ())
        boxes = by_bytes(there[at], path).parts if at in held else ()
        return Seen(tree.root, boxes or tuple(map(Part.single, tree.unlike(states[at].marks))))

    again = partial(replay, folder, words=words, start=start)
    replayed = again(step, say=say, look=partial(look, step) if step in states else None)
    operation = "" if replayed.verdict == "equal" else first_operation(body, read, there)
    if replayed.verdict == "equal" or step in states:
        return checked(step in states, replayed, None, replayed.parts, operation)
    later = min((at for at in states if at > step), default=None)
    parts = () if later is None else again(later, say=say, look=partial(look, later)).parts
    return checked(False, replayed, later if parts else None, parts, operation)


def first_operation(body: Body, read: Read, there: Mapping[int, Path]) -> str:
    """Compute the traced rows again, and name the first call with other bits.

    Args:
        body: The certified content.
        read: The run.
        there: The run's checkpoints by step.

    Returns:
        A sentence; without a trace or the trace's checkpoint, the reason for which no operation is named.

    Raises:
        DamagedError, MismatchError: The trace's checkpoint differs from the written or certified one.
    """
    trace = body.trace
    if trace is None:
        return "no operation is named: the certificate has no trace (meshwright certify OUT --trace)"
    if trace.step not in there:
        return f"no operation is named: the trace begins with the checkpoint of step {trace.step}, which is not here"
    path = there[trace.step]
    require_state(body, trace.step, read.state(path), path)
    parted = first_parted(trace.calls, trace_calls(read.config, read.samples, Checkpoint(path)))
    if parted:
        return f"first difference, after step {trace.step}: {parted}"
    count = f"{len(trace.calls):,} calls"
    return f"no operation is named: the first rows after step {trace.step} have the certified bits in all {count}"


def weights_unlike(body: Body, read: Read) -> tuple[str, ...]:
    """Draw the first weights again; return the names of tensors with other values than certified."""
    drawn = None if body.first_weights is None else first_weights(read.config)
    return () if drawn is None or body.first_weights is None else drawn.unlike(body.first_weights.marks)


def owner_of(found: Certificate, file: Path, trusted: Path) -> str:
    """Return the comment of the trusted key that signed. Raises MismatchError if none of the keys did."""
    known = {each.text: each.comment for each in read_trusted(trusted)}
    if found.body.key not in known:
        names = ", ".join(fingerprint(text) for text in known)
        raise MismatchError(f"{file} was signed by {found.signer}, and {trusted} has {names}")
    return known[found.body.key] or str(trusted)


def require_config(body: Body, out: Path, words: Sequence[str]) -> None:
    """Compare config.yaml with the certified text, and the words with the fields that a check may change.

    Raises:
        MismatchError: config.yaml is another one; names the first field.
        ConfigError: A word changes what is computed.
    """
    if not (out / CONFIG).is_file():
        valid = "--run OUT, the folder of the certified run"
        raise ConfigError.of("--check", out, f"is no run's folder: it has no {CONFIG}", valid)
    text = uncommented(plain(out / CONFIG))
    if text != body.config:
        fields = changed_fields(plain_values(body.config), plain_values(text), ())
        told = [f": {name} was {before!r}, and is {now!r}" for name, (before, now) in fields.items()]
        raise MismatchError(f"{out / CONFIG} is not the certified one{told[0] if told else ''}")
    configs = [load_config(out / CONFIG, given) for given in ((), words)] if words else []
    trees = [config.model_dump(mode="json", by_alias=True) for config in configs]
    free = free_fields(configs[0]) if configs else ()
    for name, (before, now) in changed_fields(trees[0], trees[1], free).items() if trees else ():
        if body.layouts != ANY:
            rule = f"is not the run's ({before}): with bits=usual only the run's own layout has its bits"
            raise ConfigError.of(name, now, rule, "no words; a run with bits=layout-free takes any layout")
        rule = f"is not the run's ({before}), and changes what is computed"
        raise ConfigError.of(name, now, rule, "words on layout, memory, batch.micro, threads, data.source")


def require_same(body: Body, read: Read) -> None:
    """Compare the run's identity, its data and the numbers of its steps with the certified ones.

    Raises MismatchError, which names the file and the steps.
    """
    if read.run != body.run:
        raise MismatchError(f"{read.out} is the run {read.run}, and {body.run} was certified")
    if read.data != body.data:
        source = read.config.data.source
        raise DataError(f"data.source={source} holds other tokens or samples than were certified")
    before = body.first - 1
    for each in body.checkpoints:
        if read.numbers(before + 1, each.step) != each.numbers:
            steps = f"steps {before + 1} to {each.step}"
            raise MismatchError(f"{read.out}/metrics.jsonl has other losses, norms or roots in {steps} than certified")
        before = each.step


def require_state(body: Body, step: int, tree: Tree, path: Path) -> None:
    """Compare a checkpoint of the run with the certified one. Raises MismatchError, which names the tensors."""
    certified = next(each for each in body.checkpoints if each.step == step)
    if tree.root != certified.state.root:
        names = tree.unlike(certified.state.marks)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise MismatchError(f"{path} is not the certified state: {names[0] if names else 'unnamed'}{more} differs")
    if json.dumps(Checkpoint(path).manifest.origin.resolved, sort_keys=True) != certified.decided:
        raise MismatchError(f"{path} has other decisions of auto fields than were certified")


def as_dict(found: Checked) -> dict[str, Any]:
    """Return the result as JSON values."""
    return asdict(found)


def render(found: Checked) -> None:
    """Print the signer, the parts that are as certified, and the verdict on the step."""
    console = terminal.console()
    whose = f"by {found.owner}" if found.owner is not None else "a key compared with none: --trusted KEY.pub compares"
    console.print(f"signed: {found.signer}, {whose}", soft_wrap=True)
    steps = ", ".join(map(str, found.checkpoints)) or "none"
    gone = f"; not here any more: {', '.join(map(str, found.gone))}" if found.gone else ""
    told = f"as certified: config, data, losses and norms, the checkpoints of steps {steps}{gone}"
    console.print(told, soft_wrap=True)
    for line in found.differences:
        console.print(f"differs: {line}", soft_wrap=True)
    replayed = found.replayed
    if replayed is None:
        console.print("no step was computed again: --step N computes one", soft_wrap=True)
        return
    if replayed.verdict == "equal":
        after = ", and all tensors after it" if found.state else "; tensors are certified at checkpoints alone"
        console.print(
            f"equal: steps {replayed.first} to {replayed.last} have the certified losses and norms{after}",
            soft_wrap=True,
        )
        return
    for name, (run, first, second) in replayed.numbers.items():
        console.print(
            f"step {replayed.step}, {name}: certified {run!r}, here {first!r}, once more {second!r}", soft_wrap=True
        )
    at = found.found_at or replayed.last
    for mismatch in found.parts[:1]:
        box = ", ".join(f"{a}..{b}" for a, b in zip(mismatch.first, mismatch.last, strict=True))
        box_text = f" in the box [{box}]" if box else ""
        count = f"{mismatch.differing:,} of {mismatch.elements:,} elements{box_text}" if box else "box unknown"
        more = f"; {len(found.parts) - 1} tensors more (--json)" if len(found.parts) > 1 else ""
        console.print(f"first tensor that differs, after step {at}: {mismatch.tensor}, {count}{more}", soft_wrap=True)
    console.print(found.operation, soft_wrap=True)
    if not found.parts:
        console.print("no certified checkpoint at or after the step names the tensor", soft_wrap=True)
    if replayed.verdict == "machine":
        console.print(
            "machine: two replays differ, so this machine does not compute a step twice alike", soft_wrap=True
        )
        return
    cause = "the differences above can cause it" if found.differences else "code, libraries and processor are the same"
    console.print(f"program: two replays agree with each other, and not with the run; {cause}", soft_wrap=True)

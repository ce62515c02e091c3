"""A job for an engine: a run's ranks on so many nodes, that go on where they were when they are stopped.

    slurm        an sbatch script: srun starts the ranks
    kubernetes   a JobSet, or a PyTorchJob: a pod a node, in which a shell starts the ranks
    ray          a Python script: an actor a rank, in which the rank is a process

Every engine asks a run to stop by a signal, before it takes the nodes away: the run finishes its step, saves and ends
with code 75, and the engine is told to start it again. Nothing here talks to a cluster but `submit`, by the engine's
own command.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

import yaml
from pydantic import Field, ValidationError

from meshwright.config import Config
from meshwright.config.load import parse_run, read_run, run_file
from meshwright.config.messages import problems_of
from meshwright.errors import ConfigError, LaunchError
from meshwright.section import Positive, Section

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]
"""The form that Kubernetes demands; the others take it, too."""

SUBMIT_SECONDS = 120


class JobSettings(Section):
    """Settings that every engine has. `name`: the job's; by default the run file's. `cpus`: cores of a rank."""

    name: Name | None = None
    cpus: Positive = 1

    @property
    def folder(self) -> Path:
        return Path("out").absolute()


@dataclass(frozen=True)
class Submission:
    """A run that was checked, on `nodes` nodes with as many ranks each. `words`: its key=value words."""

    run: Path
    words: tuple[str, ...]
    config: Config
    out: Path
    nodes: int
    name: str

    @property
    def ranks_per_node(self) -> int:
        return self.config.layout.world_size // self.nodes

    @property
    def uses_gpus(self) -> bool:
        return self.config.device == "cuda"

    def train_words(self, python: str, run: Path, *, resume: bool) -> list[str]:
        """The command of a rank."""
        words = [python, "-m", "meshwright", "train", str(run), *self.words, "--out", str(self.out)]
        return [*words, "--resume"] if resume else words


class Engine(Protocol):
    """One kind of cluster, with the user's settings. `suffix`: of the file; `command`: what submits it.

    `shares_folders`: whether its nodes see this machine's folders. `folder`: holds runs, as the nodes see it.
    """

    suffix: ClassVar[str]
    shares_folders: ClassVar[bool]

    @property
    def folder(self) -> Path: ...

    def text(self, submission: Submission) -> str:
        """The file's content. Raises ConfigError for what the engine cannot be asked."""

    def command(self, file: Path) -> list[str]: ...


def _engines() -> Mapping[str, type[JobSettings]]:
    from meshwright.tools.submit.kubernetes import Kubernetes
    from meshwright.tools.submit.ray_script import Ray
    from meshwright.tools.submit.slurm import Slurm

    return {"slurm": Slurm, "kubernetes": Kubernetes, "ray": Ray}


def engine_of(name: str, settings: Sequence[str]) -> tuple[Engine, str | None]:
    """The engine with its settings, `key=value` words, and the job's name where they give one.

    Raises ConfigError with all mistakes at once.
    """
    engines = _engines()
    if name not in engines:
        raise ConfigError.of("--on", name, "is no engine that we write for", ", ".join(engines))
    tree = {}
    for word in settings:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError.of("--set", word, "is no key=value word", ", ".join(sorted(engines[name].model_fields)))
        tree[key] = value if key == "time" else yaml.safe_load(value)  # YAML takes 01:00:00 for a number
    try:
        engine = engines[name].model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems_of(error, [], engines[name])) from error
    return engine, engine.name  # type: ignore[return-value]


def submission_of(
    run: Path, words: Sequence[str], out: Path, nodes: int, name: str | None, *, shares_folders: bool
) -> Submission:
    """The run, checked for a cluster that this machine is not. Raises ConfigError.

    `shares_folders`: the run's data must be here as well as there.
    """
    run = run_file(run)
    file = read_run(run, words)
    if file.auto:
        rule = "is decided by this machine, not by the cluster's"
        raise ConfigError.of("layout", "auto", rule, f"the file that `meshwright plan {run} --cluster FILE` writes")
    # Where no folder is shared, one that exists stands for that of the data.
    config = parse_run(file.tree, words if shares_folders else [*words, "data.source=."])
    if config.device == "auto":
        rule = "is decided where a run starts; a cluster must be asked for its devices before"
        raise ConfigError.of("device", "auto", rule, "device=cuda, device=cpu")
    ranks = config.layout.world_size
    if ranks % nodes:
        fitting = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
        raise ConfigError.of("--nodes", nodes, f"does not divide the layout's {ranks} ranks", fitting)
    return Submission(run, tuple(words), config, out, nodes, name or _name_of(run))


def _name_of(run: Path) -> str:
    """The run file's name, as an engine may call a job."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in run.stem.lower())
    return letters.strip("-")[:40].strip("-") or "run"


def write_script(text: str, file: Path) -> None:
    """Write the engine's file. Raises ConfigError where there is one already, or none can be."""
    if file.exists():
        raise ConfigError.of("--to", file, "is there already", "another file, or remove it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise ConfigError.of("--to", file, f"cannot be written ({error.strerror})", "another file") from error


def submit(command: Sequence[str]) -> str:
    """Hand the file to the engine; its answer. Raises LaunchError where it does not take it."""
    if shutil.which(command[0]) is None:
        raise LaunchError(f"{command[0]} is not on this machine: submit from one that has it, `{' '.join(command)}`")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"`{' '.join(command)}` has not answered within {SUBMIT_SECONDS} s") from error
    if done.returncode:
        raise LaunchError(f"`{' '.join(command)}` ended with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def own_python() -> str:
    """The interpreter that runs this, which the nodes of a cluster with shared folders have as well."""
    return sys.executable

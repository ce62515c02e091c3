"""Jobs for engines: the ranks of a run on several nodes; a stopped run is started again and resumes.

    slurm        an sbatch script: srun starts the ranks
    kubernetes   a JobSet, a TrainJob, a RayJob or a PyTorchJob: one pod per node
    ray          a Python script: one actor per rank, which starts the rank as a process
    skypilot     a task: the same shell on each node

Every engine stops a run by a signal before the nodes are taken away. The run finishes the current step, saves and ends
with code 75; the engine's file asks for a restart on that code. Only `submit` contacts a cluster, with the engine's own
command.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin

from pydantic import ConfigDict, Field, ValidationError

from meshwright.config import Config
from meshwright.config.load import WEIGHTS_FIELD, parse_run, read_run, run_file
from meshwright.config.messages import problems_of
from meshwright.config.registry import entries
from meshwright.config.section import Positive, Section, shown
from meshwright.output.outputs import refuse_existing
from meshwright.ranks.errors import ConfigError, LaunchError
from meshwright.tools.submit.forms import CONTROLS, CONTROLS_OF_TEXT

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]
"""A job's name in the form that Kubernetes demands; the other engines accept this form too."""

SUBMIT_SECONDS = 120
HELP = "help"

GPU_CORES = 6
"""Cores of a rank with a GPU: Python, which launches kernels; autograd's thread; two threads of NCCL's proxy; the
thread that writes checkpoints; and one for other work, such as copies of batches and the watchdog."""

SAFE_PATH = "PYTHONSAFEPATH"
"""With this variable Python (3.11 and later) imports nothing from the current folder, which others may control."""


@dataclass
class Submission:
    """A checked run on several nodes, with the same number of ranks on each node."""

    run: Path
    """The run file."""
    words: tuple[str, ...]
    """The command line's key=value words."""
    config: Config
    out: Path
    """The run's folder, as the nodes see it."""
    nodes: int
    name: str
    """The job's name."""
    notes: tuple[str, ...] = ()
    """Lines on files that were not checked, because only the cluster has these."""

    def __post_init__(self) -> None:
        self.ranks_per_node = self.config.layout.world_size // self.nodes
        self.uses_gpus = self.config.device == "cuda"

    @property
    def run_text(self) -> str:
        """The run file's text, which is part of the job."""
        return self.run.read_text(encoding="utf-8")

    @property
    def cores(self) -> int:
        """Cores of a rank by default: the run's threads; with a GPU at least GPU_CORES."""
        threads = self.config.threads if isinstance(self.config.threads, int) else 1
        return max(threads, GPU_CORES) if self.uses_gpus else threads

    def train_words(self, python: str, run: Path | str) -> list[str]:
        """Return a rank's command.

        The command always has --resume, which also begins a run without a checkpoint. So a job that an engine or a
        person starts again resumes.
        """
        return [python, "-m", "meshwright", "train", str(run), *self.words, "--out", str(self.out), "--resume"]


class Engine(Section):
    """One kind of cluster; the fields are the user's settings, and `--set help` prints the fields' docstrings.

    A field with a dict is set one key at a time (`env.KEY=VALUE`), a field with a tuple by repeating the word.
    `suffix`: the end of the file's name. `shares_folders`: whether the nodes may see this machine's folders.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    suffix: ClassVar[str]
    shares_folders: ClassVar[bool]
    of_lines: ClassVar[frozenset[str]] = frozenset({"setup", "env"})
    """Settings that may have line ends: lines of shell, and values of variables."""

    name: Name | None = None
    """The job's name; that of the run file."""
    cpus: Positive | None = None
    """Cores of a rank; 6 with a GPU, else the run's threads, or 1."""

    def cores(self, submission: Submission) -> int:
        return self.cpus or submission.cores

    def out_of(self, out: Path | None, run: Path) -> Path:
        """Return the run's folder as the nodes see it. `out`: the user's --out, if given."""
        return out or Path("out", run.stem)

    def prepare(self) -> list[str]:
        """Make the folders that must exist before the job starts; return lines on those that cannot be made here."""
        return []

    @abstractmethod
    def text(self, submission: Submission) -> str:
        """Return the file's content. Raises ConfigError for settings that the engine cannot satisfy."""

    @abstractmethod
    def command(self, file: Path, name: str) -> list[str]:
        """Return the command that submits the file."""

    def command_again(self, file: Path) -> list[str]:
        """Return the command that submits a changed file of the same name; empty if `command` can do so."""
        return []


def planned_line(config: Config, cluster: str | None, anyway: bool) -> list[str]:
    """The line of a run's plan on the named cluster; none without a cluster.

    Raises:
        ConfigError: The run does not fit, or cannot be planned, and `anyway` is false; or `anyway` is given without a
            cluster.
    """
    if cluster is None:
        if anyway:
            raise ConfigError.of("--anyway", "given", "has no effect without a cluster", "--cluster NAME")
        return []
    # Here: a submission without a cluster needs no torch.
    from meshwright.planner.plan.cluster import load_cluster
    from meshwright.planner.plan.gate import refuse_unfit

    return [refuse_unfit(config, load_cluster(cluster), anyway)]


def engine_class(name: str) -> type[Engine]:
    """Return the class of the engine `name`.

    Raises ConfigError if there is no such engine, PluginError if an engine of another package cannot be used.
    """
    known: dict[str, type[Engine]] = entries("submit")
    if name not in known:
        raise ConfigError.of("--on", name, "is no engine that we write for", ", ".join(known))
    return known[name]


def settings_table(engine: type[Engine]) -> str:
    """Return a line for each setting of an engine: the syntax with the default, and the meaning."""
    lines = []
    for key, field in engine.model_fields.items():
        origin, needed = get_origin(field.annotation), " Must be set." if field.is_required() else ""
        default = "" if needed or field.default is None else shown(field.default)
        written = (
            f"{key}.KEY=VALUE" if origin is dict else f"{key}=VALUE ..." if origin is tuple else f"{key}={default}"
        )
        lines.append(f"  {written:<22} {' '.join((field.description or '').split())}{needed}")
    return "\n".join(lines)


def engine_of(name: str, settings: Sequence[str]) -> Engine:
    """Return the engine with `settings`, which are `key=value` words. Raises ConfigError with all mistakes at once."""
    engine = engine_class(name)
    try:
        return engine.model_validate(_tree_of(settings, engine))
    except ValidationError as error:
        # For an unknown setting the error lists all settings.
        valid = "\n" + settings_table(engine)
        problems = [
            problem if problem.field.partition(".")[0] in engine.model_fields else replace(problem, valid=valid)
            for problem in problems_of(error, [], engine)
        ]
        raise ConfigError(problems) from error


def _tree_of(settings: Sequence[str], engine: type[Engine]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for word in settings:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError.of("--set", word, "is no key=value word", "\n" + settings_table(engine))
        first, dot, rest = key.partition(".")
        refused = CONTROLS_OF_TEXT if first in engine.of_lines else CONTROLS
        # A line end would let a value add a command to the script.
        if CONTROLS.search(key) or refused.search(value):
            raise ConfigError.of("--set", repr(word), "has a line end or another character that is not printed")
        field = engine.model_fields.get(first)
        origin = None if field is None else get_origin(field.annotation)
        if origin is dict:
            if not rest:
                raise ConfigError.of("--set", word, f"names no {key}", f"{key}.KEY=VALUE")
            tree[first] = {**tree.get(first, {}), rest: value}
        elif origin is tuple and not dot:
            tree[key] = (*tree.get(key, ()), value)
        else:
            tree[key] = value
    return tree


def submission_of(engine: Engine, run: Path, words: Sequence[str], out: Path, nodes: int) -> Submission:
    """Check a run for a cluster other than this machine. Raises ConfigError, for instance for `auto` values."""
    run = run_file(run)
    for field, text in {"--out": str(out), "RUN.yaml": str(run)}.items():
        if CONTROLS.search(text):
            raise ConfigError.of(field, repr(text), "has a line end or another character that is not printed")
    file = read_run(run, words)
    if file.auto:
        rule = "is decided by this machine, not by the cluster's"
        raise ConfigError.of("layout", "auto", rule, f"the file that `meshwright plan {run} --cluster FILE` writes")
    config, notes = _checked(file.tree, words)
    if config.device == "auto":
        rule = "is decided where a run starts; a cluster must be asked for its devices before"
        raise ConfigError.of("device", "auto", rule, "device=cuda, device=cpu")
    ranks = config.layout.world_size
    if ranks % nodes:
        fitting = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
        raise ConfigError.of("--nodes", nodes, f"does not divide the layout's {ranks} ranks", fitting)
    # The run file's name, reduced to the letters and the length that Name allows.
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in run.stem.lower())
    name = engine.name or letters.strip("-")[:40].strip("-") or "run"
    return Submission(run, tuple(words), config, out, nodes, name, notes)


def _checked(tree: dict[str, Any], words: Sequence[str]) -> tuple[Config, tuple[str, ...]]:
    """Return the config, and a line on files that are not on this machine, since the cluster may have these."""
    try:
        return parse_run(tree, words), ()
    except ConfigError as error:
        # Only files and folders that are missing here are excused, not damaged ones.
        absent = {
            problem.field: problem
            for problem in error.problems
            if (problem.field.startswith("data.") and problem.rule.startswith("is no such file"))
            or (problem.field == WEIGHTS_FIELD and not Path(str(problem.value)).expanduser().exists())
        }
        if not absent:
            raise
        config = parse_run(tree, words, unread=absent)
    named = ", ".join(f"{field}={problem.value}" for field, problem in absent.items())
    model = "; nor whether the layout fits the model" if WEIGHTS_FIELD in absent else ""
    return config, (f"not checked, since no such path is on this machine: {named}{model}",)


def check_out(submission: Submission, mount: str) -> None:
    """Raise ConfigError if --out is not on the volume that the nodes see at `mount`."""
    if not submission.out.is_relative_to(mount):
        rule = f"does not lie on the volume, which the nodes see at {mount}"
        raise ConfigError.of("--out", submission.out, rule, f"{mount}/{submission.name}")


def write_script(text: str, file: Path) -> None:
    """Write the engine's file. Raises ConfigError if the file exists or cannot be written."""
    # An existing file may have been edited by hand.
    refuse_existing("--to", file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError.of("--to", file, f"cannot be written ({error.strerror})", "another file") from error


def submit(command: Sequence[str]) -> str:
    """Run the engine's command; return its output. Raises LaunchError if the command is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        raise LaunchError(f"{command[0]} is not on this machine: submit from one that has it, `{shlex.join(command)}`")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"`{shlex.join(command)}` has not answered within {SUBMIT_SECONDS} s") from error
    if done.returncode:
        raise LaunchError(f"`{shlex.join(command)}` ended with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()

"""A task for SkyPilot: nodes of any cloud or Kubernetes, with the run file mounted and the node's shell as `run`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from meshwright.config.section import Count, Size
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.launch.signals import STOPPED_EXIT_CODE
from meshwright.tools.submit.forms import Variable
from meshwright.tools.submit.job import Engine, Submission, check_out
from meshwright.tools.submit.manifests import Tree, manifest_text, patched
from meshwright.tools.submit.node_shell import RUN_FOLDER, NodePlace, node_shell

_PLACE = NodePlace("$SKYPILOT_NODE_RANK", '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"', expands=False)


class SkyPilot(Engine):
    """A task's YAML."""

    shares_folders: ClassVar[bool] = False
    suffix: ClassVar[str] = "_sky.yaml"

    gpu: str | None = None
    """SkyPilot's name of the GPU, such as H100 (`sky show-gpus`)."""
    memory: Size | None = None
    """Memory of a node, at least, such as 64G."""
    infra: str | None = None
    """Where: aws, gcp/us-central1, k8s/CONTEXT, ...; the cheapest that has it."""
    spot: bool = False
    """Whether spot instances will do. `sky jobs launch` starts a run again that lost them."""
    image: str | None = None
    """A container image that has meshwright; without one, `setup` must install it."""
    setup: tuple[str, ...] = ()
    """A line of shell for each node before the run, such as pip install. Repeat it for more."""
    volume: str | None = None
    """A SkyPilot volume that all nodes can write to (`sky volumes ls`); --out lies there."""
    mount: str = "/runs"
    """Where the nodes see the volume."""
    env: dict[Variable, str] = Field(default_factory=dict)
    """A variable of the ranks: env.NCCL_DEBUG=INFO."""
    secrets: tuple[Variable, ...] = ()
    """A variable that is taken from your shell and not written, such as HF_TOKEN. Repeat it for more."""
    restarts: Count = 3
    """How often `sky jobs launch` starts a run again that fails; one that is stopped it always does."""
    patch: Path | None = None
    """A YAML file that is merged over what is written."""

    def out_of(self, out: Path | None, run: Path) -> Path:
        return out or Path(self.mount, run.stem)

    def text(self, submission: Submission) -> str:
        self._check_settings(submission)
        per_node = submission.ranks_per_node
        # A stopped run is restarted without limit, a failed run at most `restarts` times.
        recovery = {"max_restarts_on_errors": self.restarts, "recover_on_exit_codes": [STOPPED_EXIT_CODE]}
        resources: Tree = {"infra": self.infra, "cpus": f"{per_node * self.cores(submission)}+"}
        # In whole GiB, rounded up; "+": at least.
        resources["memory"] = f"{-(-self.memory // 2**30)}+" if self.memory else None
        resources["accelerators"] = f"{self.gpu}:{per_node}" if submission.uses_gpus else None
        resources["image_id"] = f"docker:{self.image}" if self.image else None
        resources["use_spot"] = self.spot or None
        resources["job_recovery"] = recovery
        task = {
            "name": submission.name,
            "num_nodes": submission.nodes,
            "resources": {key: value for key, value in resources.items() if value is not None},
            "file_mounts": {f"{RUN_FOLDER}/run.yaml": str(submission.run)},
            "volumes": {self.mount: self.volume} if self.volume else {},
            "envs": self.env,
            "secrets": dict.fromkeys(self.secrets),
            "setup": "".join(f"{line}\n" for line in self.setup),
            "run": node_shell(submission, _PLACE),
        }
        return manifest_text(patched([{key: value for key, value in task.items() if value}], self.patch), ())

    def command(self, file: Path, name: str) -> list[str]:
        """Return the command that submits the file. Without --async, sky would show the run's output to the end."""
        secrets = [word for secret in self.secrets for word in ("--secret", secret)]
        return ["sky", "launch", "--yes", "--async", "--cluster", name, *secrets, str(file)]

    def _check_settings(self, submission: Submission) -> None:
        """Raise ConfigError for mistakes that SkyPilot would find only after minutes, on machines that cost money."""
        check_out(submission, self.mount)
        if submission.uses_gpus and self.gpu is None:
            raise ConfigError.of("gpu", "nothing", "is missing: device=cuda needs GPUs", "a name of `sky show-gpus`")
        if self.gpu is not None and not submission.uses_gpus:
            raise ConfigError.of("gpu", self.gpu, "has no effect on device=cpu", "device=cuda")
        if self.image is None and not self.setup:
            valid = "image=IMAGE, or setup='pip install ...'"
            raise ConfigError.of("setup", "nothing", "is missing: a new machine has no meshwright", valid)
        if submission.nodes > 1 and self.volume is None and self.patch is None:
            rule = f"is missing: {submission.nodes} nodes write to one folder, {self.mount}"
            raise ConfigError.of("volume", "nothing", rule, "a name of `sky volumes ls`, or a patch that mounts one")

"""A run's certificate: one signed JSON file, and a card in YAML that a model's page can carry.

The signed content is the value of `certificate`, as JSON without spaces, with sorted keys, in ASCII. It has texts,
integers and lists alone: a number of a step is a text, so that no reader rounds. A certificate without a trace has no
field `trace`. docs/certificate.md has all fields.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from meshwright.parity.certificate import surroundings
from meshwright.ranks.errors import ConfigError, DamagedError, MismatchError
from meshwright.ranks.foreign import open_named, parse_json
from meshwright.ranks.machine import processor_name
from meshwright.tools.call_trace import DIGITS, MOST_CALLS
from meshwright.tools.keys import PUBLIC, check_signature, fingerprint, text_of
from meshwright.training.folder import write_whole
from meshwright.version import PACKAGE

FORMAT = "meshwright-certificate-1"
NAME, CARD = "certificate.json", "card.yaml"
ANY, OWN = "any", "own"
CLAIMS = {
    ANY: "each step can be computed again to the bit, under any layout that the run's bits allow",
    OWN: "each step can be computed again to the bit, under the run's own layout",
}
LIMITS = "the same kind of processor and the same libraries; others may differ in the last bits"
_CLOSED = ConfigDict(extra="forbid", strict=True)
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Step = Annotated[int, Field(ge=0, lt=2**62)]
Line = Annotated[
    str,
    Field(
        pattern=rf"^(forward|backward|weights) [!-~]+ [!-~]+ [0-9a-f]{{{DIGITS}}} [0-9a-f]{{{DIGITS}}}$", max_length=400
    ),
]
"""A line of a trace (call_trace.py)."""
MOST_BYTES = 2**26
"""Size of a certificate's file: 64 MiB, for 65,536 lines of a trace and all else."""


@checked(frozen=True, config=_CLOSED)
class State:
    """A certified state: the root of the Merkle tree, and the first digits of the leaves."""

    root: Sha256
    marks: Annotated[str, Field(pattern=r"^[0-9a-f]*$", repr=False)]


@checked(frozen=True, config=_CLOSED)
class Certified:
    """A certified checkpoint."""

    step: Step
    state: State
    decided: str
    """The values decided for `auto` fields, as JSON."""
    numbers: Sha256
    """The hash of the losses, norms and roots of the steps after the certified checkpoint before, up to this one."""


@checked(frozen=True, config=_CLOSED)
class Traced:
    """The module calls of the first rows, computed on one device of the certifying machine."""

    step: Step
    """The certified checkpoint before these rows."""
    calls: Annotated[tuple[Line, ...], Field(min_length=1, max_length=MOST_CALLS)]


@checked(frozen=True, config=_CLOSED)
class Here:
    """The program and the machine that certified: facts that explain another result."""

    code: Sha256
    libraries: dict[str, str]
    python: str
    torch_build: Sha256
    processor: str
    processor_name: str


@checked(frozen=True, config=_CLOSED)
class Body:
    """The signed content."""

    format: str
    date: str
    run: str
    layouts: Annotated[str, Field(pattern=f"^({ANY}|{OWN})$")]
    first: Step
    last: Step
    """The first and the last certified step."""
    config: Annotated[str, Field(repr=False)]
    """The text of config.yaml, without comments."""
    config_sha256: Sha256
    data: Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
    """The fingerprint of the prepared data, whose files were read."""
    first_weights: State | None
    """The initial values, drawn again from the seed; None: the run began with given weights."""
    checkpoints: Annotated[tuple[Certified, ...], Field(min_length=1)]
    here: Here
    key: Annotated[str, Field(pattern=PUBLIC.pattern)]
    """The public key, in OpenSSH's form."""
    trace: Traced | None = None

    @property
    def tree(self) -> dict[str, Any]:
        """The fields as JSON values, without an empty trace."""
        return {name: value for name, value in asdict(self).items() if name != "trace" or value is not None}


@dataclass(frozen=True)
class Certificate:
    """A read or new certificate."""

    body: Body
    signature: str

    @property
    def content(self) -> bytes:
        """The signed bytes."""
        return json.dumps(self.body.tree, sort_keys=True, separators=(",", ":")).encode()

    @property
    def text(self) -> str:
        """The file."""
        tree = {"certificate": self.body.tree, "signature": self.signature}
        return json.dumps(tree, sort_keys=True, indent=1) + "\n"

    @property
    def signer(self) -> str:
        """The fingerprint of the signing key."""
        return fingerprint(self.body.key)


def signed(fields: dict[str, Any], key: Ed25519PrivateKey) -> Certificate:
    """Sign a certificate's fields."""
    unsigned = Certificate(Body(format=FORMAT, key=text_of(key), **fields), "")
    return Certificate(unsigned.body, key.sign(unsigned.content).hex())


def read_certificate(file: Path) -> Certificate:
    """Read a certificate and check its signature.

    Raises:
        ConfigError: The file cannot be read.
        DamagedError: The file is no certificate, has more than MOST_BYTES, or differs from the form in which
            certificates are written.
        MismatchError: The signature is not the key's.
    """
    try:
        with open_named(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > MOST_BYTES:
                raise DamagedError(f"{file} is no certificate: it has {size:,} bytes; at most {MOST_BYTES:,} are read")
            text = opened.read(MOST_BYTES).decode()
        tree = parse_json(text)
    except OSError as error:
        valid = "the certificate.json that `meshwright certify OUT` writes"
        raise ConfigError.of("--check", file, f"cannot be read ({error.strerror})", valid) from error
    except ValueError as error:
        raise DamagedError(f"{file} is no certificate: {error}") from error
    try:
        held = tree["certificate"]
        if held["format"] != FORMAT:
            raise DamagedError(f"{file} has the format {held['format']!r}; this version reads {FORMAT}")
        found = Certificate(TypeAdapter(Body).validate_json(json.dumps(held)), str(tree["signature"]))
    except (KeyError, TypeError) as error:
        raise DamagedError(f"{file} is no certificate: it has no field {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedError(f"{file} is no certificate: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    # One text for one content, so that every changed byte is seen.
    if found.text != text:
        raise DamagedError(f"{file} is not as it was written: its text has another form than its content")
    if not re.fullmatch("[0-9a-f]{128}", found.signature):
        raise DamagedError(f"{file} is not as it was written: its signature has no 128 hexadecimal digits")
    try:
        check_signature(found.body.key, found.signature, found.content)
    except MismatchError as error:
        raise MismatchError(f"{file} was changed after it was signed, or is a forgery: {error}") from error
    return found


def write_certificate(found: Certificate, out: Path, facts: dict[str, Any]) -> tuple[Path, Path]:
    """Write the certificate and its card into the run's folder. `facts`: further lines of the card.

    Raises ConfigError if the file would have more than MOST_BYTES, which no reader accepts.
    """
    body = found.body
    if len(found.text) > MOST_BYTES:
        rule = f"needs a certificate of {len(found.text):,} bytes, of at most {MOST_BYTES:,}"
        raise ConfigError.of("OUT", out, rule, "no --trace, or fewer checkpoints in the folder")
    card = {
        "claim": CLAIMS[body.layouts],
        "limits": LIMITS,
        **facts,
        "steps": f"{body.first} to {body.last}",
        "states": {each.step: each.state.root for each in body.checkpoints},
        "files": {
            NAME: hashlib.sha256(found.text.encode()).hexdigest(),
            "config.yaml without comments": body.config_sha256,
        },
        **surroundings(()),
        "key": body.key,
        "command": f"meshwright certify --check {NAME} --step {body.last}",
    }
    write_whole(out, NAME, found.text)
    write_whole(out, CARD, yaml.safe_dump({"run": card}, sort_keys=False, allow_unicode=True, width=100))
    return out / NAME, out / CARD


def here() -> Here:
    """Describe this program and machine: all files of the package, the build of torch, the kind of processor."""
    code = hashlib.sha256()
    files = (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml", ".json", ".cpp") and path.is_file())
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        code.update(f"{path.relative_to(PACKAGE).as_posix()} {content}\n".encode())
    facts = surroundings(())
    # One line is on the processor, which is a fact of its own.
    build = [line for line in torch.__config__.show().splitlines() if "CPU capability" not in line]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Here(
        code=code.hexdigest(),
        libraries=facts["libraries"] | {name: version(name) for name in ("numpy", "safetensors", "tokenizers")},
        python=facts["python"],
        torch_build=hashlib.sha256("\n".join(build).encode()).hexdigest(),
        processor=", ".join([facts["processor"], *gpus]),
        processor_name=processor_name(),
    )


def differences(there: Here, now: Here) -> list[str]:
    """Name the facts of program and machine that differ from the certified ones."""
    texts = [] if there.code == now.code else ["code: other files of meshwright than certified"]
    for name in sorted(there.libraries.keys() | now.libraries.keys()):
        values = [each.libraries.get(name, "none") for each in (there, now)]
        if values[0] != values[1]:
            texts.append(f"{name}: {values[0]} was certified, here is {values[1]}")
    if there.torch_build != now.torch_build:
        texts.append("torch: another build than certified")
    for name in ("python", "processor", "processor_name"):
        values = [getattr(each, name) for each in (there, now)]
        if values[0] != values[1]:
            texts.append(f"{name.replace('_', ' ')}: {values[0]} was certified, here is {values[1]}")
    return texts

"""Ed25519 keys of certificates, in the files of OpenSSH: `~/.ssh/id_ed25519` serves, and so does `ssh-keygen`."""

from __future__ import annotations

import base64
import hashlib
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from meshwright.output.outputs import refuse_existing
from meshwright.ranks.errors import ConfigError, MismatchError
from meshwright.ranks.foreign import read_named, write_fresh

KIND = "ssh-ed25519"
PUBLIC = re.compile(rf"^{KIND} [A-Za-z0-9+/]{{68}}$")
"""The text of a public key in a certificate, without comment."""
MAKE = "meshwright certify --make-key FILE makes one"


@dataclass(frozen=True)
class Trusted:
    """A public key that the checker trusts, with the comment of its line."""

    text: str
    comment: str


def make_key(file: Path) -> Path:
    """Write a new private key, which only its owner can read, and FILE.pub; return the latter's path."""
    public = file.with_name(f"{file.name}.pub")
    refuse_existing("--make-key", file)
    refuse_existing("--make-key", public)
    key = Ed25519PrivateKey.generate()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_fresh(file, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode(), 0o600)
        write_fresh(public, f"{text_of(key)} {file.name}\n")
    except OSError as error:
        raise ConfigError.of("--make-key", file, f"cannot be written ({error.strerror})", "another file") from error
    return public


def read_key(file: Path) -> Ed25519PrivateKey:
    """Read a private key. Raises ConfigError if others may read the file, or if it has a password or another kind."""
    try:
        text = read_named(file)
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ConfigError.of("--key", file, "can be read by others", f"chmod 600 {file}")
        key = load_ssh_private_key(text.encode(), None)
    except OSError as error:
        raise ConfigError.of("--key", file, f"cannot be read ({error.strerror})", MAKE) from error
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        if "password" in str(error):  # a TypeError, of cryptography 44 a ValueError
            valid = f"a key without a password: {MAKE}"
            raise ConfigError.of("--key", file, "is locked by a password", valid) from error
        raise ConfigError.of("--key", file, "is no private key of OpenSSH", MAKE) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError.of("--key", file, "is a key of another kind", f"ed25519: {MAKE}")
    return key


def read_trusted(file: Path) -> tuple[Trusted, ...]:
    """Read public keys: a .pub file, or several lines of that form."""
    try:
        lines = read_named(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(
            "--trusted", file, f"cannot be read ({error})", "a file of public keys, KEY.pub"
        ) from error
    found = []
    for line in lines:
        words = line.split(maxsplit=2)
        if len(words) > 1 and PUBLIC.fullmatch(" ".join(words[:2])):
            found.append(Trusted(" ".join(words[:2]), words[2] if len(words) > 2 else ""))
    if not found:
        raise ConfigError.of("--trusted", file, f"has no line '{KIND} ...'", "a file of public keys, KEY.pub")
    return tuple(found)


def text_of(key: Ed25519PrivateKey) -> str:
    """Return the public key as OpenSSH writes it, without comment."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def fingerprint(text: str) -> str:
    """Return a public key's fingerprint as `ssh-keygen -lf` prints it."""
    digest = hashlib.sha256(base64.b64decode(text.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def check_signature(text: str, signature: str, content: bytes) -> None:
    """Raise MismatchError unless the signature is the public key's for the content."""
    try:
        key = load_ssh_public_key(text.encode())
        if not isinstance(key, Ed25519PublicKey):
            raise InvalidSignature
        key.verify(bytes.fromhex(signature), content)
    except (InvalidSignature, ValueError, UnsupportedAlgorithm) as error:
        raise MismatchError(f"the signature is not that of the key {fingerprint(text)} for this content") from error

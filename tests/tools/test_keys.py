"""Keys in OpenSSH's files, and signatures."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.ranks.errors import ConfigError, MismatchError
from meshwright.tools.keys import check_signature, fingerprint, make_key, read_key, read_trusted, text_of


def test_a_made_key_signs_and_others_cannot_read_it(tmp_path: Path) -> None:
    file = tmp_path / "new" / "key"
    public = make_key(file)
    assert file.stat().st_mode & 0o777 == 0o600
    key = read_key(file)
    (trusted,) = read_trusted(public)
    assert (trusted.text, trusted.comment) == (text_of(key), "key")
    check_signature(trusted.text, key.sign(b"steps").hex(), b"steps")
    with pytest.raises(MismatchError, match=r"the signature is not that of the key SHA256:"):
        check_signature(trusted.text, key.sign(b"steps").hex(), b"step")
    with pytest.raises(ConfigError, match="is there already"):
        make_key(file)


@pytest.mark.parametrize(
    "text, mode, wrong",
    [
        ("nothing", 0o600, "is no private key of OpenSSH; valid: meshwright certify --make-key FILE makes one"),
        (None, 0o644, "can be read by others; valid: chmod 600"),
    ],
)
def test_a_key_that_cannot_sign_is_refused(tmp_path: Path, text: str | None, mode: int, wrong: str) -> None:
    make_key(tmp_path / "key")
    if text is not None:
        (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(mode)
    with pytest.raises(ConfigError, match=wrong):
        read_key(tmp_path / "key")


def test_a_file_without_public_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ssh-rsa AAAA somebody\n")
    with pytest.raises(ConfigError, match="has no line "):
        read_trusted(tmp_path / "keys")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")
@pytest.mark.parametrize("password", ["", "secret"])
def test_a_key_of_ssh_keygen_serves_without_a_password(tmp_path: Path, password: str) -> None:
    file = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", password, "-C", "me@here", "-f", file], check=True)
    (trusted,) = read_trusted(tmp_path / "id.pub")
    assert trusted.comment == "me@here"
    shown = subprocess.run(["ssh-keygen", "-lf", tmp_path / "id.pub"], capture_output=True, text=True, check=True)
    assert fingerprint(trusted.text) == shown.stdout.split()[1]
    if password:
        with pytest.raises(ConfigError, match="is locked by a password"):
            read_key(file)
    else:
        assert text_of(read_key(file)) == trusted.text

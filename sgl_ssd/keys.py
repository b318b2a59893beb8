"""CURVE keys of the wire, and `python -m sgl_ssd.keys DIR`, which makes them.

    DIR/server/server.secret          the draft server's key pair
    DIR/server/clients/NAME.public    the verifiers it lets in
    DIR/NAME/client.secret            a verifier's key pair
    DIR/NAME/server.public            the draft server it trusts

`DIR/server` goes to the draft server's host (`--keys`), `DIR/NAME` to the verifier's
(`--ssd-draft-keys`). Keys are Z85 text. Files have mode 0600, folders 0700.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from sgl_ssd.errors import ConfigError, SSDError

KEY_CHARS = 40
SERVER = "server"
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class KeyPair:
    """Both halves in Z85; the secret one is never shown."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ServerKeys:
    """A draft server's own keys, and the public keys of those it lets in (key -> name)."""

    own: KeyPair
    clients: dict[bytes, str]


@dataclass(frozen=True)
class ClientKeys:
    """A verifier's own keys, and the public key of the draft server it talks to."""

    own: KeyPair
    server: bytes


def load_server_keys(folder: str) -> ServerKeys:
    """The keys in a `server` folder. Raises `ConfigError` naming the file that is wrong."""
    path = Path(folder)
    own = _read_pair(path / "server.secret")
    clients = {_read_key(file): file.stem for file in sorted((path / "clients").glob("*.public"))}
    if not clients:
        raise ConfigError(f"--keys {folder}: no clients/NAME.public in it, nobody could connect")
    return ServerKeys(own, clients)


def load_client_keys(folder: str) -> ClientKeys:
    """The keys in a verifier's folder. Raises `ConfigError` naming the file that is wrong."""
    path = Path(folder)
    return ClientKeys(_read_pair(path / "client.secret"), _read_key(path / "server.public"))


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as f:
            return f.read(1024)
    except OSError as e:
        raise ConfigError(
            f"key file {file}: {e.strerror}; make keys with: python -m sgl_ssd.keys DIR"
        ) from None


def _read_key(file: Path) -> bytes:
    key = _read(file).strip()
    if not _Z85.fullmatch(key):
        raise ConfigError(f"key file {file}: not a public key of {KEY_CHARS} characters")
    return key


def _read_pair(file: Path) -> KeyPair:
    lines = _read(file).split()
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"key file {file}: others can read this secret; run: chmod 600 {file}")
    if len(lines) != 2 or not all(map(_Z85.fullmatch, lines)):
        raise ConfigError(f"key file {file}: not a public and a secret key, a line each")
    if zmq.curve_public(lines[1]) != lines[0]:
        raise ConfigError(f"key file {file}: its two keys do not belong together")
    return KeyPair(lines[0], lines[1])


# -- making them -----------------------------------------------------------------------------------


def make_keys(folder: Path, clients: list[str]) -> list[Path]:
    """Keys of a server, unless `folder` has them, and of new `clients`; the files written.

    Raises `ConfigError` for a name that cannot be a folder, or one that has keys already.
    """
    for name in clients:
        if not _NAME.fullmatch(name) or name == SERVER:
            raise ConfigError(f"client {name!r}: use letters, digits, '.', '_', '-'")
        if (folder / name).exists():
            raise ConfigError(f"client {name!r} has keys in {folder} already; choose another name")
    written = []
    secret = folder / SERVER / "server.secret"
    if secret.exists():
        server = _read_pair(secret)
    else:
        server = KeyPair(*zmq.curve_keypair())
        written.append(_write(secret, server.public, server.secret))
    for name in clients:
        pair = KeyPair(*zmq.curve_keypair())
        written += [
            _write(folder / name / "client.secret", pair.public, pair.secret),
            _write(folder / name / "server.public", server.public),
            _write(folder / SERVER / "clients" / f"{name}.public", pair.public),
        ]
    return written


def _write(file: Path, *keys: bytes) -> Path:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(b"".join(key + b"\n" for key in keys))
    return file


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_ssd.keys",
        description="Make CURVE keys, for a draft server that is reached over a network. Run it "
        "again with other names to let more verifiers in.",
    )
    parser.add_argument("dir", type=Path, help="where to put them; made if it is not there")
    parser.add_argument(
        "clients", nargs="*", default=["verifier"], help="names of verifiers (default: verifier)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Make keys; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        if not zmq.has("curve"):
            raise ConfigError("this ZeroMQ was built without CURVE; install pyzmq from PyPI")
        for file in make_keys(args.dir, args.clients):
            print(file)
    except (SSDError, OSError) as e:
        print(f"sgl_ssd.keys: {e}", file=sys.stderr)
        return 1
    print(
        f"draft server: --keys {args.dir / SERVER}\n"
        + "\n".join(f"launcher: --ssd-draft-keys {args.dir / name}" for name in args.clients)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every socket between a verifier and a draft server.

The two interfaces are small enough that a test can drop, delay, reorder and kill. Guarantees:
`send` never blocks and says whether the message was queued; `recv` waits at most its timeout;
messages of one peer keep their order unless lost; a message arrives whole or not at all. Delivery
is *not* guaranteed: the protocol repeats state instead (see `protocol.Speculate`).

A channel belongs to the thread that made it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlparse

import zmq
import zmq.utils.z85

from sgl_ssd.errors import ConfigError
from sgl_ssd.folders import MAX_SOCKET_PATH, PREFIX, make_folder, remove_folder
from sgl_ssd.keys import ClientKeys, ServerKeys

logger = logging.getLogger(__name__)

SEND_HWM = 1024
MAX_FRAME_BYTES = 64 << 20
RECONNECT_S = 1.0
REFUSALS_LOGGED = 100


class ClientChannel(Protocol):
    """The verifier's end: one peer."""

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message; False (and dropped) when the queue is full."""

    def recv(self, timeout_s: float) -> list[bytes] | None:
        """The next message, or None after `timeout_s` seconds (0: only what is there)."""

    def close(self) -> None:
        """Drop the connection and all that is queued. Idempotent."""


class ServerChannel(Protocol):
    """The draft server's end: many peers, told apart by an opaque identity."""

    def send(self, peer: bytes, frames: list[bytes]) -> bool:
        """Queue a message to `peer`; False (and dropped) when it is gone or its queue is full."""

    def recv(self, timeout_s: float) -> tuple[bytes, list[bytes]] | None:
        """The next (peer, message), or None after `timeout_s` seconds."""

    def close(self) -> None:
        """Close the socket. Idempotent."""


def check_endpoint(endpoint: str, keys: bool = False) -> None:
    """Refuse what cannot be an endpoint, or would reach beyond this host without `keys`.

    Raises `ConfigError`.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        if not address.startswith("/") or address.endswith("/") or "\0" in address:
            raise ConfigError(f"endpoint {endpoint!r}: an ipc path must be absolute, of a file")
        if len(address) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"endpoint {endpoint!r}: an ipc path has at most {MAX_SOCKET_PATH} characters"
            )
        return
    try:
        url = urlparse(endpoint)
        host, port = url.hostname, url.port
    except ValueError as e:
        raise ConfigError(f"endpoint {endpoint!r}: {e}") from None
    # ZeroMQ reads an address in its own way: let nothing through that it could read otherwise.
    plain = address.lower() in (f"{host}:{port}", f"[{host}]:{port}")
    if scheme != "tcp" or not host or not port or not plain:
        raise ConfigError(f"endpoint {endpoint!r}: use ipc:///PATH or tcp://HOST:PORT")
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"endpoint {endpoint!r} is not on loopback and needs keys: make them with `python -m "
            "sgl_ssd.keys DIR`, give the draft server --keys and the launcher --ssd-draft-keys"
        )


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def private_ipc_endpoint() -> str:
    """An ipc endpoint in a new folder that only this user can enter (mode 0700)."""
    return f"ipc://{os.path.join(make_folder(), 'draft')}"


def remove_private_ipc(endpoint: str) -> None:
    """Remove the folder that `private_ipc_endpoint` made."""
    folder = private_folder(endpoint)
    if folder is not None:
        remove_folder(folder)


def private_folder(endpoint: str) -> str | None:
    """The folder that `private_ipc_endpoint` made; None for any other endpoint."""
    folder = os.path.dirname(endpoint.removeprefix("ipc://"))
    return folder if os.path.basename(folder).startswith(PREFIX) else None


def temporary_files_in(folder: str | None) -> dict[str, str]:
    """Environment of a process whose temporary files belong into `folder` (None: as they are).

    SGLang leaves a file there for each of its sockets. What others keep to find it again stays.
    """
    if folder is None:
        return {}
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    return {
        "TMPDIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache),
    }


def wait_for_any(channels: Sequence[ClientChannel], timeout_s: float) -> None:
    """Return once a message has come on one of several `ZmqClient`s, or after `timeout_s`."""
    poller = zmq.Poller()
    for channel in channels:
        if isinstance(channel, ZmqClient):
            channel.register(poller)
    poller.poll(_milliseconds(timeout_s))


def _prepare(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, SEND_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


def _somebody_listens(endpoint: str) -> bool:
    """Whether an ipc endpoint is in use: ZeroMQ would take it away from its owner."""
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(endpoint.removeprefix("ipc://"))
    return answer in (0, errno.EAGAIN)  # EAGAIN: its backlog is full


def _milliseconds(timeout_s: float) -> int:
    return max(0, int(timeout_s * 1e3 + 0.999))


class ZmqClient:
    """A `ClientChannel` over a ZeroMQ DEALER socket; reconnects by itself.

    With `keys` the wire is encrypted, and the server must have the key we expect.
    """

    def __init__(self, endpoint: str, identity: bytes, keys: ClientKeys | None = None) -> None:
        check_endpoint(endpoint, keys is not None)
        self._endpoint = endpoint
        self._reconnected_at = time.monotonic()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _prepare(self._socket, endpoint)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        self._socket.connect(endpoint)

    def send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self._connect_anew()
            return False
        return True

    def _connect_anew(self) -> None:
        """Nothing can be queued: drop what is.

        ZeroMQ reconnects by itself, but not to a peer that has broken its protocol once, such as
        another program on the port or one that sends frames beyond the limit.
        """
        now = time.monotonic()
        if now - self._reconnected_at >= RECONNECT_S:
            self._reconnected_at = now
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def recv(self, timeout_s: float) -> list[bytes] | None:
        try:
            # The common case on the round's path is an answer that is already there.
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            if timeout_s <= 0 or not self._socket.poll(_milliseconds(timeout_s)):
                return None
        with contextlib.suppress(zmq.Again):
            return self._socket.recv_multipart(zmq.NOBLOCK)
        return None

    def register(self, poller: zmq.Poller) -> None:
        """Let `poller` wait for our messages."""
        poller.register(self._socket, zmq.POLLIN)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close(0)
            self._context.term()


class ZmqServer:
    """A `ServerChannel` over a ZeroMQ ROUTER socket.

    With `keys` the wire is encrypted, and only verifiers whose public key is listed get in.
    Raises `ConfigError` when the endpoint is taken.
    """

    def __init__(self, endpoint: str, keys: ServerKeys | None = None) -> None:
        check_endpoint(endpoint, keys is not None)
        if _somebody_listens(endpoint):
            raise ConfigError(f"cannot listen on draft endpoint {endpoint!r}: Address in use")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _prepare(self._socket, endpoint)
        # A verifier that reconnects with its identity replaces its dead connection at once.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._doorkeeper = Doorkeeper(self._context, keys.clients) if keys is not None else None
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(f"cannot listen on draft endpoint {endpoint!r}: {e}") from None

    @property
    def fd(self) -> int:
        """ZeroMQ's edge-triggered descriptor, for an event loop."""
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, peer: bytes, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=True)
        except zmq.ZMQError:  # Again: its queue is full; EHOSTUNREACH: it is gone
            return False
        return True

    def recv(self, timeout_s: float) -> tuple[bytes, list[bytes]] | None:
        try:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            if timeout_s <= 0 or not self._socket.poll(_milliseconds(timeout_s)):
                return None
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
        return peer, frames

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close(0)
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            self._context.term()


class Doorkeeper:
    """Answers ZeroMQ's question whether the owner of a CURVE key may connect (RFC 27, ZAP).

    Runs in a thread of its own. A key that is not let in is logged once.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: dict[bytes, str]) -> None:
        self._clients = clients
        self._logged: set[bytes] = set()
        self._socket = context.socket(zmq.REP)
        self._socket.bind("inproc://zeromq.zap.01")
        self._socket.setsockopt(zmq.RCVTIMEO, 200)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="doorkeeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                request = self._socket.recv_multipart()
            except zmq.Again:
                continue
            self._socket.send_multipart(self._answer(request))
        self._socket.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id = (*request, b"", b"")[:2]
        address = request[3].decode("ascii", "replace") if len(request) > 3 else "?"
        key = request[6] if len(request) == 7 and len(request[6]) == 32 else b""
        key = zmq.utils.z85.encode(key)
        name = self._clients.get(key)
        if name is None:
            self._log_once(key, address)
            return [version, request_id, b"400", b"not among the keys that are let in", b"", b""]
        logger.debug("verifier %s connects from %s", name, address)
        return [version, request_id, b"200", b"", name.encode(), b""]

    def _log_once(self, key: bytes, address: str) -> None:
        if key not in self._logged and len(self._logged) < REFUSALS_LOGGED:
            self._logged.add(key)
            logger.warning(
                "refused a connection from %s: its public key %s is not among clients/*.public",
                address,
                key.decode("ascii", "replace"),
            )

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

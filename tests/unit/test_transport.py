"""The sockets' promises, over real ZeroMQ on both kinds of endpoint."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from servers import free_port
from sgl_ssd import protocol, transport
from sgl_ssd.errors import ConfigError, ProtocolError
from sgl_ssd.transport import (
    ZmqClient,
    ZmqServer,
    check_endpoint,
    is_loopback,
    private_ipc_endpoint,
    remove_private_ipc,
)

SOON = 5.0


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "tcp":
        yield f"tcp://127.0.0.1:{free_port()}"
        return
    name = private_ipc_endpoint()
    yield name
    remove_private_ipc(name)


@pytest.fixture
def opened() -> Iterator[Callable]:
    """Registers channels that are closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda channel: stack.enter_context(closing(channel))


def exchange(client: ZmqClient, server: ZmqServer, text: bytes = b"ping") -> bytes:
    """One message there and back; returns the identity that the server saw."""
    assert client.send([text])
    received = server.recv(SOON)
    assert received is not None, "nothing arrived"
    peer, frames = received
    assert frames == [text]
    assert server.send(peer, [b"re:", text])
    assert client.recv(SOON) == [b"re:", text]
    return peer


def eventually(condition: Callable[[], bool], seconds: float = SOON) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


# -- messages ----------------------------------------------------------------------------------


def test_messages_keep_their_order_and_their_frames(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    client = opened(ZmqClient(endpoint, b"one"))
    sent = [[b"%d" % i, b"", os.urandom(i * 37 % 5000)] for i in range(400)]
    for frames in sent:
        assert client.send(frames)
    for frames in sent:
        assert server.recv(SOON) == (b"one", frames)
    for frames in sent:
        assert server.send(b"one", frames)
    for frames in sent:
        assert client.recv(SOON) == frames
    assert client.recv(0) is None and server.recv(0) is None


def test_peers_are_told_apart(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    clients = {name: opened(ZmqClient(endpoint, name)) for name in (b"a", b"b", b"c")}
    for name, client in clients.items():
        assert exchange(client, server, name * 3) == name


def test_a_client_may_come_before_its_server(endpoint: str, opened: Callable) -> None:
    client = opened(ZmqClient(endpoint, b"early"))
    assert client.send([b"hello"])
    assert client.recv(0.02) is None
    server = opened(ZmqServer(endpoint))
    assert server.recv(SOON) == (b"early", [b"hello"])


def test_a_whole_protocol_message_travels(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    client = opened(ZmqClient(endpoint, b"one"))
    message = protocol.Ping(nonce=7)
    assert client.send(protocol.encode(message))
    received = server.recv(SOON)
    assert received is not None and protocol.decode(received[1]) == message


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.0, 0.001, 0.08])
def test_recv_waits_for_its_timeout_and_no_longer(
    endpoint: str, opened: Callable, timeout: float
) -> None:
    server = opened(ZmqServer(endpoint))
    client = opened(ZmqClient(endpoint, b"one"))
    exchange(client, server)
    for channel in (server, client):
        started = time.monotonic()
        assert channel.recv(timeout) is None
        waited = time.monotonic() - started
        assert timeout <= waited + 1e-3 and waited < timeout + 1.0


def test_negative_timeout_does_not_wait(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    started = time.monotonic()
    assert server.recv(-1.0) is None
    assert opened(ZmqClient(endpoint, b"one")).recv(-1.0) is None
    assert time.monotonic() - started < 1.0


def test_recv_returns_as_soon_as_a_message_comes(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    client = opened(ZmqClient(endpoint, b"one"))
    exchange(client, server)

    def answer_later() -> None:
        time.sleep(0.05)
        with closing(ZmqClient(endpoint, b"two")) as other:
            other.send([b"late"])
            assert other.recv(SOON) == [b"done"]

    thread = threading.Thread(target=answer_later)
    thread.start()
    started = time.monotonic()
    received = server.recv(30.0)
    assert received == (b"two", [b"late"]) and time.monotonic() - started < SOON
    assert server.send(b"two", [b"done"])
    thread.join(SOON)
    assert not thread.is_alive()


def test_waiting_for_one_of_several_ends_with_the_first_message(opened: Callable) -> None:
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    servers = [opened(ZmqServer(endpoint)) for endpoint in endpoints]
    clients = [opened(ZmqClient(endpoint, b"one")) for endpoint in endpoints]
    for client, server in zip(clients, servers, strict=True):
        exchange(client, server)
    started = time.monotonic()
    transport.wait_for_any(clients, 0.1)
    assert time.monotonic() - started + 1e-3 >= 0.1 and clients[1].recv(0.0) is None
    sender = threading.Timer(0.05, lambda: servers[1].send(b"one", [b"here"]))
    sender.start()
    started = time.monotonic()
    transport.wait_for_any(clients, 30.0)
    assert time.monotonic() - started < SOON
    assert clients[0].recv(0.0) is None and clients[1].recv(0.0) == [b"here"]
    sender.join(SOON)


# -- a peer that is gone or does not read ----------------------------------------------------------


def send_until_refused(send: Callable[[], bool], most: int = 20 * transport.SEND_HWM) -> int:
    """Number of messages accepted; every send must return at once."""
    for count in range(most):
        started = time.monotonic()
        accepted = send()
        assert time.monotonic() - started < 1.0, "send has blocked"
        if not accepted:
            return count
    raise AssertionError(f"{most} messages queued for a peer that does not read")


def test_client_never_blocks_and_queues_a_bounded_number(endpoint: str, opened: Callable) -> None:
    client = opened(ZmqClient(endpoint, b"one"))
    assert send_until_refused(lambda: client.send([b"x"])) <= transport.SEND_HWM
    assert not client.send([b"x"]), "a full queue stays full"
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 1.0, "closing must not wait for the queue"


def test_client_whose_server_does_not_read_never_blocks(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    client = opened(ZmqClient(endpoint, b"one"))
    exchange(client, server)
    payload = b"x" * 16384
    send_until_refused(lambda: client.send([payload]))
    received = server.recv(SOON)
    assert received is not None and received[1] == [payload]


def test_server_never_blocks_on_a_peer_that_does_not_read(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    slow, quick = (opened(ZmqClient(endpoint, name)) for name in (b"slow", b"quick"))
    exchange(slow, server)
    exchange(quick, server)
    payload = b"x" * 16384
    send_until_refused(lambda: server.send(b"slow", [payload]))
    exchange(quick, server)
    assert slow.recv(SOON) == [payload]


def test_server_drops_messages_to_unknown_and_gone_peers(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    assert not server.send(b"nobody", [b"x"])
    client = ZmqClient(endpoint, b"one")
    exchange(client, server)
    client.close()
    assert eventually(lambda: not server.send(b"one", [b"x"]))


# -- restarts ----------------------------------------------------------------------------------


def test_client_reconnects_after_the_server_restarts(endpoint: str, opened: Callable) -> None:
    client = opened(ZmqClient(endpoint, b"one"))
    for _ in range(3):
        server = opened(ZmqServer(endpoint))
        assert exchange(client, server) == b"one"
        server.close()


def test_a_new_connection_takes_over_its_identity(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    old = opened(ZmqClient(endpoint, b"same"))
    exchange(old, server)
    new = opened(ZmqClient(endpoint, b"same"))
    assert exchange(new, server, b"new") == b"same"
    assert server.send(b"same", [b"for the new one"])
    assert new.recv(SOON) == [b"for the new one"]
    assert old.recv(0.05) is None


def test_close_is_idempotent(endpoint: str) -> None:
    server, client = ZmqServer(endpoint), ZmqClient(endpoint, b"one")
    for channel in (client, client, server, server):
        channel.close()
    with closing(ZmqServer(endpoint)):
        pass


# -- hostile peers -----------------------------------------------------------------------------


def test_an_oversized_frame_does_not_kill_the_server(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    good = opened(ZmqClient(endpoint, b"good"))
    exchange(good, server)
    bad = opened(ZmqClient(endpoint, b"bad"))
    exchange(bad, server)
    bad.send([b"x" * (transport.MAX_FRAME_BYTES + 1)])
    assert server.recv(0.2) is None
    exchange(good, server)


def test_an_oversized_frame_does_not_kill_the_client(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    client = opened(ZmqClient(endpoint, b"one"))
    exchange(client, server)
    server.send(b"one", [b"x" * (transport.MAX_FRAME_BYTES + 1)])
    assert client.recv(0.2) is None
    assert eventually(lambda: client.send([b"again"]))
    assert server.recv(SOON) == (b"one", [b"again"])
    exchange(client, server)


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, b"\xff" + bytes(8) + b"\x7f\3\0PLAIN" + bytes(47)],
    ids=["http", "zeromq with another mechanism"],
)
def test_client_outlives_another_program_on_the_port(opened: Callable, greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        client = opened(ZmqClient(f"tcp://127.0.0.1:{port}", b"one"))
        connection, _ = other.accept()
        with connection:
            connection.sendall(greeting)
            time.sleep(0.1)
    server = opened(ZmqServer(f"tcp://127.0.0.1:{port}"))
    assert eventually(lambda: client.send([b"x"]) and server.recv(0.1) is not None)


def test_bytes_that_are_not_zeromq_do_not_kill_the_server(opened: Callable) -> None:
    port = free_port()
    server = opened(ZmqServer(f"tcp://127.0.0.1:{port}"))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, os.urandom(5000), b""):
        with socket.create_connection(("127.0.0.1", port), timeout=SOON) as raw:
            raw.sendall(garbage)
        # Random bytes may pass for the oldest dialect of ZeroMQ, not for a message of ours.
        while (received := server.recv(0.02)) is not None:
            with pytest.raises(ProtocolError):
                protocol.decode(received[1])
    exchange(opened(ZmqClient(f"tcp://127.0.0.1:{port}", b"one")), server)


def test_a_message_without_frames_is_an_empty_one(endpoint: str, opened: Callable) -> None:
    """A DEALER may send a single empty frame; ROUTER adds the identity and nothing else."""
    server = opened(ZmqServer(endpoint))
    client = opened(ZmqClient(endpoint, b"one"))
    assert client.send([b""])
    assert server.recv(SOON) == (b"one", [b""])


# -- endpoints -----------------------------------------------------------------------------------


def test_a_busy_endpoint_is_named(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    with pytest.raises(ConfigError, match="in use") as error:
        ZmqServer(endpoint)
    assert endpoint in str(error.value)
    exchange(opened(ZmqClient(endpoint, b"one")), server)


def test_a_socket_file_left_behind_is_reused(opened: Callable, tmp_path: Path) -> None:
    path = tmp_path / "draft"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert path.exists()
    server = opened(ZmqServer(f"ipc://{path}"))
    exchange(opened(ZmqClient(f"ipc://{path}", b"one")), server)


def test_private_folder_is_private_and_goes_away(opened: Callable) -> None:
    first, second = private_ipc_endpoint(), private_ipc_endpoint()
    try:
        assert first != second
        folder = Path(first.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        check_endpoint(first)
        opened(ZmqServer(first)).close()
        remove_private_ipc(first)
        assert not folder.exists()
        remove_private_ipc(first)
    finally:
        remove_private_ipc(first)
        remove_private_ipc(second)


def test_only_a_folder_of_ours_is_removed(tmp_path: Path) -> None:
    (tmp_path / "keep").touch()
    remove_private_ipc(f"ipc://{tmp_path}/draft")
    remove_private_ipc("tcp://127.0.0.1:5555")
    assert (tmp_path / "keep").exists()


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.1.2.3:5555", "tcp://example.com:5555",
        "tcp://[::]:5555", "tcp://[2001:db8::1]:5555", "tcp://eth0:5555", "tcp://:5555",
        "tcp://127.0.0.1.example.com:5555", "tcp://127.0.0.1@10.1.2.3:5555",
        "tcp://10.1.2.3:0;127.0.0.1:5555", "tcp://127.0.0.1:0;10.1.2.3:5555",
        "tcp://localhost.example.com:1", "pgm://127.0.0.1:5555", "inproc://x", "127.0.0.1:5555",
        "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:abc",
        "tcp://127.0.0.1:0", "tcp://127.0.0.1:-1", "tcp://[::1", "tcp://user@127.0.0.1:5555",
        "tcp://127.0.0.1:5555/path", "tcp://127.0.0.1:5555?x=1", "tcp://127.0.0.1:5555#x",
        "ipc://relative", "ipc://", "ipc:///", "ipc:///" + "x" * 101, "ipc:///a\0b", "", "tcp",
    ],
)  # fmt: skip
def test_what_cannot_be_an_endpoint_is_refused_by_name(endpoint: str) -> None:
    for refuse in (check_endpoint, ZmqServer, lambda e: ZmqClient(e, b"one")):
        with pytest.raises(ConfigError) as error:
            refuse(endpoint)
        assert repr(endpoint) in str(error.value)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:5555", "tcp://127.8.9.1:1", "tcp://localhost:65535", "ipc:///tmp/x y"],
)
def test_good_endpoints_pass(endpoint: str) -> None:
    check_endpoint(endpoint)


def test_ipv6_loopback_works(opened: Callable) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 loopback")
        port = probe.getsockname()[1]
    endpoint = f"tcp://[::1]:{port}"
    server = opened(ZmqServer(endpoint))
    exchange(opened(ZmqClient(endpoint, b"one")), server)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True),
     ("0.0.0.0", False), ("10.0.0.1", False), ("example.com", False), ("", False), ("*", False)],
)  # fmt: skip
def test_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_descriptor_becomes_readable(endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint))
    client = opened(ZmqClient(endpoint, b"one"))
    exchange(client, server)
    assert server.recv(0) is None
    poller = zmq.Poller()
    poller.register(server.fd, zmq.POLLIN)
    client.send([b"x"])
    assert poller.poll(SOON * 1e3)

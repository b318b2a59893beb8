"""Keys on disk, and who gets in with them over real sockets."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from servers import free_port
from sgl_ssd import keys
from sgl_ssd.errors import ConfigError
from sgl_ssd.keys import load_client_keys, load_server_keys, make_keys
from sgl_ssd.transport import ZmqClient, ZmqServer, check_endpoint

SOON = 5.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path, ["one", "two"])
    return tmp_path


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def opened() -> Iterator[Callable]:
    """Registers channels that are closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda channel: stack.enter_context(closing(channel))


# -- on disk -----------------------------------------------------------------------------------


def test_files_and_folders_are_private(folder: Path) -> None:
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert {str(f.relative_to(folder)) for f in files} == {
        "server/server.secret", "server/clients/one.public", "server/clients/two.public",
        "one/client.secret", "one/server.public", "two/client.secret", "two/server.public",
    }  # fmt: skip
    assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    assert stat.S_IMODE((folder / "one").stat().st_mode) == 0o700


def test_both_sides_fit_together(folder: Path) -> None:
    server, one = load_server_keys(str(folder / "server")), load_client_keys(str(folder / "one"))
    assert one.server == server.own.public
    assert server.clients[one.own.public] == "one"
    assert one.own.secret.decode() not in repr(one) and "secret" not in repr(server)


def test_a_later_client_leaves_the_rest_as_it_is(folder: Path) -> None:
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    make_keys(folder, ["three"])
    assert all(f.read_bytes() == data for f, data in before.items())
    assert set(load_server_keys(str(folder / "server")).clients.values()) == {"one", "two", "three"}


@pytest.mark.parametrize("name", ["server", "", "../x", "a/b", ".hidden", "a" * 65, "one"])
def test_names_that_cannot_be_or_are_taken(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        make_keys(folder, [name])


def test_the_command_prints_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert keys.main([str(tmp_path / "k")]) == 0
    out = capsys.readouterr().out
    assert "--ssd-draft-keys" in out and "--keys" in out
    assert keys.main([str(tmp_path / "k")]) == 1
    assert "already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("one/client.secret", lambda f: f.chmod(0o640), "chmod 600"),
        ("one/client.secret", lambda f: f.unlink(), "sgl_ssd.keys"),
        ("one/client.secret", lambda f: f.write_bytes(f.read_bytes()[:41]), "a line each"),
        ("one/client.secret", lambda f: f.write_bytes(b"a" * 40 + b"\n" + b"b" * 40), "together"),
        ("one/server.public", lambda f: f.write_bytes(b"short"), "40"),
        ("one/server.public", lambda f: f.write_bytes(b"\xff" * 40), "public key"),
    ],
)
def test_broken_files_are_named(folder: Path, file: str, damage: Callable, words: str) -> None:
    damage(folder / file)
    with pytest.raises(ConfigError, match=words) as error:
        load_client_keys(str(folder / "one"))
    assert str(folder / file) in str(error.value)


def test_a_server_nobody_may_talk_to_is_refused(folder: Path) -> None:
    for file in (folder / "server" / "clients").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match="nobody could connect"):
        load_server_keys(str(folder / "server"))


# -- over sockets ------------------------------------------------------------------------------


def test_beyond_loopback_only_with_keys() -> None:
    with pytest.raises(ConfigError, match=r"sgl_ssd\.keys"):
        check_endpoint("tcp://10.0.0.1:5600")
    with pytest.raises(ConfigError):
        ZmqServer("tcp://0.0.0.0:5600")
    check_endpoint("tcp://10.0.0.1:5600", keys=True)


def test_a_listed_key_gets_in(folder: Path, endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint, load_server_keys(str(folder / "server"))))
    for name in ("one", "two"):
        client = opened(ZmqClient(endpoint, name.encode(), load_client_keys(str(folder / name))))
        assert client.send([b"hello", b""])
        assert server.recv(SOON) == (name.encode(), [b"hello", b""])
        assert server.send(name.encode(), [b"welcome"])
        assert client.recv(SOON) == [b"welcome"]


def test_a_foreign_key_is_refused_and_logged_once(
    folder: Path, endpoint: str, opened: Callable, tmp_path_factory, caplog
) -> None:
    foreign = tmp_path_factory.mktemp("foreign")
    make_keys(foreign, ["stranger"])
    stranger = load_client_keys(str(foreign / "stranger"))
    own = load_server_keys(str(folder / "server"))
    # It knows our server's public key, which is no secret; its own key is not on the list.
    wrong = keys.ClientKeys(stranger.own, own.own.public)
    with caplog.at_level(logging.WARNING):
        server = opened(ZmqServer(endpoint, own))
        client = opened(ZmqClient(endpoint, b"stranger", wrong))
        client.send([b"hello"])
        assert server.recv(1.5) is None  # several attempts to connect
        again = opened(ZmqClient(endpoint, b"again", wrong))
        again.send([b"hello"])
        assert server.recv(0.5) is None
    assert caplog.text.count("refused a connection") == 1
    assert stranger.own.public.decode() in caplog.text
    # ... and those on the list are not disturbed.
    one = opened(ZmqClient(endpoint, b"one", load_client_keys(str(folder / "one"))))
    one.send([b"hello"])
    assert server.recv(SOON) == (b"one", [b"hello"])


def test_a_client_without_keys_is_not_heard(folder: Path, endpoint: str, opened: Callable) -> None:
    server = opened(ZmqServer(endpoint, load_server_keys(str(folder / "server"))))
    client = opened(ZmqClient(endpoint, b"plain"))
    client.send([b"hello"])
    assert server.recv(1.0) is None


def test_a_server_that_cannot_prove_itself_is_not_told_anything(
    folder: Path, endpoint: str, opened: Callable, tmp_path_factory
) -> None:
    other = tmp_path_factory.mktemp("other")
    make_keys(other, ["one"])
    impostor = opened(ZmqServer(endpoint, load_server_keys(str(other / "server"))))
    client = opened(ZmqClient(endpoint, b"one", load_client_keys(str(folder / "one"))))
    client.send([b"a secret prompt"])
    assert impostor.recv(1.0) is None
    plain = f"tcp://127.0.0.1:{free_port()}"
    listener = opened(ZmqServer(plain))
    client = opened(ZmqClient(plain, b"one", load_client_keys(str(folder / "one"))))
    client.send([b"a secret prompt"])
    assert listener.recv(1.0) is None


def test_nothing_of_a_message_is_readable_on_the_wire(folder: Path, opened: Callable) -> None:
    import socket

    own = load_server_keys(str(folder / "server"))
    inner, outer = free_port(), free_port()
    server = opened(ZmqServer(f"tcp://127.0.0.1:{inner}", own))
    seen = bytearray()
    with socket.create_server(("127.0.0.1", outer)) as tap:
        client = opened(
            ZmqClient(f"tcp://127.0.0.1:{outer}", b"one", load_client_keys(str(folder / "one")))
        )
        client.send([b"the prompt in clear text"])
        ours, _ = tap.accept()
        with ours, socket.create_connection(("127.0.0.1", inner)) as theirs:
            for side in (ours, theirs):
                side.settimeout(0.02)
            received = None
            for _ in range(200):
                for source, sink in ((ours, theirs), (theirs, ours)):
                    try:
                        data = source.recv(65536)
                    except TimeoutError:
                        continue
                    seen += data
                    sink.sendall(data)
                received = received or server.recv(0)
                if received:
                    break
    assert received == (b"one", [b"the prompt in clear text"])
    assert b"clear text" not in seen and b"prompt" not in seen


def test_closing_leaves_no_thread(folder: Path, endpoint: str) -> None:
    import threading

    ZmqServer(endpoint, load_server_keys(str(folder / "server"))).close()
    assert not [t for t in threading.enumerate() if t.name == "doorkeeper"]
    assert zmq.has("curve")

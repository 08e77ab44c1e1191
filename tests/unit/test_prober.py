# SPDX-License-Identifier: Apache-2.0
"""Whether somebody's host refuses to connect, and what is no refusal."""

import queue
import socket

import pytest

from epd_connector.runtime.prober import Prober, refuses


def listener(host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.bind((host, 0))
    return made


def endpoint(of: socket.socket) -> str:
    host, port = of.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_nobody_listens_at_refuses(host: str) -> None:
    # Bound and not listening: the port is nobody else's meanwhile.
    with listener(host) as silent:
        assert refuses(endpoint(silent))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_listener_that_accepts_nothing_does_not_refuse(host: str) -> None:
    """As one whose process is stopped: its kernel answers."""
    with listener(host) as stopped:
        stopped.listen()
        assert not refuses(endpoint(stopped))


def test_a_name_is_looked_up_and_every_address_of_it_must_refuse() -> None:
    with listener() as silent:
        port = silent.getsockname()[1]
        assert refuses(f"tcp://localhost:{port}")
        silent.listen()
        assert not refuses(f"tcp://localhost:{port}")


@pytest.mark.parametrize(
    "where", ["tcp://no-such-host.invalid:1", "tcp://nonsense", "ipc://@somebody", "tcp://[::1"]
)
def test_what_cannot_be_asked_does_not_refuse(where: str) -> None:
    assert not refuses(where)


def test_a_host_that_does_not_answer_does_not_refuse() -> None:
    """A full backlog: the kernel drops what more comes, as a network that is cut does."""
    with listener() as full:
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        assert not refuses(endpoint(full), timeout_s=0.2)
        for filler in fillers:
            filler.close()


def test_every_probe_is_answered_once_also_when_the_prober_closes() -> None:
    prober = Prober()
    answers: queue.Queue[bool] = queue.Queue()
    with listener() as silent:
        prober.probe(endpoint(silent), answers.put)
        assert answers.get(timeout=30)
    prober.close(10)
    prober.probe("tcp://127.0.0.1:1", answers.put)
    assert not answers.get(timeout=30)
    assert answers.empty()

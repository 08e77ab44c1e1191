# SPDX-License-Identifier: Apache-2.0
"""Addresses as people write them."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_connector.errors import RequestError
from epd_connector.link.base import endpoint, format_address, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]:14579", "::1", 14579),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("encode-0.media.svc.cluster.local:65535", "encode-0.media.svc.cluster.local", 65535),
        ("node_7:9", "node_7", 9),
    ],
)
def test_good_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert endpoint(host, port) == f"tcp://{text}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":80",
        "host:",
        "host:x",
        "host:-1",
        "host:+1",
        "host: 1",
        "host:0",
        "host:65536",
        "host:999999999999",
        "::1:80",
        "[::1]",
        "[::1:80",
        "[1.2.3.4]:80",
        "[host]:80",
        "[fe80::1%e th]:1",
        "300.1.1.1:80",
        "1.2.3:80",
        "-host:80",
        "a..b:80",
        "host/path:80",
        "tcp://host:80",
        "user@host:80",
        "host\n:80",
        "host:80\n",
        "host:\u0661",
        "h\u00f6st:80",
        f"{'a' * 64}:80",
        f"{'a.' * 127}:80",
    ],
)
def test_bad_addresses_are_named(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value) or str(text.rpartition(":")[2]) in str(caught.value)


def test_endless_address_is_not_repeated() -> None:
    with pytest.raises(RequestError, match="300") as caught:
        parse_address("a" * 100_000)
    assert len(str(caught.value)) < 300


def test_port_zero_is_for_listening_only() -> None:
    assert endpoint("::", 0) == "tcp://[::]:0"
    with pytest.raises(RequestError, match="port 0"):
        parse_address("[::]:0")


@pytest.mark.parametrize(("host", "port"), [("", 1), ("a b", 1), ("[::1]", 1), ("a", -1)])
def test_bad_parts_are_refused(host: str, port: int) -> None:
    with pytest.raises(RequestError):
        format_address(host, port)


@given(st.text(max_size=400))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except RequestError:
        return
    assert parse_address(format_address(host, port)) == (host, port)


@given(st.ip_addresses(), st.integers(1, 65535))
def test_every_ip_address_comes_back(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    assert parse_address(format_address(str(address), port)) == (str(address), port)

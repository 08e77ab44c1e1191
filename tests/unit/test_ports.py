# SPDX-License-Identifier: Apache-2.0
"""Ports that are picked for later are given to nobody else meanwhile."""

import socket

import pytest

from epd_connector.testing.ports import Ports


def test_blocks_that_live_at_once_do_not_overlap() -> None:
    made = [Ports(17) for _ in range(60)]
    ports = [port for block in made for port in range(block.first, block.first + 17)]
    assert len(set(ports)) == len(ports)


def test_they_can_be_bound() -> None:
    block = Ports(2)
    for port in (block.first, block.first + 1):
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", port))


@pytest.mark.parametrize("count", [0, 33])
def test_a_number_that_cannot_be_had_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 32"):
        Ports(count)

# SPDX-License-Identifier: Apache-2.0
"""Whether the connection of one dialing ZeroMQ socket is up, as libzmq tells it.

Owns the socket on which libzmq reports. Does not own the socket that dials.
"""

import zmq
from zmq.utils.monitor import parse_monitor_message

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
)


class Monitor:
    """Watches ``dialer`` from before its first connection on. ``up``: as of the last ``read``.

    ``given_up``, as of then, too: the other side does not speak as a listener of ours would, and
    libzmq dials it never again. Such a dialer may take frames for ever, and they are lost.

    Raises ZMQError if the process may open no more sockets; the dialer is still to be closed.
    """

    def __init__(self, dialer: "zmq.Socket[bytes]") -> None:
        self.up = False
        self.given_up = False
        self._cut_short = False
        self._dialer = dialer
        self.socket: zmq.Socket[bytes] = dialer.get_monitor_socket(_EVENTS)

    def read(self) -> bool:
        """Takes what was reported; whether an established connection broke, once or more."""
        broke = False
        while True:
            try:
                report = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return broke
            broke = self._heard(report["event"]) or broke

    def _heard(self, event: int) -> bool:
        """Whether ``event`` is the break of an established connection."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._cut_short = True
            return False
        was_up, cut_short = self.up, self._cut_short
        self.up, self._cut_short = event == zmq.EVENT_HANDSHAKE_SUCCEEDED, False
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return False
        # A handshake that only ended too soon is reported as that first, and is tried again.
        self.given_up = not (was_up or cut_short)
        return was_up

    def close(self) -> None:
        """Ends the watch. Before the dialer is closed. What was not read is read first."""
        # An I/O thread that has no room for a report waits for it under the lock that ending the
        # watch takes, too, with the interpreter's lock held: the process would stand still.
        self.read()
        self._dialer.disable_monitor()
        self.socket.close(linger=0)

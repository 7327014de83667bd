"""One question to the coordinator and its answer, for commands that are not members."""

from __future__ import annotations

from typing import Any

import zmq

from gradsum.errors import Unreachable
from gradsum.proto.address import Address
from gradsum.proto.control import CONTROL
from gradsum.proto.transport.sockets import CONTROL_LIMIT, connect_dealer, new_context


def request(address: Address, message: tuple[Any, ...], timeout: float) -> Any:
    """Send a control message and return the first answer.

    Raises Unreachable after ``timeout`` seconds without one, naming the address.
    """
    context = new_context()
    try:
        socket = connect_dealer(context, address, max_message=CONTROL_LIMIT)
        socket.send(CONTROL.encode(message))
        if not socket.poll(int(timeout * 1000), zmq.POLLIN):
            raise Unreachable(
                f"no answer from the coordinator at {address} in {timeout:g} s",
                peer=str(address),
                hint="is it running there? start it with: gradsum coordinator --bind HOST:PORT",
            )
        return CONTROL.decode(socket.recv())
    finally:
        context.destroy(linger=0)

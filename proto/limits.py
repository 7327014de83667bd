"""Numbers that both ends of a wire agree on. A frame beyond one of them is refused."""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = 1
"""Version of everything on the wire. Another version is refused with both numbers named."""

MAX_HEADER: Final = 1024
"""Bytes of a data header."""

MAX_CONTROL: Final = 1 << 20
"""Bytes of a control message."""

MAX_SLICE: Final = 64 << 20
"""Bytes of one slice's payload."""

MAX_NAME: Final = 256
"""Bytes of a tensor name in UTF-8."""

MAX_DIMS: Final = 16
MAX_PACKED: Final = 4096
"""Tensors in one packed buffer: their mask must fit a data header."""

MAX_INT: Final = (1 << 63) - 1
MAX_RANKS: Final = 65_536
MAX_GATHER: Final = 64 << 10
"""Bytes of the value that a rank may hand to a gather."""

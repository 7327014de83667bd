"""docs/wire.md is the wire's law: its tables and examples say what the code does."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradsum.proto import control, data, dtypes, limits, peer
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec

LAW = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")

MESSAGES: dict[str, Any] = {
    **control.CONTROL._kinds,
    **peer.PEER._kinds,
    **{
        kind.__name__: kind
        for kind in (control.ServerInfo, data.Header, peer.Envelope, TensorSpec, Policy)
    },
}


def rows() -> Iterator[list[str]]:
    """The cells of every row of every table, without backticks."""
    for line in LAW.splitlines():
        if line.startswith("| ") and line.endswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            yield [cell.replace("\\|", "|").replace("`", "").strip() for cell in cells]


def documented() -> dict[str, list[tuple[str, str]]]:
    """Message -> its fields as (name, type), in the order of the tables."""
    found: dict[str, list[tuple[str, str]]] = {}
    fields: list[tuple[str, str]] = []
    for cells in rows():
        if cells[0].startswith("**"):
            fields = found.setdefault(cells[0].strip("*"), [])
        elif not cells[0] and len(cells) == 4:
            fields.append((cells[1], cells[2]))
    return found


def type_text(annotation: Any) -> str:
    """A field's annotation as it is written in the source."""
    return str(getattr(annotation, "__forward_arg__", annotation))


def test_every_message_is_in_the_tables_with_its_fields_and_types() -> None:
    written = {
        name: [(field, type_text(kind.__annotations__[field])) for field in kind._fields]
        for name, kind in MESSAGES.items()
    }
    assert documented() == written


def test_limits_and_dtypes_are_those_of_the_code() -> None:
    table = {cells[0]: cells[1:] for cells in rows() if len(cells) == 3}
    for name in (n for n in vars(limits) if n.startswith("MAX_") and n != "MAX_INT"):
        assert table[name][0] == str(getattr(limits, name)), name
    for name, code in dtypes.CODES.items():
        assert table[name] == [str(code), str(dtypes.SIZES[name])], name
    assert f"protocol version **{limits.PROTOCOL}**" in LAW


def test_kinds_of_data_frames_are_those_of_the_code() -> None:
    assert ", ".join(f"{name} {number}" for number, name in data.KINDS.items()) in LAW


def examples() -> Iterator[tuple[list[tuple[str, bytes]], list[str]]]:
    """Hex dumps (format, bytes) and the lines of the decoded block that follows them."""
    dumps: list[tuple[str, bytes]] = []
    for info, body in re.findall(r"^```(\S[^\n]*)\n(.*?)^```$", LAW, re.MULTILINE | re.DOTALL):
        if info.startswith("hex "):
            dumps.append((info.removeprefix("hex "), undump(body)))
        elif info == "decoded":
            yield dumps, body.splitlines()
            dumps = []


def undump(text: str) -> bytes:
    """The bytes of a dump, whose offsets and readable column must agree with them."""
    whole = b""
    for line in text.splitlines():
        offset, digits, readable = line[:4], line[6:53], line[56:-1]
        row = bytes.fromhex(digits)
        assert int(offset, 16) == len(whole), line
        assert readable == "".join(chr(b) if 32 <= b < 127 else "." for b in row), line
        whole += row
    return whole


def decode(form: str, frame: bytes) -> str:
    match form:
        case "control":
            message = control.CONTROL.decode(frame)
            assert control.CONTROL.encode(message) == frame
            return repr(message)
        case "peer":
            envelope = peer.decode_envelope(frame)
            assert peer.encode_envelope(envelope) == frame
            return repr(envelope)
        case "data":
            header = data.decode_header(frame)
            assert data.encode_header(header) == frame
            return str(header)
        case "float32":
            return str(list(struct.unpack(f"<{len(frame) // 4}f", frame)))
        case _:
            raise AssertionError(f"unknown form {form}")


def test_every_hex_dump_decodes_to_what_stands_below_it() -> None:
    found = list(examples())
    assert [[form for form, _ in dumps] for dumps, _ in found] == [
        ["control"],
        ["data", "float32"],
        ["peer"],
    ]
    for dumps, lines in found:
        assert [decode(form, frame) for form, frame in dumps] == lines
    header = data.decode_header(found[1][0][0][1])
    assert header.length == len(found[1][0][1][1])

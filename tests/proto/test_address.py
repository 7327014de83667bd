"""HOST:PORT texts: what is taken, what is refused and how it is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import ConfigError
from gradsum.proto.address import Address, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7700", "127.0.0.1", 7700),
        ("tcp://10.0.0.1:1", "10.0.0.1", 1),
        ("node-3.cluster:0", "node-3.cluster", 0),
        ("[::1]:65535", "::1", 65_535),
        ("[fe80::1%eth0]:7700", "fe80::1%eth0", 7700),
    ],
)
def test_good_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    ["", ":", "host", "host:", ":7700", "host:seven", "host:-1", "host:65536", "host:7 7",
     "::1:7700", "[]:7700", "host:٣", "host:+1"],
)  # fmt: skip
def test_bad_addresses_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_address(text, "--bind")
    assert "--bind" in raised.value.message
    assert raised.value.hint


@given(st.sampled_from(["a", "10.1.2.3", "::1", "fe80::2"]), st.integers(0, 65_535))
def test_addresses_round_trip(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse_address(str(address)) == parse_address(address.endpoint) == address


@given(st.text(max_size=20))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ConfigError:
        return
    assert address.host
    assert 0 <= address.port <= 65_535


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org", "local", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)

"""Where a webhook may go (A37)."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from headrace.errors import InvalidRequest
from headrace.sinks.webhook_address import Policy

REFUSED = [
    # the list of the public report
    ("http://169.254.169.254/", "address"),
    ("http://127.0.0.1:8001/", "address"),
    ("http://[::1]/", "address"),
    ("http://[::ffff:10.0.0.1]/", "address"),
    ("http://2130706433/", "host"),
    ("http://0x7f.1/", "host"),
    ("http://user@10.0.0.5/", "userinfo"),
    ("file:///etc/passwd", "scheme"),
    ("gopher://x", "scheme"),
    # other forms of the same
    ("http://0177.0.0.1/", "host"),
    ("http://127.1/", "host"),
    ("http://0x7f000001/", "host"),
    ("http://0/", "host"),
    ("http://0.0.0.0/", "address"),
    ("http://127.0.0.1./", "address"),
    ("http://LOCALHOST/", "address"),
    ("http://localhost./", "address"),
    ("http://a.localhost/", "address"),
    ("http://ip6-localhost/", "address"),
    ("http://metadata.google.internal/", "address"),
    ("http://10.0.0.1/", "address"),
    ("http://172.16.0.1/", "address"),
    ("http://192.168.0.1/", "address"),
    ("http://100.64.0.1/", "address"),
    ("http://192.0.2.1/", "address"),
    ("http://198.18.0.1/", "address"),
    ("http://192.88.99.1/", "address"),
    ("http://168.63.129.16/", "address"),
    ("http://224.0.0.1/", "address"),
    ("http://255.255.255.255/", "address"),
    ("http://[::]/", "address"),
    ("http://[::127.0.0.1]/", "address"),
    ("http://[fe80::1]/", "address"),
    ("http://[fd00:ec2::254]/", "address"),
    ("http://[64:ff9b::10.0.0.1]/", "address"),
    ("http://[64:ff9b:1::1]/", "address"),
    ("http://[2002:7f00:1::]/", "address"),
    ("http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/", "address"),
    ("http://[2001:db8::1]/", "address"),
    ("http://[ff02::1]/", "address"),
    ("http://[fec0::1]/", "address"),
    ("http://[5f00::1]/", "address"),
    ("http://[fe80::1%25eth0]/", "host"),
    ("http://[::1", "form"),
    # where parsers disagree
    ("http://a@b@c/", "userinfo"),
    ("http://:secret@a.example/", "userinfo"),
    ("http://a.example\\@127.0.0.1/", "characters"),
    ("http://a.example /", "characters"),
    ("http://a.example/\r\nHost: b", "characters"),
    ("http://a.example/\x00", "characters"),
    ("http://１２７.0.0.1/", "characters"),  # noqa: RUF001
    ("http://ⓛocalhost/", "characters"),
    ("http://%31%32%37.0.0.1/", "host"),
    ("http:///path", "host"),
    ("http://", "host"),
    ("http:a.example", "scheme"),
    ("//a.example/", "scheme"),
    ("a.example", "scheme"),
    ("", "length"),
    ("http://a.example:0/", "port"),
    ("http://a.example:65536/", "form"),
    ("http://a.example:x/", "form"),
    ("http://-a.example/", "host"),
    ("http://a..example/", "host"),
    ("http://" + "a" * 64 + ".example/", "host"),
    ("http://a.example/" + "a" * 2048, "length"),
    ("ftp://a.example/", "scheme"),
    ("javascript://a.example/", "scheme"),
]


@pytest.mark.parametrize(("destination", "rule"), REFUSED)
def test_a37_what_may_not_be_sent_to_is_refused_with_its_rule_and_no_socket(
    destination: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket or a look-up")

    monkeypatch.setattr(socket, "socket", none)
    monkeypatch.setattr(socket, "getaddrinfo", none)
    with pytest.raises(InvalidRequest) as caught:
        Policy().target(destination)
    assert caught.value.details == {"header": "Webhook-URL", "rule": rule}
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("destination", "origin"),
    [
        ("https://a.example/hook?key=v&x=%20#part", "https://a.example:443"),
        ("HTTP://A.Example:8080", "http://a.example:8080"),
        ("https://8.8.8.8/", "https://8.8.8.8:443"),
        ("https://a_b.example./", "https://a_b.example:443"),
        ("https://[2606:4700::1111]/", "https://[2606:4700::1111]:443"),
        ("https://[64:ff9b::8.8.8.8]/", "https://[64:ff9b::808:808]:443"),
        ("https://xn--bcher-kva.example/", "https://xn--bcher-kva.example:443"),
        ("https://a1.2b.example:65535/", "https://a1.2b.example:65535"),
        ("http://single/", "http://single:80"),
    ],
)
def test_a_public_destination_is_taken(destination: str, origin: str) -> None:
    assert Policy().target(destination).origin == origin


@pytest.mark.parametrize(
    ("destination", "url"),
    [
        ("https://a.example/hook?key=v&x=%20#part", "https://a.example:443/hook?key=v&x=%20"),
        ("https://a.example?x", "https://a.example:443/?x"),
        ("http://A.Example", "http://a.example:80/"),
        ("http://[2606:4700:0:0::1111]:8/a/../b//c;d", "http://[2606:4700::1111]:8/a/../b//c;d"),
    ],
)
def test_what_is_connected_to_is_written_anew_from_what_was_checked(destination: str, url: str) -> None:
    assert Policy().target(destination).url == url


@given(
    st.text(st.sampled_from("ab1.@:/?#[]%\\-_;&0x"), max_size=30).map("http://{}".format)
    | st.text(max_size=20).map("https://a.example{}".format)
)
def test_two_readers_of_a_taken_destination_find_the_same_host(destination: str) -> None:
    policy = Policy(allow_private=True)
    try:
        target = policy.target(destination)
    except InvalidRequest:
        return
    again = URL(target.url, encoded=True)
    assert (again.raw_host, again.port, again.scheme) == (target.host, target.port, target.scheme)
    assert policy.target(target.url) == target


def test_private_ones_are_taken_where_the_setting_says_so_but_not_odd_forms() -> None:
    policy = Policy(allow_private=True)
    for destination in ("http://127.0.0.1:1/", "http://localhost/", "http://[::1]/", "http://169.254.169.254/"):
        policy.target(destination)
    for destination in ("http://2130706433/", "http://a@127.0.0.1/", "file:///etc/passwd"):
        with pytest.raises(InvalidRequest):
            policy.target(destination)


def test_an_allow_list_opens_single_hosts_and_networks() -> None:
    policy = Policy(allow=("10.1.0.0/16", "localhost", ".internal", "::1"))
    for destination in ("http://10.1.2.3/", "http://localhost/", "http://[::1]/"):
        policy.target(destination)
    for destination in ("http://10.2.0.1/", "http://127.0.0.1/", "http://b.localhost/"):
        with pytest.raises(InvalidRequest):
            policy.target(destination)
    assert policy.refuses("a.internal", ip_address("10.9.9.9")) == ""
    assert policy.refuses("ainternal", ip_address("10.9.9.9")) == "private"
    assert policy.refuses("any.example", ip_address("10.1.9.9")) == ""


def test_where_only_some_hosts_are_allowed_the_others_are_not() -> None:
    policy = Policy(only=("a.example", "203.0.113.0/24"), allow_private=True)
    policy.target("https://a.example/")
    policy.target("https://b.example/")  # its address may be in the network: that shows when it is looked up
    assert policy.refuses("b.example", ip_address("203.0.113.9")) == ""
    assert "ONLY" in policy.refuses("b.example", ip_address("8.8.8.8"))
    with pytest.raises(InvalidRequest):
        Policy(only=("a.example",)).target("https://b.example/")
    assert policy.refuses("a.example", ip_address("127.0.0.1")) == ""
    assert Policy(only=("a.example",)).refuses("a.example", ip_address("127.0.0.1")) == "loopback"


@given(st.ip_addresses())
def test_no_address_that_python_calls_private_is_ever_let_through(address: object) -> None:
    found = ip_address(str(address))
    if not Policy().refuses("a.example", found):
        assert found.is_global or (found.version == 6 and str(found).startswith("64:ff9b::"))
        assert not found.is_multicast

"""Addresses as clients write them."""

import pytest

from semrl_jax.support.addresses import url_of


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_has_brackets(host):
    assert url_of(host, 8000, has_tls=True) == "https://[::1]:8000"
    assert url_of("127.0.0.1", 8000, has_tls=False) == "http://127.0.0.1:8000"

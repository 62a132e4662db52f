"""What may be asked of an allowed beginning, and what only looks like it."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from lora_serve.adapters.sources.archive_url import ArchiveUrlSource, join_url, parse_url
from lora_serve.core.errors import ConfigError, InvalidRequestError

ALLOWED = "https://models.acme.com/adapters"


def is_allowed(text: str, beginning: str = ALLOWED) -> bool:
    try:
        return parse_url(text).is_below(parse_url(beginning))
    except InvalidRequestError:
        return False


@pytest.mark.parametrize(
    "url",
    [
        "https://models.acme.com/adapters",
        "https://models.acme.com/adapters/",
        "https://models.acme.com/adapters/a.tar.gz",
        "HTTPS://MODELS.ACME.COM:443/adapters/a/b.zip?sig=a%2Fb&x=..",
        "https://models.acme.com./adapters/a",
        "https://models.acme.com/%61dapters/a%20b",
        "https://models.acme.com/adapters/a..b/...",
    ],
)
def test_what_lies_below_the_beginning_is_allowed(url: str) -> None:
    assert is_allowed(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://models.acme.com/adapters/a",
        "https://models.acme.com:8443/adapters/a",
        "https://models.acme.com/adapters-of-others/a",
        "https://models.acme.com/adapter",
        "https://models.acme.com/",
        "https://models.acme.com.evil.org/adapters/a",
        "https://evil.org/models.acme.com/adapters/a",
        "https://models.acme.com@evil.org/adapters/a",
        "https://evil.org#@models.acme.com/adapters/a",
        "https://evil.org\\@models.acme.com/adapters/a",
        "https://user:pw@models.acme.com/adapters/a",
        "https://models.acme.com/adapters/../secret",
        "https://models.acme.com/adapters/%2e%2E/secret",
        "https://models.acme.com/adapters/.%2e/secret",
        "https://models.acme.com/adapters/%252e%252e/secret",
        "https://models.acme.com/adapters/..;a=b/secret",
        "https://models.acme.com/adapters/..%2fsecret",
        "https://models.acme.com/adapters/..%5csecret",
        "https://models.acme.com/adapters/./a",
        "https://models.acme.com/adapters//a",
        "https://models.acme.com//adapters/a",
        "https://models.acme.com/Adapters/a",
        "https://models.acme.com/adapters/a%00",
        "https://models.acme.com/adapters/a%0d%0aHost:%20evil",
        "https://models.acme.com/adapters/a\r\nHost: evil",
        "https://models.acme.com/adapters/a b",
        "https://models.acme.com/adapters/ä",
        "https://modеls.acme.com/adapters/a",  # noqa: RUF001 (a Cyrillic letter)
        "https://models.acme.com:0/adapters/a",
        "https://models.acme.com:/adapters/a",
        "https://[::1/adapters/a",
        "https:///adapters/a",
        "https:models.acme.com/adapters/a",
        "ftp://models.acme.com/adapters/a",
        "",
    ],
)
def test_what_only_looks_like_it_is_not(url: str) -> None:
    assert not is_allowed(url)


PIECES = [
    "adapters",
    "..",
    ".",
    "/",
    "%2e",
    "%2E",
    "%2f",
    "%5c",
    "%25",
    "\\",
    "@",
    ":",
    "?",
    "#",
    ";",
    "a",
    "evil.org",
    "//",
    "%61",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_nothing_that_is_allowed_leads_elsewhere_for_another_reader_of_urls(pieces: list[str]) -> None:
    text = "https://models.acme.com" + "".join(pieces)
    if is_allowed(text):
        other = URL(text)
        assert (other.scheme, other.host, other.port) == ("https", "models.acme.com", 443)
        path = posixpath.normpath(unquote(unquote(other.path)))
        assert path == "/adapters" or path.startswith("/adapters/")


def test_credentials_in_a_url_are_refused_in_words_that_do_not_repeat_them() -> None:
    with pytest.raises(InvalidRequestError, match="holds credentials") as caught:
        parse_url("https://user:secret@models.acme.com/adapters/a")
    assert "secret" not in str(caught.value)


def test_beginning_without_a_path_allows_the_whole_host() -> None:
    assert is_allowed("http://[::1]:8080/a/b", "http://[::1]:8080")
    assert not is_allowed("http://[::1]:8081/a/b", "http://[::1]:8080")


def test_text_form_leaves_the_query_out_and_the_request_keeps_it() -> None:
    url = parse_url("HTTP://Host:80/%7Ea/b%20c?sig=x%2Fy")
    assert f"{url}" == "http://host/~a/b%20c"
    assert url.target == "/~a/b%20c?sig=x%2Fy"


def test_redirects_are_relative_to_where_they_came_from() -> None:
    base = parse_url("https://host/a/b?x=1")
    assert f"{join_url(base, 'c')}" == "https://host/a/c"
    assert f"{join_url(base, '/c')}" == "https://host/c"
    assert f"{join_url(base, '//other/c')}" == "https://other/c"


@pytest.mark.parametrize(
    "beginning", ["models.acme.com", "ftp://a", "https://u:p@a/", "https://a/?x=1", "https://a/../b"]
)
def test_beginning_that_is_none_is_a_wrong_setting(beginning: str) -> None:
    with pytest.raises(ConfigError, match="--adapter-url"):
        ArchiveUrlSource([beginning])

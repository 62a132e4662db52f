"""The values of `format` in a JSON schema."""

from __future__ import annotations

KNOWN_FORMATS = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))  # by llguidance, exactly
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
# RFC 3339 without leap seconds, which are right in a few minutes of history only.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]{0,9})(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
# https://json-schema.org/draft/2020-12/json-schema-validation#section-7.3; all others are notes for people.
STANDARD_FORMATS = frozenset(
    (
        *KNOWN_FORMATS,
        *FORMAT_PATTERNS,
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "regex",
        "uri-reference",
        "uri-template",
    )
)

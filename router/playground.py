"""The playground page and its headers: one file without outside assets, read once."""

import base64
import hashlib
import re
from importlib.resources import files


class Html(bytes):
    """A body that is a page, not JSON."""


def page() -> tuple[Html, list[tuple[bytes, bytes]]]:
    """(the page, its headers).

    Only the page's own script runs, and it talks to its own server only: an API key typed into it
    goes nowhere else, whatever a state or an answer contains.
    """
    html = files("router").joinpath("playground.html").read_bytes()
    script = re.search(rb"<script>(.*?)</script>", html, re.DOTALL)
    assert script, "the page has one script"
    digest = base64.b64encode(hashlib.sha256(script[1]).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return Html(html), [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-cache"),
    ]

"""Requests nobody wrote against the app as Serve serves it: proxy, Gateway, handle and replica."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis import GenerationMode

from tests.deployments.conftest import Served
from tests.router.test_fuzz import CHECKS, OPERATIONS, QUICK, check, mutated

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_the_document_s_own_requests(served: Served, mode: GenerationMode) -> None:
    """Every operation of the document that the server itself gives, valid and invalid requests."""
    told = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    for method, path in OPERATIONS:
        if mode is GenerationMode.NEGATIVE and path in ("/v1/models", "/health", "/version"):
            continue  # nothing in it can be invalid
        examples = 150 if path == "/v1/systemone" else 10

        @given(case=told[path][method].as_strategy(generation_mode=mode))
        @settings(QUICK, max_examples=examples)
        def ask(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=60)

        ask()
    assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200


def test_mutated_requests(served: Served, client: httpx.Client) -> None:
    """Bodies with changed places, or bytes, or cut short."""

    @given(body=mutated())
    @settings(QUICK, max_examples=150)
    def ask(body: bytes) -> None:
        check(client.post("/v1/systemone", content=body))

    ask()
    assert client.get("/health").status_code == 200

"""Gateways are killed behind HAProxy, with the environment that deployments have."""

import json
import sys
from pathlib import Path

import pytest

from tests.deployments.conftest import ROOT
from tests.deployments.machines import can_be_made, machine

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not can_be_made(), reason="needs root and namespaces"),
]


def test_a_killed_gateway_loses_nothing(tmp_path: Path) -> None:
    """By HAProxy's second try, also of bodies of 400 kB; the callers try once."""
    with machine(tmp_path) as one:
        out = one.run(
            f". {ROOT}/deployments/node.sh; export PYTHONPATH={ROOT};"
            f" {sys.executable} -m tests.deployments.haproxy_load 2"
        )
    told = json.loads(out.partition("TOLD ")[2].splitlines()[0])
    assert told["killed"] == 2
    assert told["failed"] == []
    assert told["changed"] == 0
    assert told["answered"] > 200

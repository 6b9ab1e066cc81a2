"""Serve's own proxy is killed under load: nothing behind it can ask again, so its callers do."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import ray
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.context import _get_global_client
from typesafe_sdk import Noul, RetryPolicy, TypeSafeClient

from tests.deployments.conftest import Served, joined
from tests.waiting import until

pytestmark = pytest.mark.ray

STATES = [f"state {i}: the card was charged twice" for i in range(8)]
TOLERANCE = 1e-5

PATIENT = RetryPolicy(max_retries=30, timeout=120)
"""By default the official client asks three times in two seconds: enough where its name has the
address of another proxy, too (`test_ray_up`); the only one takes longer to come back.
"""


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    """The server of all tests, whose cluster this process joins to find the proxy: the only one,
    which is looked after every second.
    """
    with joined(served.address):
        yield served.url


def proxy() -> int:
    """The process of the only proxy; 0 while there is none that answers."""
    (about,) = _get_global_client().get_serve_details()["proxies"].values()
    try:
        actor = ray.get_actor(about["actor_name"], SERVE_NAMESPACE)
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60))
    except (ValueError, ray.exceptions.RayError):
        return 0


class Load:
    """Official clients that ask without a pause."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, float]] = []
        self.failed: list[Exception] = []
        self._url, self._enough = url, threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(i,)) for i in range(4)]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, turn: int) -> None:
        with TypeSafeClient(base_url=self._url, api_key="any", retry=PATIENT) as client:
            while not self._enough.is_set():
                number = turn % len(STATES)
                try:
                    found = client.system_one(
                        state=STATES[number], questions={"q": Noul(instructions="Angry?")}
                    )
                    self.answers.append((number, found.nouls["q"].noul))
                except Exception as error:
                    self.failed.append(error)
                turn += 3

    def wait_for(self, more: int) -> None:
        """Returns when so many more are answered, or one has failed."""
        wanted = len(self.answers) + more
        until(lambda: len(self.answers) >= wanted or bool(self.failed), f"not {wanted} answered")

    def stop(self) -> None:
        """Returns when the last request is over."""
        self._enough.set()
        for thread in self._threads:
            thread.join()


def test_a_killed_proxy_costs_retries_of_the_callers(url: str) -> None:
    """The official client's, with nothing of ours in them: each call is answered, as before."""
    load = Load(url)
    try:
        load.wait_for(40)
        until(lambda: proxy() != 0, "the proxy is not found")
        killed, at = proxy(), len(load.answers)
        os.kill(killed, signal.SIGKILL)
        load.wait_for(60)
    finally:
        load.stop()
    assert load.failed == []
    until(lambda: proxy() not in (0, killed), "no other proxy is told of")
    for number in range(len(STATES)):
        before, after = (
            [value for n, value in part if n == number]
            for part in (load.answers[:at], load.answers[at:])
        )
        assert before
        assert after
        assert max(before + after) - min(before + after) < TOLERANCE

"""The workloads under locust: `locust -f loadtest/locustfile.py --host URL`, headless or with its
web page.

`--loop open` (the default): a locust user is a process of arrivals at `--rate` requests/s, one
greenlet a due time, and response times count from the due time; locust's own waits would be closed
loops. More users, as locust ramps them or as the web page asks, offer more load. `--loop closed`: a
locust user is a client that waits for its answers. `--report FOLDER` also writes this project's
report when the test stops.
"""

import itertools
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import gevent
from geventhttpclient.useragent import RetriesExceeded, UserAgent
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import WorkerRunner

from loadtest.driver import TIMEOUT, Reply, Sample
from loadtest.http_transport import PATH, headers, reply_of
from loadtest.output import write_run
from loadtest.plan import Level, Plan
from loadtest.schedule import arrivals
from loadtest.stats import summary
from loadtest.workloads import DATA, NAMES, Options, Request, Workload, load

TIMEOUT_S = 60.0
FOREVER_S = 1e9


class _Agent(UserAgent):
    # every status is a reply; redirects and retries would be requests nobody asked for
    valid_response_codes: ClassVar[frozenset[int]] = frozenset(range(100, 600))


class Test:
    """What the users of one process share: workload, connections, requests in flight, samples."""

    def __init__(self, environment: Environment) -> None:
        """Reads the options; nothing is sent yet."""
        self.environment, given = environment, environment.parsed_options
        assert given is not None, "locust parses its options before a test starts"
        self.options = Options(bool(given.one_by_one), given.think, given.model)
        self.workload: Workload = load(given.workload, Path(given.data), self.options)
        self.given = given
        runner = environment.runner
        worker = runner.worker_index if isinstance(runner, WorkerRunner) else 0
        self.seed = given.seed + 1_000_000 * (worker + 1)
        self.numbers = itertools.count()
        self.in_flight = gevent.pool.Group()
        self.samples: list[Sample] = []
        self.most_users = 0
        self.agent = _Agent(
            max_redirects=0,
            max_retries=0,
            concurrency=1_000_000,  # a request that is due must not wait for a connection
            network_timeout=TIMEOUT_S,
            connection_timeout=TIMEOUT_S,
        )
        self.start = time.monotonic()

    def now(self) -> float:
        """Seconds since the test started."""
        return time.monotonic() - self.start

    def send(self, due: float, request: Request) -> Reply:
        """Sends one request now, and tells locust and the report, from when it was due."""
        sent = self.now()
        reply, size = self._post(request)
        done = self.now()
        self.samples.append(Sample(request.work, request.questions, due, sent, done, reply))
        self.environment.events.request.fire(
            request_type="POST",
            name=request.work,
            response_time=(done - due) * 1000,
            response_length=size,
            exception=RuntimeError(reply.error) if reply.error else None,
            context={},
        )
        return reply

    def _post(self, request: Request) -> tuple[Reply, int]:
        try:
            answer = self.agent.urlopen(
                str(self.environment.host).rstrip("/") + PATH,
                method="POST",
                headers=headers(self.given.api_key),
                payload=json.dumps(request.body).encode(),
            )
            body = bytes(answer.content)
            return reply_of(answer.status_code, body), len(body)
        except RetriesExceeded as error:
            late = isinstance(getattr(error, "original", None), (TimeoutError, gevent.Timeout))
            return Reply(TIMEOUT if late else "transport RetriesExceeded"), 0
        except (TimeoutError, gevent.Timeout):
            return Reply(TIMEOUT), 0
        except Exception as error:
            # the client's own exceptions share no base; whatever one is, the test goes on
            return Reply(f"transport {type(error).__name__}"), 0


class Caller(User):
    """An arrival process of the open loop, or a client of the closed one."""

    @task
    def run_loop(self) -> None:
        """Sends until locust stops this user."""
        test: Test = self.environment.loadtest
        test.most_users = max(test.most_users, self.environment.runner.user_count)
        if test.given.loop == "open":
            _open(test, next(test.numbers))
        else:
            _closed(test, next(test.numbers))
        raise StopUser


def _open(test: Test, number: int) -> None:
    stream = test.workload.open_stream(test.seed + number)
    first = test.now()
    for due in arrivals(test.given.arrivals, test.given.rate, FOREVER_S, test.seed + number):
        request = stream.at(due)
        gevent.sleep(max(0.0, first + due - test.now()))
        test.in_flight.spawn(test.send, first + due, request)


def _closed(test: Test, number: int) -> None:
    for step in test.workload.client(test.seed, number):
        due = test.now() + step.think_s
        gevent.sleep(step.think_s)
        # in a greenlet of its own: this one may be ended while its request is under way
        sent = test.in_flight.spawn(test.send, due, step.request)
        if sent.get().error:
            # a refusal takes no time: without a pause its client would ask in a tight loop
            gevent.sleep(0.1)


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    # on the parser itself: its web page shows these, not those of a group
    add = parser.add_argument
    add("--workload", choices=NAMES, default="mixed", help="What is asked.")
    add("--loop", choices=("open", "closed"), default="open", help="Who waits for whom.")
    add("--rate", type=float, default=1.0, help="Requests/s of one user of the open loop.")
    add("--arrivals", choices=("poisson", "even", "bursts"), default="poisson", help="Open loop.")
    add("--seed", type=int, default=0, help="The same seed asks the same.")
    add("--think", type=float, default=5.0, help="Mean think time of an agent, seconds.")
    add("--one-by-one", action="store_true", help="A request for each question.")
    add("--model", default="jev-latest", help="The model asked for.")
    add("--data", default=str(DATA), help="Folder of workload files; synthetic if absent.")
    add("--warmup", type=float, default=5.0, help="Seconds left out of the report.")
    add("--report", default="", help="Folder for the run's JSON and page.")
    # its web page would hold the key in its source
    key: dict[str, Any] = {"env_var": "LOADTEST_KEY", "include_in_web_ui": False}
    add("--api-key", default="", help="Key of the server, or LOADTEST_KEY.", **key)


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    environment.loadtest = Test(environment)  # type: ignore[attr-defined]


@events.test_stop.add_listener
def _stop(environment: Environment, **_: Any) -> None:
    test: Test = environment.loadtest  # type: ignore[attr-defined]
    seconds = test.now()
    test.in_flight.join(TIMEOUT_S)
    given = test.given
    if not (given.report and test.samples):
        return
    per_user = given.rate if given.loop == "open" else 1
    plan = Plan(
        workload=given.workload,
        loop=given.loop,
        levels=(per_user * max(1, test.most_users),),
        seconds=seconds,
        warmup_s=min(given.warmup, seconds / 2),
        shape=given.arrivals,
        seed=given.seed,
        data=Path(given.data),
        options=test.options,
    )
    run = summary(plan, [Level(plan.levels[0], 0.0, test.samples)], given.workload, "locust", {})
    runner = environment.runner
    # each worker process of a distributed test has samples of its own
    own = f"worker{runner.worker_index}" if isinstance(runner, WorkerRunner) else ""
    write_run(run, Path(given.report) / own)

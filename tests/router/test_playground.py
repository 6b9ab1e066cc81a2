"""The playground: served, self-contained, and driven in a real browser where there is one."""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from flide_engine import (
    ChoiceAnswer,
    DecisionRequest,
    DecisionResponse,
    NoulAnswer,
    ScoreAnswer,
    Usage,
)
from flide_engine.api import Answer, Question
from flide_engine.errors import Overloaded
from router.auth import key_hash
from tests.router.browser import Tab, browser_path, tab
from tests.router.test_http_app import Stub, app_of, call

KEY = "right"


def answer_of(question: Question) -> Answer:
    """The first option with 0.7, the rest share 0.3."""
    if question.type == "noul":
        return NoulAnswer(noul=0.7)
    names = list(question.criteria) if question.type == "choice" else []
    count = len(question.criteria)
    p = [0.7, *[0.3 / (count - 1)] * (count - 1)]
    if question.type == "choice":
        by_name = dict(zip(names, p, strict=True))
        return ChoiceAnswer(choice=names[0], probabilities=by_name, confidence=0.55)
    score = sum(i * x for i, x in enumerate(p))
    legend = {str(i): str(text) for i, text in enumerate(question.criteria)}
    levels = {str(i): x for i, x in enumerate(p)}
    return ScoreAnswer(score=score, legend=legend, probabilities=levels, confidence=0.5)


class Answering(Stub):
    """Answers all three types; a state of "busy" is refused for load."""

    async def decide(
        self, request: DecisionRequest, tenant: str, session_id: str
    ) -> DecisionResponse:
        self.asked.append(request)
        if request.state == "busy":
            raise Overloaded(9, "requests", 8, "max_waiting_requests", 1500)
        answers = {name: answer_of(q) for name, q in request.questions.items()}
        usage = Usage(input_tokens=120, output_tokens=len(answers))
        return DecisionResponse(model="stub", usage=usage, answers=answers)


def test_the_page_is_served_and_is_locked_in() -> None:
    """HTML with a policy that allows its own script only, also behind a prefix."""
    answer = call(Stub(), "GET", "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "<title>Decision playground</title>" in answer.text
    assert call(Stub(), "POST", "/").status_code == 405
    app = app_of(Stub())
    behind = httpx.ASGITransport(app, root_path="/prefix")  # type: ignore[arg-type]
    for path in ("/prefix", "/prefix/"):

        async def get(at: str = path) -> httpx.Response:
            async with httpx.AsyncClient(transport=behind, base_url="http://test") as client:
                return await client.get(at)

        assert "<title>Decision playground</title>" in asyncio.run(get()).text
    # no key: the page must load to ask for one
    assert call(Stub(), "GET", "/", (key_hash(KEY),)).status_code == 200


def test_the_page_has_no_outside_assets() -> None:
    """Nothing in it names another host, and it loads nothing by tag."""
    html = call(Stub(), "GET", "/").text
    assert not re.search(r"https?://", html)
    assert not re.search(r"@import|url\(|<script[^>]+src|<img|<iframe", html)
    assert re.findall(r"<link[^>]*>", html) == ['<link rel="icon" href="data:,">']


@pytest.fixture(scope="module")
def asked() -> Answering:
    """What stands behind the served page."""
    return Answering()


@pytest.fixture(scope="module")
def url(asked: Answering) -> Iterator[str]:
    """The app on a port of its own, with a key."""
    app = app_of(asked, (key_hash(KEY),))
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A browser's tab."""
    if browser_path() is None:
        pytest.skip("no Chromium here")
    with tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(browser: Tab, url: str) -> Tab:
    """The page, freshly loaded, with the key typed in."""
    browser.open(url + "/")
    browser.run("document.getElementById('key').focus()")
    browser.write(KEY)
    return browser


def text(page: Tab, element: str) -> str:
    """What an element shows."""
    return str(page.run(f"document.getElementById({element!r}).innerText"))


def ask(page: Tab) -> None:
    """Ctrl+Enter in the state; waits for what comes of it."""
    page.run("document.getElementById('state').focus()")
    page.press("Enter", modifiers=2)
    page.wait("!document.getElementById('ask').disabled")


def test_the_example_is_answered_with_bars(page: Tab, asked: Answering) -> None:
    """Probabilities in the order of the options, widths that equal them, time and tokens."""
    page.wait("document.getElementById('model').innerText !== ''")
    ask(page)
    assert text(page, "status") == "3 questions answered."
    assert asked.asked[-1].state == "My card was charged twice and nobody answers."
    rows = page.run(
        "[...document.querySelectorAll('.bars tr')].map(r => [r.children[0].innerText, "
        "r.children[2].innerText, r.querySelector('.track div').style.width])"
    )
    assert rows[:2] == [["billing", "70.0%", "70%"], ["delivery", "30.0%", "30%"]]
    assert [r[0] for r in rows[2:4]] == ["yes", "no"]
    assert [r[0] for r in rows[4:]] == ["0 can wait", "1 today", "2 at once"]
    facts = text(page, "facts")
    assert re.search(r"Round trip\n+\d+ ms", facts)
    assert re.search(r"Input tokens\n+120", facts)
    assert json.loads(page.run("document.getElementById('json').textContent"))["model"] == "stub"


def test_it_works_by_keyboard_alone(page: Tab, asked: Answering) -> None:
    """Tab reaches everything; a choice is added, filled in and asked without a pointer."""
    page.run("document.querySelector('[data-add=choice]').focus()")
    page.press("Enter")
    page.write("Which number?")
    focused = "document.activeElement.getAttribute('aria-label')"
    for label, value in (("Option 1: name", "10"), ("Option 2: name", "9")):
        while page.run(focused) != label:
            page.press("Tab")
        page.write(value)
    for _ in range(9):
        page.press("Tab")
        if page.run("document.activeElement.dataset.more") == "choice":
            break
    page.press(" ")
    assert page.run(focused) == "Option 3: name"
    page.write("2")
    while page.run("document.activeElement.id") != "ask":
        page.press("Tab")
    page.press("Enter")
    page.wait("document.querySelectorAll('.answer').length === 4")
    question = asked.asked[-1].questions["question4"]
    assert question.instructions == "Which number?"
    assert list(question.criteria) == ["10", "9", "2"], "names keep their order"
    shown = page.run("[...document.querySelectorAll('.answer:last-child th')].map(e=>e.innerText)")
    assert shown == ["10", "9", "2"]


def test_every_control_has_a_name(page: Tab) -> None:
    """By the browser's own accessibility tree; ids are not given twice."""
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"textbox", "button", "combobox", "checkbox", "group", "alert", "DisclosureTriangle"}
    nodes = [n for n in tree if not n["ignored"] and n["role"]["value"] in roles - {"alert"}]
    assert len(nodes) > 25
    unnamed = [n["role"]["value"] for n in nodes if not n.get("name", {}).get("value")]
    assert set(unnamed) <= {"group"}, unnamed  # a details element is a group without a name
    ids = page.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_errors_are_shown_plainly(page: Tab, asked: Answering) -> None:
    """Mistakes of the user, refusals of the server, and a wrong key, each in words."""
    page.run("document.querySelector('[data-rows=choice] .row [data-drop=row]').click()")
    ask(page)
    assert "1 options; 2 to 255 options per choice are supported" in text(page, "error")
    assert text(page, "error").startswith("The server refused the request (422):")
    page.run("document.querySelectorAll('[data-field=id]')[1].value = 'team'")
    ask(page)
    assert text(page, "error") == "Question ids: “team” is there twice."
    before = len(asked.asked)
    page.run("document.getElementById('state-json').click()")
    page.run("document.querySelectorAll('[data-field=id]')[1].value = 'angry'")
    ask(page)
    assert text(page, "error").startswith("The state is not JSON:")
    assert len(asked.asked) == before
    page.run("document.querySelectorAll('[data-drop=question]')[0].click()")
    page.run("document.getElementById('state-json').click()")
    page.run("document.getElementById('state').value = 'busy'")
    ask(page)
    assert text(page, "error").startswith("The server answered 429:")
    page.run("document.getElementById('key').value = 'wrong'")
    ask(page)
    assert text(page, "error") == "The server answered 401: the API key is not known"
    assert text(page, "answers") == ""


def test_curl_and_python_ask_the_same(page: Tab, asked: Answering) -> None:
    """Both are run as shown; text with quotes, a structured state and odd names survive."""
    state = {"it's": ['"quoted" \\ $HOME', 1, None], "ü": "\n"}
    page.run("document.getElementById('state-json').click()")
    page.run("document.getElementById('state').select()")
    page.write(json.dumps(state, ensure_ascii=False))
    ask(page)
    assert text(page, "error") == ""
    first = asked.asked[-1]
    assert first.state == state
    env = {"API_KEY": KEY, "PATH": "/usr/bin:/bin:/usr/local/bin"}
    for name, command in (("curl", ["sh", "-c"]), ("python", [sys.executable, "-c"])):
        code = page.run(f"document.getElementById({name!r}).textContent")
        assert KEY not in code
        done = subprocess.run([*command, code], env=env, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["usage"]["input_tokens"] == 120, done
        assert asked.asked[-1] == first, name


def test_nothing_is_loaded_from_elsewhere_and_no_error_is_logged(page: Tab, url: str) -> None:
    """By the browser's own record of the network, in light and dark, wide and narrow."""
    page.events.clear()
    page.open(url + "/?again")
    page.run("document.getElementById('key').focus()")
    page.write(KEY)
    ask(page)
    for scheme in ("light", "dark"):
        for width in (1280, 400):
            page.look(width, 900, scheme)
            assert page.run("document.documentElement.scrollWidth") <= width
    page.call("Page.captureScreenshot")
    sent = [e for e in page.events if e["method"] == "Network.requestWillBeSent"]
    urls = [e["params"]["request"]["url"] for e in sent]
    assert urls
    assert all(u.startswith((url, "data:")) for u in urls)
    logged = [e["params"]["entry"] for e in page.events if e["method"] == "Log.entryAdded"]
    logged = [entry for entry in logged if entry["level"] in ("warning", "error")]
    # the page asks for the model before a key is typed in, and is told so
    assert [entry for entry in logged if "401" not in entry["text"]] == []
    assert not [e for e in page.events if e["method"] == "Runtime.exceptionThrown"]


SHOWN = """(() => {
  const behind = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const speaks = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const said = [...document.querySelectorAll("body *")].filter((e) =>
    e.offsetParent && !e.disabled && speaks(e));
  return [[document.body.tagName, getComputedStyle(document.body).color, behind(document.body)],
    ...said.map((e) => [e.tagName + " " + e.innerText.slice(0, 20),
      getComputedStyle(e).color, behind(e)])];
})()"""
"""What elements with text show: (name, its color, the color behind it)."""


def luminance(color: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(page: Tab, scheme: str) -> None:
    """As the reader's system has it; all text stands out from what is behind it by 4.5 to 1."""
    page.look(1280, 900, scheme)
    ask(page)
    shown = page.run(SHOWN)
    assert len(shown) > 40
    behind = luminance(shown[0][2])
    assert behind < 0.05 if scheme == "dark" else behind > 0.8
    for name, color, back in shown:
        low, high = sorted((luminance(color), luminance(back)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (name, color, back)


def test_the_page_ships_with_the_package() -> None:
    """It lies beside the module, and the build is told of it."""
    root = Path(__file__).parents[2]
    assert (root / "router" / "playground.html").is_file()
    assert 'router = ["playground.html"]' in (root / "pyproject.toml").read_text()


def test_the_page_answers_over_a_real_connection(url: str) -> None:
    """Length and type as sent."""
    answer = httpx.get(url + "/", timeout=60)
    assert int(answer.headers["content-length"]) == len(answer.content)

"""Clients as their users run them: the official SDKs, and Python processes that hold a handle."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.deployments.conftest import ROOT, Served

pytestmark = pytest.mark.ray

CLIENTS = Path(__file__).parent / "clients"
NPM_SDK = "@typesafe-ai/sdk@0.6.0"


def run(command: list[str], cwd: Path, **env: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env=os.environ | env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sdk_settings(served: Served) -> dict[str, str]:
    """How both SDKs are pointed at a server."""
    return {"TYPESAFE_BASE_URL": served.url, "TYPESAFE_API_KEY": "any"}


def test_the_official_python_sdk(served: Served, tmp_path: Path) -> None:
    """Sync, async, zstd bodies, the model list, request ids, its own error for a 422."""
    script = str(CLIENTS / "sdk_check.py")
    got: dict[str, Any] = json.loads(
        run([sys.executable, script], tmp_path, **sdk_settings(served))
    )
    assert got["choice"] == "billing"
    assert 0 <= got["score"] <= 2
    assert got["request_id"]
    assert got["big_tokens"] > 600
    assert len(got["models"]) == 1
    assert "2 to 255 options per choice" in got["refused"]
    assert got["spread"] < 1e-5
    assert abs(got["noul"]) < 1e-5


class Recorder(http.server.BaseHTTPRequestHandler):
    """Notes the encoding of each body and answers with an empty decision."""

    encodings: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        """One request."""
        self.rfile.read(int(self.headers["content-length"]))
        self.encodings.append(self.headers["content-encoding"])
        usage = {"input_tokens": 1, "output_tokens": 0}
        body = json.dumps({"model": "m", "usage": usage, "answers": {}}).encode()
        self.send_response(200)
        for name, value in (("content-type", "application/json"), ("content-length", len(body))):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)


def test_the_python_sdk_compresses(tmp_path: Path) -> None:
    """Large bodies leave the SDK as zstd here, so the test above covers decoding them."""
    code = """
from typesafe_sdk import Noul, TypeSafeClient
with TypeSafeClient() as client:
    client.system_one(state="word " * 2000, questions={"q": Noul(instructions="?")})
"""
    with http.server.HTTPServer(("127.0.0.1", 0), Recorder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        env = {"TYPESAFE_BASE_URL": url, "TYPESAFE_API_KEY": "any"}
        run([sys.executable, "-c", code], tmp_path, **env)
        server.shutdown()
    assert Recorder.encodings == ["zstd"]


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js")
def test_the_official_javascript_sdk(served: Served, tmp_path: Path) -> None:
    """Unmodified, from its registry."""
    run(["npm", "install", "--silent", "--no-audit", "--no-fund", NPM_SDK], tmp_path)
    shutil.copy(CLIENTS / "sdk_check.mjs", tmp_path)
    got: dict[str, Any] = json.loads(
        run(["node", "sdk_check.mjs"], tmp_path, **sdk_settings(served))
    )
    assert got["choice"] == "billing"
    assert 0 < got["noul"] < 1
    assert 0 <= got["score"] <= 2
    assert got["tokens"] > 10
    assert got["models"] == 1
    assert "Unprocessable" in got["refused"]


def snippets(marker: str) -> list[str]:
    """Python blocks of the README below a comment `<!-- test: marker -->`."""
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"<!-- test: {marker} -->\n```python\n(.*?)```", text, re.DOTALL)


def test_the_readme_handle_snippets(served: Served) -> None:
    """Typed calls and the `DecisionClient`, from another process of a cluster's node."""
    (code,) = snippets("handle")
    env = {"RAY_ADDRESS": served.address, "RAY_AUTH_MODE": "token", "PYTHONPATH": str(ROOT)}
    out = run([sys.executable, "-c", code], ROOT, **env).splitlines()
    assert out[-3:-1] == ["billing", "billing"], out
    assert 0 < float(out[-1]) < 1


def test_the_readme_plain_snippet_without_this_project(served: Served, tmp_path: Path) -> None:
    """A process that has Ray and nothing of ours gets plain answers, and plain errors."""
    (code,) = snippets("plain")
    hide = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"flide_engine", "router", "deployments"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
"""
    fault = """
try:
    handle.decide.remote({"state": "s", "questions": {}}).result()
except Exception as error:
    print(type(error).__mro__[1].__name__, "at least 1 item" in str(error))
"""
    env = {"RAY_ADDRESS": served.address, "RAY_AUTH_MODE": "token"}
    out = run([sys.executable, "-c", hide + code + fault], tmp_path, **env).splitlines()
    assert "'choice': 'billing'" in out[-2], out
    assert out[-1].endswith("True"), out


def test_the_readme_sdk_snippet(served: Served, tmp_path: Path) -> None:
    """The official SDK, as the README shows it."""
    (code,) = snippets("sdk")
    assert run([sys.executable, "-c", code], tmp_path, **sdk_settings(served)).split() == [
        "billing"
    ]


def test_the_readme_library_snippet() -> None:
    """Without Ray and without a server."""
    (code,) = snippets("library")
    out = run([sys.executable, "-c", code + "\nimport sys; print('ray' in sys.modules)"], ROOT)
    assert "noul=0." in out
    assert out.split()[-1] == "False"


def test_the_readme_curl_block(served: Served, tmp_path: Path) -> None:
    """The request of the README's first example, at this server's port."""
    (line,) = re.findall(r"```bash\n(curl .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    asked = line.replace("http://127.0.0.1:8000", served.url)
    assert set(json.loads(run(["bash", "-c", asked], tmp_path))["answers"]) == {
        "team",
        "angry",
        "when",
    }


def test_the_readme_curl(served: Served, tmp_path: Path) -> None:
    """The line that `make serve` prints, as it is."""
    line = next(x for x in served.log.read_text().splitlines() if x.startswith("curl "))
    answers = json.loads(run(["bash", "-c", line], tmp_path))["answers"]
    assert answers["team"]["choice"] == "billing"


def test_handle_callers_get_the_error_tree(served: Served) -> None:
    """Typed calls raise what the engine raised, with its attributes, and a deadline is kept."""
    code = """
import ray
from deployments import DecisionClient
from flide_engine import DecisionRequest, Noul
from flide_engine.errors import DeadlineExceeded, InvalidRequest, TooManyTokens, UnknownModel

ray.init(log_to_driver=False)
client = DecisionClient()
noul = {"q": {"type": "noul", "instructions": "?"}}
for request in (
    {"state": "s", "questions": {}},
    {"state": "s", "questions": noul, "model": "jev-0"},
    {"state": "seven " * 40_000, "questions": noul},
    DecisionRequest(state="seven " * 40_000, questions={"q": Noul(instructions="?")}),
):
    try:
        client.decide(request)
    except InvalidRequest as error:
        print("InvalidRequest", error.faults[0].loc)
    except UnknownModel as error:
        print("UnknownModel", error.model)
    except TooManyTokens as error:
        print("TooManyTokens", error.limit)
try:
    DecisionClient(timeout=0.001).decide({"state": "late " * 5000, "questions": noul})
except DeadlineExceeded as error:
    print("DeadlineExceeded", error.seconds)
print(client.decide({"state": "s", "questions": noul}).usage.output_tokens)
"""
    env = {"RAY_ADDRESS": served.address, "RAY_AUTH_MODE": "token", "PYTHONPATH": str(ROOT)}
    out = run([sys.executable, "-c", code], ROOT, **env).splitlines()
    assert out[-6:] == [
        "InvalidRequest ('body', 'questions')",
        "UnknownModel jev-0",
        "TooManyTokens 32768",
        "TooManyTokens 32768",
        "DeadlineExceeded 0.001",
        "1",
    ]

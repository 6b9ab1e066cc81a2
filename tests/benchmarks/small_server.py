"""A server that answers every question alike: `python -m tests.benchmarks.small_server PORT`."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Health and decisions."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """It is well."""
        self._send({"status": "ok"})

    def do_POST(self) -> None:
        """One half for everything."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answers = {name: {"type": "noul", "noul": 0.5} for name in body["questions"]}
        self._send({"answers": answers, "usage": {"input_tokens": 1, "output_tokens": 0}})

    def _send(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 256
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()

"""A stand-in for the W&B service on the loopback address, for the real client and the real agent.

It answers the few GraphQL operations that an online run, `wandb sweep` and `wandb agent` ask, takes the file
stream, and keeps what was posted. An operation that it does not know gets an error by name and stays in
`asked`, so that a newer client which asks more is seen at once.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

API_KEY = "0" * 40
ENTITY, PROJECT, SWEEP = "somebody", "gradsketch", "sweep001"


@dataclass
class PostedRun:
    """What the client posted about one run."""

    config: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    exit_code: int | None = None


@dataclass
class FakeWandb:
    """State of the fake: `trials` are the parameters that an agent gets, one run each."""

    trials: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    runs: dict[str, PostedRun] = field(default_factory=dict)
    sweep_config: str = ""
    handed_out: int = 0
    url: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point a client at this fake."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": API_KEY}

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The `data` of one GraphQL operation; None if it is not known."""
        project = {"id": "project", "name": PROJECT, "entity": {"id": "entity", "name": ENTITY}}
        match operation:
            case "Viewer":
                viewer = {
                    "id": "user",
                    "entity": ENTITY,
                    "username": ENTITY,
                    "flags": "{}",
                    "teams": {"edges": []},
                }
                return {"viewer": viewer}
            case "RunResumeStatus":
                return {"model": project | {"bucket": self._bucket(variables["name"])}}
            case "UpsertBucket":
                run = self.runs.setdefault(variables["name"], PostedRun())
                run.attributes |= {key: value for key, value in variables.items() if value is not None}
                for key, entry in json.loads(variables.get("config") or "{}").items():
                    run.config[key] = entry["value"]
                bucket = self._bucket(variables["name"]) or {}
                return {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
                made = {"runID": variables["run"], "uploadHeaders": [], "files": files}
                return {"createRunFiles": made}
            case "UpsertSweep":
                self.sweep_config = variables["config"]
                sweep = {"name": SWEEP, "project": project}
                return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}
            case "SweepWithRuns":
                sweep = {"id": "sweep", "name": SWEEP, "state": "RUNNING", "config": self.sweep_config}
                return {"project": {"sweep": sweep | {"runs": {"edges": []}}}}
            case "CreateAgent":
                return {"createAgent": {"agent": {"id": "agent"}}}
            case "Heartbeat":
                commands = [] if json.loads(variables["runState"]) else self._next_commands()
                return {"agentHeartbeat": {"agent": {"id": "agent"}, "commands": json.dumps(commands)}}
        return None

    def _bucket(self, run_id: str) -> dict[str, Any] | None:
        """What the service says about a run, None if it has none of that id."""
        run = self.runs.get(run_id)
        if run is None:
            return None
        return {
            "id": run_id,
            "name": run_id,
            "displayName": run.attributes.get("displayName", ""),
            "sweepName": run.attributes.get("sweep"),
            "config": json.dumps({key: {"value": value} for key, value in run.config.items()}),
            "wandbConfig": json.dumps({"t": 1}),
            "summaryMetrics": "{}",
            "historyTail": json.dumps([json.dumps(run.history[-1])] if run.history else []),
            "eventsTail": "[]",
            "historyLineCount": len(run.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "tags": [],
        }

    def _next_commands(self) -> list[dict[str, Any]]:
        """One run for an idle agent, or the order to leave when all trials were handed out."""
        if self.handed_out == len(self.trials):
            return [{"type": "exit"}]
        self.handed_out += 1
        parameters = self.trials[self.handed_out - 1]
        arguments = {key: {"value": value} for key, value in parameters.items()}
        return [
            {
                "type": "run",
                "run_id": f"trial{self.handed_out:03d}",
                "program": "src/train.py",
                "args": arguments,
            }
        ]

    def take_stream(self, run_id: str, body: dict[str, Any]) -> None:
        """One post of the file stream: history lines and, at the end, the exit code."""
        run = self.runs.setdefault(run_id, PostedRun())
        for name, chunk in (body.get("files") or {}).items():
            run.files.append(name)
            if name == "wandb-history.jsonl":
                run.history += [json.loads(line) for line in chunk["content"]]
        if body.get("complete"):
            run.exit_code = body["exitcode"]


def _handler(fake: FakeWandb) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urlparse(self.path).path
            stream = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path)
            if path == "/graphql":
                body = json.loads(raw)
                operation = re.search(r"(?:query|mutation)\s+(\w+)", body["query"])
                name = operation.group(1) if operation else body["query"]
                fake.asked.append(name)
                data = fake.answer(name, body.get("variables") or {})
                unknown = [{"message": f"the fake does not know the operation {name}"}]
                self._reply({"data": data} if data is not None else {"errors": unknown})
            elif stream:
                fake.take_stream(stream.group(1), json.loads(raw))
                self._reply({})
            else:
                fake.asked.append(path)
                self._reply({})

        do_PUT = do_POST

        def do_GET(self) -> None:
            fake.asked.append(self.path)
            self._reply({})

        def _reply(self, answer: dict[str, Any]) -> None:
            payload = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            """Silent: `asked` is the log."""

    return Handler


@contextmanager
def fake_wandb(trials: list[dict[str, Any]] | None = None) -> Iterator[FakeWandb]:
    """Serves a fake on a free loopback port until the block is left."""
    fake = FakeWandb(trials=trials or [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

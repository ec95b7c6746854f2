# pyright: reportMissingImports=false
"""NVFlare 2.9 as the transport (`pip install silodp[deploy]`): a relay at every site, a coordinator at the server.

The relay is all of silodp that runs in the engine's process at a site: bytes in, bytes out over the guard's socket. It
reads no records and needs no JAX. The engine's job is disposable: to resume a run is to submit it again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply

from silodp.deploy.listen import GuardSocket
from silodp.deploy.wire import Late, plain

TOPIC, BYTES = "silodp/1", "bytes"
SITE_FILE = "silodp.json"  # in the kit's local folder: where the guard's socket is
ONCE, LONGEST_PAUSE = 60.0, 5.0  # seconds: for one try, and between two
FIRST_PAUSE = 0.2


class Relay(Executor):
    """A site's side. Questions come as auxiliary messages; there are no tasks."""

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        if event_type != EventType.START_RUN:
            return
        engine = fl_ctx.get_engine()
        file = engine.get_workspace().get_file_path_in_site_config(SITE_FILE)
        self.guard = GuardSocket(json.loads(Path(file).read_text())["guard"], ONCE)
        engine.register_aux_message_handler(topic=TOPIC, message_handle_func=self._asked)

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        return make_reply(ReturnCode.TASK_UNKNOWN)

    def _asked(self, topic: str, request: Any, fl_ctx: Any) -> Any:
        try:
            answer = self.guard.ask(request[BYTES])
        except (OSError, ValueError) as error:  # the server asks again; the guard gives the same bytes
            self.log_warning(fl_ctx, f"guard: {type(error).__name__}")
            return make_reply(ReturnCode.SERVICE_UNAVAILABLE)
        reply = make_reply(ReturnCode.OK)
        reply[BYTES] = answer
        return reply


class Coordinator(Controller):
    """The server's side: drives the plan in `folder`, with the engine as its way to the sites."""

    def __init__(self, folder: str, patience: float = 600.0) -> None:
        super().__init__()
        self.folder, self.patience = Path(folder), patience

    def start_controller(self, fl_ctx: Any) -> None:
        """Nothing to prepare."""

    def stop_controller(self, fl_ctx: Any) -> None:
        """Nothing to undo."""

    def process_result_of_unknown_task(self, *given: Any, **named: Any) -> None:
        """There are no tasks."""

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        from silodp.deploy.approval import load
        from silodp.deploy.server import drive

        try:
            document = load(self.folder / "plan.json")
            approvals = json.loads((self.folder / "approvals.json").read_text())
            say = lambda text: self.log_info(fl_ctx, f"silodp: {text}")
            drive(document, approvals, lambda site, data: self._rpc(site, data, abort_signal, fl_ctx), self.folder, say)
        except Exception as error:
            self.log_exception(fl_ctx, "silodp")
            (self.folder / "stopped.txt").write_text(f"{plain(error)}\n", encoding="utf-8")
            self.system_panic(f"silodp: {type(error).__name__}", fl_ctx)

    def _rpc(self, site: str, data: bytes, abort_signal: Any, fl_ctx: Any) -> bytes:
        """One question to one site, repeated until it is answered or the patience is over."""
        until, pause = time.monotonic() + self.patience, FIRST_PAUSE
        while True:
            request = Shareable()
            request[BYTES] = data
            engine, once = fl_ctx.get_engine(), min(ONCE, max(1.0, until - time.monotonic()))
            told = engine.send_aux_request(targets=[site], topic=TOPIC, request=request, timeout=once, fl_ctx=fl_ctx)
            reply = (told or {}).get(site)
            answer = reply.get(BYTES) if reply is not None and reply.get_return_code() == ReturnCode.OK else None
            if isinstance(answer, bytes | bytearray | memoryview):  # a site may send anything
                return bytes(answer)
            if abort_signal.triggered or time.monotonic() > until:
                raise Late(f"site {site}: no answer")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

"""Silos of a message run on this machine, forked from one process that has imported what all of them need. Linux.

Imports are most of what a small silo computes. A nursery holds no record, plan, key or random number and has not
started JAX, so its children share code and nothing else: `silodp.noise` and the operating system give each its coins.
`python -m silodp.deploy.nursery SOCKET` is the nursery; it ends when nobody holds the other end.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import IO, NoReturn

from silodp.errors import Gone
from silodp.garbage import collect_seldom

MOST = 1 << 16  # bytes of one request
BIRTH = 120.0  # seconds for a silo to be born: the nursery imports everything before the first
TELLING = 5.0  # seconds for the nursery to tell how a silo has ended
ENDING = 10.0  # seconds that a process may take to end


class Child:
    """A silo that was born here, with what `subprocess.Popen` has for a process: the nursery tells its exit code.

    `life` is the process whoever gets its number later, and is readable when it has ended.
    """

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], told: IO[bytes]):
        self.pid, self.stdin, self.stdout, self.told = pid, stdin, stdout, told
        self.life: list[int] = []
        with suppress(ProcessLookupError):  # it has ended already
            self.life = [os.pidfd_open(pid)]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.told], [], [], 0)[0]:
            self._ended(self.told.read())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self.told, *self.life], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(["silo"], timeout or 0.0)
        if self.returncode is None:
            heard = select.select([self.told], [], [], TELLING)[0]
            self._ended(self.told.read() if heard else b"")
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            self._strike()

    def _ended(self, word: bytes) -> None:
        """No word: the nursery was killed, and the silo may live, or the nursery does not speak."""
        if not word:
            self._strike()
        self.returncode = int(word or -signal.SIGKILL)
        self.told.close()
        while self.life:
            os.close(self.life.pop())

    def _strike(self) -> None:
        for each in self.life:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(each, signal.SIGKILL)


class Nursery(AbstractContextManager["Nursery"]):
    """The way to it, for the program that runs the silos."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "silodp.deploy.nursery", str(theirs.fileno())]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.control.settimeout(BIRTH)

    def start(self, arguments: Sequence[str]) -> Child:
        """A silo with these arguments of `silodp.deploy.silo_process`."""
        (request, stdin), (stdout, answer), (told, status) = os.pipe(), os.pipe(), os.pipe()
        try:
            born = self._ask(json.dumps(list(arguments)).encode(), [request, answer, status])
        except Gone:
            for each in (stdin, stdout, told):  # if it was born nevertheless, it has nobody to listen to and ends
                os.close(each)
            raise
        finally:
            for each in (request, answer, status):
                os.close(each)
        return Child(born, open(stdin, "wb", 0), open(stdout, "rb", 0), open(told, "rb", 0))

    def _ask(self, request: bytes, descriptors: list[int]) -> int:
        """The number of the process that was born. A nursery that says nothing is of no use to anybody."""
        try:
            socket.send_fds(self.control, [request], descriptors)
            born = self.control.recv(MOST)
        except TimeoutError:
            self.process.kill()
            raise Gone(f"the process that starts silos did not answer in {BIRTH:g} seconds") from None
        except ConnectionError:
            born = b""
        if not born:
            raise Gone(f"the process that starts silos ended (exit code {self.process.poll()})")
        return int(born)

    def __exit__(self, *exc: object) -> None:
        self.control.close()
        try:
            self.process.wait(timeout=ENDING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=ENDING)


def serve(control: socket.socket) -> None:
    """Fork a silo for each request; tell whoever holds the other end of its third descriptor how it ended."""
    statuses: dict[int, int] = {}

    def reap(*_: object) -> None:
        while statuses and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = statuses.pop(ended[0])
            with suppress(BrokenPipeError):  # nobody wants to know
                os.write(status, str(os.waitstatus_to_exitcode(ended[1])).encode())
            os.close(status)

    signal.signal(signal.SIGCHLD, reap)
    while (request := socket.recv_fds(control, MOST, 3))[0]:
        arguments, (stdin, stdout, status) = json.loads(request[0]), request[1]
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until it is known whose status is whose
        pid = os.fork()
        if pid == 0:
            for each in (control.detach(), status, *statuses.values()):
                os.close(each)
            be_silo(arguments, stdin, stdout)
        statuses[pid] = status
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.close(stdin)
        os.close(stdout)
        control.send(str(pid).encode())


def be_silo(arguments: Sequence[str], stdin: int, stdout: int) -> NoReturn:
    """What `python -m silodp.deploy.silo_process` would be, in this process."""
    from silodp.deploy import silo_process

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    code = 1
    try:
        for number, place in ((stdin, 0), (stdout, 1)):
            os.dup2(number, place)
            os.close(number)
        sys.argv[1:] = arguments
        silo_process.main()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # nothing of the nursery's is to be ended a second time


def main() -> None:
    collect_seldom()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that holds the other end
    import scipy.special  # noqa: F401 (real noise)

    from silodp.deploy import silo_process  # noqa: F401 (what all children need)

    gc.freeze()  # what is here stays: children's collections leave its pages alone
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()

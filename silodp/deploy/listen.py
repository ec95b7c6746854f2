"""The guard's Unix socket, and the relay's way to it. No JAX, no network, nobody but the relay's user and its own.

Whoever connects is asked for nothing: the kernel says which user it is. Places are few. Where all are taken, the one
who has been silent for longest gives way to who comes: a relay connects again when it has something to ask.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from silodp.deploy.wire import Late, plain, put_frame, take_frame
from silodp.errors import ConfigError, Refused

IDLE, FRAME = 3600.0, 60.0  # seconds: between questions, and for one to arrive
ONCE, FIRST_PAUSE, LONGEST_PAUSE = 60.0, 0.2, 5.0  # seconds: for one try, and between two
MOST = 8  # connections at a time
LEAVING = 1.0  # seconds that one may take that has to give way


def user_of(connection: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)[1]


def bound(path: Path) -> socket.socket:
    """A listening socket that its folder's group may use."""
    path.parent.mkdir(exist_ok=True)
    os.chmod(path.parent, 0o750)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    os.chmod(path, 0o660)
    listening.listen(MOST)
    return listening


class Listener:
    """Serves `reply` to one user, and to the one that it runs as: a guard's operator looks whether it answers."""

    def __init__(self, path: Path, user: int, reply: Callable[[bytes], bytes], largest: int):
        self.user, self.reply, self.largest = user, reply, largest
        self.listening, self.slots, self.closed = bound(path), threading.Semaphore(MOST), threading.Event()
        self.lock, self.silent = threading.Lock(), dict[socket.socket, None]()  # the longest silent one first

    def serve(self) -> None:
        """Until `close`. Where handles or memory run out for a while, it goes on afterwards: a guard that left here
        would be gone for good, with nothing wrong in its exit code."""
        while not self.closed.is_set():
            try:
                connection, _ = self.listening.accept()
                self._admit(connection)
            except (OSError, RuntimeError):  # the latter: no thread can be started
                self.closed.wait(FIRST_PAUSE)

    def _admit(self, connection: socket.socket) -> None:
        if user_of(connection) not in (self.user, os.getuid()) or not self._place():
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError:
            self.slots.release()
            connection.close()
            raise

    def _place(self) -> bool:
        """Whether there is a place, or one is made."""
        if self.slots.acquire(blocking=False):
            return True
        with self.lock:
            longest = next(iter(self.silent), None)
            if longest is None:  # all others are being answered
                return False
            del self.silent[longest]
            with suppress(OSError):  # it has just gone by itself
                longest.shutdown(socket.SHUT_RDWR)
        return self.slots.acquire(timeout=LEAVING)

    def _asked(self, connection: socket.socket) -> bytes:
        """The next question of a connection."""
        with self.lock:
            self.silent[connection] = None
        try:
            return take_frame(connection.fileno(), FRAME, self.largest, IDLE)
        finally:
            with self.lock:
                self.silent.pop(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setblocking(False)
                while data := self._asked(connection):
                    put_frame(connection.fileno(), self.reply(data), FRAME)
        except (Refused, OSError):  # a frame that is none, or a peer that went away: the connection ends, no more
            return
        finally:
            self.slots.release()

    def close(self) -> None:
        self.closed.set()
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()


class GuardSocket:
    """A relay's connection to its guard; it is made again when the guard was restarted."""

    def __init__(self, path: Path | str, patience: float):
        self.path, self.patience = str(path), patience
        self.lock = threading.Lock()
        self.connection: socket.socket | None = None

    def ask(self, data: bytes) -> bytes:
        """Safe to repeat: a guard gives the same bytes to the same question. Nobody waits long behind another."""
        if not self.lock.acquire(timeout=self.patience):
            raise Late(f"{self.path}: the guard still works on another question")
        try:
            return self._once(data)
        except OSError:  # of a connection to a guard that was restarted since
            return self._once(data)
        finally:
            self.lock.release()

    def _once(self, data: bytes) -> bytes:
        try:
            return self._asked(data)
        except BaseException:  # what is still to come would be taken for another answer
            self.close()
            raise

    def _asked(self, data: bytes) -> bytes:
        if self.connection is None:
            self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.connection.setblocking(False)  # a stopped guard with a full queue must not stop who connects
            try:
                self.connection.connect(self.path)
            except OSError:
                raise ConfigError(f"{self.path}: no guard listens there") from None
        put_frame(self.connection.fileno(), data, self.patience)
        answer = take_frame(self.connection.fileno(), self.patience)
        if not answer:
            raise ConnectionError("the guard closed the connection")
        return answer

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None


def sockets(paths: Mapping[str, Path], patience: float, once: float = ONCE) -> Callable[[str, bytes], bytes]:
    """rpc(site, bytes) over guards' sockets on this machine. A question is repeated until the patience is over."""
    links = {site: GuardSocket(path, min(once, patience)) for site, path in paths.items()}
    return lambda site, data: repeated(site, lambda: links[site].ask(data), patience)


def repeated(site: str, ask: Callable[[], bytes], patience: float) -> bytes:
    """What a site says in the end: it may be restarting, stopped for a while, or busy."""
    until, pause = time.monotonic() + patience, FIRST_PAUSE
    while True:
        try:
            return ask()
        except (OSError, Refused, ConfigError) as error:
            if time.monotonic() + pause > until:
                raise Late(f"site {site}: no answer in {patience:g} s ({plain(error)})") from None
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)

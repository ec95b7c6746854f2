"""The guard's socket: who is heard there, and that nobody hangs on it."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from silodp.deploy import listen
from silodp.deploy.listen import MOST, GuardSocket, Listener, repeated
from silodp.deploy.wire import HEADER, Late, decode, take_frame
from silodp.errors import ConfigError, Refused

LARGEST = 1 << 16


@contextmanager
def listening(path: Path, reply: Callable[[bytes], bytes], user: int | None = None) -> Iterator[Listener]:
    listener = Listener(path, os.getuid() if user is None else user, reply, LARGEST)
    yield listener
    listener.close()


def serving(listener: Listener) -> threading.Thread:
    thread = threading.Thread(target=listener.serve, daemon=True)
    thread.start()
    return thread


@contextmanager
def asking(path: Path, patience: float = 20.0) -> Iterator[GuardSocket]:
    link = GuardSocket(path, patience)
    yield link
    link.close()


def test_only_the_relays_user_and_the_guards_own_are_heard(tmp_path, monkeypatch):
    asked: list[bytes] = []
    own, relay, other = (os.getuid() + i for i in range(3))
    with listening(tmp_path / "s" / "g.sock", lambda data: asked.append(data) or data, relay) as listener:
        serving(listener)
        for user in (own, relay):
            monkeypatch.setattr(listen, "user_of", lambda connection, user=user: user)
            with asking(tmp_path / "s" / "g.sock") as link:
                assert link.ask(b"question") == b"question"
        monkeypatch.setattr(listen, "user_of", lambda connection: other)
        with asking(tmp_path / "s" / "g.sock") as link, pytest.raises(OSError):
            link.ask(b"question")
    assert len(asked) == 2


def test_a_frame_has_begun_with_its_first_byte():
    """Three bytes of a length would have kept a place for as long as a relay may be silent."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(bytes(3))
        assert raised(Late, lambda: take_frame(here.fileno(), 0.05, LARGEST, idle=3600.0))


def raised(kind: type[Exception], act: Callable[[], Any]) -> bool:
    """Whether it raises that before long; where it does neither, nobody waits for it."""
    caught: list[Exception] = []

    def acting() -> None:
        try:
            act()
        except kind as error:
            caught.append(error)

    thread = threading.Thread(target=acting, daemon=True)
    thread.start()
    thread.join(20)
    return bool(caught) and not thread.is_alive()


def test_a_header_is_not_read_when_it_is_larger_than_any_plan(monkeypatch):
    """As JSON, empty lists take many times their bytes."""
    text = b'{"a": [' + b"[]," * (HEADER // 3) + b"[]]}"
    monkeypatch.setattr(json, "loads", lambda data: pytest.fail("parsed"))
    with pytest.raises(Refused, match="at most 8388608 are read"):
        decode(struct.pack("<I", len(text)) + text)


def test_a_frame_that_is_too_long_or_none_ends_its_connection_only(tmp_path):
    with listening(tmp_path / "s" / "g.sock", bytes) as listener:
        serving(listener)
        with asking(tmp_path / "s" / "g.sock") as link:
            with pytest.raises(OSError):
                link.ask(bytes(LARGEST + 1))
            assert link.ask(b"question") == b"question"


def test_whoever_announces_much_is_not_listened_to(tmp_path):
    """400 MB are refused when eight bytes of them are there."""
    with listening(tmp_path / "s" / "g.sock", bytes) as listener:
        serving(listener)
        with connected(tmp_path / "s" / "g.sock") as link:
            link.sendall(struct.pack("<Q", 400_000_000))
            assert link.recv(1) == b""


def test_a_crowd_gets_no_more_threads_than_there_are_places(tmp_path):
    """300 connections that say nothing. Who comes to ask is served, also while they are there."""
    before = threading.active_count()
    with listening(tmp_path / "s" / "g.sock", bytes) as listener, asking(tmp_path / "s" / "g.sock") as first:
        serving(listener)
        assert first.ask(b"question") == b"question"
        with ExitStack() as crowd:
            links = [crowd.enter_context(connected(tmp_path / "s" / "g.sock")) for _ in range(300)]
            with asking(tmp_path / "s" / "g.sock") as link:
                assert repeated("here", lambda: link.ask(b"question"), 20.0) == b"question"
                assert [each.recv(1) for each in links[: 300 - MOST + 1]] == [b""] * (300 - MOST + 1)
                assert threading.active_count() <= before + 1 + MOST
                assert first.ask(b"question") == b"question"  # it had to give way, and comes again
        with asking(tmp_path / "s" / "g.sock") as link:
            assert repeated("here", lambda: link.ask(b"question"), 20.0) == b"question"


def test_who_is_being_answered_does_not_give_way(tmp_path):
    """All places are taken by questions that are worked on: who comes is turned away, and may come again."""
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def reply(data: bytes) -> bytes:
        begun.release()
        go_on.wait(20)
        return data

    with listening(tmp_path / "s" / "g.sock", reply) as listener, ExitStack() as stack:
        serving(listener)
        links = [stack.enter_context(asking(tmp_path / "s" / "g.sock")) for _ in range(MOST)]
        with ThreadPoolExecutor(MOST) as pool:
            answers = [pool.submit(link.ask, b"question") for link in links]
            assert all(begun.acquire(timeout=20) for _ in links)
            with asking(tmp_path / "s" / "g.sock") as late, pytest.raises(OSError):
                late.ask(b"question")
            go_on.set()
            assert {answer.result(20) for answer in answers} == {b"question"}


@contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.setblocking(True)  # a full queue is waited for
        link.connect(str(path))
        link.settimeout(20)
        yield link


class Short:
    """A listening socket of a process that has no handles left for a while."""

    def __init__(self, inner: socket.socket, failures: int):
        self.inner, self.left = inner, failures

    def accept(self) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.inner.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_listener_outlives_a_shortage_of_handles(tmp_path):
    """It left once, with exit code 0: nobody would have started the guard again."""
    with listening(tmp_path / "s" / "g.sock", bytes) as listener:
        listener.listening = Short(listener.listening, 3)  # type: ignore[assignment]
        thread = serving(listener)
        with asking(tmp_path / "s" / "g.sock") as link:
            assert link.ask(b"question") == b"question"
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()


def test_who_connects_to_a_guard_that_is_stopped_does_not_wait(tmp_path):
    """Its queue is full, and connecting to it would take until it goes on."""
    crowd = []
    with listening(tmp_path / "s" / "g.sock", bytes):
        for _ in range(100):
            crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            crowd[-1].setblocking(False)
            try:
                crowd[-1].connect(str(tmp_path / "s" / "g.sock"))
            except BlockingIOError:
                break
        assert raised(ConfigError, lambda: GuardSocket(tmp_path / "s" / "g.sock", 0.1).ask(b"question"))
    for each in crowd:
        each.close()


def test_an_answer_that_comes_late_is_not_taken_for_another_ones(tmp_path):
    """Also when the connection had just been made again."""
    calls, go_on = [0], threading.Event()

    def reply(data: bytes) -> bytes:
        calls[0] += 1
        if calls[0] == 1:
            raise ConnectionError
        if calls[0] == 2:
            go_on.wait(20)
        return data

    with listening(tmp_path / "s" / "g.sock", reply) as listener:
        serving(listener)
        with asking(tmp_path / "s" / "g.sock", 0.2) as link:
            with pytest.raises(Late):
                link.ask(b"first")
            go_on.set()
            link.patience = 20.0
            assert link.ask(b"second") == b"second"


def test_nobody_waits_for_ever_behind_another_question(tmp_path):
    with asking(tmp_path / "no.sock", 0.1) as link:
        assert link.lock.acquire()
        with pytest.raises(Late, match="still works on another question"):
            link.ask(b"question")
        link.lock.release()

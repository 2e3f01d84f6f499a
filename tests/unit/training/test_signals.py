"""Requests to stop, as a running step meets them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from samestep.training import signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_question(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with signals.stop_requests() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        assert asked()
    assert signal.getsignal(number) is before


def test_one_request_that_comes_twice_is_one_request() -> None:
    with signals.stop_requests() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()


def test_a_later_request_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SAME_REQUEST_SECONDS", -1.0)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), signals.stop_requests():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_of_the_main_thread_nothing_is_asked_and_nothing_changes() -> None:
    answers = []

    def ask() -> None:
        with signals.stop_requests() as asked:
            answers.append((asked(), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [(False, before)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), signals.as_interrupt():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before

"""A connection to a server on another machine; see `flight_server.py`."""

import contextlib
import queue
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from headrace.serve import messages
from headrace.serve.addresses import Address
from headrace.serve.connection import Arrived, Bytes, Credentials, Events
from headrace.serve.flight_start import starting_flight
from headrace.serve.messages import Answer, ProtocolError, Refused, Request
from headrace.serve.reception import NO_TOKEN, WRONG_TOKEN

_NO_COLUMNS = pa.schema([])
_LARGE_BINARY = pa.large_binary()
_UNKNOWN_AUTHORITY = (
    "its certificate is of an authority that is not known here: give tls_roots= with its certificate"
)
_HINTS = {
    "unable to get local issuer": _UNKNOWN_AUTHORITY,
    "self-signed certificate": _UNKNOWN_AUTHORITY,
    "self signed certificate": _UNKNOWN_AUTHORITY,
    "is not in peer certificate": "its certificate is for another name: use that name in the address",
    "WRONG_VERSION_NUMBER": "it does not use TLS: give an address with grpc://",
    "wrong version number": "it does not use TLS: give an address with grpc://",
    "Socket closed": "it has hung up: if it uses TLS, give an address with grpc+tls://",
}
_SURE_SIGNS = [sign for sign in _HINTS if sign != "Socket closed"]
"""Waiting does not help with these."""
"""What to do about some of gRPC's messages, by words in them."""
_NOISE = re.compile(r"Ssl handshake failed \(\w+\): |SSL_ERROR_SSL: |error:[0-9A-Fa-f]+:")
_LEAD = re.compile(r"^Flight returned (\w+ error, with message: )?|UNKNOWN: (ipv[46]:\S+: )?")
"""What gRPC puts before a message."""
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000)]


class FlightConnection:
    """An exchange with one server. Its threads are in Arrow most of the time: one writes, and one reads."""

    def __init__(self, address: Address, credentials: Credentials, events: Events) -> None:
        self._address, self._credentials, self._events = address, credentials, events
        self._lock = threading.Lock()
        self._is_closed = self._is_lost = self._says_goodbye = False
        self._outgoing: queue.SimpleQueue[Sequence[Request] | None] = queue.SimpleQueue()
        self._client: Any = None
        self._writer: Any = None
        self._reader: Any = None
        self._writing = threading.Thread(target=self._write, name="headrace-server-write", daemon=True)
        self._reading = threading.Thread(target=self._run, name="headrace-server-read", daemon=True)

    def start(self) -> None:
        self._reading.start()

    def send(self, requests: Sequence[Request]) -> None:
        self._outgoing.put(requests)

    def tick(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._cancel()

    def end(self) -> None:
        with self._lock:
            self._is_closed = True
        self._says_goodbye = True
        self._outgoing.put(None)

    def join(self, seconds: float) -> bool:
        # The thread that reads waits for the one that writes.
        self._reading.join(seconds)
        return not self._reading.is_alive()

    def _cancel(self) -> None:
        """End it without the server."""
        with self._lock:
            self._is_lost, reader = True, self._reader
        self._outgoing.put(None)
        if reader is not None:
            with contextlib.suppress(pa.ArrowException, OSError):
                reader.cancel()

    def _run(self) -> None:
        try:
            self._connect()
            reason = self._read()
        except (pa.ArrowException, OSError) as error:
            reason = _reason(error)
        with self._lock:
            is_expected, self._is_closed = self._is_closed, True
        if not is_expected:
            if any(sign in reason for sign in _SURE_SIGNS):
                self._events.unusable(reason)
            self._events.lost(reason)

    def _connect(self) -> None:
        options: dict[str, Any] = {"generic_options": _OPTIONS}
        if self._address.scheme == "grpc+tls":
            if self._credentials.roots is not None:
                options["tls_root_certs"] = self._credentials.roots
            if self._address.certified_name is not None:
                options["override_hostname"] = self._address.certified_name
        headers = []
        if self._credentials.token is not None:
            headers.append((b"authorization", f"Bearer {self._credentials.token}".encode()))
        with starting_flight():
            client = self._client = flight.FlightClient(self._address.location, **options)
        descriptor = flight.FlightDescriptor.for_command(b"headrace")
        writer, reader = client.do_exchange(descriptor, flight.FlightCallOptions(headers=headers))
        with self._lock:
            self._writer, self._reader = writer, reader
            is_lost = self._is_lost
        if is_lost:
            reader.cancel()

    def _write(self) -> None:
        try:
            self._writer.begin(_NO_COLUMNS)
            self._writer.write_metadata(messages.encode([self._events.hello()]))
            while (requests := self._outgoing.get()) is not None:
                for message in messages.encode_requests(requests):
                    self._writer.write_metadata(message)
            # Not if the exchange is lost: gRPC ends the process if a writer and a reader find that out together.
            if self._says_goodbye and not self._is_lost:
                self._writer.done_writing()
        except (pa.ArrowException, OSError):
            pass  # the thread that reads sees why

    def _read(self) -> str:
        """Read until the exchange is over; returns why it is."""
        reason = "the server has ended the exchange"
        self._writing.start()
        try:
            while True:
                self._accept(self._reader.read_chunk())
        except StopIteration:
            pass
        except ProtocolError as error:
            reason = f"the server sends what it should not: {error}"
        except flight.FlightUnauthenticatedError:
            reason = WRONG_TOKEN if self._credentials.token else NO_TOKEN
            self._events.unusable(reason)
        except (pa.ArrowException, OSError) as error:
            reason = _reason(error)
        # Nothing must be written while it is closed: gRPC ends the process if two threads end the same stream.
        self._cancel()
        self._writing.join()
        with contextlib.suppress(pa.ArrowException, OSError):
            # Otherwise Arrow does it later, and prints what came of it.
            self._writer.close()
        self._writer = self._reader = None
        with contextlib.suppress(pa.ArrowException, OSError):
            self._client.close()
        return reason

    def _accept(self, chunk: Any) -> None:
        if chunk.app_metadata is None:
            raise ProtocolError("a part of a batch that does not belong to any")
        arrived: list[Arrived] = []
        column = 0
        for reply in messages.decode_replies(chunk.app_metadata.to_pybytes()):
            if isinstance(reply, Answer):
                place = self._events.place(reply)
                if reply.body_bytes:
                    self._receive(reply, place, _content(chunk, column))
                    column += 1
                arrived.append((reply, place))
            else:
                self._events.reply(reply)
            if isinstance(reply, Refused):
                raise ProtocolError(reply.reason)
        if arrived:
            self._events.answers(arrived)

    def _receive(self, answer: Answer, place: Bytes | None, part: Bytes) -> None:
        """Copy the parts of a batch as they come: their memory is gRPC's, read-only, and aligned to nothing."""
        missing = answer.body_bytes
        while True:
            if not 0 < len(part) <= missing:
                raise ProtocolError("a part of a batch that is not what was announced")
            if place is not None:
                first = answer.body_bytes - missing
                place[first : first + len(part)] = part
            missing -= len(part)
            if not missing:
                return
            chunk = self._reader.read_chunk()
            if chunk.app_metadata is not None:
                raise ProtocolError("a batch that ends too early")
            part = _content(chunk, 0)


def _content(chunk: Any, number: int) -> Bytes:
    """The bytes of a column, which has one row. Arrow does not check what it receives."""
    if chunk.data is None or chunk.data.num_columns <= number or chunk.data.num_rows != 1:
        raise ProtocolError("an answer without the bytes of its batch")
    column = chunk.data.column(number)
    if column.type != _LARGE_BINARY:
        raise ProtocolError("a part of a batch that has another type")
    missing, offsets, content = column.buffers()
    if missing is not None or offsets is None or content is None or offsets.size < 16 or column.offset:
        raise ProtocolError("a part of a batch that is not one value")
    first, end = np.frombuffer(offsets, "<i8", 2)
    if not 0 <= first <= end <= content.size:
        raise ProtocolError("a part of a batch that is longer than what came")
    part: Bytes = np.frombuffer(content, np.uint8)[first:end]
    return part


def _reason(error: BaseException) -> str:
    """The part of gRPC's message that people can use."""
    text = str(error).split(". gRPC client debug context")[0].split(". Detail:")[0]
    said = _NOISE.sub("", _LEAD.sub("", text).rpartition("last error: ")[2]).strip() or type(error).__name__
    hints = [hint for sign, hint in _HINTS.items() if sign in said]
    return "; ".join([*hints, said]) if hints else said

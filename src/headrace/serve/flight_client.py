"""A connection to a server on another machine; see `flight_server.py`."""

import contextlib
import queue
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from headrace.serve import messages
from headrace.serve.addresses import Address
from headrace.serve.connection import Bytes, Credentials, Events
from headrace.serve.messages import Answer, Ask, Cancel, ProtocolError, Refused, Request, Welcome

_NO_COLUMNS = pa.schema([])
_GOODBYE_SECONDS = 1.0
_CANCEL_SECONDS = 5.0
EXCHANGES = 2
"""One exchange alone leaves the network idle while its bytes are copied."""
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000)]


class FlightConnection:
    """Several exchanges with one server, of which the first one greets it."""

    def __init__(self, address: Address, credentials: Credentials, events: Events) -> None:
        self._events = events
        self._is_closed = False
        self._lock = threading.Lock()
        self._exchanges: list[_Exchange] = []
        self._of_request: dict[int, _Exchange] = {}
        self._client: Any = None
        self._address, self._credentials = address, credentials

    def start(self) -> None:
        threading.Thread(target=self._begin, name="headrace-server-flight", daemon=True).start()

    def _begin(self) -> None:
        options: dict[str, Any] = {"generic_options": _OPTIONS}
        if self._address.scheme == "grpc+tls":
            if self._credentials.roots is not None:
                options["tls_root_certs"] = self._credentials.roots
            if self._address.certified_name is not None:
                options["override_hostname"] = self._address.certified_name
        headers = []
        if self._credentials.token is not None:
            headers.append((b"authorization", f"Bearer {self._credentials.token}".encode()))
        try:
            self._client = flight.FlightClient(str(self._address), **options)
            self._call = flight.FlightCallOptions(headers=headers)
            self._open(self._events.hello())
        except (pa.ArrowException, OSError) as error:
            self._lose(_reason(error))

    def _open(self, hello: Request) -> None:
        exchange = _Exchange(self, self._client, self._call, hello)
        with self._lock:
            self._exchanges.append(exchange)
        exchange.start()

    def welcomed(self, exchange: "_Exchange", welcome: Welcome) -> None:
        if exchange is not self._exchanges[0]:
            return
        self._events.reply(welcome)
        for _ in range(EXCHANGES - 1):
            with contextlib.suppress(pa.ArrowException, OSError):
                self._open(messages.Hello(messages.VERSION, welcome.fingerprint))

    def send(self, request: Request) -> None:
        with self._lock:
            ready = [each for each in self._exchanges if each.is_welcome]
            if not ready:
                return
            if isinstance(request, Ask):
                exchange = min(ready, key=lambda each: each.owed)
                exchange.owed += 1
                self._of_request[request.id] = exchange
            elif isinstance(request, Cancel):
                found = self._of_request.get(request.id)
                if found is None:
                    return
                exchange = found
            else:
                exchange = ready[0]
        exchange.send(request)

    def done(self, number: int) -> None:
        """A request was answered."""
        with self._lock:
            exchange = self._of_request.pop(number, None)
            if exchange is not None:
                exchange.owed -= 1

    @property
    def events(self) -> Events:
        return self._events

    def lose(self, exchange: "_Exchange", reason: str) -> None:
        """One exchange is gone, so the server is as good as gone."""
        del exchange
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for exchange in self._exchanges:
            exchange.cancel()
        self._events.lost(reason)

    def tick(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for exchange in self._exchanges:
            exchange.cancel()

    def end(self) -> None:
        """Close it, and wait until its threads have ended: they must not be in Arrow when the interpreter ends."""
        with self._lock:
            self._is_closed = True
        for exchange in self._exchanges:
            exchange.say_goodbye()
        if not all(exchange.join(_GOODBYE_SECONDS) for exchange in self._exchanges):
            for exchange in self._exchanges:
                exchange.cancel()
            for exchange in self._exchanges:
                exchange.join(_CANCEL_SECONDS)


class _Exchange:
    def __init__(self, connection: FlightConnection, client: Any, call: Any, hello: Request) -> None:
        self._connection, self._hello = connection, hello
        self._outgoing: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.is_welcome, self.owed = False, 0
        self._says_goodbye = self._is_lost = False
        self._threads: list[threading.Thread] = []
        self._writer, self._reader = client.do_exchange(
            flight.FlightDescriptor.for_command(b"headrace"), call
        )

    def start(self) -> None:
        self._writing = threading.Thread(target=self._write, name="headrace-server-write", daemon=True)
        reading = threading.Thread(target=self._read, name="headrace-server-read", daemon=True)
        self._threads += [self._writing, reading]
        for thread in self._threads:
            thread.start()

    def send(self, request: Request) -> None:
        self._outgoing.put(request)

    def say_goodbye(self) -> None:
        """The server then ends the exchange."""
        self._says_goodbye = True
        self._outgoing.put(None)

    def cancel(self) -> None:
        """End it without the server."""
        self._is_lost = True
        self._outgoing.put(None)
        with contextlib.suppress(pa.ArrowException, OSError):
            self._reader.cancel()

    def join(self, seconds: float) -> bool:
        """Whether its threads have ended."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _write(self) -> None:
        try:
            self._writer.begin(_NO_COLUMNS)
            self._writer.write_metadata(messages.encode(self._hello))
            while (request := self._outgoing.get()) is not None:
                self._writer.write_metadata(messages.encode(request))
            # Not if the exchange is lost: gRPC ends the process if a writer and a reader find that out together.
            if self._says_goodbye and not self._is_lost:
                self._writer.done_writing()
        except (pa.ArrowException, OSError):
            pass  # the thread that reads sees why

    def _read(self) -> None:
        reason = "the server has ended the exchange"
        try:
            while True:
                self._accept(self._reader.read_chunk())
        except StopIteration:
            pass
        except ProtocolError as error:
            reason = f"the server sends what it should not: {error}"
        except flight.FlightUnauthenticatedError:
            self._connection.events.reply(
                Refused("the token is not the right one; give token= that of the server")
            )
            reason = "the token is not the right one"
        except (pa.ArrowException, OSError) as error:
            reason = _reason(error)
        # Nothing must be written while it is closed: gRPC ends the process if two threads end the same stream.
        self.cancel()
        self._writing.join()
        with contextlib.suppress(pa.ArrowException, OSError):
            # Otherwise Arrow does it later, and prints what came of it.
            self._writer.close()
        self._connection.lose(self, reason)

    def _accept(self, chunk: Any) -> None:
        if chunk.app_metadata is None:
            raise ProtocolError("a part of a batch that does not belong to any")
        reply = messages.decode_reply(chunk.app_metadata.to_pybytes())
        events = self._connection.events
        if isinstance(reply, Answer):
            place = events.place(reply)
            self._receive(reply, place, chunk)
            self._connection.done(reply.id)
            events.answer(reply, place)
        elif isinstance(reply, Welcome):
            self.is_welcome = True
            self._connection.welcomed(self, reply)
        else:
            if isinstance(reply, messages.Failed):
                self._connection.done(reply.id)
            events.reply(reply)
            if isinstance(reply, Refused):
                raise ProtocolError(reply.reason)

    def _receive(self, answer: Answer, place: Bytes | None, chunk: Any) -> None:
        """Copy the parts of a batch as they come: their memory is gRPC's, read-only, and aligned to nothing."""
        missing = answer.body_bytes
        while missing:
            column = chunk.data.column(0) if chunk.data is not None and chunk.data.num_columns == 1 else None
            if (
                column is None
                or not 0 < len(column) <= missing
                or column.type != pa.uint8()
                or column.null_count
            ):
                raise ProtocolError("a part of a batch that is not what was announced")
            part: Any = np.frombuffer(column.buffers()[1], np.uint8, len(column), column.offset)
            if place is not None:
                first = answer.body_bytes - missing
                place[first : first + len(part)] = part
            missing -= len(part)
            if missing:
                chunk = self._reader.read_chunk()
                if chunk.app_metadata is not None:
                    raise ProtocolError("a batch that ends too early")


def _reason(error: BaseException) -> str:
    """The part of gRPC's message that people can use."""
    text = str(error).split(". gRPC client debug context")[0].split(". Detail:")[0]
    return text.replace("Flight returned ", "").strip() or type(error).__name__

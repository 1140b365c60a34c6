"""One writer at a time for a prefix of a bucket: an object `.lock` that its holder keeps renewing.

    t = 0 s    the holder creates .lock, and puts it again every 10 s
    t = 25 s   another one finds it 5 s old: in use
    t = 30 s   the holder is killed
    t = 91 s   another one finds it more than 60 s old, and replaces exactly this version with its own

Ages are differences of times that the server has noted: clocks of machines may differ. If the dead holder was a process
of this machine, nobody has to wait. A holder that could not renew its lease in time finds out before its next write;
should it write nevertheless, the manifest is only replaced if it is still the one that the writer has seen.
"""

import contextlib
import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from headrace.errors import DirectoryInUseError, HeadraceError, StorageError
from headrace.store.locks import LOCK_NAME
from headrace.store.objects import Objects
from headrace.store.reading import Range
from headrace.store.remote_errors import RefusedError

_PROBE_PREFIX = f"{LOCK_NAME}-"
_LONGEST_NOTE = 4096
_MOST_ATTEMPTS = 10


class Note(msgspec.Struct, frozen=True):
    """What the object says."""

    holder: str
    process: int
    host: str
    machine: str
    """The same text only where equal process numbers mean the same process; may be empty."""
    started: float
    """When the process was started."""
    token: str
    """Different for each lease."""
    renewed: int = 0
    """How often; it makes each version of the object another one."""

    def __str__(self) -> str:
        return f"{self.holder}, process {self.process} on {self.host}"


def is_lock_name(name: str) -> bool:
    """Whether an object is a lease, or what asks a server for its time."""
    return name == LOCK_NAME or name.startswith(_PROBE_PREFIX)


class Lease:
    def __init__(self, objects: Objects, holder: str) -> None:
        self._objects = objects
        self._renew_seconds = objects.client.options.renew_seconds
        self._lasts_seconds = objects.client.options.lease_seconds
        self._note = _own_note(holder)
        self._stamp = ""
        self._renewed_at = 0.0
        self._loss: str | None = None
        self._renewing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="headrace lease", daemon=True)

    def __enter__(self) -> "Lease":
        began = time.monotonic()
        self._stamp = self._acquire()
        self._check_conditions()
        self._renewed_at = began
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # Not for ever: the thread may be in the middle of a request that the network does not answer.
        self._thread.join(self._renew_seconds)
        with contextlib.suppress(HeadraceError, FileNotFoundError, RefusedError, msgspec.MsgspecError):
            found = self._objects.get_range(LOCK_NAME, 0, _LONGEST_NOTE)
            if _parse(found).token == self._note.token:
                self._objects.delete([LOCK_NAME])

    def check(self) -> None:
        """Raise if the lease is lost."""
        if self._loss is None and time.monotonic() - self._renewed_at > self._lasts_seconds / 2:
            # The thread is late: this process was stopped for a while, or the network was gone.
            self._renew()
        if self._loss is not None:
            raise StorageError(
                f"{self._objects.address}: the lease of this writer was lost: {self._loss}. Nothing was lost that was "
                "written before: do the same again to continue"
            )

    # Getting it

    def _acquire(self) -> str:
        content = msgspec.json.encode(self._note)
        for _ in range(_MOST_ATTEMPTS):
            with contextlib.suppress(RefusedError):
                return self._objects.put(LOCK_NAME, content, mode="create")
            try:
                found = self._objects.get_range(LOCK_NAME, 0, _LONGEST_NOTE)
            except FileNotFoundError:
                continue  # released just now
            note = self._note_in(found)
            if note.token == self._note.token:
                return found.about().stamp  # the answer to our own write was lost
            self._refuse_living(note, found)
            with contextlib.suppress(DirectoryInUseError):
                return self._objects.put_expecting(LOCK_NAME, content, found.about().stamp)
        raise DirectoryInUseError(
            f"{self._objects.address}: in use by several others; wait for them to finish"
        )

    def _check_conditions(self) -> None:
        """Create it once more: a server that does not refuse that would give everybody the lease."""
        try:
            self._objects.put(LOCK_NAME, msgspec.json.encode(self._note), mode="create")
        except RefusedError:
            return
        self._objects.delete([LOCK_NAME])
        raise StorageError(
            f"{self._objects.address}: the server ignores conditions of writes (If-None-Match), so that two writers at "
            "once would not notice each other; write to a local directory, and copy it there"
        )

    def _note_in(self, found: Range) -> Note:
        try:
            return _parse(found)
        except msgspec.MsgspecError:
            raise StorageError(
                f"{self._objects.place(LOCK_NAME)}: is not a lock of Headrace, which needs this name; move it away, or "
                "choose another place"
            ) from None

    def _refuse_living(self, note: Note, found: Range) -> None:
        if _has_died(note):
            return
        left = self._lasts_seconds - (self._server_time_ns() - found.about().modified_ns) / 1e9
        if left >= 0:
            raise DirectoryInUseError(
                f"{self._objects.address}: in use by {note}; wait for it to finish, or choose another place. If it was "
                f"killed, its lease ends in {left + 1:.0f} s"
            )

    def _server_time_ns(self) -> int:
        """The time on the server, as it notes it at objects."""
        probe = f"{_PROBE_PREFIX}{self._note.token}"
        self._objects.put(probe, b"")
        try:
            return self._objects.describe(probe).modified_ns
        finally:
            self._objects.delete([probe])

    # Keeping it

    def _keep(self) -> None:
        while not self._ended.wait(self._renew_seconds):
            self._renew()
            if self._loss is not None:
                return

    def _renew(self) -> None:
        with self._renewing:
            if self._ended.is_set() or self._loss is not None:
                return
            self._note = msgspec.structs.replace(self._note, renewed=self._note.renewed + 1)
            began = time.monotonic()
            try:
                content = msgspec.json.encode(self._note)
                self._stamp = self._objects.put_expecting(LOCK_NAME, content, self._stamp)
                self._renewed_at = began
            except DirectoryInUseError:
                self._loss = "it was not renewed in time, and somebody else has taken it or removed it"
            except (HeadraceError, OSError) as error:
                # It is still ours until it is over; until then, the next attempt may succeed.
                if time.monotonic() - self._renewed_at > self._lasts_seconds:
                    self._loss = f"it could not be renewed ({error})"


class HeldLease:
    """The lease under which a store and the folders inside it are written to, if there is one."""

    def __init__(self) -> None:
        self._lease: Lease | None = None

    @contextlib.contextmanager
    def during(self, lease: Lease) -> Iterator[None]:
        self._lease = lease
        try:
            yield
        finally:
            self._lease = None

    def check(self) -> None:
        if self._lease is not None:
            self._lease.check()


def _parse(found: Range) -> Note:
    return msgspec.json.decode(found.content, type=Note)


def _own_note(holder: str) -> Note:
    process = psutil.Process()
    return Note(
        holder, process.pid, socket.gethostname(), _machine(), process.create_time(), secrets.token_hex(8)
    )


@functools.cache
def _machine() -> str:
    """This machine since it was started, and the numbering of its processes: containers have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_died(note: Note) -> bool:
    """Whether the holder was a process of this machine, and is no more."""
    if not note.machine or note.machine != _machine():
        return False
    try:
        process = psutil.Process(note.process)
        is_another = abs(process.create_time() - note.started) > 1
        return bool(is_another or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False

"""A plain web server for tests: the files of a directory over HTTP, in ranges. It answers 200 for a folder, too."""

import contextlib
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def web_server(directory: Path) -> Iterator[str]:
    """The address at which the files of a directory are."""

    class Handler(_RangeHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(directory))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


class _RangeHandler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.translate_path(self.path)
        wanted = self.headers.get("Range", "")
        if not wanted or not os.path.isfile(path):
            super().do_GET()
            return
        content = Path(path).read_bytes()
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(content))
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", self.date_time_string(int(os.path.getmtime(path))))
        self.end_headers()
        self.wfile.write(content[start:stop])

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""

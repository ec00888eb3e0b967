"""The HTTP server of ``pegaflow exporter``: a few clients at a time, whom one that says nothing does not hinder."""

import contextlib
import socket
import sys
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

CLIENTS_MAX = 8
"""So many threads, each for one client. Whoever comes then takes the place of the one that came first."""

SILENT_SECONDS_MAX = 10.0
"""Clients that neither send nor take anything for so long are cut off."""


class Server(ThreadingMixIn, WSGIServer):
    """Answers at an address of version 4."""

    daemon_threads = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._lock = threading.Lock()
        self._clients: list[socket.socket] = []
        self._threads_left = threading.Semaphore(CLIENTS_MAX)
        super().__init__(*arguments, **options)

    def server_bind(self) -> None:
        """Take the address. Unlike the base class it asks no name server who we are, which may take long."""
        # Connections that have ended keep the address for a minute from whoever does not say that he shares it with
        # them.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client on a thread."""
        if not self._threads_left.acquire(blocking=False):
            self._cut_off_oldest()
            self._threads_left.acquire()
        with self._lock:
            self._clients.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A client has been served, or could not be."""
        with self._lock:
            known = request in self._clients
            if known:
                self._clients.remove(request)
        super().shutdown_request(request)
        if known:
            self._threads_left.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went, was cut off or stayed silent is no failure; all else is told."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _cut_off_oldest(self) -> None:
        with self._lock:
            for client in self._clients[:1]:
                with contextlib.suppress(OSError):  # it has gone by itself
                    client.shutdown(socket.SHUT_RDWR)


class Server6(Server):
    """Answers at an address of version 6."""

    address_family = socket.AF_INET6


class Handler(WSGIRequestHandler):
    """One client."""

    timeout = SILENT_SECONDS_MAX

    def log_message(self, *_what: object) -> None:
        """Say nothing of each request."""

    def address_string(self) -> str:
        """The address as it is, without asking a name server."""
        return str(self.client_address[0])

"""Authorities and certificates for the length of a test."""

import subprocess
from pathlib import Path


def certificates(place: Path) -> tuple[Path, Path, Path]:
    """An authority, and key and certificate of a server that it has signed."""
    names = ("authority.key", "authority.pem", "server.key", "server.csr", "server.pem", "extensions")
    authority_key, authority, key, request, certificate, extensions = (place / name for name in names)
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    new = ["req", "-newkey", "rsa:2048", "-nodes"]
    for words in (
        [*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", authority_key, "-out", authority],
        [*new, "-subj", "/CN=localhost", "-keyout", key, "-out", request],
        ["x509", "-req", "-days", "2", "-in", request, "-CA", authority, "-CAkey", authority_key, "-CAcreateserial"],
    ):
        more = ["-extfile", extensions, "-out", certificate] if words[0] == "x509" else []
        subprocess.run(["openssl", *map(str, [*words, *more])], check=True, capture_output=True)
    return authority, key, certificate

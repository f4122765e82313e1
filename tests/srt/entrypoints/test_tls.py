"""HTTPS with certificates that the `openssl` program makes."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from certificates import make_certificate, openssl
from patience import PATIENCE_S
from toy_engine import ServerProcess, text_of, toy_flags

from tercet.srt.entrypoints.server import serve
from tercet.srt.entrypoints.tls import tls_context
from tercet.srt.server_args import ServerArgs

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl program is not installed")

PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: server.pem and server.key, locked.key with a password, client.pem and client.key."""
    folder = tmp_path_factory.mktemp("certs")
    make_certificate(folder, "server")
    make_certificate(folder, "client")
    openssl("ec", "-aes256", "-passout", f"pass:{PASSWORD}", "-in", "server.key", "-out", "locked.key", folder=folder)
    return folder


def args(certs: Path, **files: str) -> ServerArgs:
    """Settings with these files of the folder. `ssl_keyfile_password` is no file."""
    settings = {name: str(certs / one) if name != "ssl_keyfile_password" else one for name, one in files.items()}
    return ServerArgs(model_path="m", **settings)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"ssl_certfile": "gone.pem"}, "--ssl-certfile: cannot load .*gone.pem: No such file or directory"),
        ({"ssl_certfile": "server.pem"}, "no private key in PEM form; --ssl-keyfile names the file of the key"),
        ({"ssl_certfile": "server.key", "ssl_keyfile": "server.key"}, "--ssl-certfile and --ssl-keyfile: cannot load "),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "server.pem"}, "no private key in PEM form$"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "client.key"}, "the private key is not that of the certificate"),
        (
            {"ssl_certfile": "client.pem", "ssl_keyfile": "locked.key", "ssl_keyfile_password": PASSWORD},
            "the private key is not that of the certificate",
        ),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "locked.key"}, "--ssl-keyfile-password is missing"),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "locked.key", "ssl_keyfile_password": "wrong"},
            "--ssl-keyfile-password does not fit",
        ),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_keyfile_password": "x"},
            "the private key is not encrypted",
        ),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_ca_certs": "server.key"},
            "--ssl-ca-certs: cannot load .*server.key",
        ),
    ],
)
def test_files_that_do_not_fit_are_named(certs: Path, files: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tls_context(args(certs, **files))
    assert serve(args(certs, **files)) == 1


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"])
def test_a_setting_without_a_certificate_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} needs --ssl-certfile"):
        ServerArgs(model_path="m", **{name: "x"})


def test_old_versions_of_tls_are_refused(certs: Path) -> None:
    context = tls_context(args(certs, ssl_certfile="server.pem", ssl_keyfile="server.key"))
    assert context is not None and context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE


def test_the_key_may_be_encrypted_and_clients_may_need_a_certificate(certs: Path) -> None:
    files = {"ssl_certfile": "server.pem", "ssl_keyfile": "locked.key", "ssl_keyfile_password": PASSWORD}
    context = tls_context(args(certs, **files, ssl_ca_certs="client.pem"))
    assert context is not None and context.verify_mode is ssl.CERT_REQUIRED
    assert tls_context(ServerArgs(model_path="m")) is None


def test_https_with_certificates_on_both_sides(certs: Path, tmp_path: Path) -> None:
    flags = [*toy_flags(tmp_path), "--port", "0", "--ssl-certfile", str(certs / "server.pem")]
    flags += ["--ssl-keyfile", str(certs / "locked.key"), "--ssl-keyfile-password", PASSWORD]
    flags += ["--ssl-ca-certs", str(certs / "client.pem")]
    trust = ssl.create_default_context(cafile=str(certs / "server.pem"))
    stranger = ssl.create_default_context(cafile=str(certs / "server.pem"))
    trust.load_cert_chain(certs / "client.pem", certs / "client.key")
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    with ServerProcess(tmp_path, flags) as server:
        url = server.ready().url
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=trust, timeout=PATIENCE_S) as client:
            events = client.post("/generate", json=body).text.split("\n\n")
            assert json.loads(events[-3].removeprefix("data: "))["text"] == text_of(5)
            assert PASSWORD not in client.get("/server_info").text
        for verify in (stranger, None):
            with pytest.raises(httpx.TransportError):
                httpx.get((url if verify else url.replace("https", "http")) + "/health", verify=verify or True)
        _answer_before_the_body(url, trust)
        assert "Traceback" not in server.log, server.log


def _answer_before_the_body(url: str, trust: ssl.SSLContext) -> None:
    """The connection ends in order, although TLS cannot be closed for writing alone."""
    host, port = url.removeprefix("https://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain,
        trust.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n{")
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    assert answer.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in answer

"""Settings: the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from .setting import server_setting as _server


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """The settings of the HTTP server."""

    TITLE: ClassVar[str] = "The HTTP server"

    served_model_name: Annotated[
        str | None, _server("Model name in the API; default: the name of the model's folder or file")
    ] = None
    host: Annotated[str, _server("Address to listen on")] = "127.0.0.1"
    port: Annotated[int, _server("TCP port to listen on; 0: any free port")] = 30000
    tokenizer_worker_num: Annotated[
        int, _server("Number of processes that serve HTTP: they read bodies, tokenise and write answers")
    ] = 1
    api_key: Annotated[
        str | list[str] | None,
        _server(
            "API key that clients must send; repeat it for several keys; default: the variable TERCET_API_KEY",
            secret=True,
            repeatable=True,
        ),
    ] = None
    max_concurrent_requests_per_key: Annotated[
        int | None,
        _server("Maximum number of unanswered requests of an API key, or of a client address without keys"),
    ] = None
    requests_per_minute_per_key: Annotated[
        int | None,
        _server("Maximum number of requests in a minute of an API key, or of a client address without keys"),
    ] = None
    allowed_origins: Annotated[
        str | None,
        _server(
            "Origins whose web pages may use the server (CORS): https://ui.example, several with commas between them "
            "or as a JSON list; *: all; default: none"
        ),
    ] = None
    ssl_certfile: Annotated[str | None, _server("PEM file of the certificate chain; serves HTTPS instead of HTTP")] = (
        None
    )
    ssl_keyfile: Annotated[str | None, _server("PEM file of the private key; default: the file of --ssl-certfile")] = (
        None
    )
    ssl_keyfile_password: Annotated[str | None, _server("Password of an encrypted private key", secret=True)] = None
    ssl_ca_certs: Annotated[
        str | None,
        _server("PEM file of CA certificates; only clients with a certificate of one of these CAs can connect"),
    ] = None
    incremental_streaming_output: Annotated[
        bool, _server("Each event of a /generate stream has only the new text and ids, not the whole output so far")
    ] = False
    response_store_mib: Annotated[
        int,
        _server(
            "MiB of memory for responses of /v1/responses that clients can continue and read; of more, the oldest are "
            "dropped; 0: none is stored"
        ),
    ] = 0
    resume_grace: Annotated[
        float,
        _server(
            "Seconds for which a client can continue a stream after its connection broke; 0: the request ends at once"
        ),
    ] = 0.0
    resume_file: Annotated[
        str | None,
        _server(
            "File that records the streams of --resume-grace, with their prompts, so that clients can continue them "
            "after the server was killed or restarted; default: none"
        ),
    ] = None

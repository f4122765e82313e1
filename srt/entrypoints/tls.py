"""TLS: the server's certificate, and the certificates of clients if they are asked for."""

from __future__ import annotations

import ssl

from ..server_args import ServerArgs


def tls_context(args: ServerArgs) -> ssl.SSLContext | None:
    """The TLS settings of the server; None without `--ssl-certfile`. TLS 1.2 and 1.3 are accepted.

    With `--ssl-ca-certs`, only a client with a certificate of these authorities can connect. Raises ValueError, which
    names the flag and the file.
    """
    if args.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    flag, path = "--ssl-certfile", args.ssl_certfile
    if args.ssl_keyfile is not None:
        flag, path = "--ssl-certfile and --ssl-keyfile", f"{args.ssl_certfile} and {args.ssl_keyfile}"
    is_asked = False

    def password() -> str:
        """Without this function, OpenSSL would ask for the password on the terminal."""
        nonlocal is_asked
        is_asked = True
        return args.ssl_keyfile_password or ""

    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password)
    except (OSError, ValueError) as error:
        # OpenSSL's KEY_VALUES_MISMATCH or KEY_TYPE_MISMATCH. Then a password has been accepted.
        is_other_key = (getattr(error, "reason", None) or "").startswith("KEY_")
        if is_asked and not is_other_key:
            wrong = "is missing" if args.ssl_keyfile_password is None else "does not fit"
            raise ValueError(f"the private key is encrypted, and --ssl-keyfile-password {wrong}") from error
        reason = getattr(error, "strerror", None) or str(error)
        if is_other_key:
            reason = "the private key is not that of the certificate"
        elif "PEM lib" in reason:
            hint = "; --ssl-keyfile names the file of the key" if args.ssl_keyfile is None else ""
            reason = f"no certificate or no private key in PEM form{hint}"
        raise ValueError(f"{flag}: cannot load {path}: {reason}") from error
    if args.ssl_keyfile_password is not None and not is_asked:
        raise ValueError("--ssl-keyfile-password is given, but the private key is not encrypted")
    if args.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(args.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ValueError(f"--ssl-ca-certs: cannot load {args.ssl_ca_certs}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context

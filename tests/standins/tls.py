"""A certificate for loopback, made for one run of the tests, with which a stand-in serves over TLS."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from loopback import Loopback

__all__ = ["serve_tls", "write_certificate"]


def write_certificate(folder: Path) -> Path:
    """Write a key and its certificate, which is its own authority, to one file: those who trust it name that file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    places = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(places, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = folder / "loopback.pem"
    path.write_bytes(key.private_bytes(*form) + made.public_bytes(serialization.Encoding.PEM))
    return path


def serve_tls(server: Loopback, certificate: Path) -> None:
    """Have a stand-in that has not been entered yet serve over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.serve_with(context)

"""Fetching files over the network: resumed, retried, verified. Independent of formats."""

from .bucket import Bucket, BucketObject
from .catalogue import (
    CatalogueFile,
    KnownNames,
    Resolution,
    catalogue_age,
    is_complete,
    not_found,
    resolve,
    substitution_text,
)
from .checksums import ChecksumHasher, hasher, matches
from .fetch import fetch_files
from .http import HttpTransport, failure
from .http_source import HttpSource
from .hub import Hub, HubFile, HubRepository, hub_endpoint
from .originals import FetchedFile, Originals, OriginalsRecord, stored_originals
from .retries import Patience, Transient, retry_after, retrying
from .threads import ask_all
from .transport import Answer, Transport, read_small, require_network

__all__ = [
    "Answer",
    "Bucket",
    "BucketObject",
    "CatalogueFile",
    "ChecksumHasher",
    "FetchedFile",
    "HttpSource",
    "HttpTransport",
    "Hub",
    "HubFile",
    "HubRepository",
    "KnownNames",
    "Originals",
    "OriginalsRecord",
    "Patience",
    "Resolution",
    "Transient",
    "Transport",
    "ask_all",
    "catalogue_age",
    "failure",
    "fetch_files",
    "hasher",
    "hub_endpoint",
    "is_complete",
    "matches",
    "not_found",
    "read_small",
    "require_network",
    "resolve",
    "retry_after",
    "retrying",
    "stored_originals",
    "substitution_text",
]

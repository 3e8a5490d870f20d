"""What a client of S3 needs to know, as the control plane's client has found it out.

So one URL and one set of storage options, environment and profiles serve both planes. It knows
settings, and makes no request for objects.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fsspec.asyn import sync  # type: ignore[import-untyped]

from shardstore.storage.stores.errors import explained, keep_quiet_about
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import FIRST_DEADLINE_S
from shardstore.storage.stores.s3_options import ENCRYPTION

__all__ = ["S3Settings", "s3_settings"]

_LASTING = timedelta(minutes=10)
"""How long renewed credentials are taken to hold where nothing says it."""

SIGNED_BYTES = 1024 * 1024
"""Hashing larger bodies takes client and server together a fifth of a save over plain HTTP
(measured on Ceph's gateway)."""

_lock = threading.Lock()
_found: dict[int, S3Settings] = {}


@dataclass(frozen=True)
class RenewedCredentials:
    """Credentials that end: of a role, a container, an instance. Called, it gives those of now, as
    obstore wants them.

    Attributes:
        credentials: botocore's, which gets new ones in time.
        loop: that they are used on.
    """

    credentials: Any = field(repr=False)
    loop: Any = field(repr=False, compare=False)

    def __call__(self) -> dict[str, Any]:
        """Any thread but the loop's may call it."""
        found: dict[str, Any] = sync(self.loop, self._current, timeout=FIRST_DEADLINE_S)
        return found

    async def _current(self) -> dict[str, Any]:
        frozen = await _frozen(self.credentials)
        until = getattr(self.credentials, "_expiry_time", None) or datetime.now(UTC) + _LASTING
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token or None,
            "expires_at": until.astimezone(UTC),
        }


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """Endpoint, region, credentials and time limits.

    Attributes:
        region: of the bucket, or any name where there are none.
        endpoint: URL of the service.
        anonymous: requests are not signed.
        key: access key; ``None`` where there are none, or renewed ones.
        secret: secret key.
        token: session token.
        renewed: credentials that end.
        connect_timeout_s: for a connection.
        read_timeout_s: for an answer, or its next piece.
        verify: whether certificates are checked, or the file of those that are trusted.
        signs_payload: whether the signature of a request covers what it sends (botocore's
            ``payload_signing_enabled``); ``None``: see :meth:`signs`.
        virtual_hosts: buckets are addressed in the host's name, and not in the path.
        proxy: URL of the proxy that was given; ``None``: that of the environment, if there is one.
        requester_pays: requests say so.
        encryption: what objects are encrypted with, by obstore's names.
    """

    region: str
    endpoint: str
    anonymous: bool = False
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    renewed: RenewedCredentials | None = field(default=None, repr=False)
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    verify: bool | str = True
    signs_payload: bool | None = None
    virtual_hosts: bool = False
    proxy: str | None = field(default=None, repr=False)
    requester_pays: bool = False
    encryption: tuple[tuple[str, Any], ...] = ()

    @property
    def of_amazon(self) -> bool:
        """Whether the service is Amazon's own."""
        return "amazonaws.com" in self.endpoint or not self.endpoint

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return not self.endpoint.startswith("http://")

    def of_now(self) -> S3Settings:
        """The same with the keys of this moment, for a client that can not ask for others."""
        if self.renewed is None:
            return self
        given = self.renewed()
        keys = {"key": given["access_key_id"], "secret": given["secret_access_key"]}
        return replace(self, **keys, token=given["token"])

    def signs(self, size: int) -> bool:
        """Whether the signature of a request that sends so many bytes covers them (Amazon S3 API
        reference, "Signature Calculations for the Authorization Header": ``UNSIGNED-PAYLOAD``).

        By default, with TLS it does not, as with botocore; without it, where that costs nothing to
        speak of: documents, commits and small chunks. Large chunks are held by the checksums in
        those; whoever can change what is under way unencrypted could change each answer as well.
        """
        if self.signs_payload is not None:
            return self.signs_payload
        return not self.tls and size < SIGNED_BYTES


def s3_settings(location: Location) -> S3Settings:
    """The settings that the control plane's client has for a location.

    Raises:
        StorageError: there are no credentials, or they can not be got.
    """
    fs = location.remote.fs
    with _lock:
        found = _found.get(id(fs))
        if found is None:
            try:
                found = sync(fs.loop, _settings, fs, timeout=FIRST_DEADLINE_S)
            except Exception as error:
                raise explained("connecting to", location.url, error) from error
            assert found is not None
            if found.key is None:
                # Keys are asked for each time: those of a session are renewed.
                _found[id(fs)] = found
        return found


async def _settings(fs: Any) -> S3Settings:
    client = await fs.set_session()
    meta = client.meta
    region, endpoint = meta.region_name, meta.endpoint_url or ""
    s3 = meta.config.s3 or {}
    arguments = {**(fs.s3_additional_kwargs or {}), **fs.req_kw}
    settings = S3Settings(
        region=region if region and not region.startswith("aws-") else "us-east-1",
        endpoint=endpoint,
        anonymous=bool(fs.anon),
        connect_timeout_s=float(meta.config.connect_timeout),
        read_timeout_s=float(meta.config.read_timeout),
        # As it was found out of options, variables and profiles.
        verify=client._endpoint.http_session._verify,
        signs_payload=s3.get("payload_signing_enabled"),
        virtual_hosts=s3.get("addressing_style") == "virtual",
        proxy=(meta.config.proxies or {}).get(endpoint.partition("://")[0]),
        requester_pays=arguments.get("RequestPayer") is not None,
        encryption=tuple((ENCRYPTION[n], v) for n, v in arguments.items() if n in ENCRYPTION),
    )
    keep_quiet_about({})  # of modules, too, that a client's making has imported
    credentials = client._request_signer._credentials
    if settings.anonymous or credentials is None:
        return settings
    if hasattr(credentials, "refresh_needed"):
        return replace(settings, renewed=RenewedCredentials(credentials, fs.loop))
    frozen = await _frozen(credentials)
    return replace(
        settings, key=frozen.access_key, secret=frozen.secret_key, token=frozen.token or None
    )


async def _frozen(credentials: Any) -> Any:
    frozen = credentials.get_frozen_credentials()
    if hasattr(frozen, "__await__"):
        frozen = await frozen
    keep_quiet_about({}, frozen.access_key, frozen.secret_key, frozen.token)
    return frozen

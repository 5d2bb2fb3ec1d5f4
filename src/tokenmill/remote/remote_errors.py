"""The errors of object stores, and the sentence that tells a user what an error of obstore means.

obstore has few exception types and puts the rest into its messages, so these are searched for status codes and for
the addresses that were asked.
"""

from __future__ import annotations

import re

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.remote.object_request import SCHEMES, ObjectRequest, describe_endpoint

__all__ = [
    "AccessDenied",
    "AlreadyThere",
    "ChangedObject",
    "NoSuchObject",
    "RemoteError",
    "ServerUnreachable",
    "TruncatedAnswer",
    "explain",
    "explain_configuration",
    "is_transient",
]


class RemoteError(TokenmillError):
    """A request to an object store failed."""


class NoSuchObject(RemoteError):
    """The object or its bucket does not exist."""


class ChangedObject(RemoteError):
    """The object is not the one that was first read."""


class AlreadyThere(RemoteError):
    """The object to be created exists already."""


class AccessDenied(RemoteError):
    """The server asks for credentials or for other ones, so a retry would not help."""


class ServerUnreachable(RemoteError):
    """No server answers at this address."""


class TruncatedAnswer(RemoteError):
    """The body of an answer has fewer bytes than were asked for."""


_METADATA_SERVICES = ("/latest/api/token", "/latest/meta-data", "169.254.169.254", "metadata.google")
"""Addresses that obstore asks for the role of the machine if the environment has no keys."""
_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": f"{_ACCOUNT} and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
_NO_CONNECTION = ("kind: Connect", "kind: Timeout")
"""obstore's words for a connection that was never made; one that broke is `kind: Request`."""
_BUSY = ("429", "503")
_PERMANENT = ("400", "401", "403", "404", "405", "409", "411", "416", "501")
"""Status codes that a retry does not change."""


def explain(request: ObjectRequest, error: Exception) -> TokenmillError:
    """What an error of obstore means to a user."""
    from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError

    message, url, names = str(error), request.url, _KEYS[request.scheme]
    is_missing = isinstance(error, FileNotFoundError)
    if (is_missing or "404" in message) and ("NoSuchBucket" in message or "ContainerNotFound" in message):
        where = describe_endpoint(request.scheme)
        bucket = f"{request.scheme}://{request.bucket}"
        return NoSuchObject(f"{bucket} does not exist at {where}; check the URL's first part")
    if is_missing:
        return NoSuchObject(f"{url} does not exist")
    if isinstance(error, ValueError):
        return UsageError(f"{url} is not the name of an object: {_first_line(error)}")
    if isinstance(error, AlreadyExistsError) or (isinstance(error, PreconditionError) and request.do == "create"):
        return AlreadyThere(f"{url} exists already, with other content")
    if isinstance(error, PreconditionError):
        return ChangedObject(f"{url} was replaced while it was being read")
    if "status code: 416" in message:
        return ChangedObject(f"{url} ends before byte {request.start:,}; it was replaced or cut off")
    if any(service in message for service in _METADATA_SERVICES):
        public = f"; for a public bucket set {SCHEMES[request.scheme]}_SKIP_SIGNATURE=true"
        return AccessDenied(f"{url} needs credentials, and there are none: set {names}{public}")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or " 403 " in message or " 401 " in message:
        allowed = "what they allow" if " and " in names else "what it allows"
        return AccessDenied(f"access to {url} was denied; check {names}, and {allowed}")
    if "error sending request" in message or "error trying to connect" in message:
        where, name = describe_endpoint(request.scheme), _ENDPOINTS[request.scheme]
        return ServerUnreachable(f"{url}: {where} cannot be reached or does not answer; check {name}")
    if status := re.search(r"status code: (\d+) ([^:\n]*)", message):
        code, reason = status[1], "busy" if status[1] in _BUSY else status[2].strip()
        return RemoteError(f"{url}: the server answers {code} ({reason})")
    if "response body error" in message:
        return RemoteError(f"{url}: the connection breaks off in the middle of every answer")
    return RemoteError(f"{url}: {_first_line(error)}")


def is_transient(failure: TokenmillError, message: str, *, is_known: bool) -> bool:
    """Whether a retry may help, by what `explain` made of an error and by the error's own message.

    A server that never answered (`is_known` is False) and takes no connection likely has another address.
    """
    if isinstance(failure, ServerUnreachable):
        return is_known or not any(kind in message for kind in _NO_CONNECTION)
    return type(failure) is RemoteError and not any(f"status code: {code}" in message for code in _PERMANENT)


def explain_configuration(bucket: str, error: Exception) -> UsageError:
    """Why obstore cannot open a bucket with the settings of the environment."""
    if "Account must be specified" in str(error):
        return UsageError(f"{bucket} needs the name of an account: set {_ACCOUNT}")
    return UsageError(f"{bucket} cannot be used: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """The start of an error of obstore, without the dump of its internals that follows."""
    line = str(error).partition("\n")[0].partition(": <?xml")[0]
    return re.sub(r"^Generic \w+ error: ", "", line).strip()[:200]

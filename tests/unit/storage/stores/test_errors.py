"""Which failures of a request are certain to be the end of it, and in which words they are told."""

from __future__ import annotations

import errno
import os
import ssl

import botocore.session
import pytest
from botocore.exceptions import EndpointConnectionError, ParamValidationError, SSLError

from shardstore.errors import StorageError
from shardstore.storage.stores.errors import explained, is_refusal


def answered(status: int, retries: int = 0, code: str = "Something") -> OSError:
    """As s3fs raises it: an error of Python's, because of one of botocore's."""
    cause = Exception("An error occurred")
    cause.response = {  # type: ignore[attr-defined]
        "Error": {"Code": code, "Message": "happened"},
        "ResponseMetadata": {"HTTPStatusCode": status, "RetryAttempts": retries},
    }
    error = OSError(errno.EIO, "Something happened")
    error.__cause__ = cause
    return error


def with_status(status: int) -> Exception:
    """As adlfs raises it."""
    error = Exception("Something happened")
    error.status_code = status  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "certain"),
    [
        (answered(403), True),
        (answered(400), True),
        (answered(403, retries=1), False),
        (answered(500), False),
        (answered(503), False),
        (answered(503, retries=1, code="SlowDown"), True),
        (answered(429, retries=3, code="TooManyRequests"), True),
        (answered(504), False),
        (with_status(403), True),
        (with_status(503), False),
        (PermissionError("no"), True),
        (OSError(errno.ENOSPC, "full"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
        (TimeoutError("late"), False),
        (OSError("something"), False),
        (ValueError("not an answer"), False),
        (StorageError("s3://bucket/x: no answer within 20 s"), False),
    ],
)
def test_refusals_are_told_from_errors_that_may_pass(error: Exception, certain: bool) -> None:
    assert is_refusal(error) is certain
    with pytest.raises(StorageError) as caught:
        raise explained("creating", "s3://bucket/x", error) from error
    assert is_refusal(caught.value) is certain


@pytest.mark.parametrize(
    ("url", "speaks_of_s3"), [("s3://bucket/step", True), ("gs://bucket/step", False)]
)
@pytest.mark.parametrize("error", [PermissionError("no"), ConnectionError("gone")])
def test_each_store_is_told_of_in_its_own_words(
    url: str, speaks_of_s3: bool, error: Exception
) -> None:
    assert ("AWS_" in str(explained("writing", url, error))) == speaks_of_s3


def test_the_reason_of_an_error_of_several_lines_is_kept() -> None:
    client = botocore.session.get_session().create_client(
        "s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    with pytest.raises(ParamValidationError) as caught:
        client.get_object(Bucket="b b", Key="x")
    text = str(explained("reading", "s3://b b/x", caught.value))
    assert "Parameter validation failed: Invalid bucket name" in text
    several = ValueError("the first line\nthe second line")
    assert "the second line" not in str(explained("reading", "s3://b/x", several))


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EMFILE, "raise the limit"), (errno.ECONNREFUSED, "check the endpoint")],
)
def test_the_reason_why_there_is_no_connection_is_told(number: int, advice: str) -> None:
    reason = OSError(number, os.strerror(number))
    hidden = EndpointConnectionError(endpoint_url="http://127.0.0.1:9", error=reason)
    for error in (reason, hidden):
        text = str(explained("reading", "s3://b/x", error))
        assert text.count(os.strerror(number)) == 1
        assert advice in text
    error = SSLError(endpoint_url="https://127.0.0.1:9", error=ssl.SSLError(1, "WRONG_VERSION"))
    assert os.strerror(1) not in str(explained("reading", "s3://b/x", error))  # no number of errno


@pytest.mark.parametrize("said", ["", "None"])
def test_an_answer_without_a_message_is_told_by_its_code(said: str) -> None:
    error = PermissionError(said)
    error.__cause__ = answered(403, code="AccessDenied").__cause__
    assert "failed: AccessDenied; the store refuses" in str(explained("reading", "s3://b/x", error))
    assert "failed: 413: " in (
        text := str(explained("writing", "s3://b/x", answered(413, code="")))
    )
    assert "proxy" in text
    unknown = OSError("An error occurred (NoName) when calling PutObject: None")
    assert "PutObject; check" in str(explained("writing", "s3://b/x", unknown))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (answered(400, code="ExpiredToken"), "the session token has expired"),
        (answered(507, code="XMinioStorageFull"), "free space"),
        (answered(503, code="ServiceUnavailable"), "try again later"),
        (answered(409, code="AccountProblem"), "see the store's error message"),
        (NotImplementedError(), "is only read"),
    ],
)
def test_the_url_is_not_blamed_for_what_the_store_says(error: Exception, advice: str) -> None:
    text = str(explained("writing", "s3://b/x", error))
    assert advice in text
    assert "check the URL" not in text


@pytest.mark.parametrize(("url", "advice"), [("gs://b/x", "gcsfs"), ("sftp://h/x", "the package")])
def test_a_package_that_is_missing_is_the_remedy(url: str, advice: str) -> None:
    error = ImportError('SFTPFileSystem requires "paramiko" to be installed')
    assert advice in str(explained("connecting to", url, error)).partition("installed;")[2]

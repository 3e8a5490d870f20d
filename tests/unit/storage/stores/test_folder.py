"""Errors of the operating system, in words that help."""

from __future__ import annotations

import errno

import pytest

from shardstore.errors import StorageError
from shardstore.storage.stores.folder import store_errors


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSYS, errno.EOPNOTSUPP])
def test_what_mounts_of_buckets_answer_to_a_rename_is_told_with_the_remedy(number: int) -> None:
    """gcsfuse answers with the first one (its issues 644 and 655)."""
    with pytest.raises(StorageError, match=r"bucket.* URL"), store_errors("committing", "x"):
        raise OSError(number, "")

"""Create a bucket unless it is there, once the server answers: create_bucket.py NAME.

Endpoint, region and credentials come from the environment, as for every other client.
"""

from __future__ import annotations

import sys
import time

import botocore.config
import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

LIMIT_S = 60.0


def main() -> int:
    name = sys.argv[1]
    config = botocore.config.Config(s3={"addressing_style": "path"}, connect_timeout=2)
    client = botocore.session.Session().create_client("s3", config=config)
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            client.create_bucket(Bucket=name)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                print(f"bucket {name} was not created: {code}", file=sys.stderr)
                return 1
        except BotoCoreError as error:
            if time.monotonic() > deadline:
                print(f"the S3 server does not answer: {error}", file=sys.stderr)
                return 1
            time.sleep(0.5)
            continue
        print(f"bucket {name} is there")
        return 0


if __name__ == "__main__":
    sys.exit(main())

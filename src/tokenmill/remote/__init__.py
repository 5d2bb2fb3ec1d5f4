"""Object stores: `s3://`, `gs://` and `az://` URLs, and what of them is kept on this machine.

client.py    one request: obstore, retries, and errors as sentences
courier.py   the same from a process that was forked
bucket.py    objects by name: list, read, download, put, create, delete
ranges.py    stretches of objects, fetched ahead of their use
cache.py     whole files on a local disk, in bounded room, shared by all processes of a machine
"""

from tokenmill.remote.bucket import Bucket, ObjectInfo, is_remote, split_url

__all__ = ["Bucket", "ObjectInfo", "is_remote", "split_url"]

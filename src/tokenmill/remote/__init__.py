"""Object stores: `s3://`, `gs://` and `az://` URLs, and a cache of their files on this machine.

object_request.py   what is asked, and of which server
remote_errors.py    what an error means to a user
client.py           one request: obstore and retries
thread_pool.py      threads that never keep a program from ending
bucket.py           objects by name: list, read, download, put, create, delete
ranges.py           byte ranges of objects, prefetched
cache.py            whole files on a local disk, in bounded space, shared by all processes of a machine
fetcher.py          whole files, downloaded into the cache in the background
paths.py            objects as input files
"""

from tokenmill.remote.bucket import Bucket, ObjectInfo, split_url

__all__ = ["Bucket", "ObjectInfo", "split_url"]

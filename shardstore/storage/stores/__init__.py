"""Local disks and object stores: one protocol, and the two classes that implement it."""

from shardstore.storage.stores.folder import LocalFolder
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix

Location.kinds = LocalFolder, ObjectPrefix

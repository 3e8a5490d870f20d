"""Movers transfer chunks between memory and stores: one protocol, and the classes for folders and
for object stores."""

from shardstore.storage.movers.files import FolderMover
from shardstore.storage.movers.mover import Mover
from shardstore.storage.movers.object_mover import ObjectMover
from shardstore.storage.stores.folder import LocalFolder
from shardstore.storage.stores.prefix import ObjectPrefix

Mover.kinds = {LocalFolder: FolderMover, ObjectPrefix: ObjectMover}

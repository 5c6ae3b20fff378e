"""The commands that are answered, by the kind of value that they work on. Importing this registers them all."""

from litebroker_rq.commands import hashes, keys, lists, server, sets, sorted_sets, streams, strings

__all__ = ["hashes", "keys", "lists", "server", "sets", "sorted_sets", "streams", "strings"]

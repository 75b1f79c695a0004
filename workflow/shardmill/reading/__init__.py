"""Reading anything that calls itself ShareGPT: files to conversations and rejects, nothing lost in silence.

`Reader` is the way in; docs/reading.md says what it makes of what.
"""

from shardmill.reading.reader import Reader
from shardmill.reading.reasons import BadRecords, RejectReason
from shardmill.reading.records import Conversation, Message, Place, ReadCounts, Reject
from shardmill.reading.sources import dataset_digest, dataset_files

__all__ = [
    "BadRecords",
    "Conversation",
    "Message",
    "Place",
    "ReadCounts",
    "Reader",
    "Reject",
    "RejectReason",
    "dataset_digest",
    "dataset_files",
]

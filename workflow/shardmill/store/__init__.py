"""The object store: finished shards to S3 and back, checked by content, with the manifest always last."""

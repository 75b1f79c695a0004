"""A build's status as a web page of this machine alone: read-only, and nothing from the network in it."""

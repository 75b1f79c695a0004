"""All servers of a run as one pool: one fleet process per host and server set, and the jobs that share it."""

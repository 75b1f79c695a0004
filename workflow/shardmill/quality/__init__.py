"""Checks over a build's rows: .sql files, the facts that they read, verdicts, and the accounting."""

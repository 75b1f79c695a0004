"""The report page and the dataset card of a build."""

from shardmill.report.card import write_card
from shardmill.report.page import write_report

__all__ = ["write_card", "write_report"]

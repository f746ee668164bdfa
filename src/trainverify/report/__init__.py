"""Verdicts and reports, as text, JSON, a page, a test, and in the formats of CI systems."""

from trainverify.report.verdict import EXIT, Compared, Report, Shown, Verdict, codes_page, finding_json, grouped

__all__ = ["EXIT", "Compared", "Report", "Shown", "Verdict", "codes_page", "finding_json", "grouped"]

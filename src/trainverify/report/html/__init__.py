"""A report as one self-contained page: verdict, repair, evidence, pictures, obligations with filters."""

from trainverify.report.html.page import Entry, page

__all__ = ["Entry", "page"]

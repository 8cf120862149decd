"""What shows a run: the page, the report, advice, and loggers of other systems."""

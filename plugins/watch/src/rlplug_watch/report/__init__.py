"""Report of a run: one HTML file that needs no network, written from the files of the run folder."""

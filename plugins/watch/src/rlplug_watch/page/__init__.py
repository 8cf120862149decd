"""``rlplug watch``: a page on loopback that follows runs and compares them, from the files of their folders."""

from rlplug_watch.page.server import make_app

__all__ = ["make_app"]

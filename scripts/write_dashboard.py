"""Writes plugins/watch/src/rlplug_watch/loggers/grafana.json: the Grafana dashboard of the metrics that a run serves.

``python scripts/write_dashboard.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when the
file is not what ``plugins/watch/src/rlplug_watch/loggers/dashboard.py`` says.
"""

from __future__ import annotations

import sys

from rlplug_watch.loggers.dashboard import dashboard_json
from rlplug_watch.loggers.prometheus import DASHBOARD
from written_files import write_or_check

if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, DASHBOARD, lambda text: dashboard_json()))

"""Writes rlplug/observability/loggers/grafana.json: the Grafana dashboard of the metrics that a run serves.

``python scripts/write_dashboard.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when the
file is not what ``rlplug/observability/loggers/dashboard.py`` says.
"""

from __future__ import annotations

import sys

from written_files import write_or_check

from rlplug.observability.loggers.dashboard import dashboard_json
from rlplug.observability.loggers.prometheus import DASHBOARD

if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, DASHBOARD, lambda text: dashboard_json()))

"""One module for each command of rlplug that has no folder of its own; ``lightning_cli`` runs fit and validate."""

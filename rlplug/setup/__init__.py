"""Setup of a run from its configuration: reads its files, plans it, builds its models, and starts its parts."""

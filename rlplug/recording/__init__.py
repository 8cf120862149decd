"""The recorder of a run: its folder with configuration, metrics, samples, trained policy, and what is printed."""

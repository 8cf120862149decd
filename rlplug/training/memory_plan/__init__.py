"""The memory plan: what lives on each GPU in each phase of a step, predicted before anything is loaded."""

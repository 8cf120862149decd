"""The profiler of a few steps, and its summary: what each phase of a step spends its time on."""

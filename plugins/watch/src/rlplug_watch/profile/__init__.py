"""The summary of a profiled run: what each phase of a step spends its time on."""

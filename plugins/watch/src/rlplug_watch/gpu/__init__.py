"""How busy the GPUs of a training are: NVML's counters of each step, and the update's share of their peak (MFU)."""

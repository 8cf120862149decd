"""Configurations of verl, TRL and OpenRLHF as configurations of rlplug."""

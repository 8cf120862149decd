"""Certification: records of which engine, trainer and versions work together, how they are made and what they say."""

"""Models: configuration, construction, loading, export, packing and the LM head."""

"""Models: configuration, construction, loading, export, packed rows and the LM head."""

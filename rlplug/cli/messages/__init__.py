"""What is wrong with a value of the configuration, in words of its key, from what jsonargparse says."""

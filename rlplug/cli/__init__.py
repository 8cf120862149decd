"""The command line: ``rlplug fit | validate | plan | plugins | report``, and the run folder."""

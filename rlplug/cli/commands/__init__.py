"""The core's commands. A command is an entry point of the group ``rlplug.commands``, in any distribution."""

"""The command line: :mod:`.app` starts it, and the other modules have the commands."""

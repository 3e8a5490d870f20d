"""The command line.

:mod:`shardstore.cli.app` has the commands, the rooms beside it do their work.
"""

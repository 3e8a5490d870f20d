"""Movers transfer chunks between memory and stores."""

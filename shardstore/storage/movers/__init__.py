"""How chunks move between memory and stores."""

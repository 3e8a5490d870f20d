"""Communication between ranks: coordinator, messages, process groups."""

"""Publishers: how the relay hands messages to a broker, one module for each client."""

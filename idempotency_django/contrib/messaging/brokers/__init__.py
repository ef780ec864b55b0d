"""One module for each publisher, and the loop of ``run_consumer``."""

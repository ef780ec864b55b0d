"""Tasks and jobs: a message that a queue delivers twice has its effect once."""

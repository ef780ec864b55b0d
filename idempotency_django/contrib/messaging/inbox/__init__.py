"""The webhook inbox: what was received is durable before it is acknowledged, and handled once."""

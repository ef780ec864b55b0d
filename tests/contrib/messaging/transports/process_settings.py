"""Settings of a process of ``run_consumer``."""

from tests.support import outside_settings

globals().update({name: value for name, value in vars(outside_settings).items() if name.isupper()})
IDEMPOTENCY = {"CONSUMERS": ["tests.contrib.messaging.transports.consumers.billing"]}

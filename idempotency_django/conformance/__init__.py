"""Tests any HTTP API with idempotency keys from the outside.

Run it with ``python -m idempotency_django.conformance URL``. The API may run on any server. It
needs neither Django nor this package there, and nothing here imports Django. The requirements are
data for runners in any language: ``requirements.yaml`` and ``dialects.yaml``.
"""

from importlib.util import find_spec

for _name in ("httpx", "yaml"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"The conformance runner needs {_name}. Install the extra: "
            'pip install "idempotency-django[conformance]"',
            name=_name,
        )

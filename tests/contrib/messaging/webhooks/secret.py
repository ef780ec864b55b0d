"""What the sender of the storm signs with."""

from __future__ import annotations

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

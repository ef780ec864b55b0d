"""What a run is to show of the view, as multiples of one another within the run."""

# the page says × and ≤
from __future__ import annotations

from typing import Final

from benchmarks.comparison import AWAY, Limit
from benchmarks.project import ATOMIC, BARE, CACHED, FENCED, MEMORY, MIXIN, OTHER, REDIS, STEPS
from benchmarks.site import FAR

FIRST, REPLAY = f"{MIXIN} first", f"{MIXIN} replay"
BARE_FIRST, ATOMIC_FIRST, OTHER_FIRST = f"{BARE} first", f"{ATOMIC} first", f"{OTHER} first"

LIMITS: Final = (
    Limit(f"first request ≤ 1.25 × `atomic()`, {AWAY}", FIRST, 1.25, ATOMIC_FIRST, FAR),
    Limit(f"first request < django-idempotency-key's, {AWAY}", FIRST, 0.99, OTHER_FIRST, FAR),
    Limit("first request ≤ 1.40 × `atomic()`", FIRST, 1.40, ATOMIC_FIRST),
    Limit("leased first request with `atomic()` ≤ 2.2 × bare", f"{FENCED} first", 2.2, BARE_FIRST),
    Limit("first request of three steps ≤ 3.2 × bare", f"{STEPS} first", 3.2, BARE_FIRST),
    Limit("first request on `RedisStore` ≤ 1.5 × bare", f"{REDIS} first", 1.5, BARE_FIRST),
    Limit(
        "first request on `CachedStore` ≤ 1.15 × on `DatabaseStore`", f"{CACHED} first", 1.15, FIRST
    ),
    Limit("first request on `MemoryStore` ≤ 1.12 × bare", f"{MEMORY} first", 1.12, BARE_FIRST),
    Limit("replay ≤ 0.80 × bare", REPLAY, 0.8, BARE_FIRST),
    Limit("replay on `CachedStore` ≤ 0.35 × bare", f"{CACHED} replay", 0.35, BARE_FIRST),
)

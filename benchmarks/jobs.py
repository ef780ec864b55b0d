"""``python -m benchmarks.jobs``: the effects of a task that is delivered again while it runs.

A task of eight seconds on Valkey, which delivers it again after two. ``QUICK=1``: four and one.
Peers that are not installed are left out: celery-once is in no dependency group, because it needs
an old redis.
"""

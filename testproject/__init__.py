"""The reference app: a small payments API, protected in each of the ways there are.

Read ``payments/views.py`` first. ``make serve`` runs it, ``make demo`` shows what it is about.
"""

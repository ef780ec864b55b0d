from __future__ import annotations

from django.urls import path

from benchmarks import views
from benchmarks.project import LABELS

urlpatterns = [path(f"{variant}/", getattr(views, variant)) for variant in LABELS]

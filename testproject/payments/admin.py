from __future__ import annotations

from django.contrib import admin

from .models import Effect, Posting


@admin.register(Effect)
class EffectAdmin(admin.ModelAdmin):
    list_display = ["id", "kind", "owner", "reference", "amount", "currency", "created_at"]
    list_filter = ["kind", "owner"]
    search_fields = ["reference"]


@admin.register(Posting)
class PostingAdmin(admin.ModelAdmin):
    list_display = ["id", "side", "owner", "reference", "amount", "currency", "created_at"]
    list_filter = ["side", "owner"]
    search_fields = ["reference"]

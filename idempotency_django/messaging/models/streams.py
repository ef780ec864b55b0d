"""The table of streams: how far each of them is processed, and by whom."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ...models import ExactCharField


class StreamPosition(models.Model):
    """How far one stream is processed. One row per stream, however many messages it has."""

    id = models.BigAutoField(primary_key=True)
    stream = ExactCharField(_("stream"), max_length=255, unique=True)
    # Raised by each new owner: what an earlier one does then matches no row. A peer counts its own.
    epoch = models.BigIntegerField(_("epoch"), default=0)
    # The offset of the last message whose effects are committed; -1: none yet.
    position = models.BigIntegerField(_("position"), default=-1)
    updated_at = models.DateTimeField(_("updated"))

    class Meta:
        verbose_name = _("stream position")
        verbose_name_plural = _("stream positions")
        permissions = [("reset_streamposition", _("Can reset the positions of streams"))]

    def __str__(self) -> str:
        return str(self.stream)

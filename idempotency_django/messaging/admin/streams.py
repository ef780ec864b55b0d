"""Streams in the admin: how far each is processed, and setting that by hand."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...tracing.moments import Moment
from .. import positions
from ..databases import database
from ..models import StreamPosition
from .base import ReadOnly

TEMPLATE = "admin/idempotency_messaging/streamposition/reset.html"


class ResetForm(forms.Form):
    """The new position of a stream, and why.

    Attributes:
        row: the stream as the operator sees it.
    """

    position = forms.IntegerField(
        label=gettext_lazy("Position"),
        min_value=-1,
        max_value=positions.LARGEST,
        help_text=gettext_lazy("The last offset that counts as processed; -1: none."),
    )
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=200)
    # The row as the operator has seen it: another one must not be changed by an old page.
    seen = forms.CharField(widget=forms.HiddenInput)

    def __init__(self, row: StreamPosition, data: Any = None) -> None:
        initial = {"position": row.position, "seen": _seen(row)}
        super().__init__(data, initial=initial)
        self.row = row

    def clean(self) -> None:
        if self.cleaned_data.get("seen") != _seen(self.row):
            raise forms.ValidationError(
                _("The stream has moved since you opened this page. Open it again, and look.")
            )

    def apply(self) -> None:
        """Set the position. The owner of a stream is fenced; a peer's epoch is its own."""
        row, values = self.row, {"position": self.cleaned_data["position"]}
        if not row.stream.startswith(positions.PEER):
            values["epoch"] = row.epoch + 1
        positions.change(database(), row.stream, **values)


def _seen(row: StreamPosition) -> str:
    return f"{row.epoch}:{row.position}"


@admin.register(StreamPosition)
class StreamPositionAdmin(ReadOnly):
    """Lists and shows the streams and peers; who may can reset a position, and nobody can edit."""

    list_display = ("stream", "epoch", "position", "updated")
    fields = readonly_fields = list_display
    search_fields = ("stream__startswith",)
    search_help_text = gettext_lazy("Finds streams whose names begin with this text.")
    ordering = ("stream",)
    actions = None

    def has_reset_permission(self, request: HttpRequest) -> bool:
        """Whether the user may set positions by hand."""
        may_reset = request.user.has_perm("idempotency_messaging.reset_streamposition")
        return may_reset and self.has_view_permission(request)

    @admin.display(description=gettext_lazy("updated"))
    def updated(self, row: Any) -> SafeString:
        return Moment(row.updated_at, row.now).html

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.reset_view)
        name = "idempotency_messaging_streamposition_reset"
        return [path("<path:object_id>/reset/", view, name=name), *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        context |= {"may_reset": self.has_reset_permission(request)}
        return super().render_change_form(request, context, *args, **options)

    def reset_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for the new position of a stream, and set it."""
        if not self.has_reset_permission(request):
            raise PermissionDenied
        with transaction.atomic(using=database()):
            rows = self.get_queryset(request).filter(pk=_number(object_id))
            row = (rows.select_for_update() if request.method == "POST" else rows).first()
            if row is None:
                raise Http404
            form = ResetForm(row, request.POST if request.method == "POST" else None)
            if form.is_valid():
                form.apply()
                self._log(request, form)
                page = "admin:idempotency_messaging_streamposition_change"
                site = self.admin_site.name
                return HttpResponseRedirect(reverse(page, args=[row.pk], current_app=site))
        return self._question(request, form)

    def _log(self, request: HttpRequest, form: ResetForm) -> None:
        """Say who has done it, and why."""
        values = {**form.cleaned_data, "before": form.row.position}
        text = _("Reset from %(before)d to %(position)d: %(reason)s") % values
        user: Any = request.user
        LogEntry.objects.log_actions(user.pk, [form.row], CHANGE, text)
        done = _("The position of the stream was reset. Its owner must claim it again.")
        self.message_user(request, done, messages.SUCCESS)

    def _question(self, request: HttpRequest, form: ResetForm) -> HttpResponse:
        layout: Any = helpers.AdminForm  # whose types ask for the form of a model
        fieldsets = [(None, {"fields": ["position", "reason"]})]
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "title": _("Reset the position"),
            "original": form.row,
            "is_peer": form.row.stream.startswith(positions.PEER),
            "form": form,
            "fieldset": next(iter(layout(form, fieldsets, {}, (), model_admin=self))),
        }
        return TemplateResponse(request, TEMPLATE, context)


def _number(object_id: str) -> int:
    """The primary key that the admin has quoted."""
    try:
        return int(unquote(object_id))
    except ValueError:
        raise Http404 from None

"""The page on which an operator settles an interrupted record: it explains, asks, and does it."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin import ModelAdmin, helpers
from django.contrib.admin.models import CHANGE
from django.contrib.admin.utils import quote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from ..models import IdempotencyStep
from .interventions import carry_out
from .settlements import Settlement
from .states import STATES, state_of
from .timeline import Event


def settle(
    model_admin: ModelAdmin[Any],
    request: HttpRequest,
    rows: QuerySet[Any],
    record: Any,
    way: type[Settlement],
) -> HttpResponse:
    """Ask how the record, the one among the rows, is to be settled; once answered, settle it."""
    if request.method != "POST":
        return _asked(model_admin, request, rows, record, way(initial={"attempt": record.attempt}))
    form = way(request.POST)
    if not form.is_valid():
        return _asked(model_admin, request, rows, record, form)
    changes = form.changes(request.user.get_username())
    done = carry_out(
        rows,
        user_id=request.user.pk,
        eligible=form.eligible,
        flag=CHANGE,
        logged=form.logged(),
        apply=lambda locked: locked.update(**changes),
    )
    if done:
        model_admin.message_user(request, form.done, messages.SUCCESS)
    else:
        model_admin.message_user(request, _left_alone(rows, form), messages.WARNING)
    return HttpResponseRedirect(_address(model_admin, record))


def _left_alone(rows: QuerySet[Any], form: Settlement) -> str:
    """Why nothing was done, as the record is now."""
    record = rows.first()
    because = form.refusal(record) if record else _("It has been deleted in the meantime.")
    because = because or _("It is in use now; look at it again in a while.")
    return _("The idempotency key was left unchanged. %(reason)s") % {"reason": because}


def _address(model_admin: ModelAdmin[Any], record: Any) -> str:
    return reverse(
        "admin:idempotency_django_idempotencykey_change",
        args=[quote(record.pk)],
        current_app=model_admin.admin_site.name,
    )


def _asked(
    model_admin: ModelAdmin[Any],
    request: HttpRequest,
    rows: QuerySet[Any],
    record: Any,
    form: Settlement,
) -> HttpResponse:
    steps = IdempotencyStep.objects.using(rows.db).filter(record=record.pk).count()
    refusal = form.refusal(record)
    context = {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": form.title,
        "original": record,
        "state": STATES[state_of(record)],
        "lease": Event("", record.lease_expires_at, record.now),
        "form": form,
        "errors": form.errors,
        "fieldset": next(iter(_fieldsets(model_admin, form))),
        "refusal": refusal,
        "consequences": [] if refusal else form.consequences(record, steps),
    }
    template = "admin/idempotency_django/idempotencykey/settle.html"
    return TemplateResponse(request, template, context)


def _fieldsets(model_admin: ModelAdmin[Any], form: Settlement) -> Any:
    """The form in the admin's own layout; its hidden field is the template's business."""
    fields = [field.name for field in form.visible_fields()]
    layout: Any = helpers.AdminForm  # whose types ask for the form of a model
    return layout(form, [(None, {"fields": fields})], {}, (), model_admin=model_admin)

"""How an action is done: the operator is asked and answers, and it is done, logged and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin, helpers
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...stores import stores
from ...tracing.moments import Moment
from ...tracing.states import STATES, state_of
from .base import Action

MOST: Final = 1_000
"""Records that are selected at once, each of which is logged; a purge is the tool for more."""

TEMPLATE: Final = "admin/idempotency_django/idempotencykey/action.html"


def perform_on_one(
    model_admin: ModelAdmin[Any],
    request: HttpRequest,
    rows: QuerySet[Any],
    record: Any,
    kind: type[Action],
) -> HttpResponse:
    """Ask whether to do it to the record, the one among the rows; once answered, do it."""
    form = kind([record], request.POST if request.method == "POST" else None)
    if not form.is_valid():
        return _question(model_admin, request, form, record)
    if carry_out(form, rows, request.user):
        model_admin.message_user(request, form.done(1), messages.SUCCESS)
    else:
        model_admin.message_user(request, _why_left_alone(form, rows), messages.WARNING)
    page = f"admin:idempotency_django_idempotencykey_{kind.leads_to}"
    arguments = [quote(record.pk)] if kind.leads_to == "change" else []
    site = model_admin.admin_site.name
    return HttpResponseRedirect(reverse(page, args=arguments, current_app=site))


def list_action(kind: type[Action]) -> Callable[..., HttpResponse | None]:
    """The action as the list of records offers it."""

    def action(
        model_admin: ModelAdmin[Any], request: HttpRequest, rows: QuerySet[Any]
    ) -> HttpResponse | None:
        return _perform_on_many(model_admin, request, rows, kind)

    action.__name__ = f"{kind.name}_selected"
    return admin.action(action, permissions=[kind.permission], description=kind.title)


def _perform_on_many(
    model_admin: ModelAdmin[Any], request: HttpRequest, rows: QuerySet[Any], kind: type[Action]
) -> HttpResponse | None:
    """Ask whether to do it; after the answer, do it, report it and return ``None``."""
    selected = rows.order_by().values("pk")[: MOST + 1].count()
    if selected > MOST:
        text = _("At most %(most)d idempotency keys can be selected for this.") % {"most": MOST}
        model_admin.message_user(request, text, messages.ERROR)
        return None
    form = kind(list(rows), request.POST if "post" in request.POST else None)
    if not form.is_valid():
        return _question(model_admin, request, form)
    done = carry_out(form, rows, request.user)
    level = messages.SUCCESS if done else messages.INFO
    model_admin.message_user(request, form.done(done), level)
    if selected > done:
        model_admin.message_user(request, _left_count(selected - done), messages.WARNING)
    return None


def carry_out(form: Action, rows: QuerySet[Any], user: Any) -> int:
    """Log it and do it, in one transaction, to those of the rows that nothing speaks against then.

    What somebody else holds at this moment is left alone. Returns how many it was done to.
    """
    can_skip = connections[rows.db].features.has_select_for_update_skip_locked
    seen = [record.pk for record in form.records if not form.refusal(record)]
    with transaction.atomic(using=rows.db):
        locked = rows.filter(pk__in=seen).select_for_update(skip_locked=can_skip)
        records = [record for record in locked if not form.refusal(record)]
        LogEntry.objects.log_actions(user.pk, records, form.flag, form.logged())
        _forget(records)
        keys = [record.pk for record in records]
        chosen = rows.model._base_manager.using(rows.db).filter(pk__in=keys)
        form.apply(chosen, user.get_username())
    return len(records)


def _forget(records: list[Any]) -> None:
    """Make every store forget what is about to change."""
    for store in stores.all():
        if store.recalls:
            for record in records:
                store.forget(record.key, record.scope)


def _why_left_alone(form: Action, rows: QuerySet[Any]) -> str:
    """Why nothing was done, as the record is now."""
    record = rows.first()
    because = form.refusal(record) if record else _("It has been deleted in the meantime.")
    because = because or _("It is in use now; look at it again in a while.")
    return _("The idempotency key was left unchanged. %(reason)s") % {"reason": because}


def _left_count(count: int) -> str:
    return ngettext(
        "%(count)d was left unchanged: it has changed since you looked, or is in use now.",
        "%(count)d were left unchanged: they have changed since you looked, or are in use now.",
        count,
    ) % {"count": count}


def _question(
    model_admin: ModelAdmin[Any], request: HttpRequest, form: Action, original: Any = None
) -> HttpResponse:
    """The page that says what follows, and asks; of one record, if there is an original."""
    refusals = [refusal for record in form.records if (refusal := form.refusal(record))]
    possible = len(refusals) < len(form.records)
    listed = [record for record in form.records if original or not form.refusal(record)]
    context = {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": form.title,
        "original": original,
        "records": [
            (record, STATES[state_of(record)], Moment(record.lease_expires_at, record.now))
            for record in listed
        ],
        "refusals": dict.fromkeys(refusals),
        "left_alone": 0 if original else len(refusals),
        "possible": possible,
        "consequences": form.consequences() if possible else [],
        "form": form,
        "errors": form.errors,
        "fieldset": next(iter(_fieldsets(model_admin, form))),
        "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
    }
    return TemplateResponse(request, TEMPLATE, context)


def _fieldsets(model_admin: ModelAdmin[Any], form: Action) -> Any:
    """The form in the admin's own layout; its hidden fields are the template's business."""
    fields = [field.name for field in form.visible_fields()]
    layout: Any = helpers.AdminForm  # whose types ask for the form of a model
    return layout(form, [(None, {"fields": fields})], {}, (), model_admin=model_admin)

"""What an operator may do to records: each asks first, is logged, and spares what is in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.contrib import messages
from django.contrib.admin import ModelAdmin, helpers
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import connections, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..models import DatabaseNow, lease_is_over
from ..records import Status
from ..stores import stores
from .states import STATES, state_of

MOST: Final = 1_000
"""Records that are selected at once, each of which is logged; a purge is the tool for more."""


@dataclass(frozen=True, slots=True)
class Intervention:
    """One of the things that an operator may do; its texts are translated when they are used.

    Attributes:
        name: of the admin action.
        title: what is going to be done.
        consequence: what happens then, for the operator who is asked.
        limits: what it cannot be done to.
        logged: the log entry of each record.
        flag: the kind of log entry.
        eligible: which of some records it can be done to.
        apply: does it.
        done: the message that says to how many records it was done.
    """

    name: str
    title: Any
    consequence: Any
    limits: Any
    logged: Any
    flag: int
    eligible: Callable[[QuerySet[Any]], QuerySet[Any]]
    apply: Callable[[QuerySet[Any]], object]
    done: Callable[[int], str]


def _replayed(rows: QuerySet[Any]) -> QuerySet[Any]:
    live = Q(expires_at=None) | Q(expires_at__gt=DatabaseNow())
    return rows.filter(live, status=Status.COMPLETED)


def _expire(rows: QuerySet[Any]) -> None:
    kept = F("purge_at") - F("expires_at")  # the retention, which goes on counting from the expiry
    rows.update(purge_at=Coalesce(DatabaseNow() + kept, DatabaseNow()), expires_at=DatabaseNow())


def _not_running(rows: QuerySet[Any]) -> QuerySet[Any]:
    return rows.filter(~Q(status=Status.IN_PROGRESS) | lease_is_over())


def _expired_count(count: int) -> str:
    return ngettext(
        "%(count)d idempotency key was expired.", "%(count)d idempotency keys were expired.", count
    ) % {"count": count}


def _deleted_count(count: int) -> str:
    return ngettext(
        "%(count)d idempotency key was deleted.", "%(count)d idempotency keys were deleted.", count
    ) % {"count": count}


def _left_count(count: int) -> str:
    return ngettext(
        "%(count)d was left unchanged: it has changed since you looked, or is in use now.",
        "%(count)d were left unchanged: they have changed since you looked, or are in use now.",
        count,
    ) % {"count": count}


EXPIRE: Final = Intervention(
    name="expire_selected",
    title=gettext_lazy("Expire idempotency keys"),
    consequence=gettext_lazy(
        "Their answers are no longer replayed. The next request with such a key is executed, even "
        "if it is a retry of one that was executed before."
    ),
    limits=gettext_lazy("Only completed keys that have not expired yet can be expired."),
    logged=gettext_lazy("Expired; the next request with this key is executed."),
    flag=CHANGE,
    eligible=_replayed,
    apply=_expire,
    done=_expired_count,
)

DELETE: Final = Intervention(
    name="delete_selected",
    title=gettext_lazy("Delete idempotency keys"),
    consequence=gettext_lazy(
        "Neither they nor their steps are kept for the audit. The next request with such a key is "
        "executed from the beginning, even if it is a retry of one that was executed before."
    ),
    limits=gettext_lazy("A key in progress cannot be deleted before its lease has ended."),
    logged=gettext_lazy("Deleted; the next request with this key is executed."),
    flag=DELETION,
    eligible=_not_running,
    apply=lambda rows: rows.delete(),
    done=_deleted_count,
)


def intervene(
    model_admin: ModelAdmin[Any], request: HttpRequest, rows: QuerySet[Any], what: Intervention
) -> HttpResponse | None:
    """Ask whether to do it; after the answer, do it, report it and return ``None``."""
    selected = rows.order_by().values("pk")[: MOST + 1].count()
    if selected > MOST:
        text = _("At most %(most)d idempotency keys can be selected for this.") % {"most": MOST}
        model_admin.message_user(request, text, messages.ERROR)
        return None
    if request.POST.get("post"):
        done = carry_out(
            rows,
            user_id=request.user.pk,
            eligible=what.eligible,
            flag=what.flag,
            logged=str(what.logged),
            apply=what.apply,
        )
        _report(model_admin, request, what, done, selected)
        return None
    eligible = list(what.eligible(rows))
    context = {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": what.title,
        "what": what,
        "records": [(record, STATES[state_of(record)]) for record in eligible],
        "left_alone": selected - len(eligible),
        "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
    }
    template = "admin/idempotency_django/idempotencykey/confirm.html"
    return TemplateResponse(request, template, context)


def carry_out(
    rows: QuerySet[Any],
    *,
    user_id: Any,
    eligible: Callable[[QuerySet[Any]], QuerySet[Any]],
    flag: int,
    logged: str,
    apply: Callable[[QuerySet[Any]], object],
) -> int:
    """Log it and do it, in one transaction, to those of the rows that are eligible then.

    What somebody else holds at this moment is left alone. Returns how many it was done to.
    """
    features = connections[rows.db].features
    with transaction.atomic(using=rows.db):
        locked = list(
            eligible(rows).select_for_update(skip_locked=features.has_select_for_update_skip_locked)
        )
        LogEntry.objects.log_actions(user_id, locked, flag, logged)
        _forget(locked)
        apply(rows.model._base_manager.using(rows.db).filter(pk__in=[r.pk for r in locked]))
    return len(locked)


def _forget(records: list[Any]) -> None:
    """Make every store forget what is about to change."""
    for store in stores.all():
        if store.recalls:
            for record in records:
                store.forget(record.key, record.scope)


def _report(
    model_admin: ModelAdmin[Any], request: HttpRequest, what: Intervention, done: int, selected: int
) -> None:
    level = messages.SUCCESS if done else messages.INFO
    model_admin.message_user(request, what.done(done), level)
    if selected > done:
        model_admin.message_user(request, _left_count(selected - done), messages.WARNING)

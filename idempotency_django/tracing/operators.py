"""What operators did to rows in the admin, as its log has it."""

from __future__ import annotations

from collections.abc import Sequence

from django.apps import apps

from .timelines import Entry, Member


def logged(members: Sequence[Member]) -> list[Entry]:
    """What was done in the admin to members that are rows of one table, and by whom.

    The log has the clock of the server that the operator used, not the database's.

    Args:
        members: those that the admin shows; it logs which row of a table it changed, and not in
            which database.
    """
    if not (members and apps.is_installed("django.contrib.admin")):
        return []
    by_pk = {str(member.row.pk): member for member in members}
    content_type = apps.get_model("contenttypes", "ContentType").objects.get_for_model(
        members[0].row
    )
    log = apps.get_model("admin", "LogEntry").objects.filter(
        content_type=content_type, object_id__in=list(by_pk)
    )
    return [
        Entry(
            at=entry.action_time,
            now=member.row.now,
            what=entry.get_change_message() or str(entry.get_action_flag_display()),
            member=member,
            by=entry.user.get_username(),
        )
        for entry in log.select_related("user").order_by("action_time", "pk")
        if (member := by_pk.get(str(entry.object_id)))
    ]

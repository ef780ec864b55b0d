"""What all actions have in common: a form, which may have no fields, and the texts around it."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib.admin.models import CHANGE
from django.db.models import QuerySet


class Action(forms.Form):
    """One of the things that an operator can do; its fields are what the operator enters for it.

    Attributes:
        name: of its page; the list calls it ``<name>_selected``.
        title: what is going to be done.
        button: what leads to its page from a record's; empty if Django's own button does.
        permission: who may do it: the admin's method ``has_<permission>_permission`` says.
        for_many: whether records can be selected for it in the list.
        leads_to: the admin's page that follows when one record is done.
        flag: the kind of log entry.
    """

    name: ClassVar[str]
    title: ClassVar[Any]
    button: ClassVar[Any] = ""
    permission: ClassVar[str]
    for_many: ClassVar[bool] = False
    leads_to: ClassVar[str] = "changelist"
    flag: ClassVar[int] = CHANGE

    def __init__(self, records: list[Any], data: Any = None) -> None:
        """For these records, as the operator sees them; ``data`` is what the operator sent."""
        super().__init__(data)
        self.records = records

    def offers(self, record: Any) -> bool:
        """Whether the record's page has the button."""
        return not self.refusal(record)

    def refusal(self, record: Any) -> str:
        """Why it cannot be done to the record; empty if it can."""
        raise NotImplementedError

    def consequences(self) -> list[str]:
        """What happens then to the records, for the operator who is asked."""
        raise NotImplementedError

    def apply(self, rows: QuerySet[Any], by: str) -> None:
        """Do it to these rows, which are locked, for the user of this name."""
        raise NotImplementedError

    def logged(self) -> str:
        """The log entry of each record."""
        raise NotImplementedError

    def done(self, count: int) -> str:
        """The message after it was done to that many records."""
        raise NotImplementedError

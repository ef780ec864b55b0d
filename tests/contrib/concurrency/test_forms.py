"""Two people edit the same thing in forms: the second one gets a message, not a lost update."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django import forms
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import OperationalError, connections, transaction
from django.forms import modelform_factory
from django.http import HttpRequest
from django.test import Client
from django.urls import path

from idempotency_django.contrib.concurrency import VersionedForm, VersionField
from idempotency_django.contrib.concurrency.errors import ConcurrentModification
from idempotency_django.contrib.concurrency.versions import STALE
from idempotency_django.testing import in_threads
from tests.contrib.concurrency.models import Deed, Extended, Owner, Ticket

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
]

site = admin.AdminSite()


class UppercaseForm(VersionedForm):
    """A form of the project's own."""

    def clean_title(self) -> str:
        return str(self.cleaned_data["title"]).upper()


@admin.register(Ticket, site=site)
class TicketAdmin(admin.ModelAdmin):
    form = UppercaseForm
    fieldsets = [("First", {"fields": ["title"]}), ("Second", {"fields": (("amount", "version"),)})]


class DeedInline(admin.TabularInline):
    """An inline that knows nothing of versions."""

    model = Deed
    extra = 0


class OwnerAdmin(admin.ModelAdmin):
    """Has that inline in some of the tests, as a check refuses it."""


site.register(Extended, form=VersionedForm)
site.register(Owner, OwnerAdmin)
urlpatterns = [path("admin/", site.urls)]

TicketForm = modelform_factory(Ticket, form=VersionedForm, fields=["title", "version"])


def filled(ticket: Ticket, **values: Any) -> VersionedForm:
    """The form as its user sends it, who saw the ticket as it is in memory."""
    shown = TicketForm(instance=ticket)
    hidden = {field.name: field.value() for field in shown.hidden_fields()}
    assert hidden == {"version": ticket.version}
    saved = Ticket.objects.using(ticket._state.db).get(pk=ticket.pk)
    return TicketForm({**hidden, **values}, instance=saved)


class TestForm:
    def test_stale(self) -> None:
        """A form whose object was changed since it was shown is invalid, and says why."""
        ticket = Ticket.objects.create(title="a")
        Ticket.objects.get().save()
        form = filled(ticket, title="b")
        assert not form.is_valid()
        assert form.non_field_errors() == [STALE]
        assert form.has_error("__all__", "stale")

    def test_faster(self) -> None:
        """What is changed after the validation is refused by save()."""
        form = filled(Ticket.objects.create(title="a"), title="b")
        assert form.is_valid()
        Ticket.objects.get().save()
        with pytest.raises(ConcurrentModification):
            form.save()
        assert Ticket.objects.get().title == "a"

    def test_locked(self, using: str) -> None:
        """In a transaction, as in the admin, nothing changes it between validation and save()."""
        connection = connections[using]
        if not connection.features.has_select_for_update_nowait:
            pytest.skip("a whole database is locked, by the first write")
        ticket = Ticket.objects.using(using).create(title="a")

        def change() -> None:
            with pytest.raises(OperationalError), transaction.atomic(using=using):
                rows = Ticket.objects.using(using).select_for_update(nowait=True)
                rows.get(pk=ticket.pk).save()

        with transaction.atomic(using=using):
            form = filled(ticket, title="b")
            assert form.is_valid(), form.errors
            in_threads([change])
            form.save()
        [found] = Ticket.objects.using(using)
        assert (found.title, found.version) == ("b", 2)

    def test_any_form(self) -> None:
        """So is a form of Django's own that has the version among its fields."""
        ticket = Ticket.objects.create(title="a")
        Ticket.objects.get().save()
        plain = modelform_factory(Ticket, fields=["title", "version"])
        form = plain({"title": "b", "version": "1"}, instance=Ticket.objects.get())
        assert form.non_field_errors() == [STALE]
        with pytest.raises(ValidationError, match="changed since"):
            ticket.full_clean()

    def test_left_out(self) -> None:
        """A client that leaves the version out does not overwrite blindly."""
        ticket = Ticket.objects.create(title="a")
        form = TicketForm({"title": "b"}, instance=ticket)
        assert "version" in form.errors

    @pytest.mark.parametrize("version", ["77", "9223372036854775807", "x", ""])
    def test_version_of_new(self, version: str) -> None:
        """Whoever creates something does not choose its version."""
        form = TicketForm({"title": "a", "version": version}, initial={"version": version})
        assert form.is_valid(), form.errors
        form.save().save()
        assert Ticket.objects.get().version == 2

    def test_form_without_version(self) -> None:
        """A form that would notice nothing is refused, with what to do."""
        form = modelform_factory(Ticket, form=VersionedForm, fields=["title"])
        with pytest.raises(ImproperlyConfigured, match=r"Add the field to Meta\.fields"):
            form({"title": "b"}, instance=Ticket.objects.create()).is_valid()


@pytest.fixture
def page(client: Client) -> Callable[[str], Any]:
    """Opens the admin's page of an object, as a superuser."""
    client.force_login(User.objects.create_superuser("admin", password="admin"))
    return lambda path: client.get(f"/admin/tests/ticket/{path}")


def hidden(response: Any) -> dict[str, str]:
    [version] = re.findall(r'type="hidden" name="version" value="(\d+)"', response.content.decode())
    return {"version": version}


class TestAdmin:
    def test_two_editors(self, client: Client, page: Callable[[str], Any]) -> None:
        """The second one who saves sees a message, and what they had entered."""
        ticket = Ticket.objects.create(title="a")
        url = f"/admin/tests/ticket/{ticket.pk}/change/"
        shown = hidden(page(f"{ticket.pk}/change/"))
        saved = client.post(url, {"title": "first", "amount": "1", **shown})
        assert saved.status_code == 302

        refused = client.post(url, {"title": "second", "amount": "2", **shown})

        assert refused.status_code == 200
        assert str(STALE) in refused.content.decode()
        assert 'value="second"' in refused.content.decode()
        found = Ticket.objects.get()
        assert (found.title, found.amount, found.version) == ("FIRST", 1, 2)

    def test_without_fieldsets(self, client: Client, page: Callable[[str], Any]) -> None:
        """An admin that names no fields has the version in its form, whatever it is called."""
        page("")
        extended = Extended.objects.create(name="a")
        text = client.get(f"/admin/tests/extended/{extended.pk}/change/").content.decode()
        hidden = f'<input type="hidden" name="revision" value="{extended.revision}"'
        assert text.count(hidden) == 1

    def test_stale_line(
        self, client: Client, page: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A line of an inline that was changed meanwhile is an error of the form."""
        monkeypatch.setattr(OwnerAdmin, "inlines", [DeedInline])
        page("")
        deed = Deed.objects.create(owner=Owner.objects.create(name="a"))
        url = f"/admin/tests/owner/{deed.owner_id}/change/"
        lines = {"TOTAL_FORMS": 1, "INITIAL_FORMS": 1, "0-id": deed.pk, "0-owner": deed.owner_id}
        form = {f"deed_set-{name}": value for name, value in {**lines, "0-version": 1}.items()}
        Deed.objects.get().save()
        refused = client.post(url, {"name": "b", **form})
        assert refused.status_code == 200
        assert str(STALE) in refused.content.decode()
        assert (Owner.objects.get().name, Deed.objects.get().version) == ("a", 2)
        assert client.post(url, {"name": "b", **form, "deed_set-0-version": 2}).status_code == 302

    def test_stale_line_to_delete(
        self, client: Client, page: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So is a line that is to be deleted; one that is current is deleted."""
        monkeypatch.setattr(OwnerAdmin, "inlines", [DeedInline])
        monkeypatch.setattr(DeedInline, "form", VersionedForm)
        page("")
        deed = Deed.objects.create(owner=Owner.objects.create(name="a"))
        url = f"/admin/tests/owner/{deed.owner_id}/change/"
        lines = {"TOTAL_FORMS": 1, "INITIAL_FORMS": 1, "0-id": deed.pk, "0-owner": deed.owner_id}
        lines |= {"0-version": 1, "0-DELETE": "on"}
        form = {f"deed_set-{name}": value for name, value in lines.items()}
        Deed.objects.get().save()
        refused = client.post(url, {"name": "b", **form})
        assert refused.status_code == 200
        assert str(STALE) in refused.content.decode()
        assert client.post(url, {"name": "b", **form, "deed_set-0-version": ""}).status_code == 200
        assert (Owner.objects.get().name, Deed.objects.get().version) == ("a", 2)
        assert client.post(url, {"name": "b", **form, "deed_set-0-version": 2}).status_code == 302
        assert not Deed.objects.exists()

    def test_check_of_an_inline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An inline whose form may lack the version is named by a check of its model."""
        monkeypatch.setattr(OwnerAdmin, "inlines", [DeedInline])
        [error] = Deed.check()
        assert error.id == "idempotency_django.E034"
        assert "DeedInline has forms" in error.msg
        monkeypatch.setattr(DeedInline, "form", VersionedForm)
        assert Deed.check() == []

    @pytest.mark.parametrize(
        "attributes",
        [
            {},
            {"form": forms.ModelForm},
            {"form": VersionedForm, "list_editable": ["title"]},
        ],
    )
    def test_check(self, attributes: dict[str, Any]) -> None:
        """An admin whose forms may carry no version is refused by a check of its model."""
        other = admin.AdminSite()
        other.register(Ticket, type("Broken", (admin.ModelAdmin,), attributes))
        [error] = Ticket.check()
        assert error.id == "idempotency_django.E034"
        assert error.msg.startswith("Broken has forms that may lack the version")
        other.unregister(Ticket)
        assert Ticket.check() == []

    @pytest.mark.parametrize(
        "attributes",
        [
            {"fields": ["title"]},
            {"exclude": ["version"]},
            {"readonly_fields": ["version"]},
            {"fieldsets": [("All", {"fields": ["title", ("amount",)]})]},
            {"get_fields": lambda *_: ["title"]},
        ],
    )
    def test_left_out(self, attributes: dict[str, Any]) -> None:
        """An admin whose page does not send the version saves nothing, and says what to do."""
        other = admin.AdminSite()
        broken = type("Broken", (admin.ModelAdmin,), {"form": VersionedForm, **attributes})
        other.register(Ticket, broken)
        ticket = Ticket.objects.create(title="a")
        form = other.get_model_admin(Ticket).get_form(HttpRequest(), ticket)
        with pytest.raises(ImproperlyConfigured, match="has no field 'version'"):
            form({"title": "b"}, instance=ticket).is_valid()


def test_version_that_may_be_blank() -> None:
    """A form cannot be sent without the version, whatever the field says."""
    field = VersionField(blank=True).formfield()
    assert field is not None
    assert field.required

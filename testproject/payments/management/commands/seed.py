from __future__ import annotations

from typing import Any

from django.contrib.auth.models import Permission, User
from django.core.management.base import BaseCommand
from rest_framework.authtoken.models import Token


class Command(BaseCommand):
    help = "Makes the users alice, bob and admin, where they are missing."

    def handle(self, *args: Any, **options: Any) -> None:
        for name in ("alice", "bob"):
            self._customer(name)
        if not User.objects.filter(username="admin").exists():
            User.objects.create_superuser("admin", password="admin")
        self.stdout.write(
            "Users: alice and bob (header 'Authorization: Token alice-token' or 'bob-token'), "
            "admin (password admin, at /admin/)."
        )

    def _customer(self, name: str) -> None:
        user, created = User.objects.get_or_create(username=name)
        if created:
            user.set_password(name)
            user.save()
        may_charge = Permission.objects.get_by_natural_key("add_effect", "payments", "effect")
        user.user_permissions.add(may_charge)
        Token.objects.get_or_create(user=user, defaults={"key": f"{name}-token"})

"""What the tests count."""

from __future__ import annotations

from django.contrib.auth.base_user import AbstractBaseUser
from django.db import models


class Effect(models.Model):
    """One row for each time that a view really did something."""

    reference = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.reference


class Member(AbstractBaseUser):
    """A user whose primary key is a name, which may be given to a second person."""

    username = models.CharField(max_length=50, primary_key=True)
    joined = models.DateTimeField(auto_now_add=True)

    USERNAME_FIELD = "username"

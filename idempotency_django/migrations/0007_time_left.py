from importlib import resources
from typing import Any

from django.db import migrations

# What the database store calls on PostgreSQL instead of idempotency_acquire_1, which stays for the
# processes that run the release before.
FILE = 'postgresql_functions_2.sql'
FUNCTIONS = ('idempotency_acquire_2',)


def make(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if connection.vendor != 'postgresql':
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_language WHERE lanname = 'plpgsql'")
        if cursor.fetchone() is None:
            return  # the store gets along with plain statements
    model = apps.get_model('idempotency_django', 'IdempotencyKey')
    quote = schema_editor.quote_name
    names = {field.name: quote(field.column) for field in model._meta.concrete_fields}
    folder = resources.files('idempotency_django.stores.database.dialects') / 'sql'
    text = (folder / FILE).read_text('utf-8')
    schema_editor.execute(text.format(table=quote(model._meta.db_table), **names), params=None)


def drop(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == 'postgresql':
        for name in FUNCTIONS:
            schema_editor.execute(f'DROP FUNCTION IF EXISTS {name}')


class Migration(migrations.Migration):

    dependencies = [
        ('idempotency_django', '0006_functions'),
    ]

    operations = [
        migrations.RunPython(make, drop, hints={'model_name': 'idempotencykey'}),
    ]

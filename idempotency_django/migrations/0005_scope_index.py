from typing import Any

from django.db import migrations

# On PostgreSQL, the planner prefers this index to the unique one where its statistics do not know a
# scope yet: it takes the scope for rare, and then reads all its rows to find one key. An index in
# another collation cannot answer the store's statements, only the admin's searches, which ask in
# that collation. "POSIX" sorts as "C" does.
INDEX = 'idempotency_scope_idx'


def _make(schema_editor: Any, collation: str) -> None:
    if schema_editor.connection.vendor == 'postgresql':
        schema_editor.execute(f'DROP INDEX {INDEX}')
        schema_editor.execute(
            f'CREATE INDEX {INDEX} ON idempotency_django_idempotencykey (scope{collation})'
        )


def collate(apps: Any, schema_editor: Any) -> None:
    _make(schema_editor, ' COLLATE "POSIX"')


def restore(apps: Any, schema_editor: Any) -> None:
    _make(schema_editor, '')


class Migration(migrations.Migration):

    dependencies = [
        ('idempotency_django', '0004_causes'),
    ]

    operations = [
        migrations.RunPython(collate, restore, hints={'model_name': 'idempotencykey'}),
    ]

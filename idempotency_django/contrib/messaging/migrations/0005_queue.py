from typing import Any

from django.db import migrations, models

INDEX = 'idempotency_inbox_order_idx'


def replace(apps: Any, schema_editor: Any) -> None:
    """Give the index an expression that the primary key cannot answer; see ``queue.Unkeyed``."""
    if schema_editor.connection.vendor == 'postgresql':
        schema_editor.execute(f'DROP INDEX {INDEX}')
        schema_editor.execute(
            f'CREATE INDEX {INDEX} ON idempotency_messaging_inboxmessage '
            '("group", source, state, (id + 0))'
        )


class Migration(migrations.Migration):

    dependencies = [
        ('idempotency_messaging', '0004_stopped'),
    ]

    operations = [
        migrations.DeleteModel(name='OutboxLease'),
        migrations.RemoveIndex(model_name='inboxmessage', name='idempotency_inbox_group_idx'),
        migrations.AddIndex(
            model_name='inboxmessage',
            index=models.Index(fields=['group', 'source', 'state', 'id'], name=INDEX),
        ),
        migrations.RunPython(
            replace, migrations.RunPython.noop, hints={'model_name': 'inboxmessage'}
        ),
    ]

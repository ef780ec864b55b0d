import importlib
from typing import Any

import django.db.models.deletion
from django.db import migrations, models

LEASES = importlib.import_module('idempotency_django.migrations.0001_initial').LEASES


def restore_index(apps: Any, schema_editor: Any) -> None:
    """SQLite makes a new table for a new column, and knows only the indexes of the model."""
    if schema_editor.connection.vendor == 'sqlite':
        schema_editor.add_index(apps.get_model('idempotency_django', 'IdempotencyKey'), LEASES)


class Migration(migrations.Migration):

    dependencies = [
        ('idempotency_django', '0001_initial'),
    ]

    operations = [
        migrations.AlterModelOptions(
            name='idempotencykey',
            options={'permissions': [('view_answer', 'Can see the stored answers of idempotency keys'), ('settle', 'Can settle interrupted idempotency keys')], 'verbose_name': 'idempotency key', 'verbose_name_plural': 'idempotency keys'},
        ),
        migrations.AddField(
            model_name='idempotencykey',
            name='hold',
            field=models.BooleanField(db_default=False, default=False, verbose_name='held when interrupted'),
        ),
        migrations.CreateModel(
            name='IdempotencyStep',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('position', models.PositiveSmallIntegerField(verbose_name='position')),
                ('name', models.CharField(max_length=100, verbose_name='name')),
                ('attempt', models.PositiveIntegerField(verbose_name='attempt')),
                ('result', models.TextField(verbose_name='result')),
                ('completed_at', models.DateTimeField(verbose_name='completed')),
                ('record', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='steps', to='idempotency_django.idempotencykey', verbose_name='idempotency key')),
            ],
            options={
                'verbose_name': 'idempotency step',
                'verbose_name_plural': 'idempotency steps',
                'ordering': ('record', 'position'),
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('record', 'position'), name='idempotency_step_position_uniq')],
            },
        ),
        migrations.RunPython(restore_index, migrations.RunPython.noop),
    ]

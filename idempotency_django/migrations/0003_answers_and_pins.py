import importlib

from django.db import migrations, models

restore_index = importlib.import_module('idempotency_django.migrations.0002_leases_and_steps').restore_index


class Migration(migrations.Migration):

    dependencies = [
        ('idempotency_django', '0002_leases_and_steps'),
    ]

    operations = [
        migrations.AddField(
            model_name='idempotencykey',
            name='pinned',
            field=models.BooleanField(db_default=False, default=False, verbose_name='kept for its request'),
        ),
        migrations.RunPython(restore_index, migrations.RunPython.noop),
    ]

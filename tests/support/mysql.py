"""PyMySQL as Django's MySQL driver: unlike mysqlclient it installs without a compiler."""

from __future__ import annotations

import pymysql


def use_pymysql() -> None:
    """Let Django's MySQL backend find PyMySQL where it looks for mysqlclient."""
    pymysql.install_as_MySQLdb()
